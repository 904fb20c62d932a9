//! Time and memory of opening a bundle's context binaries on the QNN backend.
//!
//! ```sh
//! open_contexts libQnnHtp.so libQnnSystem.so FOLDER [THREADS [BUDGET_MB]]
//! ```

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::path::PathBuf;
use std::time::Instant;

use qhx_benches::memory::peak_and_anonymous;
use qhx_exec::backend::{Backend as _, ContextSource};
use qhx_qnn::{QnnBackend, QnnOptions};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut path = || arguments.next().map(PathBuf::from).ok_or("a file or folder is missing");
    let (htp, system, folder) = (path()?, path()?, path()?);
    let open_threads = arguments.next().map(|n| n.parse()).transpose()?;
    let read_budget_mb = arguments.next().map(|n| n.parse()).transpose()?;
    let mut sources = Vec::new();
    for entry in std::fs::read_dir(&folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|e| e == "bin") {
            let key = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
            sources.push(ContextSource { key, binary: Some(path), ..ContextSource::default() });
        }
    }
    sources.sort_by(|a, b| a.key.cmp(&b.key));
    sources.retain(|source| !source.key.contains("embed"));
    let options = QnnOptions {
        htp,
        system: Some(system),
        open_threads,
        read_budget_mb,
        ..QnnOptions::default()
    };
    let backend = QnnBackend::new(options)?;
    let mb = |bytes: u64| bytes as f64 / 1e6;
    let (before, _) = peak_and_anonymous();
    let start = Instant::now();
    let opened = backend.open_contexts(&sources)?;
    let time = start.elapsed();
    let (peak, anonymous) = peak_and_anonymous();
    let files: u64 = opened.iter().map(|opened| opened.context.resident_bytes()).sum();
    for (source, opened) in sources.iter().zip(&opened) {
        println!("{:30} {:.0} ms", source.key, opened.time.as_secs_f64() * 1e3);
    }
    println!(
        "{} contexts of {:.0} MB in {:.0} ms; peak RSS before {:.0} MB, after {:.0} MB, of it not from files {:.0} MB",
        opened.len(),
        mb(files),
        time.as_secs_f64() * 1e3,
        mb(before),
        mb(peak),
        mb(anonymous)
    );
    Ok(())
}
