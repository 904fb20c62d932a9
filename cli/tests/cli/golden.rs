//! Golden steps: what a bundle is to answer, and what happens when it does not.

use std::path::{Path, PathBuf};

use qhx_tests::files;
use qhx_tests::plugin_files::copy_folder;
use qhx_tiers::tier;

use crate::run::{Program, bundle, checkpoint, copy_of_bundle, edit_manifest, folder, forge};
use crate::trace;

/// The tiny model's files of golden steps, in a bundle.
const GOLDEN: &str = "golden/tiny.json";
const DECODE: &str = "tiny_decode_f16.bin";
const HEAD: &str = "tiny_lmhead_f16.bin";

/// Replaces a file of a bundle that the manifest has no hash of any more.
fn replace(bundle: &Path, name: &str, by: &[u8]) {
    std::fs::write(bundle.join(name), by).expect("written");
    edit_manifest(bundle, |manifest| {
        let files = manifest["artifacts"]["files"].as_object_mut().expect("files");
        files.remove(name).expect("the file is listed");
    });
}

fn read(file: &Path) -> Vec<u8> {
    std::fs::read(file).expect("the file can be read")
}

#[test]
fn the_cpu_gives_the_golden_answers_of_its_bundle_alone() {
    let folder = folder();
    let verify = |bundle: &Path| qhx!(folder, "verify", bundle);
    let run = verify(bundle()).args(["--backend", "cpu"]).run().ok();
    run.prints(&["ok   golden generate-3: cosine 1.000000", "ok   golden generate-8: "]);
    let json = verify(bundle()).args(["--json"]).run().ok().json();
    assert_eq!(json["golden"]["backend"], "cpu");
    assert_eq!(json["golden"]["steps"][1]["passed"], true);

    // The answers of another prompt.
    let other = copy_of_bundle(folder.path());
    let mut golden: serde_json::Value = files::json(&other.join(GOLDEN));
    golden["steps"][0]["tokens"][1] = 7.into();
    replace(&other, GOLDEN, golden.to_string().as_bytes());
    let run = verify(&other).run();
    assert_eq!(run.code, 1, "{run:?}");
    run.prints(&["FAIL golden generate-3: cosine 0."]);
    assert_eq!(verify(&other).args(["--json"]).run().json()["passed"], false);
    // The CPU is not asked when a bundle is opened.
    let generate = qhx!(folder, "generate", other);
    generate.args(["a", "--max-new", "1"]).run().ok();

    let options = "--max-ctx 32 --prefill 0 --cpu-only --no-golden";
    let plain = forge(folder.path(), &checkpoint(), "plain", options);
    assert!(!plain.join("golden").exists());
    let run = verify(&plain).run().ok();
    assert!(!run.stdout.contains("golden"), "{}", run.stdout);
}

/// Names of golden steps and whether they pass, as `qhx verify` says.
fn steps(report: &serde_json::Value) -> Vec<(&str, bool)> {
    let steps = report["golden"]["steps"].as_array().expect("steps").iter();
    steps.map(|s| (s["name"].as_str().expect("a name"), s["passed"] == true)).collect()
}

/// A tiny model with image and audio towers, and what it is forged with.
const SEES_AND_HEARS: (&str, [&str; 4]) =
    ("gemma4-tiny", ["--recipe-option", "towers=all", "--recipe-option", "audio-tokens=54"]);
const SEES: (&str, [&str; 2]) = ("qwen3vl-tiny", ["--recipe-option", "image-size=48"]);

#[test]
fn each_modality_of_a_bundle_has_a_golden_step() {
    let folder = folder();
    let verify = |out: &str| {
        let verify = qhx!(folder, "verify", out, "--backend", "cpu");
        verify.args(["--json"]).run().json()
    };
    let forge = |(name, how): (&str, &[&str]), out: &str| {
        let forge = qhx!(folder, "forge", qhx_paths::fixture(name));
        let shape = ["--name", "tiny", "--max-ctx", "200", "--prefill", "24", "--cpu-only"];
        forge.args(["--out", out]).args(shape).args(how).run().ok();
    };
    forge((SEES_AND_HEARS.0, &SEES_AND_HEARS.1), "all");
    let filling = [("generate-51", true), ("generate-at-175", true)];
    let text = [[("generate-3", true), ("generate-8", true)], filling].concat();
    let media = [("generate-image", true), ("generate-audio", true)];
    let report = verify("all");
    assert_eq!(steps(&report), [&text[..], &media].concat(), "{report}");
    // Graphs that are not there are not asked for.
    forge((SEES_AND_HEARS.0, &["--recipe-option", "towers=none"]), "none");
    assert_eq!(steps(&verify("none")), text);

    // The answers to another image, and one without its pixels.
    let file = folder.path().join("all").join(GOLDEN);
    let golden: serde_json::Value = files::json(&file);
    let image = golden["steps"].as_array().expect("steps").iter().position(|s| {
        s["media"]["type"] == "image" && s["media"]["rgb"].as_array().is_some_and(|p| p.len() > 9)
    });
    let image = image.expect("an image");
    let mut other = golden.clone();
    for value in other["steps"][image]["media"]["rgb"].as_array_mut().expect("pixels") {
        *value = (255 - value.as_u64().expect("a byte")).into();
    }
    replace(&folder.path().join("all"), GOLDEN, other.to_string().as_bytes());
    let report = verify("all");
    assert_eq!(steps(&report)[image], ("generate-image", false), "{report}");
    let mut damaged = golden;
    damaged["steps"][image]["media"]["rgb"] = serde_json::json!([1, 2, 3]);
    std::fs::write(&file, damaged.to_string()).expect("written");
    let run = qhx!(folder, "verify", "all", "--backend", "cpu").run();
    let message = "golden steps: step \"generate-image\": ";
    run.says(&[message]);
}

