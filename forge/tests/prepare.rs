//! Portable bundles, compiled by a stand-in for the QNN library: what is resumed, locked and refused.
#![expect(clippy::unwrap_used, reason = "helpers of tests")]

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_forge::prepare::{PrepareOptions, PrepareReport, prepare};
use qhx_forge::{ForgeOptions, Silent, forge};
use qhx_paths::fixture;
use serde_json::json;

mod common;

use common::{StandIn, read_json, says};

/// A portable bundle of two contexts in `folder`.
fn portable(folder: &Path) -> PathBuf {
    let mut options = ForgeOptions::new(folder.join("portable"));
    (options.max_ctx, options.prefill, options.portable) = (Some(32), Some(Vec::new()), true);
    forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap();
    options.out
}

fn prepared(bundle: &Path, compiler: &StandIn) -> Result<PrepareReport> {
    let out = bundle.join("prepared/v81-0123456789abcdef");
    let key = "0123456789abcdef".to_owned();
    let record = json!({"for": "v81"});
    let options = PrepareOptions { out, key, record, share_weights: true };
    prepare(&Manifest::load(bundle)?, compiler, &options, &mut Silent)
}

/// Entries of the folder of prepared bundles.
fn entries(bundle: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(bundle.join("prepared")).unwrap();
    entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
}

#[test]
fn a_prepared_bundle_has_binaries_and_links_to_the_rest() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = portable(folder.path());
    let source = read_json(&Manifest::load(&bundle).unwrap().path);
    assert_eq!(source["portable"], json!({"version": 2}));
    let compiler = StandIn::default();
    let report = prepared(&bundle, &compiler).unwrap();
    let manifest = Manifest::load(&report.manifest).unwrap();
    assert_eq!(manifest.model.dsp_arch, Some(81));
    assert_eq!(manifest.raw["prepared"], json!({"for": "v81"}));
    assert_eq!(manifest.raw.get("portable"), None);
    for (context, made) in manifest.artifacts.contexts.iter().zip(&report.contexts) {
        let binary = manifest.root.join(context.bin.as_ref().unwrap());
        assert_eq!(std::fs::metadata(binary).unwrap().len(), made.binary_bytes);
        assert!(!context.onnx.is_empty() && !made.kept);
    }
    for (path, file) in &manifest.artifacts.files {
        let bytes = std::fs::read(manifest.root.join(path)).unwrap();
        assert_eq!(Some(bytes.len() as u64), file.bytes, "{path}");
        assert!(path.ends_with(".bin") || bytes == std::fs::read(bundle.join(path)).unwrap());
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt as _;
        let path = manifest.artifacts.tokenizer.as_ref().unwrap();
        assert_eq!(std::fs::metadata(bundle.join(path)).unwrap().nlink(), 2);
    }
    // The folder is the bundle's own: it may be forged again.
    let mut options = ForgeOptions::new(&bundle);
    (options.max_ctx, options.prefill, options.overwrite) = (Some(32), Some(Vec::new()), true);
    forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap();
}

/// Says to the same test in a process of its own when it is to be killed.
const KILLED_AT: &str = "QHX_TEST_KILLED_AT";
const BUNDLE: &str = "QHX_TEST_BUNDLE";

#[test]
fn a_killed_preparation_goes_on_where_it_was() {
    if let (Ok(at), Some(bundle)) = (std::env::var(KILLED_AT), std::env::var_os(BUNDLE)) {
        let killed = StandIn::stops_at(at.parse().unwrap(), || std::process::abort());
        prepared(Path::new(&bundle), &killed).unwrap();
    }
    for at in [0, 1] {
        let folder = tempfile::tempdir().unwrap();
        let bundle = portable(folder.path());
        let child = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_killed_preparation_goes_on_where_it_was"])
            .env(KILLED_AT, at.to_string())
            .env(BUNDLE, &bundle)
            .output()
            .unwrap();
        assert!(!child.status.success());
        // Nothing to open but a hidden folder.
        assert!(
            entries(&bundle).iter().all(|name| name.starts_with('.')),
            "{:?}",
            entries(&bundle)
        );
        let compiler = StandIn::default();
        let report = prepared(&bundle, &compiler).unwrap();
        let kept = report.contexts.iter().filter(|context| context.kept).count();
        assert_eq!(
            (kept, compiler.compiled.lock().unwrap().len()),
            (at, report.contexts.len() - at)
        );
        assert_eq!(entries(&bundle), ["v81-0123456789abcdef"]);
        for context in Manifest::load(&report.manifest).unwrap().artifacts.contexts {
            let path = report.manifest.with_file_name(context.bin.unwrap());
            let text = std::fs::read_to_string(path).unwrap();
            assert!(text.starts_with(&format!("{}: ", context.key)), "{text}");
        }
    }
}

#[test]
fn a_full_disk_leaves_what_is_finished_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = portable(folder.path());
    let full = StandIn::stops_at(1, || Err(Error::new(ErrorKind::Io, "no space left on device")));
    let error = says(prepared(&bundle, &full), "no space left");
    assert!(error.hint_text().unwrap().contains("the same command goes on"), "{error:?}");
    assert_eq!(
        prepared(&bundle, &StandIn::default()).unwrap().contexts.iter().filter(|c| c.kept).count(),
        1
    );
}

#[test]
fn a_second_process_that_prepares_the_same_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = portable(folder.path());
    let same = bundle.clone();
    let compiler = StandIn::stops_at(0, move || {
        let error = says(prepared(&same, &StandIn::default()), "by another process");
        assert!(error.hint_text().unwrap().contains("wait for it"), "{error:?}");
        Ok(())
    });
    prepared(&bundle, &compiler).unwrap();
}

#[test]
fn a_changed_file_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let bundle = portable(folder.path());
    let manifest = Manifest::load(&bundle).unwrap();
    let onnx = &manifest.artifacts.contexts[0].onnx[0].1;
    for path in [onnx.clone(), format!("{onnx}_data")] {
        let path = bundle.join(path);
        let bytes = std::fs::read(&path).unwrap();
        let mut changed = bytes.clone();
        changed[bytes.len() / 2] ^= 1;
        std::fs::write(&path, changed).unwrap();
        let error = prepared(&bundle, &StandIn::default()).unwrap_err();
        assert!(error.message().starts_with(&path.display().to_string()), "{error}");
        assert!(!bundle.join("prepared").exists());
        std::fs::write(&path, bytes).unwrap();
    }
}

#[test]
fn a_bundle_for_the_cpu_is_not_portable() {
    let folder = tempfile::tempdir().unwrap();
    let mut options = ForgeOptions::new(folder.path().join("cpu"));
    (options.max_ctx, options.prefill) = (Some(32), Some(Vec::new()));
    forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap();
    let error = says(prepared(&options.out, &StandIn::default()), "not a portable bundle");
    assert!(error.hint_text().unwrap().contains("--portable"), "{error:?}");
}
