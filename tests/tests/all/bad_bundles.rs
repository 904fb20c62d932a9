//! Bundles that are damaged or do not fit: one message that names the thing, nothing half-open.

#[cfg(target_os = "linux")]
mod faults;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::{Error, ErrorKind};
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::manifest::Manifest;
use qhx_exec::backend::Backend;
use qhx_exec::null::NullBackend;
use qhx_tests::tiny::{self, CPU, Variant};
use qhx_tests::{backends, files, plugin_files};
use qhx_tiers::tier;
use qhx_types::{DType, GraphInfo, TensorInfo};
use serde_json::{Value, json};

/// A copy of the tied tiny model's bundle that a test may damage.
struct Copy {
    folder: tempfile::TempDir,
    manifest: PathBuf,
}

impl Copy {
    fn new(variant: Variant) -> Self {
        let source = tiny::bundle(&tiny::fixture("qwen35-tied"), variant);
        let folder = tempfile::tempdir().unwrap();
        plugin_files::copy_folder(source.parent().unwrap(), folder.path());
        let manifest = folder.path().join(source.file_name().unwrap());
        Self { folder, manifest }
    }

    fn file(&self, end: &str) -> PathBuf {
        let mut found = Vec::new();
        let mut folders = vec![self.folder.path().to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
                let path = entry.path();
                if path.is_dir() {
                    folders.push(path);
                } else if path.to_str().unwrap().ends_with(end) {
                    found.push(path);
                }
            }
        }
        found.sort();
        found.into_iter().next().unwrap_or_else(|| panic!("no file ends with {end}"))
    }

    fn edit(&self, change: impl FnOnce(&mut Value)) {
        files::edit(&self.manifest, change);
    }

    fn error(&self, backend: Arc<dyn Backend>) -> Error {
        tiny::open(&self.manifest, backend).map(|_| ()).unwrap_err()
    }
}

#[track_caller]
fn says(error: &Error, kind: ErrorKind, parts: &[&str]) {
    qhx_tests::says(error, kind, parts);
    assert!(error.report().to_string().len() < 1500, "{error}");
}

fn truncate(path: &Path) {
    let length = fs::metadata(path).unwrap().len();
    fs::File::options().write(true).open(path).unwrap().set_len(length / 2).unwrap();
}

#[test]
fn a_missing_or_damaged_manifest_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("absent.json");
    says(&Manifest::load(&path).unwrap_err(), ErrorKind::Manifest, &["absent.json"]);

    let copy = Copy::new(CPU);
    fs::write(&copy.manifest, b"{\"schema_version\": 1,").unwrap();
    says(&copy.error(backends::cpu()), ErrorKind::Manifest, &[".json"]);
    fs::write(&copy.manifest, [0xff, 0xfe, 0x00]).unwrap();
    says(&copy.error(backends::cpu()), ErrorKind::Manifest, &[".json"]);

    let copy = Copy::new(CPU);
    copy.edit(|m| m["artifacts"]["contexts"]["decode"]["onnx"] = 7.into());
    says(
        &copy.error(backends::cpu()),
        ErrorKind::Manifest,
        &["/artifacts/contexts/decode/onnx", "7"],
    );
    let copy = Copy::new(CPU);
    copy.edit(|m| m["artifacts"]["embed"] = "../outside.bin".into());
    says(
        &copy.error(backends::cpu()),
        ErrorKind::Manifest,
        &["/artifacts/embed", "../outside.bin"],
    );
}

