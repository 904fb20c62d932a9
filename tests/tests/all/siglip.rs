//! SigLIP 2 and CLIP from checkpoint to vectors of texts and images, against those of `transformers`
//! (`tests/oracle/siglip_embed.py`, `clip.py`).

use qhx_base::ErrorKind;
use qhx_base::compare::Distance;
use qhx_core::engine::Model;
use qhx_core::op::{ImageRules, Segment};
use qhx_forge::{ForgeOptions, Precision, Silent, Task, forge};
use qhx_media::{Limits, Source};
use qhx_tests::forged::{Forged, set};
use qhx_tests::{backends, files, has, says, tiny};
use qhx_text::Tokenizer;
use qhx_tiers::tier;
use serde::Deserialize;
use serde_json::{Value, json};

const FIXED: &str = "siglip-fixed";
const NAFLEX: &str = "siglip-naflex";
/// The middle of images, a token of the class, and texts that end at their last token.
const CLIP: &str = "encoders/clip";
/// Patches of the graphs of images that keep their shape.
const BUDGETS: [&str; 2] = ["24", "60"];

/// Golden values from `tests/oracle/siglip_embed.py`.
#[derive(Deserialize)]
struct Goldens {
    texts: Vec<Text>,
    images: Vec<Image>,
    /// Texts, and what `SiglipTokenizer` makes of them before it cuts them.
    #[serde(default)]
    plain: Vec<(String, String)>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
    ids: Vec<u32>,
    vector: Vec<f32>,
}

#[derive(Deserialize)]
struct Image {
    image: String,
    /// The most patches that it was given.
    patches: usize,
    vector: Vec<f32>,
}

fn goldens(fixture: &str) -> Goldens {
    tiny::golden_json(fixture)
}

fn bundle(fixture: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&tiny::fixture(fixture), |options| {
        options.task = Some(Task::Embed);
        change(options);
    })
}

/// The vectors of texts, and of images of `patches` patches, are those of the reference.
fn compare(mut model: Model, goldens: &Goldens, patches: Option<usize>, cosine: f64, label: &str) {
    let mut worst = 1.0f64;
    let mut near = |found: &[f32], expected: &[f32], what: &str| {
        let distance = Distance::of(found, expected).unwrap();
        worst = worst.min(distance.cosine);
        assert!(distance.cosine >= cosine, "{label}: {what}: cosine {}", distance.cosine);
        assert!(distance.largest < 0.1, "{label}: {what}: {}", distance.largest);
    };
    for Text { text, ids, vector } in &goldens.texts {
        assert_eq!(&model.tokenizer().unwrap().encode(text, true).unwrap(), ids, "{text}");
        near(model.embed(ids).unwrap(), vector, text);
    }
    let images = goldens.images.iter().filter(|one| patches.is_none_or(|all| one.patches == all));
    for Image { image, vector, .. } in images {
        let source = Source::File(tiny::fixture("").join(image));
        let decoded = qhx_media::decode_image(&source, &ImageRules::default(), &Limits::default());
        let decoded = decoded.unwrap().into_media().unwrap();
        near(model.embed_media(&decoded).unwrap(), vector, image);
    }
    eprintln!("{label}: least cosine {worst:.7}");
}

#[test]
fn cpu_equals_the_reference() {
    for fixture in [FIXED, CLIP] {
        compare(bundle(fixture, |_| ()).on_cpu(), &goldens(fixture), None, 0.99999, fixture);
    }
    for patches in BUDGETS {
        let bundle = bundle(NAFLEX, |o| set(o, &[("image-patches", patches)]));
        let count = patches.parse().ok();
        compare(bundle.on_cpu(), &goldens(NAFLEX), count, 0.99999, &format!("{NAFLEX} {patches}"));
    }
}

/// Other checkpoints, made by `clip.py --unseen`: `QHX_TEST_CLIP=A:B`.
#[tier(by_hand = "QHX_TEST_CLIP")]
fn checkpoints_of_the_environment_equal_the_reference() {
    for folder in std::env::split_paths(&std::env::var_os("QHX_TEST_CLIP").unwrap()) {
        let text = std::fs::read_to_string(folder.join("goldens.json")).unwrap();
        let goldens: Goldens = serde_json::from_str(&text).unwrap();
        let bundle = Forged::of(&folder, |options| options.task = Some(Task::Embed));
        compare(bundle.on_cpu(), &goldens, None, 0.99999, &folder.display().to_string());
    }
}

/// The fixture with another `tokenizer_config.json` or `tokenizer.json`, and the tokenizer of its bundle.
fn tokenizer_of(file: &str, change: impl FnOnce(&mut Value)) -> Tokenizer {
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = folder.path().join("checkpoint");
    qhx_tests::plugin_files::copy_folder(&tiny::fixture(FIXED), &checkpoint);
    files::edit(&checkpoint.join(file), change);
    let mut options = ForgeOptions::new(folder.path().join("bundle"));
    options.task = Some(Task::Embed);
    forge(&checkpoint, &options, &mut Silent).unwrap_or_else(|e| panic!("{e}"));
    Tokenizer::from_file(&folder.path().join("bundle/tokenizer.json")).unwrap()
}

