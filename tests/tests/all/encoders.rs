//! Encoders of families beside Mistral's, and rerankers that score pairs of texts, against what
//! `sentence-transformers` makes of the same texts.

use qhx_base::compare::Distance;
use qhx_base::{CancelToken, ErrorKind};
use qhx_core::engine::Model;
use qhx_core::manifest::Verdict;
use qhx_forge::{ForgeOptions, Task};
use qhx_tests::forged::{Forged, set};
use qhx_tests::{backends, says, tiny};
use qhx_tiers::tier;
use serde::Deserialize;

const GEMMA: &str = "embeddinggemma-tiny";
const BERT: &str = "embed-bert-tiny";
const RERANKERS: [&str; 4] =
    ["rerank-bert-tiny", "rerank-xlmr-tiny", "rerank-llama-tiny", "rerank-qwen3-tiny"];
/// Fixtures from `tests/oracle/text_encoders.py`.
const ENCODERS: [&str; 8] = [
    "encoders/modernbert",
    "encoders/mpnet",
    "encoders/distilbert",
    "encoders/nomic",
    "encoders/gte",
    "encoders/jina",
    "encoders/bge-m3",
    "encoders/ministral3",
];
const CROSS_ENCODERS: [&str; 3] =
    ["encoders/modernbert-reranker", "encoders/mpnet-reranker", "encoders/gte-reranker"];

/// Golden values of a text from `tests/oracle/encoders.py`.
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
    let Goldens { texts } = tiny::golden_json(fixture);
    assert!(texts.len() >= 5);
    texts
}

/// A bundle of a fixture, opened on the CPU or on the NPU.
fn opened(fixture: &str, npu: bool, change: impl FnOnce(&mut ForgeOptions)) -> (Forged, Model) {
    opened_for(fixture, npu.then_some("v81"), change)
}