#[test]
fn parameters_that_the_op_cannot_use_are_named_by_their_place() {
    let tensors = |role: &str, name: &str| json!({role: name});
    for (key, value, parts) in [
        ("decode", 7.into(), &["plan.params.decode:", "found 7", "a string or an array"][..]),
        ("decode", json!(["decode", 7]), &["plan.params.decode[1]:", "found 7", "a string"]),
        ("decode", json!([]), &["plan.params.decode:", "found []", "at least 1 items"]),
        ("decode", Value::Null, &["plan.params.decode: missing"]),
        ("lmhead", json!({}), &["plan.params.lmhead:", "found {}", "expected a string"]),
        (
            "tensors",
            tensors("lgits", "logits"),
            &["plan.params.tensors.lgits:", "did you mean \"logits\"?"],
        ),
        (
            "tensors",
            tensors("logits", "lgits"),
            &["plan.params.tensors.logits:", "name \"lgits\"", "graph \"lmhead\" has \"logits\""],
        ),
        (
            "tensors",
            tensors("past_k_*", "pst_k_*"),
            &["plan.params.tensors.past_k_*:", "\"pst_k_*\"", "has \"past_k_2\""],
        ),
    ] {
        let copy = Copy::new(CPU);
        copy.edit(|m| m["plan"]["params"][key] = value.clone());
        let manifest = copy.manifest.to_str().unwrap().to_owned();
        let error = copy.error(backends::cpu());
        says(&error, ErrorKind::Manifest, &[parts, &["\"qwen3_5_generate\"", &manifest]].concat());
    }

    // What an op does not know is no error: published bundles have such keys.
    let copy = Copy::new(CPU);
    copy.edit(|m| m["plan"]["params"]["of_another_tool"] = json!({"decode": 7}));
    copy.edit(|m| m["plan"]["params"]["tensors"] = tensors("logits", "logits"));
    tiny::open(&copy.manifest, backends::cpu()).unwrap();
}

#[test]
fn missing_truncated_and_garbage_files_are_named() {
    for end in ["embed_f16.bin", "tokenizer.json", ".onnx"] {
        let copy = Copy::new(CPU);
        let file = copy.file(end);
        let name = file.file_name().unwrap().to_str().unwrap().to_owned();
        fs::remove_file(&file).unwrap();
        says(&copy.error(backends::cpu()), ErrorKind::Artifact, &[&name]);
    }
    for (end, kind) in [
        ("embed_f16.bin", ErrorKind::Artifact),
        ("tokenizer.json", ErrorKind::Artifact),
        (".onnx", ErrorKind::Context),
        (".onnx_data", ErrorKind::Context),
    ] {
        let copy = Copy::new(CPU);
        let file = copy.file(end);
        truncate(&file);
        let error = copy.error(backends::cpu());
        let name = file.file_name().unwrap().to_str().unwrap();
        assert!(error.report().to_string().contains(name), "{error}");
        assert!(
            error.kind() == kind || error.kind() == ErrorKind::Artifact,
            "{:?}: {error}",
            error.kind()
        );
    }
    let copy = Copy::new(CPU);
    fs::write(copy.file("tokenizer.json"), b"\x00\x01garbage").unwrap();
    says(&copy.error(backends::cpu()), ErrorKind::Artifact, &["tokenizer.json"]);
}

#[tier(qnn)]
fn damaged_context_binaries_are_named() {
    let variant = Variant { target: Some("v81"), ..CPU };
    type Damage = fn(&Path);
    let damage: [(&str, Damage); 4] = [
        ("missing", |path| fs::remove_file(path).unwrap()),
        ("empty", |path| fs::write(path, b"").unwrap()),
        ("truncated", truncate),
        ("garbage", |path| fs::write(path, vec![0x5a; 100_000]).unwrap()),
    ];
    for (what, damage) in damage {
        let copy = Copy::new(variant);
        let file = copy.file("decode_f16.bin");
        damage(&file);
        let error = copy.error(backends::qnn());
        assert!(error.report().to_string().contains("decode_f16.bin"), "{what}: {error}");
        assert!(
            matches!(error.kind(), ErrorKind::Artifact | ErrorKind::Context),
            "{what}: {:?} {error}",
            error.kind()
        );
    }
}

#[tier(qnn)]
fn a_bundle_for_a_newer_architecture_is_refused_in_words() {
    let variant = Variant { target: Some("v75"), ..CPU };
    let bundle = tiny::bundle(&tiny::fixture("qwen35-tied"), variant);
    let backend = backends::qnn_device(Some(73));
    let error = tiny::open(&bundle, backend).map(|_| ()).unwrap_err();
    says(&error, ErrorKind::Context, &["v75", "v73"]);
}

