//! Checks of golden steps that tests of several families share.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use qhx::golden::Golden;
use qhx_core::engine::Model;
use qhx_tests::{backends, tiny};

/// Graphs that were not executed.
pub(crate) fn idle(model: &Model) -> Vec<String> {
    let stats = model.graph_stats().into_iter().filter(|graph| graph.executions == 0);
    stats.map(|graph| graph.graph).collect()
}

/// The golden steps that the CPU makes of a bundle are what a model of it gives on a device.
pub(crate) fn pass(manifest: &Path, model: &mut Model, label: &str) {
    let mut own = tiny::open(manifest, backends::cpu()).unwrap();
    let golden = Golden::make(&mut own, true, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    for step in &golden.steps {
        let report = golden.check(model, step).unwrap();
        assert!(report.passed, "{label}: {report:?}");
    }
}

/// The golden steps of a bundle whose host-op steps by itself execute every graph, pass, and fail where a few weights
/// of a graph of each of these stems are others.
pub(crate) fn find_damage(manifest: &Path, stems: &[&str]) {
    let place = manifest.display();
    let mut model = tiny::open(manifest, backends::cpu()).unwrap();
    let golden = Golden::make(&mut model, false, &mut |_| ()).unwrap_or_else(|e| panic!("{e}"));
    let all = model.graphs().unwrap();
    let all: BTreeSet<&str> = all.iter().map(|graph| &*graph.name).collect();
    let graphs = golden.steps.iter().flat_map(|step| &step.graphs);
    let executed: BTreeSet<&str> = graphs.map(|execution| &*execution.graph).collect();
    assert_eq!(executed, all, "{place}");
    let bytes = serde_json::to_string(&golden).unwrap().len();
    assert!(bytes < 200_000, "{place}: {bytes} bytes");
    for step in &golden.steps {
        let report = golden.check(&mut model, step).unwrap();
        assert!(report.passed && report.cosine > 0.99999, "{place}: {report:?}");
    }
    drop(model);
    let folder = manifest.parent().unwrap().join("onnx");
    for stem in stems {
        let files = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let is_data = |file: &std::path::PathBuf| {
            let name = file.file_name().unwrap().to_str().unwrap();
            name.starts_with(stem) && name.ends_with(".onnx_data")
        };
        let file = files.into_iter().find(is_data).unwrap_or_else(|| panic!("{place}: {stem}"));
        let whole = fs::read(&file).unwrap();
        let mut damaged = whole.clone();
        // 4.5 where weights are of f16, 1026 where they are of f32: some in each eighth.
        let eighth = (damaged.len() / 8) & !3;
        for place in damaged.chunks_mut(eighth) {
            let some = place.len().min(64) & !1;
            place[..some].copy_from_slice(&[0x80, 0x44].repeat(some / 2));
        }
        fs::write(&file, damaged).unwrap();
        let mut model = tiny::open(manifest, backends::cpu()).unwrap();
        let mut reports = golden.steps.iter().map(|step| golden.check(&mut model, step).unwrap());
        assert!(reports.any(|report| !report.passed), "{place}: {stem} is damaged");
        fs::write(&file, whole).unwrap();
    }
}
