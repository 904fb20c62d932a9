//! `/v1/rerank`.

use serde_json::json;

use crate::bundles::{Running, options, ranking, with_instruction};
use crate::client::with;

/// The tiny model goes on with Paris behind the first one: `tests/fixtures/qwen3-tiny/goldens.json`.
const DOCUMENTS: [&str; 3] = ["word привет", "capital of France is", "crab walks"];

#[test]
fn the_best_document_comes_first_with_its_index_and_its_text() {
    let running = Running::start(options([("ranking", ranking())]));
    let ask = |more: serde_json::Value| {
        running.client.post("/v1/rerank", &with(json!({"query": "The "}), more))
    };
    let all = ask(json!({"documents": DOCUMENTS})).status(200).json();
    let results = all["results"].as_array().unwrap();
    let scores: Vec<_> =
        results.iter().map(|one| one["relevance_score"].as_f64().unwrap()).collect();
    assert!(scores.is_sorted_by(|a, b| a >= b) && scores.len() == 3, "{all}");
    assert_eq!(results[0]["index"], 1);
    assert!(scores[0] > 0.99 && scores[2] < 0.5, "{all}");
    assert!(all["usage"]["total_tokens"].as_u64().unwrap() > 10, "{all}");
    let objects = DOCUMENTS.map(|text| json!({"text": text}));
    let top = ask(json!({"texts": objects, "top_n": 1, "return_documents": true}));
    let top = top.status(200).json();
    assert_eq!(top["results"].as_array().unwrap().len(), 1);
    assert_eq!(top["results"][0]["document"]["text"], DOCUMENTS[1]);
    assert_eq!(top["results"][0]["relevance_score"].as_f64(), Some(scores[0]), "the same again");
    for (body, param) in [
        (json!({}), "documents"),
        (json!({"documents": []}), "documents"),
        (json!({"documents": ["a", 1]}), "documents[1]"),
        (json!({"documents": ["a"], "top_n": 0}), "top_n"),
        (json!({"documents": ["a"], "query": null}), "query"),
        (json!({"documents": ["a"], "instruction": "Find it."}), "instruction"),
    ] {
        ask(body).refuses(400, "param", param);
    }
    let long = "long ".repeat(300);
    ask(json!({"documents": ["a", long]})).refuses(400, "code", "context_length_exceeded");
    let cut = ask(json!({"documents": ["a", long], "truncate": true})).status(200).json();
    assert_eq!(cut["results"].as_array().unwrap().len(), 2, "{cut}");
    // What was cut off was not read.
    assert!(cut["usage"]["prompt_tokens"].as_u64().unwrap() <= 2 * 200, "{cut}");
}

#[test]
fn an_instruction_takes_the_place_of_the_bundles_own() {
    let manifest = with_instruction();
    let running = Running::start(options([("ranking", manifest.as_path())]));
    let scores = |more: serde_json::Value| {
        let body = with(json!({"query": "capital of France is", "documents": [""]}), more);
        let json = running.client.ask("/v1/rerank", &body);
        json["results"][0]["relevance_score"].as_f64().unwrap()
    };
    let own = scores(json!({}));
    assert!(own > 0.99, "{own}");
    // From a state that was kept, so that the last bits differ.
    assert!((scores(json!({"instruction": "The "})) - own).abs() < 1e-6);
    assert!(scores(json!({"instruction": "word привет "})) < own);
}
