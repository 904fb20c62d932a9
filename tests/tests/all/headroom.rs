//! Values that f16 does not hold, and the powers of two in weights that keep them within it.

use std::path::Path;

use half::bf16;
use qhx::golden::Golden;
use qhx_base::compare::Distance;
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::Model;
use qhx_core::op::Segment;
use qhx_forge::f16_range::measure::{F16_MAX, Measured, measure};
use qhx_forge::receipt::Reference;
use qhx_forge::registry::recipe;
use qhx_forge::{Fold, ForgeOptions, Silent};
use qhx_tests::forged::{Forged, set};
use qhx_tests::replay::{alike, greedy_exact, shortest, step_exact, within};
use qhx_tests::rescaled::rescaled;
use qhx_tests::{backends, files, has, tiny};
use qhx_tiers::tier;
use qhx_types::Media;

const TINY: &str = "llama3-tiny";
/// Positions of a smaller context.
const SMALL: usize = 16;
/// The layer whose values are made larger.
const LAYER: &str = "model.layers.1.";

/// The tiny model with weights of one layer times powers of two.
fn with(powers: &[(&str, i32)]) -> tempfile::TempDir {
    rescaled(TINY, |name| {
        let part = name.strip_prefix(LAYER).and_then(|part| part.strip_suffix(".weight"));
        powers.iter().find(|(name, _)| part == Some(name)).map(|(_, power)| *power)
    })
}

/// Products 2^17 times larger than they are, which the next projection takes back: the same function.
fn overflowing() -> tempfile::TempDir {
    with(&[("mlp.up_proj", 17), ("mlp.down_proj", -17)])
}

fn measured(checkpoint: &Path) -> Measured {
    measured_of(TINY, checkpoint, |_| ())
}

/// With the texts of a tiny model.
fn measured_of(tiny: &str, checkpoint: &Path, change: impl FnOnce(&mut ForgeOptions)) -> Measured {
    let goldens = tiny::goldens(&tiny::fixture(tiny));
    let texts: Vec<_> =
        shortest(&goldens, 3).iter().map(|case| case.prompt.clone() + &case.text).collect();
    let opened = Checkpoint::open(checkpoint).unwrap();
    let texts = texts.iter().map(|text| ("text", text.as_str()));
    let mut reference = Reference::new(&opened, texts, 40).unwrap();
    let longest = reference.longest();
    measured_by(&opened, longest, change, &mut |model| reference.read(model, &Silent))
}

fn measured_by(
    checkpoint: &Checkpoint,
    longest: usize,
    change: impl FnOnce(&mut ForgeOptions),
    read: &mut dyn FnMut(&mut Model) -> qhx_base::Result<()>,
) -> Measured {
    let out = tempfile::tempdir().unwrap();
    let open = |manifest: &Path| tiny::open(manifest, backends::cpu());
    let mut options = ForgeOptions::new(out.path().join("out"));
    change(&mut options);
    measure(checkpoint, recipe, &options, longest, (&open, read), &mut Silent).unwrap()
}

fn peak(found: &Measured, layer: &str, kind: &str) -> f32 {
    let mut peaks = found.peaks.iter();
    let one = peaks.find(|peak| peak.layer == layer && peak.kind == kind);
    let places = found.peaks.iter().map(|peak| format!("{} {}", peak.layer, peak.kind));
    let none = || panic!("{layer} {kind} is none of {:?}", places.collect::<Vec<_>>());
    one.unwrap_or_else(none).largest
}

/// A bundle without prompt graphs.
fn bundle(checkpoint: &Path, folds: &[Fold], change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(checkpoint, |options| {
        options.max_ctx = Some(64);
        options.prefill = Some(Vec::new());
        options.folds = folds.to_vec();
        change(options);
    })
}

/// Logits behind some tokens, and behind as many as the smaller context [`SMALL`] does not hold.
fn logits(model: &mut Model) -> Vec<f32> {
    let op = model.op_mut();
    op.prefill(&[Segment::Tokens(&[440, 17, 4, 99])]).unwrap();
    let mut found = op.logits().unwrap().to_f32();
    let rest: Vec<u32> = (100..).take(SMALL).collect();
    op.prefill(&[Segment::Tokens(&rest)]).unwrap();
    found.extend(op.logits().unwrap().to_f32());
    found
}