#[tier(qnn)]
fn the_npu_passes_golden_steps_with_media() {
    let bundles = Bundles::new();
    let models: [(&str, &[&str]); 2] = [(SEES.0, &SEES.1), (SEES_AND_HEARS.0, &SEES_AND_HEARS.1)];
    let count = if qhx_tests::tiny::full_matrix() { 2 } else { 1 };
    for (name, how) in models.into_iter().take(count) {
        let forge = bundles.qhx().args(["forge"]).args([qhx_paths::fixture(name)]);
        let shape = ["--name", "tiny", "--max-ctx", "200", "--prefill", "0", "--target", "v79"];
        forge.args(["--out", name, "--for-emulator"]).args(shape).args(how).run().ok();
        assert!(!bundles.folder.path().join(name).join("onnx").exists(), "made, and not kept");
        let verify = bundles.qhx().args(["verify", name, "--backend", "qnn", "--json"]).run();
        let report = verify.json();
        assert!(steps(&report).contains(&("generate-image", true)), "{report}");
        assert!(steps(&report).iter().all(|(_, passed)| *passed), "{report}");
        assert!(steps(&report).len() > 2, "{report}");
    }
}

#[cfg(not(feature = "builtin-ops"))]
#[test]
fn a_forge_that_cannot_compute_golden_steps_fails() {
    let folder = folder();
    let forge = |more: &[&str]| {
        let forge = qhx!(folder, "forge", checkpoint());
        let shape = ["--max-ctx", "32", "--prefill", "0", "--cpu-only", "--no-plugins"];
        forge.args(["--out", "plain"]).args(shape).args(more).run()
    };
    let run = forge(&[]);
    assert_eq!(run.code, 8, "{run:?}");
    let words = ["error: golden steps: ", "the bundle is there, without golden steps; --no-golden"];
    let said = run.stderr.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.iter().all(|words| said.contains(words)), "{}", run.stderr);
    assert!(!folder.path().join("plain/golden").exists());
    forge(&["--overwrite", "--no-golden"]).ok();
}

/// Bundles of the tiny model on the library.
struct Bundles {
    folder: tempfile::TempDir,
}

impl Bundles {
    fn new() -> Self {
        Self { folder: folder() }
    }

    fn qhx(&self) -> Program {
        Program::npu(self.folder.path())
    }

    fn forge(&self, out: &str, from: &[&Path], precision: &str) -> PathBuf {
        let forge = self.qhx().args(["forge"]).args(from).args(["--out", out, "--name", "tiny"]);
        let shape = ["--target", "v79", "--max-ctx", "32", "--prefill", "0", "--onnx"];
        forge.args(shape).args(["--precision", precision]).run().ok();
        self.folder.path().join(out)
    }

    fn generate(&self, bundle: &Path) -> Program {
        self.qhx().args(["generate"]).arg(bundle).args(["The", "--max-new", "1"])
    }

    /// A copy of a bundle with another file.
    fn with(&self, whole: &Path, name: &str, by: &[u8]) -> PathBuf {
        let to = self.folder.path().join("changed");
        let _ = std::fs::remove_dir_all(&to);
        copy_folder(whole, &to);
        replace(&to, name, by);
        to
    }

    /// Asserts that the bundle is refused, for this graph.
    fn refused(&self, bundle: &Path, because: &str) {
        let run = self.generate(bundle).run();
        assert_eq!(run.code, 6, "{because}: {run:?}");
        assert_eq!(run.stdout, "", "{because}");
        let message = run.stderr.replace(['\n', ' '], "");
        assert!(message.contains("wronganswersonthisdevice"), "{}", run.stderr);
        assert!(message.contains(&because.replace(' ', "")), "{because}: {}", run.stderr);
    }
}

/// A byte of the exponent of a weight: the middle of what looks like f16 weights.
fn weight(binary: &[u8]) -> usize {
    let is_weight = |pair: &[u8]| (0x10..0x38).contains(&(pair[1] & 0x7f));
    let start = (binary.len() / 4) & !1;
    let runs = binary[start..].windows(128).step_by(2);
    let at = runs.map(|run| run.chunks(2).all(is_weight)).position(|found| found);
    start + at.expect("weights") * 2 + 65
}

