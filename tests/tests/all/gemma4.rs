//! The Gemma 4 tiny model from checkpoint to text, against goldens that `transformers` made.

use std::fs;
use std::path::Path;

use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::{Content, ContentPart, Message, Model, Part, Prompt, Request, Speculate};
use qhx_core::op::{AudioRules, ImageRules, Segment};
use qhx_forge::plan::plan;
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Precision};
use qhx_media::{Limits, Source};
use qhx_tests::forged::{Dumping, Forged, set};
use qhx_tests::replay::{
    self, accepted_exact, alike, generate, greedy_exact, hands_over, play, play_speculative,
    shortest, speculative_exact, step_exact, within,
};
use qhx_tests::rescaled::rescaled;
use qhx_tests::tiny::{self, Case, Goldens};
use qhx_tests::{backends, files, has, plugin_files, suite};
use qhx_tiers::tier;
use qhx_types::Media;
use serde::Deserialize;
use serde_json::{Value, json};

pub(crate) const TINY: &str = "gemma4-tiny";
/// Random weights in other shapes: pattern of layers, donors, heads, window, pooling, budget, chunk.
const UNSEEN: &str = "gemma4-unseen";
/// Positions that a sliding layer of the tiny model sees.
const WINDOW: usize = 13;
/// Layers of the tiny model that have keys of their own; those after them read the donors 4 and 1.
const OWN: usize = 5;
/// Logits on the CPU differ by rounding only.
const CPU_DISTANCE: f64 = 1e-4;

/// Forges a checkpoint, for the CPU where nothing else is said.
pub(crate) fn try_bundle(
    checkpoint: &Path,
    change: impl FnOnce(&mut ForgeOptions),
) -> qhx_base::Result<Forged> {
    Forged::try_of(checkpoint, |options| {
        options.name = Some(TINY.to_owned());
        options.max_ctx = Some(200);
        options.prefill = Some(vec![24]);
        set(options, &[("towers", "none")]);
        change(options);
    })
}

pub(crate) fn bundle(change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    try_bundle(&tiny::fixture(TINY), change).unwrap_or_else(|e| panic!("{e}"))
}

pub(crate) fn goldens() -> Goldens {
    tiny::goldens(&tiny::fixture(TINY))
}

/// With the towers for images and audio, and more recipe options.
fn with_towers(given: &[(&str, &str)]) -> impl FnOnce(&mut ForgeOptions) {
    move |options| set(options, &[&[("towers", "all"), ("audio-tokens", "54")][..], given].concat())
}

/// Executions of a graph so far.
fn executions(model: &Model, graph: &str) -> u64 {
    replay::executions(model, |name| name == graph)
}

fn equals_the_reference(model: &mut Model, goldens: &Goldens, label: &str) {
    let cases: Vec<&Case> = goldens.cases.iter().collect();
    greedy_exact(model, &cases, label);
    within(step_exact(model, goldens, &cases, label), CPU_DISTANCE, label);
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
        let decode = &bundle.json()["plan"]["params"]["decode"];
        assert_eq!(decode.as_array().map_or(1, Vec::len), parts, "{decode}");
        equals_the_reference(&mut bundle.on_cpu(), &goldens, &format!("{parts} parts"));
    }
}

/// Prompt graphs narrower than the window, several widths at once, and none.
#[test]
fn prompts_in_chunks_of_any_width_say_the_same() {
    let goldens = goldens();
    for widths in [vec![], vec![5, 7], vec![150]] {
        let bundle = bundle(|o| o.prefill = Some(widths.clone()));
        let mut model = bundle.on_cpu();
        equals_the_reference(&mut model, &goldens, &format!("prompts in {widths:?}"));
        // Of draft tokens all rows would need the layers that only a prompt's last token passes.
        let refusal = model.info().verification.refusal.clone().unwrap();
        let why = if widths.is_empty() { "no graphs" } else { "end before the last layers" };
        assert!(refusal.contains(why), "{widths:?}: {refusal}");
        assert!(refusal.contains("--recipe-option verify=8"), "{widths:?}: {refusal}");
    }
}

