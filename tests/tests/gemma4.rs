//! The Gemma 4 toy from checkpoint to text, against goldens that `transformers` made.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

use qhx_core::compare::Distance;
use qhx_core::engine::{Message, Model, Prompt, Request};
use qhx_core::op::Segment;
use qhx_forge::{ForgeOptions, Precision, Silent, forge};
use qhx_tests::replay::{generate, greedy_exact, play, shortest, step_exact};
use qhx_tests::toys::{self, Case, Goldens};
use qhx_tests::{backends, plugin_files, suite};
use serde_json::{Value, json};

const TOY: &str = "gemma4-toy";
/// Positions that a sliding layer of the toy sees.
const WINDOW: usize = 13;
/// Layers of the toy that have keys of their own; those after them read the donors 4 and 1.
const OWN: usize = 5;
/// Logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

struct Bundle {
    manifest: PathBuf,
    _folder: tempfile::TempDir,
}

impl Bundle {
    fn manifest(&self) -> Value {
        serde_json::from_slice(&fs::read(&self.manifest).unwrap()).unwrap()
    }

    /// Changes the manifest.
    fn edit(&self, change: impl FnOnce(&mut Value)) {
        let mut manifest = self.manifest();
        change(&mut manifest);
        fs::write(&self.manifest, manifest.to_string()).unwrap();
    }

    fn open(&self) -> Model {
        toys::open(&self.manifest, backends::cpu()).unwrap()
    }

    fn refusal(&self) -> String {
        toys::open(&self.manifest, backends::cpu()).unwrap_err().to_string()
    }
}

/// Forges a checkpoint, for the CPU where nothing else is said.
fn try_bundle(
    checkpoint: &Path,
    change: impl FnOnce(&mut ForgeOptions),
) -> Result<Bundle, qhx_core::Error> {
    let folder = tempfile::tempdir().unwrap();
    let mut options = ForgeOptions::new(folder.path().join("bundle"));
    options.name = Some(TOY.to_owned());
    options.max_ctx = Some(200);
    options.prefill = Some(vec![24]);
    change(&mut options);
    let report = forge(checkpoint, &options, &mut Silent)?;
    Ok(Bundle { manifest: report.manifest, _folder: folder })
}

fn bundle(change: impl FnOnce(&mut ForgeOptions)) -> Bundle {
    try_bundle(&toys::fixture(TOY), change).unwrap_or_else(|e| panic!("{e}"))
}

fn goldens() -> Goldens {
    toys::goldens(&toys::fixture(TOY))
}

/// Executions of a graph so far.
fn executions(model: &Model, graph: &str) -> u64 {
    model.graph_stats().iter().find(|s| s.graph == graph).map_or(0, |s| s.executions)
}

#[expect(clippy::print_stderr, reason = "a test says what it measured or why it is skipped")]
fn equals_the_reference(model: &mut Model, goldens: &Goldens, label: &str) {
    let cases: Vec<&Case> = goldens.cases.iter().collect();
    greedy_exact(model, &cases, label);
    let Distance { largest, cosine, .. } = step_exact(model, goldens, &cases, label);
    eprintln!("{label}: logits differ by at most {largest:.2e}, cosine {cosine:.7}");
    assert!(largest <= CPU_DISTANCE, "{label}: logits differ by {largest:e}");
}

/// Cuts before the donors 1 and 4, between them, behind them, and among the layers that read them; the published three
/// parts where nothing is said.
#[test]
fn cpu_equals_the_reference_however_the_layers_are_spread() {
    let goldens = goldens();
    let longest = goldens.cases.iter().map(|case| case.prompt_ids.len()).max();
    assert!(longest.unwrap() > 6 * WINDOW, "a prompt goes around the rings several times");
    for (shards, parts) in [(0, 3), (1, 1), (5, 5), (9, 9)] {
        let bundle = bundle(|o| o.shards = shards);
        let decode = &bundle.manifest()["plan"]["params"]["decode"];
        assert_eq!(decode.as_array().map_or(1, Vec::len), parts, "{decode}");
        equals_the_reference(&mut bundle.open(), &goldens, &format!("{parts} parts"));
    }
}

/// Prompt graphs narrower than the window, several widths at once, and none.
#[test]
fn prompts_in_chunks_of_any_width_say_the_same() {
    let goldens = goldens();
    for widths in [vec![], vec![5, 7], vec![150]] {
        let bundle = bundle(|o| o.prefill = Some(widths.clone()));
        equals_the_reference(&mut bundle.open(), &goldens, &format!("prompts in {widths:?}"));
    }
}

