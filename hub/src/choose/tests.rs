//! Which files of a repository are wanted.

use super::*;

fn listing(name: &str, paths: &[&str]) -> Listing {
    let file = |path: &&str| RemoteFile {
        path: (*path).to_owned(),
        bytes: Some(1),
        blob: BlobId::named(&"a".repeat(64)),
    };
    Listing {
        name: name.parse().unwrap(),
        commit: "c".repeat(40),
        files: paths.iter().map(file).collect(),
    }
}

fn is_manifest(name: &str) -> bool {
    name.ends_with(".json") && !["config.json", "tokenizer.json"].contains(&name)
}

fn folders(paths: &[&str]) -> Vec<String> {
    bundles(paths.iter().copied(), is_manifest).into_iter().map(|bundle| bundle.path).collect()
}

fn selected(want: &Want, listing: &Listing) -> Result<Vec<String>, String> {
    let selection = want.select(listing, is_manifest).map_err(|e| e.report().to_string())?;
    Ok(selection.files.into_iter().map(|file| file.path).collect())
}

const PUBLISHED: [&str; 12] = [
    ".gitattributes",
    "README.md",
    "catalog.json",
    "v79/m.json",
    "v79/decode.bin",
    "v81/m.json",
    "v81/other.json",
    "v81/decode.bin",
    "v81/vlm/vision.json",
    "v81/vlm/tower.bin",
    "v81-w8/m.json",
    "v81-w8/decode.bin",
];

#[test]
fn a_bundle_is_a_folder_with_a_manifest_and_data() {
    assert_eq!(folders(&PUBLISHED), ["v79", "v81", "v81-w8"]);
    assert_eq!(folders(&["m.json", "onnx/decode.onnx"]), [""]);
    assert_eq!(
        folders(&["llm/v81/m.json", "llm/v81/x.bin", "asr/v81/m.json", "asr/v81/x.bin"]),
        ["asr/v81", "llm/v81"]
    );
    let checkpoint = [
        "config.json",
        "vocab.json",
        "model.safetensors.index.json",
        "extra.json",
        "model-1.safetensors",
        "pytorch_model.bin",
        "onnx/model.onnx",
    ];
    assert!(folders(&checkpoint).is_empty());
}

#[test]
fn one_folder_is_taken_by_architecture_or_by_name() {
    let listing = listing("o/n", &PUBLISHED);
    let archs = |archs: &[u32]| Want { archs: archs.to_vec(), ..Want::default() };
    assert_eq!(selected(&archs(&[79]), &listing).unwrap(), ["v79/m.json", "v79/decode.bin"]);
    assert_eq!(selected(&archs(&[85, 81, 79]), &listing).unwrap().len(), 5, "v81, not v81-w8");
    let folder = Want { folder: Some("v81-w8".to_owned()), ..Want::default() };
    assert_eq!(selected(&folder, &listing).unwrap(), ["v81-w8/m.json", "v81-w8/decode.bin"]);
    let none = selected(&Want::default(), &listing).unwrap_err();
    assert_eq!(none, "o/n: which bundle? There is v79, v81, v81-w8\n  hint: choose one: o/n/v79");
    let other = selected(&archs(&[73]), &listing).unwrap_err();
    assert!(
        other.starts_with("o/n: no bundle in it runs on v73; there is v79, v81, v81-w8"),
        "{other}"
    );
    let absent = Want { folder: Some("v82".to_owned()), ..Want::default() };
    assert!(selected(&absent, &listing).unwrap_err().contains("\"v82\" is no bundle in it"));
}

#[test]
fn of_two_variants_neither_is_taken_unasked() {
    let listing = listing("o/n", &["v81-a/m.json", "v81-a/x.bin", "v81-b/m.json", "v81-b/x.bin"]);
    let want = Want { archs: vec![81], ..Want::default() };
    let error = selected(&want, &listing).unwrap_err();
    assert!(error.contains("several bundles for v81: v81-a, v81-b"), "{error}");
}