/// Graphs of all layers verify draft tokens, whoever projects per-layer inputs and however the layers are spread:
/// rings, donors in other parts, conversations that go back. Where prompts ask for as many rows, one graph does both.
#[test]
fn draft_tokens_leave_the_answer_of_plain_decoding() {
    let goldens = goldens();
    let cases: Vec<&Case> = goldens.cases.iter().collect();
    let around = cases.iter().filter(|case| case.prompt_ids.len() > WINDOW);
    let around = around.max_by_key(|case| case.output_ids.len()).unwrap();
    for (verify, shards, ple, prefill) in
        [("8", 0, "graph", vec![24]), ("4", 9, "host", vec![5]), ("16", 1, "graph", vec![16])]
    {
        let bundle = bundle(|o| {
            (o.shards, o.prefill) = (shards, Some(prefill));
            set(o, &[("verify", verify), ("ple", ple)]);
        });
        let mut model = bundle.on_cpu();
        let rows: usize = verify.parse().unwrap();
        assert_eq!(model.info().verification.widths, [rows]);
        // Prompts take these graphs, too.
        equals_the_reference(&mut model, &goldens, &format!("draft tokens by graphs of {rows}"));
        for mode in ["3", "auto"] {
            let found = speculative_exact(&mut model, &cases, mode.parse().unwrap(), verify);
            eprintln!("graphs of {rows}, {mode} draft tokens: {found:?}");
            assert!(mode == "auto" || found.accepted > 0, "{rows}: {found:?}");
        }
        for right in [1, rows / 2, rows.min(around.output_ids.len() - 1)] {
            let found = accepted_exact(&mut model, around, rows, right);
            eprintln!("{right} of {rows} kept: {found:?}");
            assert!(found.largest <= CPU_DISTANCE, "{right} of {rows} kept: {found:?}");
        }
        for chat in &goldens.chat {
            let played = play_speculative(&mut model, chat, "3".parse().unwrap());
            assert!(played[1..].iter().all(|turn| turn.reused_tokens > 0), "{}", chat.id);
        }
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
        let mut model = bundle.on_cpu();
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
    let mut model = bundle.on_cpu();
    for chat in &goldens.chat {
        let played = play(&mut model, chat);
        for (index, pair) in chat.turns.windows(2).enumerate() {
            let reused = played[index + 1].reused_tokens;
            assert_eq!(reused, pair[1].reusable(&pair[0]), "{}, {index}", chat.id);
        }
    }
    let turn = &goldens.chat[0].turns[0];
    assert!(turn.output_ids.len() > 2 * WINDOW);
    let request = Request::greedy(goldens.chat[0].prompt(0), turn.output_ids.len());
    model.reset().unwrap();
    assert_eq!(generate(&mut model, &request).tokens, turn.output_ids);
    let again = generate(&mut model, &request);
    assert_eq!(again.tokens, turn.output_ids);
    assert!(again.reused_tokens > 0, "the second time consumed the whole question again");
}

/// The tiny model with another `config.json`.
fn checkpoint(config: &Value) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    plugin_files::copy_folder(&tiny::fixture(TINY), folder.path());
    fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
    folder
}

fn config(name: &str) -> Value {
    files::json(&tiny::fixture(TINY).join(name))
}

/// Published checkpoints and those that `transformers` 5 saves give the same graphs and parameters.
#[test]
fn both_spellings_of_the_configuration_make_the_same_bundle() {
    let other = checkpoint(&config("config.saved.json"));
    let made = |bundle: &Forged| {
        let manifest = bundle.json();
        let files = manifest["artifacts"]["files"].as_object().unwrap();
        let hashes: Vec<_> = files.iter().map(|(k, f)| (k.clone(), f["sha256"].clone())).collect();
        assert!(hashes.iter().any(|(file, _)| file.starts_with("onnx/decode_p0")), "{hashes:?}");
        (manifest["params"].clone(), manifest["plan"].clone(), hashes)
    };
    let other = try_bundle(other.path(), with_towers(&[])).unwrap_or_else(|e| panic!("{e}"));
    assert_eq!(made(&other), made(&bundle(with_towers(&[]))));
}