/// Layers that read a donor write no cache, so a prompt needs them for its last token alone.
#[test]
fn only_the_last_token_of_a_prompt_passes_the_layers_that_share() {
    let graphs = ["prefill24_p0", "prefill24_p1", "decode_p0", "decode_p1", "decode_p2", "lmhead"];
    for (widths, tokens, expected) in [
        (vec![24], 1, [0, 0, 1, 1, 1, 1]),
        (vec![24], 25, [1, 1, 1, 1, 1, 1]),
        (vec![24], 60, [3, 3, 1, 1, 1, 1]),
        (vec![], 60, [0, 0, 60, 60, 1, 1]),
    ] {
        let bundle = bundle(|o| o.prefill = Some(widths.clone()));
        let mut model = bundle.open();
        model.op_mut().prefill(&[Segment::Tokens(&vec![70; tokens])]).unwrap();
        assert_eq!(model.op_mut().position(), tokens);
        let found = graphs.map(|graph| executions(&model, graph));
        assert_eq!(found, expected, "{tokens} tokens, {widths:?}");
        // No graph for prompts holds such a layer, and none gives rows for the next part.
        let names = model.graph_stats().into_iter().map(|s| s.graph);
        assert!(!names.into_iter().any(|name| name == "prefill24_p2"));
    }
}

#[test]
fn a_second_turn_goes_back_to_what_the_rings_have_lost() {
    let goldens = goldens();
    let bundle = bundle(|_| ());
    let mut model = bundle.open();
    for chat in &goldens.chat {
        model.reset().unwrap();
        let played = play(&mut model, chat);
        for (index, pair) in chat.turns.windows(2).enumerate() {
            let reused = played[index + 1].reused_tokens;
            assert_eq!(reused, pair[1].reusable(&pair[0]), "{}, {index}", chat.id);
        }
    }
    let turn = &goldens.chat[0].turns[0];
    assert!(turn.output_ids.len() > 2 * WINDOW);
    let messages = vec![Message::new("user", &turn.user)];
    let chat = Prompt::Chat { messages, thinking: None };
    let request = Request::greedy(chat, turn.output_ids.len());
    model.reset().unwrap();
    assert_eq!(generate(&mut model, &request).tokens, turn.output_ids);
    let again = generate(&mut model, &request);
    assert_eq!(again.tokens, turn.output_ids);
    assert!(again.reused_tokens > 0, "the second time consumed the whole question again");
}