/// The first SigLIP learned texts without punctuation; one that a file already makes lower-case is left as it is.
#[test]
fn texts_are_put_as_the_checkpoints_tokenizer_puts_them() {
    let own = Tokenizer::from_file(&tiny::fixture(FIXED).join("tokenizer.json")).unwrap();
    let ids = |tokenizer: &Tokenizer, text: &str| tokenizer.encode(text, true).unwrap();
    let first =
        tokenizer_of("tokenizer_config.json", |c| c["tokenizer_class"] = json!("SiglipTokenizer"));
    let plain = goldens(FIXED).plain;
    assert!(plain.len() > 4, "{plain:?}");
    for (text, canonical) in &plain {
        assert_eq!(ids(&first, text), ids(&own, canonical), "{text:?}");
    }
    let lower = tokenizer_of("tokenizer.json", |file| {
        let own = file["normalizer"].take();
        let lowercase = json!({"type": "Lowercase"});
        file["normalizer"] = json!({"type": "Sequence", "normalizers": [own, lowercase]});
    });
    assert_eq!(ids(&lower, "A Boat!"), ids(&own, "a boat!"));
}

/// With several graphs an image goes through the smallest that holds it at its own size.
#[test]
fn an_image_goes_through_the_graph_that_holds_it() {
    let bundle = bundle(NAFLEX, |o| set(o, &[("image-patches", "24,60")]));
    let mut model = bundle.on_cpu();
    for (side, graph) in [(32u32, "vision24"), (56, "vision60"), (400, "vision60")] {
        let rgb = vec![7; (side * side * 3) as usize];
        model.embed_media(&qhx_types::Media::image(rgb, side, side).unwrap()).unwrap();
        let all = model.graph_stats();
        let ran: Vec<_> = all.iter().filter(|stats| stats.executions > 0).collect();
        assert!(ran.iter().any(|stats| stats.graph == graph), "{side}: {ran:?}");
        if side == 32 {
            assert_eq!(ran.len(), 1, "{ran:?}");
        }
    }
}

#[test]
fn what_is_neither_a_text_nor_an_image_is_refused() {
    let bundle = bundle(FIXED, |_| ());
    let mut model = bundle.on_cpu();
    let image = Segment::Image { rgb: &[1, 2, 3], width: 1, height: 1 };
    for (segments, what) in [
        (&[image, Segment::Tokens(&[5])][..], "an image beside other segments"),
        (&[Segment::Tokens(&[5; 41])], "41 tokens, the encoder takes at most 40"),
        (&[Segment::Audio { samples: &[0.0], rate: 16_000 }], "audio"),
    ] {
        has(model.op_mut().embed(segments).unwrap_err().message(), &[what]);
    }
    assert!(model.op_mut().embed(&[image]).is_ok());
    drop(model);
    bundle.refuses([
        ("/params/padding/token", json!(481), "padding/token: found 481"),
        ("/params/image/filter", json!("nearest"), "unknown variant `nearest`"),
        ("/params/image/side", json!(4), "expected 16"),
        ("/params/image/patch", json!(4), "expected 48"),
        ("/plan/params/vision", json!("eye"), "eye"),
    ]);
    let mut options = ForgeOptions::new(std::env::temp_dir().join("none"));
    options.task = Some(Task::Embed);
    set(&mut options, &[("image-patches", "24")]);
    let error = forge(&tiny::fixture(FIXED), &options, &mut Silent).unwrap_err();
    says(&error, ErrorKind::Usage, &["images of one size"]);
}

/// Images of extreme shapes have a vector, or an error that says why they have none.
#[test]
fn a_clip_of_thin_images_says_what_it_takes() {
    let mut model = bundle(CLIP, |_| ()).on_cpu();
    let mut embed = |width: u32, height: u32| {
        let rgb = vec![9; (width * height * 3) as usize];
        model.embed_media(&qhx_types::Media::image(rgb, width, height).unwrap()).map(<[f32]>::len)
    };
    assert_eq!(embed(1, 1).unwrap(), 28);
    assert_eq!(embed(20_000, 7).unwrap(), 28);
    let error = embed(1, 2_000_000).unwrap_err();
    says(&error, ErrorKind::Prompt, &["1×2000000", "35×70000000"]);
}

#[tier(qnn)]
fn the_npu_is_near_the_reference() {
    let cases = [
        (FIXED, "v81", Precision::Fp16, 0.999),
        (CLIP, "v81", Precision::Fp16, 0.999),
        (NAFLEX, "v81", Precision::Fp16, 0.999),
        (NAFLEX, "v73", Precision::Fp16, 0.999),
        (FIXED, "v81", Precision::W8A16, 0.99),
        (FIXED, "v73", Precision::W8A16, 0.99),
        (NAFLEX, "v73", Precision::W8A16, 0.99),
    ];
    for (fixture, target, precision, cosine) in
        cases.into_iter().take(if tiny::full_matrix() { 7 } else { 3 })
    {
        let bundle = bundle(fixture, |o| {
            o.precision = precision;
            o.compiler = Some(backends::compiler(target));
            if fixture == NAFLEX {
                set(o, &[("image-patches", "24")]);
            }
        });
        let model = bundle.open(backends::qnn());
        let patches = (fixture == NAFLEX).then_some(24);
        let label = format!("{fixture} {target} {}", precision.name());
        compare(model, &goldens(fixture), patches, cosine, &label);
    }
}
