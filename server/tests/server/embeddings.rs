//! `/v1/embeddings`.

use base64::Engine as _;
use serde_json::{Value, json};

use crate::bundles::{Running, encoder, language, options, shared, towers};
use crate::client::{Response, with};

fn send(input: Value, more: Value) -> Response {
    let body = with(json!({"model": "encoder", "input": input}), more);
    shared().client.post("/v1/embeddings", &body)
}

fn vectors(json: &Value) -> Vec<Vec<f32>> {
    let data = json["data"].as_array().unwrap().iter();
    let values = |value: &Value| {
        value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap() as f32).collect()
    };
    data.map(|one| values(&one["embedding"])).collect()
}

fn norm(vector: &[f32]) -> f32 {
    vector.iter().map(|value| value * value).sum::<f32>().sqrt()
}

const TEXTS: [&str; 3] = ["def fib(n): return n", "SELECT name FROM users", "a"];

#[test]
fn texts_together_have_the_vectors_that_they_have_alone() {
    let together = send(json!(TEXTS), json!({})).status(200).json();
    assert_eq!(together["object"], "list");
    let indices: Vec<_> =
        together["data"].as_array().unwrap().iter().map(|one| &one["index"]).collect();
    assert_eq!(indices, [0, 1, 2]);
    let alone: Vec<_> =
        TEXTS.iter().flat_map(|text| vectors(&send(json!(text), json!({})).json())).collect();
    // Short texts share a graph, whose rows round by their place.
    for (together, alone) in vectors(&together).iter().zip(&alone) {
        assert!(together.iter().zip(alone).all(|(a, b)| (a - b).abs() < 1e-5));
    }
    let apart = Running::start(options([("encoder", encoder())]).packs(false));
    let apart = apart.client.ask("/v1/embeddings", &json!({"input": TEXTS}));
    assert_eq!(vectors(&apart), alone, "bit for bit");
    assert!(alone.iter().all(|vector| (norm(vector) - 1.0).abs() < 1e-3));
    assert_ne!(alone[0], alone[1]);
    let used = together["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(used > 3 && together["usage"]["total_tokens"] == used);
}

#[test]
fn base64_holds_the_same_values() {
    let floats = vectors(&send(json!(TEXTS[0]), json!({})).json()).remove(0);
    let json = send(json!(TEXTS[0]), json!({"encoding_format": "base64"})).status(200).json();
    let text = json["data"][0]["embedding"].as_str().unwrap();
    let bytes = base64::engine::general_purpose::STANDARD.decode(text).unwrap();
    let values: Vec<f32> =
        bytes.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect();
    assert_eq!(values, floats);
}

#[test]
fn fewer_dimensions_are_the_first_ones_normalised() {
    let whole = vectors(&send(json!(TEXTS[0]), json!({})).json()).remove(0);
    let json = send(json!(TEXTS[0]), json!({"dimensions": 8})).status(200).json();
    let cut = vectors(&json).remove(0);
    assert_eq!(cut.len(), 8);
    assert!((norm(&cut) - 1.0).abs() < 1e-5);
    let ratio = cut[0] / whole[0];
    assert!(cut.iter().zip(&whole).all(|(a, b)| (a - b * ratio).abs() < 1e-5));
    send(json!("a"), json!({"dimensions": 1 << 20})).refuses(400, "param", "dimensions");
}

#[test]
fn tokens_are_embedded_as_they_are() {
    let body = json!({"model": "encoder", "prompt": TEXTS[1]});
    let tokens = shared().client.post("/tokenize", &body).json()["tokens"].clone();
    let allowed = json!({"allow_token_ids": true});
    let of_tokens = vectors(&send(tokens.clone(), allowed.clone()).status(200).json());
    assert_eq!(of_tokens, vectors(&send(json!([tokens]), allowed).json()));
    assert_eq!(of_tokens, vectors(&send(json!(TEXTS[1]), json!({})).json()));
    // LangChain sends those of another model unless check_embedding_ctx_length is false.
    for input in [tokens.clone(), json!([tokens])] {
        let error = send(input, json!({})).status(400).error();
        assert_eq!((&error["param"], &error["code"]), (&json!("input"), &json!("unsupported")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("check_embedding_ctx_length=False"), "{message}");
    }
}

/// Vectors are those that `tests/oracle/siglip_embed.py` has of `transformers`.
#[test]
fn images_and_texts_have_the_vectors_of_the_reference() {
    let running = Running::start(options([("towers", towers())]));
    let golden = std::fs::read(qhx_paths::fixture("siglip-fixed").join("goldens.json")).unwrap();
    let golden: Value = serde_json::from_slice(&golden).unwrap();
    let (text, image) = (&golden["texts"][0], &golden["images"][0]);
    let file = std::fs::read(qhx_paths::fixture(image["image"].as_str().unwrap())).unwrap();
    let data = base64::engine::general_purpose::STANDARD.encode(file);
    let url = format!("data:image/png;base64,{data}");
    let part = json!({"type": "image_url", "image_url": {"url": url}});
    let send = |input: &Value| running.client.post("/v1/embeddings", &json!({"input": input}));
    let both = vectors(&send(&json!([text["text"], part])).status(200).json());
    assert_eq!(both.len(), 2);
    for (found, expected) in both.iter().zip([text, image]) {
        let expected = expected["vector"].as_array().unwrap().iter().map(|v| v.as_f64().unwrap());
        let dot: f64 = found.iter().zip(expected).map(|(a, b)| f64::from(*a) * b).sum();
        assert!(dot > 0.9999, "{dot}");
    }
    assert_eq!(vectors(&send(&part).status(200).json()), both[1..]);
    assert_eq!(vectors(&send(&json!({"image_url": url})).status(200).json()), both[1..]);
    for (url, what) in [("data:image/png;base64,AAAA", "image"), ("data:,", "image")] {
        send(&json!({"image_url": url})).status(400).says(what);
    }
    // A model of texts alone says so.
    let of_texts = Running::start(options([("encoder", encoder())]));
    let refused = of_texts.client.post("/v1/embeddings", &json!({"input": part})).status(400);
    refused.says("takes no images");
}

#[test]
fn what_is_wrong_is_named() {
    for (input, more, param) in [
        (json!(null), json!({}), "input"),
        (json!([]), json!({}), "input"),
        (json!([[]]), json!({}), "input"),
        (json!({"a": 1}), json!({}), "input"),
        (json!({"image_url": {"url": "file:///image.png"}}), json!({}), "input"),
        (json!({"image_url": 1}), json!({}), "image_url"),
        (json!("a"), json!({"encoding_format": "hex"}), "encoding_format"),
        (json!("a"), json!({"dimensions": 0}), "dimensions"),
        (json!("a"), json!({"normalize": false}), "normalize"),
        (json!("a"), json!({"instruction": "Find it."}), "instruction"),
        (json!("a"), json!({"model": "language"}), "model"),
    ] {
        assert_eq!(send(input, more).status(400).error()["param"], param);
    }
}

#[test]
fn a_text_that_is_too_long_is_named_or_cut() {
    let ids = vec![1; 4000];
    for (input, more) in [
        (json!(["a", "word ".repeat(4000)]), json!({})),
        (json!(["a", "word ".repeat(120)]), json!({})),
        (json!([[1], ids]), json!({"allow_token_ids": true})),
    ] {
        let error =
            send(input.clone(), more.clone()).refuses(400, "code", "context_length_exceeded");
        assert!(error["message"].as_str().unwrap().starts_with("input 1: "), "{error}");
        let mut cut = more;
        cut["truncate"] = true.into();
        assert_eq!(vectors(&send(input, cut).status(200).json()).len(), 2);
    }
}

#[test]
fn what_nothing_here_serves_says_what_would() {
    let running = Running::start(options([("language", language())]));
    let body = json!({"input": "a"});
    running.client.post("/v1/embeddings", &body).status(501).says("--task embed");
    running.client.post("/v1/rerank", &json!({})).refuses(501, "code", "not_served");
}