#[test]
fn products_are_measured_and_folded_on_the_cpu() {
    let (usual, large) = (measured(&tiny::fixture(TINY)), overflowing());
    assert!(usual.folds.as_ref().is_ok_and(Vec::is_empty), "{usual:?}");
    for kind in ["residual", "gate_proj", "up_proj", "product", "score"] {
        let size = peak(&usual, "layers.1", kind);
        assert!(size > 0.0 && size < 1000.0, "{kind}: {size}");
    }
    let found = measured(large.path());
    let product = peak(&found, "layers.1", "product");
    assert!(product > F16_MAX, "{found:?}");
    assert!((product / peak(&usual, "layers.1", "product") / 131_072.0 - 1.0).abs() < 1e-3);
    assert_eq!(peak(&found, "layers.1", "gate_proj"), peak(&usual, "layers.1", "gate_proj"));
    let folds = found.folds.unwrap();
    let parts: Vec<_> = folds.iter().map(|fold| fold.part.as_str()).collect();
    assert_eq!(parts, ["model.layers.1.mlp.up_proj"]);

    let goldens = tiny::goldens(&tiny::fixture(TINY));
    let cases = shortest(&goldens, 2);
    let bundle = bundle(large.path(), &folds, |_| ());
    let mut model = bundle.on_cpu();
    greedy_exact(&mut model, &cases, "folded");
    within(step_exact(&mut model, &goldens, &cases, "folded"), 1e-3, "folded");
    has(&std::fs::read_to_string(&bundle.manifest).unwrap(), &["\"model.layers.1.mlp.up_proj\": "]);
}

/// Each fold changes an activation, a product or the hidden states from there on.
#[test]
fn folded_graphs_compute_the_same_on_the_cpu() {
    for (powers, folds) in [
        (&[("mlp.gate_proj", 14)][..], &["model.layers.1.mlp.gate_proj"][..]),
        (&[("mlp.down_proj", 16)], &["model.layers.1.mlp.down_proj"]),
        (&[("self_attn.o_proj", 18)], &["model.layers.1.self_attn.o_proj"]),
    ] {
        let large = with(powers);
        let found = measured(large.path()).folds.unwrap();
        let parts: Vec<_> = found.iter().map(|fold| fold.part.as_str()).collect();
        assert_eq!(parts[..folds.len()], *folds, "{powers:?}: {found:?}");
        let [plain, folded] = [&[][..], &found[..]].map(|folds| {
            let bundle = bundle(large.path(), folds, |o| o.contexts = vec![SMALL]);
            logits(&mut bundle.on_cpu())
        });
        let distance = Distance::of(&folded, &plain).unwrap();
        assert!(distance.relative < 1e-4, "{powers:?}: {distance:?}");
    }
}

/// A step of Gemma 4 is a chain of graphs; it is measured as one, and what is folded is so in each graph of the chain.
#[test]
fn a_chain_of_graphs_is_measured_and_folded() {
    const CHAIN: &str = "gemma4-tiny";
    let large = rescaled(CHAIN, |name| match name.split_once("language_model.layers.1.mlp.")?.1 {
        "up_proj.weight" => Some(18),
        "down_proj.weight" => Some(-18),
        _ => None,
    });
    let text_only = |options: &mut ForgeOptions| set(options, &[("towers", "none")]);
    let usual = measured_of(CHAIN, &tiny::fixture(CHAIN), text_only);
    assert!(usual.folds.as_ref().is_ok_and(Vec::is_empty), "{usual:?}");
    for layer in ["layers.0", "layers.4", "layers.8"] {
        for kind in ["residual", "up_proj", "score"] {
            let size = peak(&usual, layer, kind);
            assert!(size > 0.0 && size < 10_000.0, "{layer} {kind}: {size}");
        }
    }
    let found = measured_of(CHAIN, large.path(), text_only);
    assert!(peak(&found, "layers.1", "up_proj") > F16_MAX, "{found:?}");
    let folds = found.folds.unwrap();
    assert!(folds.iter().all(|fold| fold.part.ends_with("layers.1.mlp.up_proj")), "{folds:?}");
    let [plain, folded] = [&[][..], &folds[..]]
        .map(|folds| logits(&mut bundle(large.path(), folds, text_only).on_cpu()));
    let distance = Distance::of(&folded, &plain).unwrap();
    assert!(!folds.is_empty() && distance.relative < 1e-4, "{distance:?}");
}

