//! Encoders of families beside Mistral's, against what `sentence-transformers` makes of the same texts.

#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use std::path::PathBuf;

use qhx_core::compare::Distance;
use qhx_core::engine::Model;
use qhx_forge::{ForgeOptions, Silent, Task, forge};
use qhx_tests::{backends, tiny};
use qhx_tiers::tier;
use serde::Deserialize;

const GEMMA: &str = "embeddinggemma-tiny";

/// What `tests/oracle/encoders.py` writes of a text.
#[derive(Deserialize)]
struct Text {
    role: String,
    text: String,
    ids: Vec<u32>,
    vector: Vec<f32>,
}

fn texts(fixture: &str) -> Vec<Text> {
    #[derive(Deserialize)]
    struct Goldens {
        texts: Vec<Text>,
    }
    let json = std::fs::read(tiny::fixture(fixture).join("goldens.json")).unwrap();
    let Goldens { texts } = serde_json::from_slice(&json).unwrap();
    assert!(texts.len() >= 5);
    texts
}

/// A bundle of a fixture, opened on a backend.
fn opened(
    fixture: &str,
    libraries: Option<&(PathBuf, PathBuf)>,
    change: impl FnOnce(&mut ForgeOptions),
) -> (tempfile::TempDir, Model) {
    let folder = tempfile::tempdir().unwrap();
    let mut options = ForgeOptions::new(folder.path().join("bundle"));
    options.task = Task::Embed;
    options.compiler = libraries.map(|(htp, system)| backends::compiler(htp, system, "v81"));
    change(&mut options);
    let report = forge(&tiny::fixture(fixture), &options, &mut Silent)
        .unwrap_or_else(|e| panic!("{fixture}: {e}"));
    let backend = libraries.map_or_else(backends::cpu, |libraries| backends::qnn(libraries));
    let model = tiny::open(&report.manifest, backend).unwrap();
    (folder, model)
}

/// The tokens of each text behind its prefix, and its vector within `largest` of the reference's in every value.
fn compare(model: &mut Model, texts: &[Text], largest: f64, cosine: f64) {
    for text in texts {
        let params = &model.manifest().params.rest;
        let prefix = params[&format!("{}_prefix", text.role)].as_str().unwrap().to_owned();
        let tokens = model.tokenizer().unwrap().encode(&(prefix + &text.text), true).unwrap();
        assert_eq!(tokens, text.ids, "{}", text.text);
        let vector = model.embed(&tokens).unwrap();
        let distance = Distance::of(vector, &text.vector).unwrap();
        assert!(distance.largest <= largest, "{}: {:e}", text.text, distance.largest);
        assert!(distance.cosine >= cosine, "{}: cosine {}", text.text, distance.cosine);
    }
}

/// Layers that see a window on both sides, in one part and in two, of which one has no layer that sees all.
#[test]
fn embeddinggemma_equals_the_reference() {
    let texts = texts(GEMMA);
    for shards in [1, 2] {
        let change = |o: &mut ForgeOptions| (o.shards, o.prefill) = (shards, Some(vec![32]));
        let (_folder, mut model) = opened(GEMMA, None, change);
        assert_eq!((model.info().embedding_dim, model.info().max_ctx), (40, 128));
        compare(&mut model, &texts, 1e-4, 0.99999);
        let tokens: Vec<&[u32]> = texts.iter().map(|text| text.ids.as_slice()).collect();
        let together = model.embed_many(&tokens).unwrap();
        for (vector, text) in together.iter().zip(&texts) {
            let distance = Distance::of(vector, &text.vector).unwrap();
            assert!(distance.largest <= 1e-4, "{}, together: {:e}", text.text, distance.largest);
        }
    }
}

#[tier(qnn)]
#[test]
fn htp_embeddinggemma_is_near_the_reference() {
    let libraries = tiny::qnn_libraries();
    let change = |o: &mut ForgeOptions| (o.max_ctx, o.prefill) = (Some(40), Some(Vec::new()));
    let (_folder, mut model) = opened(GEMMA, Some(&libraries), change);
    let mut texts = texts(GEMMA);
    texts.retain(|text| text.ids.len() <= 40);
    compare(&mut model, &texts, 2e-2, 0.999);
}