/// The tied tiny model's graphs as the CPU backend describes them, changed, on a backend that executes
/// nothing.
fn with_graphs(change: impl Fn(&mut GraphInfo)) -> Error {
    let bundle = tiny::bundle(&tiny::fixture("qwen35-tied"), CPU);
    let manifest = Manifest::load(&bundle).unwrap();
    let artifacts = manifest.open_artifacts();
    let cpu = backends::cpu();
    let contexts = manifest
        .artifacts
        .contexts
        .iter()
        .map(|entry| {
            let source = manifest.context_source(&artifacts, &entry.key).unwrap();
            let context = cpu.open_context(&source).unwrap();
            let graphs = context.graphs().iter().map(|graph| {
                let mut graph = GraphInfo::clone(graph);
                change(&mut graph);
                graph
            });
            (entry.key.clone(), graphs.collect())
        })
        .collect();
    Model::open(
        ModelOptions::new(manifest, Arc::new(NullBackend::new(contexts)), &tiny::plugins())
            .threads(1),
    )
    .map(|_| ())
    .unwrap_err()
}

fn tensor<'a>(graph: &'a mut GraphInfo, name: &str) -> Option<&'a mut TensorInfo> {
    graph.inputs.iter_mut().chain(&mut graph.outputs).find(|t| t.name == name)
}

#[test]
fn tensors_that_are_missing_or_do_not_fit_are_named() {
    let error = with_graphs(|graph| graph.inputs.retain(|t| t.name != "past_ssm_3"));
    says(&error, ErrorKind::Graph, &["decode", "past_ssm_3"]);

    let error = with_graphs(|graph| {
        graph.inputs.retain(|t| t.name != "past_ssm_3");
        graph.outputs.retain(|t| t.name != "present_ssm_3");
    });
    says(&error, ErrorKind::Graph, &["layer 3", "past_ssm_3"]);

    let error = with_graphs(|graph| graph.outputs.retain(|t| t.name != "new_k_2"));
    says(&error, ErrorKind::Graph, &["past_k_2", "new_k_2"]);

    let error = with_graphs(|graph| {
        if let Some(tensor) = tensor(graph, "past_ssm_1") {
            tensor.shape[1] += 1;
        }
    });
    says(&error, ErrorKind::Graph, &["past_ssm_1", "present_ssm_1", "shape"]);

    let error = with_graphs(|graph| {
        if let Some(tensor) = tensor(graph, "cos") {
            tensor.dtype = DType::I32;
        }
    });
    says(&error, ErrorKind::Graph, &["cos", "i32", "f16 or f32"]);

    let error = with_graphs(|graph| {
        if let Some(tensor) = tensor(graph, "cmask") {
            tensor.shape = vec![1, 7];
        }
    });
    says(&error, ErrorKind::Graph, &["cmask", "[1, 7]", "201"]);

    let error = with_graphs(|graph| {
        if let ("lmhead", Some(tensor)) = (graph.name.clone().as_str(), tensor(graph, "x")) {
            tensor.dtype = DType::F16;
        }
    });
    says(&error, ErrorKind::Graph, &["decode", "lmhead", "f16", "f32"]);

    // Both ends renamed: nothing is lost when the manifest says how the graph calls it.
    let error = with_graphs(|graph| {
        if let ("lmhead", Some(tensor)) = (graph.name.clone().as_str(), tensor(graph, "logits")) {
            tensor.name = "scores".to_owned();
        }
    });
    says(&error, ErrorKind::Graph, &["lmhead", "logits", "scores", "plan.params.tensors"]);
}

#[test]
fn an_unknown_host_op_lists_what_is_installed() {
    let copy = Copy::new(CPU);
    copy.edit(|m| m["plan"]["steps"][0]["host"] = "qwen9_generate".into());
    let error = copy.error(backends::cpu());
    says(&error, ErrorKind::Plugin, &["qwen9_generate", "qwen3_5_generate", "--plugin"]);
}

#[tier(qnn)]
fn a_backend_that_cannot_use_the_bundle_says_so() {
    let copy = Copy::new(CPU);
    let error = copy.error(backends::qnn());
    assert!(error.report().to_string().contains("decode"), "{error}");
    assert!(matches!(error.kind(), ErrorKind::Context | ErrorKind::Artifact), "{error}");
}