#[test]
fn scores_beyond_f16_are_refused_by_layer() {
    let large = with(&[("self_attn.q_proj", 9), ("self_attn.k_proj", 9)]);
    let found = measured(large.path());
    let error = found.folds.unwrap_err();
    assert!(error.message().contains("layers.1: score reaches"), "{error}");
    assert!(error.hint_text().is_some_and(|hint| hint.contains("--cpu-only")), "{error}");
}

/// Whatever a bundle is for: experts on the host, encoders, recognisers and voices.
#[test]
fn every_family_is_measured() {
    for (tiny, layer, kind) in [
        ("phimoe-6", "layers.1", "score"),
        ("qwen3-moe", "layers.1", "residual"),
        ("embed-bert-tiny", "encoder.layer.1", "residual"),
        ("whisper-tiny", "model.encoder.layers.1", "residual"),
        ("whisper-tiny", "layers.1", "fc1"),
        ("kokoro-tiny", "", ""),
        ("qwen3vl-tiny", "model.visual.blocks.6", "residual"),
        ("qwen25vl-unseen", "visual.blocks.2", "residual"),
    ] {
        let checkpoint = Checkpoint::open(&tiny::fixture(tiny)).unwrap();
        let small = |options: &mut ForgeOptions| {
            if tiny.contains("vl-") {
                set(options, &[("image-size", "48")]);
            }
        };
        let found = measured_by(&checkpoint, 64, small, &mut |model| {
            Golden::make(model, true, &mut |_| ()).map(drop)
        });
        assert!(found.folds.as_ref().is_ok_and(Vec::is_empty), "{tiny}: {found:?}");
        let nearest = found.nearest().unwrap_or_else(|| panic!("{tiny}: nothing is measured"));
        assert!(nearest.largest > 0.0 && nearest.largest < 10_000.0, "{tiny}: {nearest:?}");
        if !layer.is_empty() {
            let size = peak(&found, layer, kind);
            assert!(size > 0.0, "{tiny} {layer} {kind}: {found:?}");
        }
    }
}

/// A vision tower with a channel that leaves f16 in its third block, as bf16 checkpoints have it.
#[test]
fn a_tower_is_measured_on_an_image_and_folded() {
    const SEES: &str = "qwen3vl-tiny";
    let large = rescaled(SEES, |_| Some(0));
    files::edit_tensors(&large.path().join("model.safetensors"), |tensors| {
        let bias = tensors.iter_mut().find(|t| t.0 == "model.visual.blocks.2.mlp.linear_fc2.bias");
        bias.unwrap().3[..2].copy_from_slice(&bf16::from_f32(147_456.0).to_le_bytes());
    });
    let small = |options: &mut ForgeOptions| set(options, &[("image-size", "48")]);
    let rgb = (0u32..48 * 48 * 3).map(|value| (value * 7919 % 251) as u8).collect();
    let image = Media::image(rgb, 48, 48).unwrap();
    let see = |model: &mut Model| model.op_mut().prefill(&[image.segment()]).map(drop);
    let opened = Checkpoint::open(large.path()).unwrap();
    let found = measured_by(&opened, 64, small, &mut |model| see(model));
    assert!(peak(&found, "model.visual.blocks.1", "residual") < 1000.0, "{found:?}");
    assert!(peak(&found, "model.visual.blocks.2", "residual") > F16_MAX, "{found:?}");
    let folds = found.folds.unwrap();
    let parts: Vec<_> = folds.iter().map(|fold| fold.part.as_str()).collect();
    assert_eq!(parts, ["model.visual.blocks.2.mlp.linear_fc2"]);
    let [plain, folded] = [&[][..], &folds[..]].map(|folds| {
        let bundle = bundle(large.path(), folds, small);
        let mut model = bundle.on_cpu();
        see(&mut model).unwrap();
        model.op_mut().logits().unwrap().to_f32()
    });
    let distance = Distance::of(&folded, &plain).unwrap();
    assert!(distance.relative < 1e-4, "{distance:?}");
}