/// E2B's layers without keys of their own have an MLP twice as wide.
#[test]
fn a_width_of_the_mlp_that_the_tensors_do_not_have_is_named() {
    let mut config = config("config.json");
    config["text_config"]["use_double_wide_mlp"] = json!(false);
    let error = try_bundle(checkpoint(&config).path(), |_| ()).err().unwrap().to_string();
    assert!(error.contains("layers.5.mlp.gate_proj.weight"), "{error}");
    assert!(error.contains("[232, 100]") && error.contains("[116, 100]"), "{error}");
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
        bundle.refusal().to_string()
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
    let error = lacking.refusal().to_string();
    assert!(error.contains("layer 3") || error.contains("_4"), "{error}");

    // A table of per-layer inputs that is cut short.
    let short = bundle(|_| ());
    let table = short.json()["artifacts"]["ple"]["table"].as_str().unwrap().to_owned();
    let table = short.manifest.with_file_name(table);
    let file = fs::File::options().write(true).open(&table).unwrap();
    file.set_len(9 * 12 * 2 * 489).unwrap();
    has(&short.refusal().to_string(), &["ple_table_f16.bin", "490"]);
    file.set_len(9 * 12 * 2 * 490 - 1).unwrap();
    has(&short.refusal().to_string(), &["no whole number of rows of 108"]);

    let pad = bundle(|_| ());
    pad.edit(|manifest| manifest["params"]["ple"]["pad_token_id"] = json!(490));
    has(&pad.refusal().to_string(), &["pad_token_id: 490, expected a token below 490"]);
}

/// On the emulator: prompts around the rings in fp16; int8 weights by the tolerant gate.
#[tier(qnn)]
fn the_npu_equals_the_reference() {
    let goldens = goldens().brief();
    let (most, full) = if tiny::full_matrix() { (usize::MAX, true) } else { (2, false) };
    let v81 = bundle(|o| o.compiler = Some(backends::compiler("v81")));
    let mut model = v81.open(backends::qnn());
    let mut cases = shortest(&goldens, most);
    // A prompt of more than one chunk.
    cases.extend(goldens.cases.iter().find(|case| case.id == "ends").filter(|_| !full));
    greedy_exact(&mut model, &cases[cases.len() - 1..], "fp16");
    alike(step_exact(&mut model, &goldens, &cases, "fp16"), 0.9999, "v81 fp16");
    alike(hands_over(&mut model, &goldens, cases[0], "fp16"), 0.9999, "tokens on the CPU");
    if full {
        for chat in &goldens.chat {
            play(&mut model, chat);
        }
    }
    drop(model);
    for target in ["v79", "v75"].into_iter().filter(|_| full) {
        let bundle = bundle(|o| o.compiler = Some(backends::compiler(target)));
        let mut model = bundle.open(backends::qnn());
        let found = step_exact(&mut model, &goldens, &shortest(&goldens, 2), target);
        alike(found, 0.9999, &format!("{target} fp16"));
    }
    let int8 = bundle(|o| {
        o.compiler = Some(backends::compiler("v79"));
        o.precision = Precision::W8A16;
    });
    let mut model = int8.open(backends::qnn());
    let cases = shortest(&goldens, if full { 3 } else { 1 });
    suite::passes(&mut model, &cases, usize::MAX, "w8a16");
}

/// The tiny model with the products of its MLPs and the rows between its layers larger by these powers of 2, and norms
/// and gates that take the factors back: the same function, exactly so in bf16.
fn enlarged(products: i32, rows: i32) -> tempfile::TempDir {
    rescaled(TINY, |name| {
        let layer = name.split_once("language_model.layers.").map(|(_, rest)| rest);
        let (layer, part) = layer.and_then(|rest| rest.split_once('.')).unwrap_or_default();
        // The rows grow at the end of the first layer, and stay as large.
        match (layer == "0", part.trim_end_matches(".weight")) {
            (_, "mlp.up_proj") => Some(products),
            (true, "layer_scalar") => Some(rows),
            (
                false,
                "post_attention_layernorm"
                | "post_feedforward_layernorm"
                | "post_per_layer_input_norm",
            ) => Some(rows),
            (false, "per_layer_input_gate") => Some(-rows),
            _ => None,
        }
    })
}

#[test]
fn the_host_projects_per_layer_inputs_as_graphs_do() {
    let goldens = goldens();
    for prefill in [vec![], vec![5, 24]] {
        let bundle = bundle(|o| {
            o.prefill = Some(prefill.clone());
            set(o, &[("ple", "host")]);
        });
        let manifest = bundle.json();
        assert_eq!(manifest["plan"]["params"]["ple"], Value::Null, "no graph projects");
        assert!(manifest["artifacts"]["ple"]["proj"].is_string());
        let mut model = bundle.on_cpu();
        equals_the_reference(&mut model, &goldens, &format!("prompts in {prefill:?}"));
        assert_eq!(executions(&model, "ple"), 0);
    }
}