fn opened_for(
    fixture: &str,
    target: Option<&str>,
    change: impl FnOnce(&mut ForgeOptions),
) -> (Forged, Model) {
    let bundle = Forged::of(&tiny::fixture(fixture), |options| {
        options.task = Some(Task::Embed);
        options.compiler = target.map(backends::compiler);
        change(options);
    });
    let model = if target.is_some() { bundle.open(backends::qnn()) } else { bundle.on_cpu() };
    (bundle, model)
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
        let (_folder, mut model) = opened(GEMMA, false, change);
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

/// Absolute positions, and LayerNorm behind each part of a layer.
#[test]
fn bert_equals_the_reference() {
    let texts = texts(BERT);
    let change = |o: &mut ForgeOptions| (o.shards, o.prefill) = (2, Some(vec![16]));
    let (_folder, mut model) = opened(BERT, false, change);
    compare(&mut model, &texts, 1e-4, 0.99999);
    let error = model.score_parts(&[&texts[0].ids], &CancelToken::new()).unwrap_err();
    says(&error, ErrorKind::Usage, &["--task score"]);
}

/// Windows on both sides, distances with numbers of their own, rotary positions, gates; in one part and in two, alone
/// and together.
#[test]
fn further_encoders_equal_the_reference() {
    for (place, fixture) in ENCODERS.into_iter().enumerate() {
        let texts = texts(fixture);
        let change =
            |o: &mut ForgeOptions| (o.shards, o.prefill) = (1 + place % 2, Some(vec![16, 64]));
        let (_folder, mut model) = opened(fixture, false, change);
        assert!([320, 322].contains(&model.info().max_ctx), "{fixture}");
        compare(&mut model, &texts, 1e-4, 0.99999);
        let short: Vec<&Text> = texts.iter().filter(|text| text.ids.len() < 64).collect();
        let tokens: Vec<&[u32]> = short.iter().map(|text| text.ids.as_slice()).collect();
        let together = model.embed_many(&tokens).unwrap();
        for (vector, text) in together.iter().zip(short) {
            let distance = Distance::of(vector, &text.vector).unwrap();
            assert!(distance.largest <= 1e-4, "{fixture}, {}: {:e}", text.text, distance.largest);
        }
    }
}

/// The first values of vectors that were trained for it.
#[test]
fn vectors_are_as_short_as_asked_for() {
    #[derive(Deserialize)]
    struct Short {
        ids: Vec<u32>,
        short: Vec<f32>,
    }
    #[derive(Deserialize)]
    struct Goldens {
        texts: Vec<Short>,
    }
    let Goldens { texts } = tiny::golden_json("encoders/nomic");
    let (_folder, mut model) = opened("encoders/nomic", false, |o| set(o, &[("dimensions", "16")]));
    assert_eq!(model.info().embedding_dim, 16);
    for Short { ids, short } in &texts {
        let distance = Distance::of(model.embed(ids).unwrap(), short).unwrap();
        assert!(distance.largest <= 1e-4, "{:e}", distance.largest);
    }
    let wide =
        Forged::try_of(&tiny::fixture("encoders/nomic"), |o| set(o, &[("dimensions", "37")]));
    let error = wide.unwrap_err();
    says(&error, ErrorKind::Usage, &["37", "1 to 36"]);
}

/// Weights of tokens by the rules of `FlagEmbedding`, and vectors of all but the first.
#[test]
fn tokens_have_weights_and_vectors() {
    #[derive(Deserialize)]
    struct Expected {
        text: String,
        vector: Vec<f32>,
        sparse: Vec<(u32, f32)>,
        /// Their number, and the values of the first and of the last.
        multi: Vec<f32>,
    }
    #[derive(Deserialize)]
    struct Goldens {
        texts: Vec<Expected>,
    }
    let Goldens { texts } = tiny::golden_json("encoders/bge-m3");
    let (_folder, model) = opened("encoders/bge-m3", false, |o| o.shards = 2);
    let mut embedder = qhx::Embedder::new(model).unwrap();
    let mut all = Vec::new();
    for Expected { text, vector, sparse, multi } in &texts {
        let found = embedder.embed_tokens(text, qhx::Role::Document).unwrap();
        let near = |a: &[f32], b: &[f32]| {
            let distance = Distance::of(a, b).unwrap();
            assert!(distance.largest <= 1e-4, "{text}: {:e}", distance.largest);
        };
        near(&found.vector, vector);
        let weights = found.sparse.as_ref().unwrap();
        assert!(weights.keys().eq(sparse.iter().map(|(id, _)| id)), "{text}: {weights:?}");
        if !sparse.is_empty() {
            let [a, b]: [Vec<f32>; 2] =
                [weights.values().copied().collect(), sparse.iter().map(|(_, w)| *w).collect()];
            near(&a, &b);
        }
        let rows = found.multi.as_ref().unwrap();
        assert_eq!(rows.len() as f32, multi[0], "{text}");
        let (first, last) = multi[1..].split_at(20);
        near(&rows[0], first);
        near(&rows[rows.len() - 1], last);
        all.push(found);
    }
    assert!(all[0].late_score(&all[0]).unwrap() > 0.9999);
    assert!(all[0].lexical_score(&all[5]).unwrap() > 0.0);
    let (_folder, model) = opened(BERT, false, |_| ());
    let error = qhx::Embedder::new(model).unwrap().embed_tokens("a", qhx::Role::Query);
    says(&error.unwrap_err(), ErrorKind::Usage, &["without weights or vectors of tokens"]);
}

/// The adapter of a task, and its instruction.
#[test]
fn an_adapter_inside_a_checkpoint_is_merged() {
    #[derive(Deserialize)]
    struct Adapted {
        text: String,
        passage_ids: Vec<u32>,
        passage: Vec<f32>,
    }
    #[derive(Deserialize)]
    struct Goldens {
        texts: Vec<Adapted>,
    }
    let Goldens { texts } = tiny::golden_json("encoders/jina");
    let task = |task| move |o: &mut ForgeOptions| set(o, &[("adapter", task)]);
    let (_folder, mut model) = opened("encoders/jina", false, task("retrieval.passage"));
    for Adapted { text, passage_ids, passage } in texts {
        let role = "document".to_owned();
        let text = Text { role, text, ids: passage_ids, vector: passage };
        compare(&mut model, &[text], 1e-4, 0.99999);
    }
    let other = Forged::try_of(&tiny::fixture("encoders/jina"), task("clustering"));
    let error = other.unwrap_err();
    says(
        &error,
        ErrorKind::Usage,
        &["clustering", "retrieval.query, retrieval.passage, separation"],
    );
}

/// Pairs of texts with their scores.
#[derive(Deserialize)]
struct Pairs {
    query: String,
    pairs: Vec<Pair>,
}

#[derive(Deserialize)]
struct Pair {
    document: String,
    ids: Vec<u32>,
    score: f64,
}

/// Pairs that are cut to `limit` tokens.
#[derive(Deserialize)]
struct TooLong {
    limit: usize,
    truncated: Vec<Truncated>,
}

#[derive(Deserialize)]
struct Truncated {
    query: String,
    document: String,
    ids: Vec<u32>,
    score: f64,
}

fn pairs(fixture: &str) -> Pairs {
    tiny::golden_json(fixture)
}

/// The score of a pair, as the manifest has it.
fn scored(model: &mut Model, parts: &[Vec<u32>]) -> f64 {
    let parts: Vec<&[u32]> = parts.iter().map(Vec::as_slice).collect();
    let logit = f64::from(model.score_parts(&parts, &CancelToken::new()).unwrap());
    match model.manifest().params.rerank.as_ref().unwrap().verdict {
        Verdict::Head { sigmoid: true } => 1.0 / (1.0 + (-logit).exp()),
        _ => logit,
    }
}

/// The tokens of each pair, and its score within `off` of the reference's. Scores of a fixture lie further apart.
fn compare_scores(fixture: &str, model: &mut Model, off: f64) {
    let Pairs { query, pairs } = pairs(fixture);
    let rules = model.manifest().params.rerank.clone().unwrap();
    let mut worst = 0.0f64;
    for Pair { document, ids, score } in &pairs {
        let tokenizer = model.tokenizer().unwrap();
        let parts = match rules.prompt.as_str() {
            "" => tokenizer.encode_pair(&query, document, usize::MAX, &CancelToken::new()).unwrap(),
            prompt => {
                let text = prompt.replace("{query}", &query).replace("{document}", document);
                vec![tokenizer.encode(&text, true).unwrap()]
            }
        };
        assert_eq!(&parts.concat(), ids, "{fixture}: {document}");
        let found = scored(model, &parts);
        worst = worst.max((found - score).abs());
        assert!((found - score).abs() <= off, "{fixture}: {document}: {found}, expected {score}");
    }
    let scores: Vec<f64> = pairs.iter().map(|pair| pair.score).collect();
    let spread = scores.iter().fold(0.0f64, |most, score| most.max((score - scores[0]).abs()));
    assert!(spread > 5e-3, "{fixture}: scores {scores:?}");
    eprintln!("{fixture}: scores within {worst:e}");
}

fn scoring(options: &mut ForgeOptions) {
    options.task = Some(Task::Score);
    options.prefill = Some(Vec::new());
}

/// Pairs with and without token types, the first row, the last or the mean, logits and sigmoids.
#[test]
fn rerankers_score_as_the_reference() {
    for fixture in RERANKERS.into_iter().chain(CROSS_ENCODERS) {
        let (_folder, mut model) = opened(fixture, false, scoring);
        assert_eq!((model.info().scores, model.info().embedding_dim), (1, 0), "{fixture}");
        compare_scores(fixture, &mut model, 1e-4);
        let error = model.embed(&pairs(fixture).pairs[0].ids).unwrap_err();
        says(&error, ErrorKind::Usage, &["qhx rerank"]);
    }
}

/// The longer text is cut, or both.
#[test]
fn pairs_that_are_too_long_are_cut_as_by_the_reference() {
    for fixture in RERANKERS.into_iter().filter(|name| *name != "rerank-llama-tiny") {
        let TooLong { limit, truncated } = tiny::golden_json(fixture);
        assert_eq!(truncated.len(), 3);
        let (_folder, mut model) = opened(fixture, false, scoring);
        for Truncated { query, document, ids, score } in &truncated {
            let tokenizer = model.tokenizer().unwrap();
            let parts = tokenizer
                .encode_pair_truncated(query, document, limit, &CancelToken::new())
                .unwrap();
            assert_eq!(&parts.concat(), ids, "{fixture}: {query} {document}");
            let found = scored(&mut model, &parts);
            assert!((found - score).abs() <= 1e-4, "{fixture}: {found}, expected {score}");
        }
        // Where special tokens stand around a pair, they are three at least.
        let tokenizer = model.tokenizer().unwrap();
        let none = tokenizer.encode("", true).unwrap().is_empty();
        let two = tokenizer.encode_pair_truncated("a", "b", 2, &CancelToken::new());
        assert_eq!(two.is_ok(), none, "{fixture}");
    }
}

/// Checkpoints with goldens of the same form: those of other sizes that `text_encoders.py --unseen` draws, or published
/// ones. `QHX_TEST_ENCODERS` has their folders.
#[tier(by_hand = "QHX_TEST_ENCODERS")]
fn encoders_of_the_environment_equal_the_reference() {
    let folders = std::env::var_os("QHX_TEST_ENCODERS").unwrap();
    for folder in std::env::split_paths(&folders) {
        let name = folder.to_str().unwrap();
        let goldens: serde_json::Value = tiny::golden_json(name);
        if goldens["pairs"].is_array() {
            let (_folder, mut model) = opened(name, false, scoring);
            compare_scores(name, &mut model, 1e-4);
        } else {
            let (_folder, mut model) = opened(name, false, |o| o.prefill = Some(vec![16]));
            compare(&mut model, &texts(name), 1e-4, 0.99999);
        }
    }
}

#[tier(qnn)]
fn htp_rerankers_score_near_the_reference() {
    let few = if tiny::full_matrix() { RERANKERS.len() + CROSS_ENCODERS.len() } else { 1 };
    for &target in tiny::targets() {
        for fixture in RERANKERS.into_iter().chain(CROSS_ENCODERS).take(few) {
            let (_folder, mut model) = opened_for(fixture, Some(target), scoring);
            compare_scores(fixture, &mut model, 1e-2);
        }
    }
}

#[tier(qnn)]
fn htp_further_encoders_are_near_the_reference() {
    let few = if tiny::full_matrix() { ENCODERS.len() } else { 2 };
    let both = |target| ENCODERS[..few].iter().map(move |fixture| (*fixture, target));
    for (fixture, target) in tiny::targets().iter().flat_map(both) {
        let change = |o: &mut ForgeOptions| (o.max_ctx, o.prefill) = (Some(48), Some(Vec::new()));
        let (_folder, mut model) = opened_for(fixture, Some(target), change);
        let mut texts = texts(fixture);
        texts.retain(|text| text.ids.len() <= 48);
        compare(&mut model, &texts, 2e-2, 0.999);
    }
}

#[tier(qnn)]
fn htp_embeddinggemma_is_near_the_reference() {
    let change = |o: &mut ForgeOptions| (o.max_ctx, o.prefill) = (Some(40), Some(Vec::new()));
    let (_folder, mut model) = opened(GEMMA, true, change);
    let mut texts = texts(GEMMA);
    texts.retain(|text| text.ids.len() <= 40);
    compare(&mut model, &texts, 2e-2, 0.999);
}