/// Biases of keys that hardly turn are the same for all keys, which softmax does not see.
#[test]
fn large_biases_of_keys_do_not_make_large_scores() {
    const BIASED: &str = "qwen2-tiny";
    const DIM: usize = 18;
    let score = |bias: Option<f32>| {
        let folder = rescaled(BIASED, |_| Some(0));
        let config = folder.path().join("config.json");
        let mut changed: serde_json::Value = files::json(&config);
        changed["rope_theta"] = 1e8.into();
        std::fs::write(&config, changed.to_string()).unwrap();
        files::edit_tensors(&folder.path().join("model.safetensors"), |tensors| {
            let biases = tensors.iter_mut().filter(|(name, ..)| name.ends_with("k_proj.bias"));
            for (bytes, bias) in biases.flat_map(|(_, _, _, data)| {
                // The slowest pair of each head.
                let pairs = data.as_chunks_mut().0.iter_mut().enumerate();
                let slowest = pairs.filter(|(index, _)| index % (DIM / 2) == DIM / 2 - 1);
                slowest.map(|(_, bytes)| bytes).zip(bias.into_iter().cycle())
            }) {
                *bytes = bf16::from_f32(bias).to_le_bytes();
            }
        });
        peak(&measured_of(BIASED, folder.path(), |_| ()), "layers.1", "score")
    };
    let (usual, large) = (score(None), score(Some(2000.0)));
    assert!(large < 2.0 * usual, "{large}, where the fixture has {usual}");
}

/// Worth of inputs: the sum of the squares of what the weight reads. Ranges: the largest of that, and of the results.
#[test]
fn inputs_of_weights_have_a_worth_and_a_range() {
    let found = measured(&tiny::fixture(TINY));
    let worth = |name: &str| &found.columns[name].squares;
    let gate = worth("model.layers.1.mlp.gate_proj");
    assert!(gate.iter().all(|sum| *sum > 0.0) && gate == worth("model.layers.1.mlp.up_proj"));
    assert_ne!(gate, worth("model.layers.0.mlp.gate_proj"));
    // What is read grows by 2^17, and its squares by 2^34.
    let large = measured(overflowing().path());
    let down = "model.layers.1.mlp.down_proj";
    for (usual, large) in worth(down).iter().zip(large.columns[down].squares.iter()) {
        assert!((large / usual / 2f32.powi(34) - 1.0).abs() < 1e-3, "{large} {usual}");
    }
    let range = |found: &Measured, name: &str| found.columns[name].range.unwrap();
    let (usual, large) = (range(&found, down), range(&large, down));
    assert!((large.inputs / usual.inputs / 2f32.powi(17) - 1.0).abs() < 1e-3, "{large:?}");
    assert_eq!(usual.outputs, peak(&found, "layers.1", "down_proj"));
    assert_eq!(usual.inputs, peak(&found, "layers.1", "product"));
}

#[test]
fn folds_that_f16_does_not_hold_are_refused_by_name() {
    for (fold, message) in [
        ("layers.9.mlp.up_proj=3", "no projection of the graphs has this in its name"),
        ("layers.1.mlp.up_proj=16", "model.layers.1.mlp.up_proj.weight: its largest value"),
        ("layers.1.mlp.gate_proj=24", "model.layers.1.mlp.gate_proj.weight: its largest value"),
    ] {
        let change = |o: &mut ForgeOptions| o.folds = vec![fold.parse().unwrap()];
        has(Forged::try_of(&tiny::fixture(TINY), change).unwrap_err().message(), &[message]);
    }
    for text in ["layers.1", "layers.1=0", "layers.1=25", "=3", "layers.1=-1"] {
        assert!(text.parse::<Fold>().is_err(), "{text}");
    }
}

#[tier(qnn)]
fn htp_overflows_without_folds_and_answers_with_them() {
    let backend = backends::qnn();
    let large = overflowing();
    let folds = measured(large.path()).folds.unwrap();
    let goldens = tiny::goldens(&tiny::fixture(TINY)).brief();
    let cases = shortest(&goldens, 1);
    let made = |folds: &[Fold]| {
        let compiler = backends::compiler("v81");
        bundle(large.path(), folds, |o| o.compiler = Some(compiler))
    };
    let overflows = made(&[]);
    let mut model = overflows.open(backend.clone());
    let op = model.op_mut();
    op.prefill(&[Segment::Tokens(&cases[0].prompt_ids)]).unwrap();
    // The emulator gives the largest number of f16 in place of a larger one.
    let wrong = Distance::of(&op.logits().unwrap().to_f32(), &goldens.logits(cases[0])[0]);
    eprintln!("without folds: {wrong:?}");
    assert!(wrong.is_err() || wrong.is_ok_and(|wrong| wrong.cosine < 0.9));

    let folded = made(&folds);
    let mut model = folded.open(backend);
    greedy_exact(&mut model, &cases, "folded");
    alike(step_exact(&mut model, &goldens, &cases, "folded"), 0.999, "folded");
}