#[test]
fn manifests_and_patterns_narrow_the_choice() {
    let listing = listing("o/n", &PUBLISHED);
    let want = |manifest: Option<&str>, include: &[&str]| Want {
        folder: Some("v81".to_owned()),
        manifest: manifest.map(str::to_owned),
        include: include.iter().map(|text| (*text).to_owned()).collect(),
        ..Want::default()
    };
    let other = selected(&want(Some("other"), &[]), &listing).unwrap();
    assert!(
        other.contains(&"v81/other.json".to_owned()) && !other.contains(&"v81/m.json".to_owned())
    );
    let some = selected(&want(Some("m"), &["*.bin"]), &listing).unwrap();
    assert_eq!(some, ["v81/m.json", "v81/decode.bin", "v81/vlm/tower.bin"]);
    let absent = selected(&want(Some("x"), &[]), &listing).unwrap_err();
    assert!(absent.contains("no manifest \"x\"\n  hint: it has m.json, other.json"), "{absent}");
    assert!(selected(&want(None, &["a{"]), &listing).unwrap_err().starts_with("--include"));
}

#[test]
fn programs_are_left_out_and_paths_stay_inside() {
    let with = |path: &'static str| listing("o/n", &["m.json", "a.bin", path]);
    let select = |path| Want::default().select(&with(path), is_manifest);
    assert_eq!(select("install.sh").unwrap().left_out, ["install.sh"]);
    for path in
        ["../x.bin", "/etc/x", "a/../../x", "a\\..\\x", "c:x", "a//b", "nul.bin", "x\u{1b}y"]
    {
        let error = select(path).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact, "{path}: {error}");
    }
    for path in ["A.bin", "a.bin/x"] {
        assert!(select(path).unwrap_err().message().contains("letters have no case"), "{path}");
    }
    let mut nameless = with("x.bin");
    nameless.files[2].blob = None;
    let error = Want::default().select(&nameless, is_manifest).unwrap_err();
    assert!(error.message().contains("no length or no hash"), "{error}");
}

fn checkpoint(name: &str, paths: &[&str]) -> Result<(String, Vec<String>), String> {
    let found = Selection::checkpoint(&listing(name, paths), CheckpointFiles::All, &[]);
    let found = found.map_err(|e| e.report().to_string())?;
    Ok((found.folder, found.files.into_iter().map(|file| file.path).collect()))
}

#[test]
fn a_checkpoint_is_its_configuration_and_weights() {
    let paths = [
        "README.md",
        "config.json",
        "tokenizer.json",
        "modeling.py",
        "consolidated.safetensors",
        "model-1.safetensors",
        "model-2.safetensors",
        "model.safetensors.index.json",
        "x.gguf",
        "1_Pooling/config.json",
        "onnx/config.json",
        "pytorch_model.bin",
    ];
    let (folder, files) = checkpoint("o/n", &paths).unwrap();
    assert_eq!(folder, "");
    assert_eq!(
        files,
        [
            "config.json",
            "tokenizer.json",
            "model-1.safetensors",
            "model-2.safetensors",
            "model.safetensors.index.json",
            "1_Pooling/config.json"
        ]
    );
    let configured =
        Selection::checkpoint(&listing("o/n", &paths), CheckpointFiles::Configuration, &[]);
    assert_eq!(configured.unwrap().files.len(), 4);
    let error = checkpoint("o/n", &["README.md", "v81/m.json"]).unwrap_err();
    assert!(error.starts_with("o/n: there is no checkpoint in it"), "{error}");
}

#[test]
fn folders_that_modules_json_names_are_taken() {
    let paths = [
        "config.json",
        "model.safetensors",
        "modules.json",
        "1_Pooling/config.json",
        "2_Dense_256/config.json",
        "2_Dense_256/model.safetensors",
        "2_Dense_1024/config.json",
        "2_Dense_1024/model.safetensors",
        "2_Dense_1024/pytorch_model.bin",
    ];
    let modules =
        br#"[{"path": ""}, {"path": "1_Pooling"}, {"path": "2_Dense_1024"}, {"path": "../x"}]"#;
    let folders = module_folders(modules);
    assert_eq!(folders, ["1_Pooling", "2_Dense_1024"]);
    let found = Selection::checkpoint(&listing("o/n", &paths), CheckpointFiles::All, &folders);
    let found: Vec<_> = found.unwrap().files.into_iter().map(|file| file.path).collect();
    assert_eq!(found, [&paths[..4], &paths[6..8]].concat());
}