#[test]
fn graphs_project_per_layer_inputs() {
    let forged = bundle(|o| o.prefill = Some(vec![5, 24]));
    let manifest = forged.json();
    assert_eq!(manifest["artifacts"]["ple"]["proj"], Value::Null, "the host needs no weights");
    let mut model = forged.on_cpu();
    equals_the_reference(&mut model, &goldens(), "prompts in [5, 24]");
    assert!(executions(&model, "ple") > 0 && executions(&model, "ple24") > 0);
    forged.edit(|manifest| manifest["plan"]["params"]["ple"] = json!("ple"));
    has(&forged.refusal().to_string(), &["/plan/params/ple: the decoder takes"]);
}

/// Options of a decoder alone, whose products are divided by 2 to this power.
fn shifted(options: &mut ForgeOptions, shift: &str) {
    options.prefill = Some(Vec::new());
    options.recipe_options.insert("down-shift".to_owned(), shift.to_owned());
}

/// In single precision throughout, the shift changes nothing.
#[test]
fn the_shift_changes_nothing_in_single_precision() {
    let goldens = goldens();
    for shift in ["0", "8"] {
        let bundle = bundle(|o| shifted(o, shift));
        let cases = shortest(&goldens, 1);
        let found = step_exact(&mut bundle.on_cpu(), &goldens, &cases, "shifted");
        assert!(found.largest <= CPU_DISTANCE, "{shift}: {found:?}");
    }
}

/// On the emulator, with products beyond the range of f16: divided, they say the same; as they are, nothing.
#[tier(qnn, full)]
fn products_beyond_the_range_of_half_precision_need_the_shift() {
    let goldens = goldens();
    let case = goldens.cases.iter().find(|case| case.id == "tiny").unwrap();
    let logits = |checkpoint: &Path, shift: &str| {
        let bundle = try_bundle(checkpoint, |o| {
            shifted(o, shift);
            o.compiler = Some(backends::compiler("v81"));
        });
        let bundle = bundle.unwrap_or_else(|e| panic!("{e}"));
        let mut model = bundle.open(backends::qnn());
        let op = model.op_mut();
        let mut worst: Option<Distance> = None;
        for (step, expected) in goldens.logits(case).iter().enumerate().take(4) {
            match step.checked_sub(1) {
                None => op.prefill(&[Segment::Tokens(&case.prompt_ids)]).map(drop),
                Some(before) => op.decode(case.output_ids[before]).map(drop),
            }?;
            let found = Distance::of(&op.logits().unwrap().capped(op.info().softcap), expected)?;
            worst = Some(worst.map_or(found, |worst| worst.worse(found)));
        }
        Ok::<_, qhx_base::Error>(worst.unwrap())
    };
    for (products, rows, shift, right) in [
        (0, 0, "0", true),
        (0, 0, "4", true),
        (12, 8, "0", true),
        (12, 8, "4", true),
        (14, 8, "0", false),
        (14, 8, "4", true),
    ] {
        let found = logits(enlarged(products, rows).path(), shift);
        let label = format!("products 2^{products}, rows 2^{rows}, shift {shift}");
        match &found {
            Ok(found) => eprintln!(
                "{label}: logits differ by at most {:.2e}, cosine {:.7}",
                found.largest, found.cosine
            ),
            Err(error) => eprintln!("{label}: {error}"),
        }
        let cosine = found.map_or(0.0, |found| found.cosine);
        assert_eq!(cosine >= 0.9999, right, "{label}: cosine {cosine}");
    }
}