/// The checkpoint with one row of a matrix, which is one scale of its quantized form, 64 times as large.
fn scaled(to: &Path) {
    copy_folder(&checkpoint(), to);
    let file = to.join("model.safetensors");
    let mut bytes = read(&file);
    let length = u64::from_le_bytes(bytes[..8].try_into().expect("a length")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).expect("JSON");
    let tensor = &header["model.layers.0.mlp.down_proj.weight"];
    let begin = 8 + length + tensor["data_offsets"][0].as_u64().expect("an offset") as usize;
    let width = tensor["shape"][1].as_u64().expect("a width") as usize;
    for pair in bytes[begin..begin + 2 * width].chunks_exact_mut(2) {
        let value = u16::from_le_bytes([pair[0], pair[1]]);
        let larger = if value & 0x7fff == 0 { value } else { value + (6 << 7) };
        pair.copy_from_slice(&larger.to_le_bytes());
    }
    std::fs::write(file, bytes).expect("written");
}

#[tier(qnn)]
fn a_whole_bundle_is_asked_once() {
    let bundles = Bundles::new();
    let whole = bundles.forge("whole", &[&checkpoint()], "fp16");
    let count = |cache: &str| {
        let traced = bundles.generate(&whole).args(["--trace", "trace.json"]);
        let run = traced.env("QHX_CACHE_DIR", cache).run().ok();
        let events = trace::events(&bundles.folder.path().join("trace.json"));
        let asked = trace::spans(&events, "golden step").len();
        let graphs = events.iter().filter(|event| event["cat"] == "graph").count();
        (asked, graphs, run.stdout)
    };
    let (first, second) = (count("cache"), count("cache"));
    assert_eq!((first.0, second.0), (1, 0));
    assert!(first.1 >= second.1 + 5, "{first:?} {second:?}");
    assert_eq!(first.2, second.2, "the state is as it was");
    // A cache that cannot be written.
    std::fs::write(bundles.folder.path().join("file"), "").expect("written");
    assert_eq!([count("file/cache").0, count("file/cache").0], [1, 1]);

    // Another state of a file.
    let head = whole.join(HEAD);
    std::fs::write(&head, read(&head)).expect("written");
    assert_eq!([count("cache").0, count("cache").0], [1, 0]);

    let verify = bundles.qhx().args(["verify", "whole", "--backend", "qnn", "--json"]).run().ok();
    let golden = &verify.json()["golden"];
    assert_eq!((&golden["backend"], &golden["passed"]), (&"qnn".into(), &true.into()));
    assert_eq!(golden["steps"].as_array().map(Vec::len), Some(3));
}

#[tier(qnn)]
fn a_wrong_bundle_is_refused_and_its_graph_named() {
    let bundles = Bundles::new();
    let whole = bundles.forge("whole", &[&checkpoint()], "fp16");
    let mut flipped = read(&whole.join(DECODE));
    let at = weight(&flipped);
    flipped[at] ^= 0x40;
    let changed = bundles.with(&whole, DECODE, &flipped);
    bundles.refused(&changed, "graph \"decode\" departs first");
    bundles.generate(&changed).args(["--backend", "cpu"]).run().ok();

    let config = checkpoint().join("config.json");
    let other = bundles.forge("other", &[Path::new("--synthetic"), &config], "fp16");
    let changed = bundles.with(&whole, HEAD, &read(&other.join(HEAD)));
    bundles.refused(&changed, "graph \"lmhead\" departs first: output \"logits\"");
    bundles.generate(&changed).args(["--unverified"]).run().ok();
    let verify = bundles.qhx().args(["verify"]).arg(&changed).args(["--json"]).run();
    assert_eq!(verify.code, 1, "{verify:?}");
    assert_eq!(verify.json()["golden"]["comparison"]["departs"]["graph"], "lmhead");
    std::fs::remove_dir_all(changed.join("onnx")).expect("removed");
    bundles.refused(&changed, "no ONNX graphs");
    let changed = bundles.with(&whole, DECODE, &read(&other.join(DECODE)));
    bundles.refused(&changed, "graph \"decode\" departs first");

    let changed = bundles.with(&whole, GOLDEN, &read(&other.join(GOLDEN)));
    bundles.refused(&changed, "the golden steps are of other weights");
    let golden = read(&whole.join(GOLDEN));
    let changed = bundles.with(&whole, GOLDEN, &golden[..golden.len() / 2]);
    bundles.generate(&changed).run().fails(4, &["golden steps: EOF"]);
    std::fs::remove_file(changed.join(GOLDEN)).expect("removed");
    bundles.generate(&changed).run().ok();
}

#[tier(qnn)]
fn one_wrong_scale_is_found() {
    let bundles = Bundles::new();
    let whole = bundles.forge("whole", &[&checkpoint()], "w8a16");
    let from = bundles.folder.path().join("scaled-checkpoint");
    scaled(&from);
    let scaled = bundles.forge("scaled", &[&from], "w8a16");
    let decode = ["tiny_decode_f16.bin", "tiny_decode_w8.bin"];
    let decode = decode.into_iter().find(|name| whole.join(name).exists()).expect("a binary");
    let changed = bundles.with(&whole, decode, &read(&scaled.join(decode)));
    bundles.refused(&changed, "graph \"decode\" departs first");
}
