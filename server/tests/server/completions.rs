//! `/v1/completions`.

use std::path::PathBuf;

use serde_json::{Value, json};

use crate::bundles::{Running, changed, language, options, shared};
use crate::client::{Response, with};

const ROUTE: &str = "/v1/completions";
const PROMPT: &str = "The capital of France is";
const TEXT: &str = " Paris. The river Seine runs through it.";

fn send(more: Value) -> Response {
    let greedy = json!({"model": "language", "prompt": PROMPT, "temperature": 0, "max_tokens": 40});
    shared().client.post(ROUTE, &with(greedy, more))
}

fn ask(more: Value) -> Value {
    send(more).status(200).json()
}

fn tokens(text: &str) -> Vec<u64> {
    let body = json!({"model": "language", "prompt": text});
    let json = shared().client.post("/tokenize", &body).json();
    json["tokens"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

#[test]
fn a_text_goes_on_as_the_reference_does() {
    let json = ask(json!({"stop": " A small"}));
    assert_eq!(json["object"], "text_completion");
    assert_eq!(json["choices"][0]["text"], TEXT);
    assert_eq!(json["choices"][0]["finish_reason"], "stop");
    assert_eq!(json["usage"]["prompt_tokens"], 10);
    let of_tokens = ask(json!({"prompt": tokens(PROMPT), "stop": " A small"}));
    assert_eq!(of_tokens["choices"][0]["text"], TEXT);
    let chunks = send(json!({"stream": true, "stop": " A small"})).status(200);
    assert_eq!(chunks.events().last().map(String::as_str), Some("[DONE]"));
    let chunks = chunks.chunks();
    let pieces = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str());
    assert_eq!(pieces.collect::<String>(), TEXT);
}

#[test]
fn several_prompts_have_a_choice_each() {
    let prompts = json!([PROMPT, "The capital of Japan is"]);
    let json = ask(json!({"prompt": prompts, "n": 2, "max_tokens": 3}));
    let choices = json["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!((texts.len(), texts[0], texts[2]), (4, texts[1], texts[3]));
    assert!(TEXT.starts_with(texts[0]) && !TEXT.starts_with(texts[2]), "{texts:?}");
    let lists = json!([tokens(PROMPT), tokens("The capital of Japan is")]);
    let of_tokens = ask(json!({"prompt": lists, "n": 2, "max_tokens": 3}));
    assert_eq!(of_tokens["choices"], json["choices"]);
    // Each prompt counts once, whatever the number of its choices.
    assert_eq!(json["usage"]["prompt_tokens"], 19);
}

#[test]
fn a_prompt_is_part_of_an_answer_that_echoes_it() {
    let json = ask(json!({"echo": true, "max_tokens": 0}));
    assert_eq!(json["choices"][0]["text"], PROMPT);
    let chunks = send(json!({"echo": true, "stream": true, "stop": " A small"})).chunks();
    let pieces = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str());
    assert_eq!(pieces.collect::<String>(), format!("{PROMPT}{TEXT}"));
}

/// Request of a benchmark: the log-probabilities of a text's tokens.
#[test]
fn logprobs_of_a_prompt_are_those_of_its_generation() {
    let generated = ask(json!({"logprobs": 1, "stop": " A small"}));
    let text = generated["choices"][0]["text"].as_str().unwrap();
    let generated = &generated["choices"][0]["logprobs"];
    let whole = tokens(&format!("{PROMPT}{text}"));
    let json = ask(json!({"prompt": whole, "echo": true, "logprobs": 1, "max_tokens": 1}));
    let scored = &json["choices"][0]["logprobs"];
    let list = |of: &Value, name: &str| of[name].as_array().unwrap().clone();
    for name in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(list(scored, name).len(), whole.len() + 1, "{name}");
    }
    assert!(scored["token_logprobs"][0].is_null() && scored["top_logprobs"][0].is_null());
    let prompt = tokens(PROMPT).len();
    let names = list(scored, "tokens");
    // The stop text was held back, and its tokens are no part of the text.
    let count = whole.len() - prompt;
    assert_eq!(names[prompt..whole.len()], list(generated, "tokens")[..count]);
    let own = list(scored, "token_logprobs");
    for (at, expected) in list(generated, "token_logprobs")[..count].iter().enumerate() {
        let found = own[prompt + at].as_f64().unwrap();
        assert!((found - expected.as_f64().unwrap()).abs() < 2e-3, "{found} {expected}");
        // Greedy: it is the likeliest.
        let top = scored["top_logprobs"][prompt + at].as_object().unwrap();
        assert!(top.values().all(|other| other.as_f64().unwrap() <= found), "{top:?}");
    }
    // What the model would not say is less likely.
    assert!(own[1..prompt].iter().any(|logprob| logprob.as_f64().unwrap() < -0.1), "{own:?}");
    let alone = ask(json!({"prompt": whole, "echo": true, "logprobs": 1, "max_tokens": 0}));
    assert_eq!(list(&alone["choices"][0]["logprobs"], "tokens"), names[..whole.len()]);
}

