//! Properties of a manifest that a user of a bundle notices.

use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn published() -> Value {
    json!({
        "schema_version": 1,
        "model": {"name": "Tiny-0.1B", "family": "tiny", "dsp_arch": "v81", "soc_model": 87},
        "params": {"hidden": 64, "vocab": 300, "n_layers": 4, "max_ctx": 128, "kv_dim": 32,
                   "head_dim": 16, "rope_theta": 1e7, "eos_token_id": 7},
        "artifacts": {
            "contexts": {
                "decode": {"bin": "decode_f16.bin"},
                "lmhead": {"bin": "lmhead.bin", "onnx": "lmhead.onnx"},
                "shared": {"onnx": {"prefill": "p.onnx", "step": "s.onnx"}},
            },
            "embed": "embed_f16.bin",
            "tokenizer": "tokenizer.json",
            "vision": {"graph": "vit.bin"},
        },
        "plan": {"params": {"decode": "tiny_decode", "lmhead": "tiny_lmh"},
                 "steps": [{"host": "tiny_generate", "repeat": true}]},
        "chat": {"bos": ["<s>", 3], "assistant": {"gen_prefill": "<|im_start|>assistant\n"}},
        "fixture_dir": "host",
        "license": "MIT",
    })
}

fn read(document: Value) -> Result<Manifest> {
    Manifest::from_value(Path::new("bundle/tiny.json"), document, None)
}

/// The published manifest with the value at `pointer` replaced.
fn with(pointer: &str, value: Value) -> Value {
    let mut document = published();
    *document.pointer_mut(pointer).unwrap_or_else(|| panic!("no {pointer}")) = value;
    document
}

#[test]
fn a_published_manifest_is_understood() {
    let manifest = read(published()).unwrap();
    assert_eq!(manifest.root, Path::new("bundle"));
    assert_eq!(manifest.model.name, "Tiny-0.1B");
    assert_eq!(manifest.model.dsp_arch, Some(81));
    assert_eq!(manifest.model.rest["soc_model"], 87);
    assert_eq!(manifest.params.max_ctx, Some(128));
    assert_eq!(manifest.params.eos_token_id, [7]);
    assert_eq!(manifest.params.rest["kv_dim"], 32);
    let contexts = &manifest.artifacts.contexts;
    let keys: Vec<_> = contexts.iter().map(|c| c.key.as_str()).collect();
    assert_eq!(keys, ["decode", "lmhead", "shared"], "in the manifest's order");
    assert_eq!(contexts[0].bin.as_deref(), Some("decode_f16.bin"));
    assert_eq!(contexts[1].onnx, [("lmhead".to_owned(), "lmhead.onnx".to_owned())]);
    assert_eq!(contexts[2].onnx[1], ("step".to_owned(), "s.onnx".to_owned()));
    let embed = manifest.artifacts.embed.as_ref().unwrap();
    assert_eq!((embed.path.as_str(), embed.dtype), ("embed_f16.bin", DType::F16));
    assert_eq!(manifest.host_op().unwrap(), "tiny_generate");
    assert_eq!(manifest.plan.params["lmhead"], "tiny_lmh");
    assert_eq!(manifest.fixture_dir.as_deref(), Some("host"));
    assert_eq!(manifest.raw["license"], "MIT", "unknown keys reach the host-op");
    let chat = manifest.chat.unwrap();
    assert_eq!(chat.bos, [Piece::Text("<s>".into()), Piece::Token(3)]);
    assert_eq!(chat.gen_prefill, Some(vec![Piece::Text("<|im_start|>assistant\n".into())]));
}

#[test]
fn sampling_is_what_the_manifest_says_and_off_otherwise() {
    let sampling =
        |value| read(with("/params", json!({"sampling": value}))).unwrap().params.sampling;
    let off = SamplingParams::default();
    assert_eq!(sampling(json!({"top_k": 64})), Some(off.clone().temperature(1.0).top_k(64)));
    let given =
        json!({"temperature": 0.6, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05});
    let expected = off.temperature(0.6).top_p(0.95).min_p(0.1).repetition_penalty(1.05);
    assert_eq!(sampling(given), Some(expected));
    assert_eq!(sampling(Value::Null), None);
}

#[test]
fn alternative_forms() {
    let arch = |v| read(with("/model/dsp_arch", v)).unwrap().model.dsp_arch;
    assert_eq!(arch(json!(81)), Some(81));
    assert_eq!(arch(json!("75")), Some(75));
    assert_eq!(arch(Value::Null), None);
    let eos = read(with("/params/eos_token_id", json!([7, 9]))).unwrap();
    assert_eq!(eos.params.eos_token_id, [7, 9]);
    let embed = json!({"path": "e.bin", "dtype": "f32"});
    let embed = read(with("/artifacts/embed", embed)).unwrap().artifacts.embed.unwrap();
    assert_eq!(embed.dtype, DType::F32);
    let chat = read(with("/chat", json!(false))).unwrap().chat.unwrap();
    assert_eq!(chat.style, ChatStyle::None);
    let mut nameless = published();
    nameless.as_object_mut().unwrap().remove("model");
    assert_eq!(read(nameless).unwrap().model.name, "tiny", "the file's name");
}