/// The toy with another `config.json`.
fn checkpoint(config: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    plugin_files::copy_folder(&toys::fixture(TOY), folder.path());
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn config(name: &str) -> Value {
    serde_json::from_slice(&fs::read(toys::fixture(TOY).join(name)).unwrap()).unwrap()
}

/// Published checkpoints and those that `transformers` 5 saves give the same graphs and parameters.
#[test]
fn both_spellings_of_the_configuration_make_the_same_bundle() {
    let other = checkpoint(&config("config.saved.json"));
    let made = |bundle: &Bundle| {
        let manifest = bundle.manifest();
        let files = manifest["artifacts"]["files"].as_object().unwrap();
        let hashes: Vec<_> = files.iter().map(|(k, f)| (k.clone(), f["sha256"].clone())).collect();
        assert!(hashes.iter().any(|(file, _)| file.starts_with("onnx/decode_p0")), "{hashes:?}");
        (manifest["params"].clone(), manifest["plan"].clone(), hashes)
    };
    let other = try_bundle(other.path(), |_| ()).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(made(&other), made(&bundle(|_| ())));
}

#[test]
fn variants_without_a_recipe_are_refused_by_name() {
    for (key, value, part) in [
        ("enable_moe_block", json!(true), "enable_moe_block: experts"),
        ("attention_k_eq_v", json!(true), "attention_k_eq_v: keys that are values"),
        ("use_bidirectional_attention", json!("vision"), "use_bidirectional_attention"),
        ("hidden_size_per_layer_input", json!(0), "no per-layer inputs"),
        ("num_kv_shared_layers", json!(8), "none of the 1 layers before them is a full_attention"),
        ("num_kv_shared_layers", json!(9), "expected fewer than the 9 layers"),
        ("vocab_size_per_layer_input", json!(7), "vocab_size_per_layer_input is 7"),
    ] {
        let mut config = config("config.json");
        config["text_config"][key] = value;
        let error = try_bundle(checkpoint(&config).path(), |_| ()).err().unwrap().to_string();
        assert!(error.contains(part) && error.contains("config.json"), "{key}: {error}");
    }
    let mut moe = config("config.json");
    moe["architectures"] = json!(["Gemma4UnifiedForConditionalGeneration"]);
    let error = try_bundle(checkpoint(&moe).path(), |_| ()).err().unwrap().to_string();
    assert!(error.contains("Gemma4UnifiedForConditionalGeneration"), "{error}");
}

#[test]
fn what_does_not_fit_is_named() {
    let shared = |layers: usize| {
        let bundle = bundle(|_| ());
        bundle.edit(|manifest| manifest["params"]["kv_shared_layers"] = json!(layers));
        bundle.refusal()
    };
    let error = shared(9 - OWN - 1);
    let part = "layer 5, the donor of 7: the decode graphs (decode_p0, decode_p1, decode_p2) have no past_k_5";
    assert!(error.contains(part), "{error}");
    let error = shared(9 - OWN + 1);
    let part = "layer 4 reads the keys and values of layer 3, but the decode graphs";
    assert!(error.contains(part) && error.contains("have past_k_4"), "{error}");

    // A donor whose cache no graph has.
    let lacking = bundle(|o| o.prefill = Some(Vec::new()));
    lacking.edit(|manifest| {
        let decode = manifest["plan"]["params"]["decode"].as_array_mut().unwrap();
        decode.remove(1);
    });
    let error = lacking.refusal();
    assert!(error.contains("layer 3") || error.contains("_4"), "{error}");

    // A table of per-layer inputs that is cut short.
    let short = bundle(|_| ());
    let table = short.manifest()["artifacts"]["ple"]["table"].as_str().unwrap().to_owned();
    let table = short.manifest.with_file_name(table);
    let file = fs::File::options().write(true).open(&table).unwrap();
    file.set_len(9 * 12 * 2 * 489).unwrap();
    let error = short.refusal();
    assert!(error.contains("ple_table_f16.bin") && error.contains("490"), "{error}");
    file.set_len(9 * 12 * 2 * 490 - 1).unwrap();
    let error = short.refusal();
    assert!(error.contains("no whole number of rows of 108"), "{error}");

    let pad = bundle(|_| ());
    pad.edit(|manifest| manifest["params"]["ple"]["pad_token_id"] = json!(490));
    let error = pad.refusal();
    assert!(error.contains("pad_token_id: 490, expected a token below 490"), "{error}");
}

/// On the emulator: prompts around the rings in fp16; int8 weights by the tolerant gate.
#[test]
#[expect(clippy::print_stderr, reason = "a test says what it measured or why it is skipped")]
fn the_npu_equals_the_reference() {
    let Some(libraries) = toys::qnn_tier().filter(|_| !cfg!(feature = "builtin-ops")) else {
        return;
    };
    let (htp, system) = &libraries;
    let goldens = goldens();
    let (most, full) = if toys::full_matrix() { (usize::MAX, true) } else { (2, false) };
    let v81 = bundle(|o| o.compiler = Some(backends::compiler(htp, system, "v81")));
    let mut model = toys::open(&v81.manifest, backends::qnn(&libraries)).unwrap();
    let mut cases = shortest(&goldens, most);
    // A prompt of more than one chunk.
    cases.extend(goldens.cases.iter().find(|case| case.id == "ends").filter(|_| !full));
    greedy_exact(&mut model, &cases[cases.len() - 1..], "fp16");
    let Distance { largest, cosine, .. } = step_exact(&mut model, &goldens, &cases, "fp16");
    eprintln!("v81 fp16: logits differ by at most {largest:.2e}, cosine {cosine:.7}");
    assert!(cosine >= 0.9999, "fp16: cosine {cosine}");
    if full {
        for chat in &goldens.chat {
            model.reset().unwrap();
            play(&mut model, chat);
        }
    }
    drop(model);
    let int8 = bundle(|o| {
        o.compiler = Some(backends::compiler(htp, system, "v79"));
        o.precision = Precision::W8A16;
    });
    let mut model = toys::open(&int8.manifest, backends::qnn(&libraries)).unwrap();
    for case in shortest(&goldens, if full { usize::MAX } else { 1 }) {
        model.reset().unwrap();
        let request = Request::greedy(Prompt::Text(case.prompt.clone()), case.output_ids.len());
        let found = generate(&mut model, &request).tokens;
        assert!(suite::tolerated(&found, &case.output_ids), "w8a16, {}: {found:?}", case.id);
    }
}