#[test]
fn what_is_wrong_is_named() {
    for (more, param) in [
        (json!({"prompt": null}), "prompt"),
        (json!({"prompt": []}), "prompt"),
        (json!({"prompt": [1, "a"]}), "prompt"),
        (json!({"prompt": [[-1]]}), "prompt"),
        (json!({"suffix": "end"}), "suffix"),
        (json!({"best_of": 2}), "best_of"),
        (json!({"logprobs": 99}), "logprobs"),
        (json!({"stream": true, "echo": true, "logprobs": 1}), "stream"),
        (json!({"model": "encoder"}), "model"),
    ] {
        assert_eq!(send(more.clone()).status(400).error()["param"], param, "{more}");
    }
    let error = send(json!({"prompt": [4_000_000]})).status(400).error();
    assert!(error["message"].as_str().unwrap().contains("outside the model's vocabulary"));
    send(json!({"prompt": ""})).status(400);
}

/// The model with marks for filling in, under the ids of other special tokens.
fn filling() -> PathBuf {
    let manifest = changed(language(), "filling", |_| {});
    let file = manifest.with_file_name("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    for token in tokenizer["added_tokens"].as_array_mut().unwrap() {
        let mark = match token["id"].as_u64().unwrap() {
            442 => "<|fim_prefix|>",
            443 => "<|fim_suffix|>",
            441 => "<|fim_middle|>",
            _ => continue,
        };
        token["content"] = mark.into();
    }
    std::fs::write(&file, tokenizer.to_string()).unwrap();
    manifest
}

#[test]
fn the_middle_of_a_text_is_filled_in() {
    let bundle = filling();
    let running = Running::start(options([("language", bundle.as_path())]));
    let client = &running.client;
    let tokens = |text: &str| {
        let body = json!({"prompt": text, "add_special_tokens": false});
        client.ask("/tokenize", &body)["tokens"].as_array().unwrap().clone()
    };
    let (before, behind) = ("The capital of France", "is a city.");
    let prompt = [
        vec![json!(440), json!(442)],
        tokens(before),
        vec![json!(443)],
        tokens(behind),
        vec![json!(441)],
    ];
    let ask = |more: Value| {
        let body = with(json!({"temperature": 0, "max_tokens": 12}), more);
        client.ask(ROUTE, &body)["choices"][0]["text"].clone()
    };
    let expected = ask(json!({"prompt": prompt.concat()}));
    assert!(!expected.as_str().unwrap().is_empty());
    assert_ne!(ask(json!({"prompt": before})), expected);
    assert_eq!(ask(json!({"prompt": before, "suffix": behind})), expected);
    let body = json!({"input_prefix": "The capital", "prompt": " of France", "input_suffix": behind,
                      "n_predict": 12, "temperature": 0, "input_extra": []});
    let filled = client.ask("/infill", &body);
    assert_eq!((&filled["content"], &filled["stop"]), (&expected, &json!(true)));
    let body = json!({"model": "language", "prompt": before, "suffix": behind, "stream": false,
                      "options": {"temperature": 0, "num_predict": 12}});
    assert_eq!(client.ask("/api/generate", &body)["response"], expected);
    let none = json!({"model": "language", "input_prefix": "a", "input_suffix": "b"});
    shared().client.post("/infill", &none).refuses(400, "param", "suffix");
}