#[test]
fn errors_point_at_the_json_pointer() {
    let hash = json!({"files": {"a/b~c": {"sha256": "12"}}, "contexts": {"d": {"bin": "d.bin"}}});
    let cases = [
        ("/schema_version", json!(2), "/schema_version: expected 1, found 2"),
        (
            "/artifacts/contexts/decode/bin",
            json!(7),
            "/artifacts/contexts/decode/bin: expected a string, found 7",
        ),
        (
            "/artifacts/contexts/decode/bin",
            json!(""),
            "/artifacts/contexts/decode/bin: expected a string that is not empty, found \"\"",
        ),
        (
            "/artifacts/contexts/decode",
            json!({}),
            "/artifacts/contexts/decode: neither \"bin\" nor \"onnx\"",
        ),
        (
            "/artifacts/contexts/decode",
            json!({"bin": "d.bin", "us": {"tiny_decode": 0}}),
            "/artifacts/contexts/decode/us/tiny_decode: expected a number above 0, found 0",
        ),
        ("/artifacts/contexts", json!({}), "/artifacts/contexts: missing or empty"),
        (
            "/artifacts/contexts/shared/onnx/step",
            json!([1]),
            "/artifacts/contexts/shared/onnx/step: expected a string, found a list of 1",
        ),
        ("/artifacts", hash, "/artifacts/files/a~1b~0c/sha256: expected a SHA-256"),
        (
            "/artifacts/embed",
            json!({"path": "e", "dtype": "f8"}),
            "/artifacts/embed/dtype: expected a dtype such as \"f16\", found \"f8\"",
        ),
        ("/artifacts/tokenizer", json!({}), "/artifacts/tokenizer/path: missing"),
        ("/params/hidden", json!(-1), "/params/hidden: expected a whole number of at least 0"),
        ("/params/hidden", json!(1u64 << 40), "/params/hidden: expected a number of at most 2^31"),
        ("/params/eos_token_id", json!([1, "x"]), "/params/eos_token_id/1: expected a whole"),
        (
            "/params",
            json!({"sampling": {"top_p": 0}}),
            "/params/sampling: option top_p: expected a number above 0",
        ),
        ("/params", json!({"sampling": {"topk": 3}}), "/params/sampling: sampling: unknown field"),
        ("/params", json!([]), "/params: expected an object, found a list of 0"),
        ("/model/dsp_arch", json!("hexagon"), "/model/dsp_arch: expected \"v81\", 81 or null"),
        ("/plan/steps/0/host", json!("../x"), "/plan/steps/0/host: expected the name of a host-op"),
        ("/plan/params", json!("x"), "/plan/params: expected an object, found \"x\""),
        ("/chat/bos", json!([true]), "/chat/bos/0: expected a string or a token id, found true"),
        ("/chat", json!({"style": "yaml"}), "/chat/style: expected \"auto\", \"markers\""),
    ];
    let mut failures = Vec::new();
    for (pointer, value, expected) in cases {
        match read(with(pointer, value.clone())) {
            Err(e) if e.kind() == ErrorKind::Manifest && e.message().starts_with(expected) => {}
            Err(e) => failures.push(format!("{pointer} = {value}: {}", e.message())),
            Ok(_) => failures.push(format!("{pointer} = {value}: accepted")),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn the_host_op_is_one() {
    let manifest = read(with("/plan/steps", json!([{"graph": "x"}]))).unwrap();
    assert!(manifest.host_op().unwrap_err().message().contains("/plan/steps: no step names"));
    let manifest = read(with("/plan/steps", json!([{"host": "a"}, {"host": "b"}]))).unwrap();
    assert!(manifest.host_op().unwrap_err().message().contains("two host-ops, \"a\" and \"b\""));
}

#[test]
fn artifacts_root_stays_inside_unless_the_caller_names_it() {
    let mut document = published();
    document["artifacts_root"] = json!("files");
    assert_eq!(read(document.clone()).unwrap().root, Path::new("bundle/files"));
    for outside in ["/data/local/tmp", "../other"] {
        document["artifacts_root"] = json!(outside);
        let error = read(document.clone()).unwrap_err();
        assert!(error.message().starts_with("/artifacts_root: "), "{error}");
        assert!(error.hint_text().unwrap().contains("ARTIFACTS_ROOT"));
    }
    let path = Path::new("bundle/tiny.json");
    let given = Manifest::from_value(path, document, Some(Path::new("/somewhere"))).unwrap();
    assert_eq!(given.root, Path::new("/somewhere"));
}

fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes).unwrap();
    }
    dir
}

