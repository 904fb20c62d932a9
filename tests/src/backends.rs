//! The backends under test.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_exec::backend::Backend;
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_qnn::{Library, QnnBackend, QnnOptions, Target};

/// The CPU backend.
pub fn cpu() -> Arc<dyn Backend> {
    Arc::new(qhx_cpu::CpuBackend::new(qhx_cpu::CpuOptions::default()).expect("the CPU backend"))
}

/// The QNN backend over the given libraries.
pub fn qnn(libraries: &(PathBuf, PathBuf)) -> Arc<dyn Backend> {
    qnn_device(libraries, None)
}

/// The QNN backend over the given libraries, as if on a device of the given architecture.
pub fn qnn_device(
    (htp, system): &(PathBuf, PathBuf),
    device_arch: Option<u32>,
) -> Arc<dyn Backend> {
    let options = QnnOptions {
        htp: htp.clone(),
        system: Some(system.clone()),
        device_arch,
        ..QnnOptions::default()
    };
    Arc::new(QnnBackend::new(options).unwrap_or_else(|e| panic!("{e}")))
}

/// The compiler of context binaries for a target such as `v81`.
pub fn compiler(htp: &Path, system: &Path, target: &str) -> Arc<dyn Compiler> {
    let library = Library::open(htp, Some(system)).unwrap_or_else(|e| panic!("{e}"));
    let target = Target::named(target).unwrap_or_else(|| panic!("no target {target}"));
    Arc::new(QnnCompiler::new(library, target))
}