/// The sizes of the published bundle's files follow from the configuration of E4B.
#[test]
fn a_bundle_of_the_published_size_has_the_published_parts() {
    let config = qhx_paths::workspace().join("tests/configs/gemma-4-e4b.json");
    let checkpoint = Checkpoint::synthetic(&config, 1).unwrap();
    let mut options = ForgeOptions::new("bundle");
    options.precision = Precision::W8A16;
    options.head = Some(Precision::Fp16);
    options.prefill = Some(Vec::new());
    options.recipe_options.insert("audio".to_owned(), "w8a16".to_owned());
    let (plan, recipe) = plan(&checkpoint, recipe, &options, true).unwrap();
    let near = |found: u64, gigabytes: f64| {
        let found = found as f64 / 1e9;
        assert!((found / gigabytes - 1.0).abs() < 0.01, "{found} GB, expected {gigabytes}");
    };
    // Where the published bundle has a scale for each output, a block of 32 takes 34 bytes.
    const BLOCKS: f64 = 34.0 / 32.0;
    for (key, gigabytes) in [
        ("decode_p0", 1.14 * BLOCKS),
        ("decode_p1", 1.14 * BLOCKS),
        ("decode_p2", 1.66 * BLOCKS),
        ("lmhead", 1.342),
        ("ple", 0.0276 * BLOCKS),
        ("vision", 0.302),
        // Three graphs, each with the weights of the tower.
        ("audio_enc", 3.0 * 0.293 * BLOCKS),
    ] {
        near(plan.contexts.iter().find(|c| c.key == key).unwrap().weight_bytes, gigabytes);
    }
    near(plan.embed_bytes, 1.342);
    let table = plan.tables.iter().find(|(key, _)| key == "ple").unwrap();
    // In 8 bits, where the published one has f16.
    near(table.1, 5.637 / 2.0 * BLOCKS);
    // Prompts compute 23 of the 24 layers with keys of their own, and project for no more than these.
    options.prefill = Some(vec![128]);
    let (_, prompts) =
        qhx_forge::plan::plan(&checkpoint, qhx_forge::registry::recipe, &options, true).unwrap();
    let projected = |key: &str| {
        let mut graphs = prompts.contexts.iter().flat_map(|context| &context.graphs);
        let graph = graphs.find(|graph| graph.name() == key).unwrap();
        let context = graph.tensors().iter().find(|t| t.name == "context").unwrap();
        context.shape.clone()
    };
    assert_eq!([projected("ple"), projected("ple128")], [[1, 42 * 256], [128, 23 * 256]]);
    assert_eq!(recipe.params["vision"]["max_soft_tokens"], 280);
    assert_eq!(recipe.plan_params["decode"], json!(["decode_p0", "decode_p1", "decode_p2"]));
    // Whole chunks of 12.
    let lengths = json!(["audio_enc_48", "audio_enc_192", "audio_enc_756"]);
    assert_eq!(recipe.plan_params["audio_enc"], lengths);
    assert_eq!(recipe.params["transcription"], json!({"prompt": "\nTranscription: "}));
}

/// Golden values of images and audio.
#[derive(Deserialize)]
struct MediaGoldens {
    media: Vec<MediaCase>,
    media_chat: MediaChat,
}

#[derive(Deserialize)]
struct MediaCase {
    id: String,
    parts: Vec<MediaPart>,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: String,
}

#[derive(Deserialize)]
struct MediaChat {
    turns: Vec<MediaTurn>,
}

#[derive(Deserialize)]
struct MediaTurn {
    user: Value,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: String,
}

#[derive(Deserialize, Clone)]
#[serde(rename_all = "snake_case")]
enum MediaPart {
    Text(String),
    Image(String),
    Audio(String),
}

impl MediaPart {
    /// The image or clip from its file in a fixture, as the op's rules want it; none for text.
    fn media(&self, tiny: &str) -> Option<Media> {
        let file = |name: String| Source::File(tiny::fixture(tiny).join(name));
        let limits = Limits::default();
        Some(match self {
            Self::Text(_) => return None,
            Self::Image(id) => {
                let source = file(format!("{id}.png"));
                let found =
                    qhx_media::decode_image(&source, &ImageRules::default(), &limits).unwrap();
                Media::image(found.rgb, found.width, found.height).unwrap()
            }
            Self::Audio(id) => {
                let source = file(format!("{id}.wav"));
                let found =
                    qhx_media::decode_audio(&source, &AudioRules::default(), &limits).unwrap();
                Media::audio(found.samples, found.rate).unwrap()
            }
        })
    }
}