#[test]
fn a_folder_is_its_first_manifest_and_others_go_by_name() {
    let tiny = serde_json::to_vec(&published()).unwrap();
    let vlm = serde_json::to_vec(&with("/model/name", json!("vlm"))).unwrap();
    let dir = folder(&[
        ("tiny-vlm.json", &vlm),
        ("tiny.json", &tiny),
        ("config.json", b"{}"),
        ("generation_config.json", b"{}"),
        ("preprocessor_config.json", b"{}"),
        ("special_tokens_map.json", b"{}"),
        ("tokenizer.json", b"{}"),
        ("tokenizer_config.json", b"{}"),
        ("._a.json", b"\0"),
        ("a.bin", b""),
    ]);
    std::fs::create_dir(dir.path().join("a.json")).unwrap();
    let name = |path: &Path| Manifest::load(path).map(|m| m.model.name);
    assert_eq!(name(dir.path()).unwrap(), "vlm");
    assert_eq!(name(&dir.path().join("tiny")).unwrap(), "Tiny-0.1B");
    assert_eq!(name(&dir.path().join("tiny.json")).unwrap(), "Tiny-0.1B");
    let error = name(&dir.path().join("tiny-audio")).unwrap_err();
    assert!(error.message().ends_with("tiny-audio: no such file"), "{error}");
    assert!(error.hint_text().unwrap().ends_with("tiny-vlm.json, tiny.json"), "{error}");

    std::fs::write(dir.path().join("added.json"), b"{\"x\": 1}").unwrap();
    let error = name(dir.path()).unwrap_err();
    assert!(error.message().contains("added.json: /schema_version: missing"), "{error}");
    assert!(error.hint_text().unwrap().contains("tiny-vlm.json, tiny.json"), "{error}");

    let empty = tempfile::tempdir().unwrap();
    assert!(name(empty.path()).unwrap_err().message().contains("no manifest in this folder"));
}

#[test]
fn hostile_files_are_refused_by_name() {
    let mut bom = vec![0xef, 0xbb, 0xbf];
    bom.extend(serde_json::to_vec(&published()).unwrap());
    let deep = "[".repeat(100_000);
    let dir = folder(&[
        ("bom.json", &bom),
        ("twice.json", b"{\"schema_version\": 1,\n \"artifacts\": {\"embed\": 1, \"embed\": 2}}"),
        ("utf16.json", b"\xff\xfe{\0}\0"),
        ("empty.json", b" \n"),
        ("cut.json", b"{\"schema_version\": 1, \"art"),
        ("deep.json", deep.as_bytes()),
        ("list.json", b"[]"),
    ]);
    std::fs::File::create(dir.path().join("huge.json")).unwrap().set_len(MAX_BYTES + 1).unwrap();
    assert!(Manifest::load(&dir.path().join("bom.json")).is_ok());
    let cases = [
        ("twice.json", "key \"embed\" is given twice at line 2"),
        ("utf16.json", "UTF-16"),
        ("empty.json", "the file is empty"),
        ("cut.json", "EOF"),
        ("deep.json", "recursion limit"),
        ("list.json", "/: expected an object, found a list of 0"),
        ("huge.json", "larger than 16 MiB"),
    ];
    for (file, expected) in cases {
        let error = Manifest::load(&dir.path().join(file)).unwrap_err();
        assert!(error.message().contains(file), "{error}");
        assert!(error.message().contains(expected), "{error}");
    }
}

#[test]
fn context_sources_resolve_below_the_root() {
    let bytes =
        serde_json::to_vec(&with("/artifacts/contexts/shared/onnx/step", json!("../escape.onnx")))
            .unwrap();
    let dir = folder(&[("tiny.json", &bytes), ("lmhead.onnx", b"x"), ("tokenizer.json", b"{}")]);
    let manifest = Manifest::load(dir.path()).unwrap();
    let files = manifest.open_artifacts();

    let source = manifest.context_source(&files, "lmhead").unwrap();
    assert_eq!(source.onnx, [("lmhead".to_owned(), dir.path().join("lmhead.onnx"))]);
    assert_eq!(source.binary, Some(dir.path().join("lmhead.bin")), "the backend reports it");

    let error = manifest.context_source(&files, "decode").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("decode_f16.bin"), "{error}");
    assert!(error.message().contains("/artifacts/contexts/decode/bin"), "{error}");

    let error = manifest.context_source(&files, "shared").unwrap_err();
    assert!(error.message().contains("leaves the bundle's folder"), "{error}");

    let error = manifest.context_source(&files, "vision").unwrap_err();
    assert_eq!(error.hint_text(), Some("it has decode, lmhead, shared"));

    assert_eq!(manifest.tokenizer_config_path(&files).unwrap(), None);
    std::fs::write(dir.path().join("tokenizer_config.json"), "{}").unwrap();
    let beside = manifest.tokenizer_config_path(&files).unwrap();
    assert_eq!(beside, Some(dir.path().join("tokenizer_config.json")));
}