#[test]
fn weights_of_torch_are_taken_where_there_are_no_others() {
    let sharded = [
        "config.json",
        "pytorch_model-00001-of-00002.bin",
        "pytorch_model-00002-of-00002.bin",
        "pytorch_model.bin.index.json",
    ];
    let others = ["pytorch_model.fp16.bin", "training_args.bin", "optimizer.pt", "x.gguf"];
    let (folder, files) = checkpoint("o/n", &[&sharded[..], &others].concat()).unwrap();
    assert_eq!((&*folder, &files[..]), ("", &sharded.map(str::to_owned)[..]));
    let voices = ["config.json", "kokoro-v1_0.pth", "voices/af_heart.pt", "voices/bm_lewis.pt"];
    let others = ["samples/a.wav", "eval/a.pt"];
    assert_eq!(checkpoint("o/n", &[&voices[..], &others].concat()).unwrap().1, voices);
    let two = checkpoint("o/n", &["config.json", "a.pth", "b.pth"]).unwrap_err();
    assert!(two.contains("no checkpoint in it"), "{two}");
    // A repository with an ONNX graph beside such weights is no bundle, whatever its JSON files are called.
    assert!(folders(&["long.json", "pytorch_model.bin", "onnx/model.onnx"]).is_empty());
}

#[test]
fn an_onnx_file_with_voices_is_a_checkpoint_and_no_bundle() {
    let kitten = ["config.json", "kitten_tts_mini_v0_8.onnx", "voices.npz"];
    let (folder, files) = checkpoint("o/n", &[&kitten[..], &["README.md"]].concat()).unwrap();
    assert_eq!((&*folder, &files[..]), ("", &kitten.map(str::to_owned)[..]));
    assert!(folders(&["m.json", "a.onnx", "voices.npz"]).is_empty());
    for others in [&kitten[..2], &[&kitten[..], &["b.onnx"]].concat()] {
        let error = checkpoint("o/n", others).unwrap_err();
        assert!(error.contains("no checkpoint in it"), "{error}");
    }
}

#[test]
fn an_archive_of_nemo_is_a_checkpoint() {
    let paths = ["README.md", "canary.nemo"];
    let (folder, files) = checkpoint("o/n", &paths).unwrap();
    assert_eq!(
        (folder.as_str(), files.as_slice()),
        ("canary.nemo", ["canary.nemo".to_owned()].as_slice())
    );
    // What transformers reads comes first.
    let both = ["canary.nemo", "config.json", "model.safetensors", "llm_backbone/config.json"];
    let (folder, files) = checkpoint("o/n", &both).unwrap();
    assert_eq!((folder.as_str(), files.len()), ("", 3));
}

#[test]
fn one_gguf_file_is_taken_with_its_parts() {
    let paths =
        ["a-q4.gguf", "a-q8-00001-of-00002.gguf", "a-q8-00002-of-00002.gguf", "mmproj-a.gguf"];
    let error = checkpoint("o/n", &paths).unwrap_err();
    assert!(error.contains("which file? There is a-q4.gguf, a-q8-00001-of-00002.gguf"), "{error}");
    let (folder, files) = checkpoint("o/n/a-q8-00001-of-00002.gguf", &paths).unwrap();
    assert_eq!(folder, "a-q8-00001-of-00002.gguf");
    assert_eq!(files, paths[1..3]);
    assert_eq!(checkpoint("o/n", &paths[..1]).unwrap().0, "a-q4.gguf");
    assert!(checkpoint("o/n/b.gguf", &paths).unwrap_err().contains("no such file"));
}