impl MediaCase {
    fn request(&self, tiny: &str) -> Request {
        let part = |part: &MediaPart| match part {
            MediaPart::Text(text) => Part::Text(text.clone()),
            other => Part::Media(other.media(tiny).unwrap()),
        };
        let parts = self.parts.iter().map(part).collect();
        Request::greedy(Prompt::Parts(parts), self.output_ids.len())
    }
}

fn media_goldens(tiny: &str) -> MediaGoldens {
    tiny::golden_json(tiny)
}

/// A tensor of the goldens `[rows, width]`, by rows.
fn golden(tiny: &str, name: &str) -> Vec<Vec<f32>> {
    let file = tiny::fixture(tiny).join("goldens.safetensors");
    let (shape, values) = files::tensor(&file, name);
    values.chunks_exact(shape[1]).map(<[f32]>::to_vec).collect()
}

/// Distance of what was dumped from a golden tensor.
fn distance(dumping: &mut Dumping, name: &str, tiny: &str, tensor: &str) -> Distance {
    dumping.distance(name, &golden(tiny, tensor).concat())
}

/// Names of the soft tokens of an image or a clip, in dumps and in goldens; none for text.
fn soft_tokens(part: &MediaPart) -> Option<(&'static str, String)> {
    match part {
        MediaPart::Text(_) => None,
        MediaPart::Image(id) => Some(("image_soft", format!("image.{id}.soft"))),
        MediaPart::Audio(id) => Some(("audio_soft", format!("audio.{id}.soft"))),
    }
}

/// Says the words of images and clips, one, several, and both in one prompt; and what lies on the way equals the
/// reference: mel frames, soft tokens, logits.
fn says_the_same(bundle: &Forged, tiny: &str) {
    let mut dumping = Dumping::open(&bundle.manifest, backends::cpu());
    for case in &media_goldens(tiny).media {
        dumping.reset().unwrap();
        let generation = generate(&mut dumping, &case.request(tiny));
        assert_eq!(generation.prompt_tokens, case.prompt_ids.len(), "{}", case.id);
        for part in &case.parts {
            if let MediaPart::Audio(id) = part {
                // Frames beyond the clip are zeros in the reference.
                let mut expected = golden(tiny, &format!("audio.{id}.mel"));
                while expected.last().is_some_and(|row| row.iter().all(|v| *v == 0.0)) {
                    expected.pop();
                }
                let expected = expected.concat();
                let mel = dumping.distance("mel", &expected);
                assert!(mel.largest <= 2e-4, "{id}: mel {mel:?}");
            }
            let Some((name, tensor)) = soft_tokens(part) else { continue };
            let soft = distance(&mut dumping, name, tiny, &tensor);
            eprintln!("{}: soft tokens {:.1e}, cosine {:.8}", case.id, soft.largest, soft.cosine);
            assert!(soft.cosine >= 0.999_999 && soft.largest <= 1e-5, "{}: {soft:?}", case.id);
        }
        let expected = &golden(tiny, &format!("{}.logits", case.id))[0];
        let logits = dumping.distance("logits", expected);
        eprintln!("{}: logits {:.1e}", case.id, logits.largest);
        assert!(logits.largest <= CPU_DISTANCE, "{}: logits {logits:?}", case.id);
        assert_eq!(generation.tokens, case.output_ids, "{}", case.id);
        // Bytes that are no character become one mark each, or one mark in all, as they come.
        if !case.text.contains('\u{fffd}') {
            assert_eq!(generation.text.trim_start(), case.text.trim_start(), "{}", case.id);
        }
    }
}

#[test]
fn images_and_clips_say_the_same() {
    says_the_same(&bundle(with_towers(&[])), TINY);
}

/// Forged with nothing said but the checkpoint.
#[test]
fn a_checkpoint_of_other_shapes_says_the_same() {
    let checkpoint = tiny::fixture(UNSEEN);
    let bundle = try_bundle(&checkpoint, |options| {
        *options = ForgeOptions::new(options.out.clone());
    });
    let bundle = bundle.unwrap_or_else(|e| panic!("{e}"));
    let goldens = tiny::goldens(&checkpoint);
    let found = step_exact(&mut bundle.on_cpu(), &goldens, &goldens.all(), UNSEEN);
    assert!(found.largest <= CPU_DISTANCE, "{found:?}");
    says_the_same(&bundle, UNSEEN);
}

