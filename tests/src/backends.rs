//! The backends under test.

use std::sync::Arc;

use qhx_exec::backend::Backend;
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_qnn::{Library, QnnBackend, QnnOptions, Target};

use crate::tiny;

/// The CPU backend.
pub fn cpu() -> Arc<dyn Backend> {
    Arc::new(qhx_cpu::CpuBackend::new(qhx_cpu::CpuOptions::exact()).expect("the CPU backend"))
}

/// The QNN backend, for a test with `#[tier(qnn)]`.
pub fn qnn() -> Arc<dyn Backend> {
    qnn_device(None)
}

/// The QNN backend as if on a device of the given architecture.
pub fn qnn_device(device_arch: Option<u32>) -> Arc<dyn Backend> {
    let (htp, system) = tiny::qnn_libraries();
    let options = QnnOptions { htp, system: Some(system), device_arch, ..QnnOptions::default() };
    Arc::new(QnnBackend::new(options).unwrap_or_else(|e| panic!("{e}")))
}

/// The compiler of context binaries for a target such as `v81`, for a test with `#[tier(qnn)]`.
pub fn compiler(target: &str) -> Arc<dyn Compiler> {
    let (htp, system) = tiny::qnn_libraries();
    let library = Library::open(&htp, Some(&system)).unwrap_or_else(|e| panic!("{e}"));
    let target = Target::named(target).unwrap_or_else(|| panic!("no target {target}"));
    Arc::new(QnnCompiler::new(library, target))
}