/// Towers of int8 weights say the same words, of soft tokens that are nearly the same.
#[test]
fn towers_of_int8_weights_see_and_hear() {
    let int8 = bundle(with_towers(&[("vision", "w8a16"), ("audio", "w8a16")]));
    let mut dumping = Dumping::open(&int8.manifest, backends::cpu());
    for case in media_goldens(TINY).media.iter().filter(|c| ["boat", "noon"].contains(&&*c.id)) {
        dumping.reset().unwrap();
        assert_eq!(generate(&mut dumping, &case.request(TINY)).tokens, case.output_ids);
        for (name, tensor) in case.parts.iter().filter_map(soft_tokens) {
            let soft = distance(&mut dumping, name, TINY, &tensor);
            eprintln!(
                "{}, int8: soft tokens {:.1e}, cosine {:.6}",
                case.id, soft.largest, soft.cosine
            );
            assert!(soft.cosine >= 0.99 && soft.largest > 1e-5, "{}: {soft:?}", case.id);
        }
    }
}

/// A larger budget, several graphs: the smallest that holds an image or clip takes it.
#[test]
fn each_image_and_clip_goes_through_the_smallest_graph() {
    let sizes = [("image-patches", "540,1200"), ("image-tokens", "140"), ("audio-tokens", "18,54")];
    let bundle = bundle(with_towers(&sizes));
    // A checkpoint with a chat template is asked in a message.
    let transcription = &bundle.json()["params"]["transcription"];
    assert_eq!(transcription["chat"], json!(true), "{transcription}");
    let mut dumping = Dumping::open(&bundle.manifest, backends::cpu());
    let flag = MediaPart::Image("flag".to_owned()).media(TINY).unwrap();
    let short = Request::greedy(Prompt::Parts(vec![Part::Media(flag)]), 1);
    generate(&mut dumping, &short);
    let soft = distance(&mut dumping, "image_soft", TINY, "image.flag.soft140");
    assert!(soft.cosine >= 0.999_999 && soft.largest <= 1e-3, "{soft:?}");
    let stop = MediaPart::Audio("stop".to_owned()).media(TINY).unwrap();
    let bread = MediaPart::Audio("bread".to_owned()).media(TINY).unwrap();
    for clip in [stop, bread] {
        dumping.reset().unwrap();
        generate(&mut dumping, &Request::greedy(Prompt::Parts(vec![Part::Media(clip)]), 1));
    }
    for (id, tensor) in [("stop", "audio.stop.soft"), ("bread", "audio.bread.soft")] {
        let soft = distance(&mut dumping, "audio_soft", TINY, tensor);
        assert!(soft.cosine >= 0.999_999, "{id}: {soft:?}");
    }
    let graphs = ["vision_540", "vision_1200", "audio_enc_18", "audio_enc_54"];
    let found = graphs.map(|graph| executions(&dumping, graph));
    assert_eq!(found, [0, 1, 1, 1]);
}

/// Token by token, and with draft tokens.
#[test]
fn a_conversation_goes_on_after_an_image() {
    let bundle = bundle(with_towers(&[("verify", "4")]));
    let mut model = bundle.on_cpu();
    for (played, mode) in ["off", "3"].into_iter().enumerate() {
        model.reset().unwrap();
        talk_about_an_image(&mut model, mode.parse().unwrap(), played as u64);
    }
}

/// Plays the conversation with a model that did so `played` times.
fn talk_about_an_image(model: &mut Model, speculate: Speculate, played: u64) {
    let mut messages: Vec<Message> = Vec::new();
    for (index, turn) in media_goldens(TINY).media_chat.turns.iter().enumerate() {
        let content: Content = match turn.user.as_str() {
            Some(text) => text.into(),
            None => {
                let parts: Vec<MediaPart> = serde_json::from_value(turn.user.clone()).unwrap();
                let part = |part: &MediaPart| match part {
                    MediaPart::Text(text) => ContentPart::Text(text.clone()),
                    other => ContentPart::Media(other.media(TINY).unwrap()),
                };
                parts.iter().map(part).collect::<Vec<_>>().into()
            }
        };
        messages.push(Message::new("user", content));
        let prompt = Prompt::Chat { messages: messages.clone(), thinking: None };
        let request = Request::greedy(prompt, turn.output_ids.len());
        let generation = generate(model, &request.speculate(speculate));
        assert_eq!(generation.prompt_tokens, turn.prompt_ids.len(), "turn {index}");
        assert_eq!((generation.tokens, &*generation.text), (turn.output_ids.clone(), &*turn.text));
        assert_eq!(generation.reused_tokens > 0, index > 0, "turn {index}");
        assert_eq!(executions(model, "vision"), 1 + played, "turn {index}");
        messages.push(Message::new("assistant", turn.text.as_str()));
    }
}

#[test]
fn media_that_a_bundle_cannot_take_are_refused_in_a_sentence() {
    let refused = |model: &mut Model, media: Media| {
        let request = Request::greedy(Prompt::Parts(vec![Part::Media(media)]), 1);
        let error = replay::try_generate(model, &request).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Prompt, "{error}");
        error.to_string()
    };
    let image = || MediaPart::Image("tree".to_owned()).media(TINY).unwrap();
    let clip = |samples: usize, rate: u32| Media::audio(vec![0.1; samples], rate).unwrap();
    let mut text = bundle(|_| ()).on_cpu();
    has(&refused(&mut text, image()), &["the bundle takes no images: it has no graphs \"vision\""]);
    has(&refused(&mut text, clip(16_000, 16_000)), &["the bundle takes no audio"]);
    let mut model = bundle(with_towers(&[("image-patches", "540")])).on_cpu();
    let error = refused(&mut model, image());
    assert!(error.starts_with("image 1: an image of "), "not in `place`: {error}");
    assert!(error.contains("becomes 594 patches, but the bundle's graphs take 540"), "{error}");
    has(&refused(&mut model, clip(100, 16_000)), &["shorter than one frame"]);
    let error = refused(&mut model, clip(16_000 * 3, 16_000));
    assert!(error.contains("is 75 soft tokens, the bundle takes 54 (2.2 s) at most"), "{error}");
    assert!(error.starts_with("audio 1: ") && error.contains("qhx transcribe"), "{error}");
    let silence = Media::audio(vec![0.0; 16_000], 16_000).unwrap();
    let silence = Request::greedy(Prompt::Parts(vec![Part::Media(silence)]), 1);
    assert_eq!(generate(&mut model, &silence).tokens.len(), 1);
    has(&refused(&mut model, clip(8_000, 8_000)), &["8000 samples a second, expected 16000"]);
    let film = Media::video(vec![0; 12], 2, 2, vec![0.0]).unwrap();
    has(&refused(&mut model, film), &["the prompt has a video"]);
}

/// On the emulator: an image and a spoken sentence, through towers of f16 and of int8.
#[tier(qnn)]
fn the_npu_sees_and_hears() {
    let full = tiny::full_matrix();
    let goldens = media_goldens(TINY);
    // What is smaller takes the emulator less time, int8 weights above all.
    let forms: [(_, _, _, _, &[&str]); 3] = [
        ("fp16", 0.999, "540", "54", &["boat", "noon"]),
        ("fp16", 0.999, "630", "54", &[]),
        ("w8a16", 0.99, "468", "18", &["pole", "stop"]),
    ];
    for (weights, least, patches, tokens, ids) in
        forms.into_iter().skip(usize::from(full)).take(1 + usize::from(full))
    {
        let bundle = bundle(|o| {
            let towers = [("vision", weights), ("audio", weights)];
            let sizes = [("image-patches", patches), ("audio-tokens", tokens)];
            with_towers(&[towers, sizes].concat())(o);
            o.compiler = Some(backends::compiler("v81"));
        });
        let mut dumping = Dumping::open(&bundle.manifest, backends::qnn());
        for case in goldens.media.iter().filter(|c| ids.is_empty() || ids.contains(&&*c.id)) {
            dumping.reset().unwrap();
            let generation = generate(&mut dumping, &case.request(TINY));
            assert_eq!(generation.tokens, case.output_ids, "{}", case.id);
            for (name, tensor) in case.parts.iter().filter_map(soft_tokens) {
                let soft = distance(&mut dumping, name, TINY, &tensor);
                let label = format!("{}, {weights}", case.id);
                eprintln!("{label}: soft tokens {:.1e}, cosine {:.7}", soft.largest, soft.cosine);
                assert!(soft.cosine >= least, "{label}: {soft:?}");
            }
        }
    }
}
