//! States of conversations that take turns.

use serde_json::{Value, json};

use crate::bundles::{Running, golden, keeping, language, options, recurrent};
use crate::client::Client;

/// Two conversations in turns, of which the first comes back, on a server with `parallel` sessions. Returns how many
/// tokens its first prompt had, and how many its second one did not consume again.
fn come_back(running: &Running, tiny: &str) -> (u64, u64) {
    let ask = |messages: &[Value]| {
        let body = json!({"messages": messages, "temperature": 0});
        running.client.ask("/v1/chat/completions", &body)
    };
    let (_, sky, answer) = golden(tiny, "sky");
    let (_, bread, _) = golden(tiny, "bread");
    let user = |text: &str| json!({"role": "user", "content": text});
    let first = ask(&[user(&sky)]);
    assert_eq!(first["choices"][0]["message"]["content"], answer);
    ask(&[user(&bread)]);
    let assistant = json!({"role": "assistant", "content": answer});
    let second = ask(&[user(&sky), assistant, user("And at night?")]);
    let usage = &second["usage"];
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (first["usage"]["prompt_tokens"].as_u64().unwrap(), cached)
}

#[test]
fn a_conversation_that_comes_back_goes_on_from_its_state() {
    for (tiny, bundle) in [("llama3-tiny", language()), ("qwen35-tied", recurrent())] {
        let one = |runtime| options([("it", bundle)]).runtime(runtime).parallel(1);
        let (prompt, cached) = come_back(&Running::start(one(keeping())), tiny);
        assert!(cached >= prompt, "{tiny}: {cached} of {prompt}");
        let (prompt, cached) = come_back(&Running::start(one(crate::bundles::runtime())), tiny);
        assert!(cached < prompt, "{tiny}: {cached} of {prompt} without");
    }
}

#[test]
fn a_new_conversation_takes_the_session_of_the_oldest() {
    let running = Running::start(options([("it", language())]).parallel(2));
    let mut messages: Vec<Vec<Value>> = Vec::new();
    // Nothing is kept but what sessions have.
    let cached = |messages: &[Value]| {
        let body = json!({"messages": messages, "max_tokens": 2});
        let answer = running.client.ask("/v1/chat/completions", &body);
        answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    for topic in ["The sea", "A loaf of bread", "Rain in the night", "Four violins"] {
        messages.push(vec![json!({"role": "user", "content": format!("{topic} and {topic}")})]);
        cached(messages.last().unwrap());
    }
    let [.., third, fourth] = messages.as_mut_slice() else { unreachable!() };
    for conversation in [third, fourth] {
        conversation.push(json!({"role": "assistant", "content": "Yes."}));
        conversation.push(json!({"role": "user", "content": "Why?"}));
        let cached = cached(conversation);
        assert!(cached > 12, "{cached} of the first turn");
    }
}

/// A text with a word in it.
fn about(word: &str) -> String {
    format!(
        "The sea and the wind and the rain and the sea again. The word that nobody knows is {word}."
    )
}

/// Tokens whose state a request found, by the route that it asks.
fn cached(client: &Client, path: &str, text: &str, salt: Option<&str>) -> u64 {
    let mut body = match path {
        "/v1/completions" => json!({"prompt": text, "max_tokens": 1}),
        "/v1/responses" => json!({"input": text, "max_output_tokens": 1}),
        _ => json!({"messages": [{"role": "user", "content": text}], "max_tokens": 1}),
    };
    body["cache_salt"] = salt.into();
    let usage = client.ask(path, &body)["usage"].clone();
    let places = [
        "/prompt_tokens_details/cached_tokens",
        "/input_tokens_details/cached_tokens",
        "/cache_read_input_tokens",
    ];
    let found = places.iter().find_map(|place| usage.pointer(place)?.as_u64());
    found.unwrap_or_else(|| panic!("{path}: {usage}"))
}

const ROUTES: [&str; 4] =
    ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];

/// A server with two keys, and a client of each.
fn two_keys(parallel: usize, share: bool) -> (Running, [Client; 2]) {
    let keys = ["of-alice", "of-bob"];
    let options = options([("it", language())]).runtime(keeping()).parallel(parallel);
    let running = Running::start(options.api_keys(keys.map(str::to_owned)).share_states(share));
    let clients = keys.map(|key| running.client.clone().with("x-api-key", key));
    (running, clients)
}

#[test]
fn a_guess_of_another_keys_prompt_finds_no_state() {
    // Tokens that a guess finds behind a wrong one, with and without somebody else's prompt that it is.
    let found = |parallel, asks: bool| {
        let (_running, [alice, bob]) = two_keys(parallel, false);
        let mut found = Vec::new();
        for path in ROUTES {
            let text = |word: &str| format!("{path}: {}", about(word));
            if asks {
                cached(&alice, path, &text("zebra"), None);
            }
            cached(&bob, path, &text("apple"), None);
            found.push(cached(&bob, path, &text("zebra"), None));
            if asks {
                let own = cached(&alice, path, &text("zebra"), None);
                assert!(own > 30, "{path}: {own}");
            }
        }
        found
    };
    for parallel in [1, 3] {
        assert_eq!(found(parallel, true), found(parallel, false), "{parallel} sessions");
    }
}

#[test]
fn keys_of_one_team_share_states() {
    let (_running, [alice, bob]) = two_keys(1, true);
    let path = ROUTES[0];
    cached(&alice, path, &about("zebra"), None);
    let whole = cached(&bob, path, &about("zebra"), None);
    assert!(whole > 30, "{whole}");
}

#[test]
fn a_cache_salt_sets_states_apart() {
    // Without keys all clients are one.
    let running = Running::start(options([("it", language())]).runtime(keeping()).parallel(1));
    for path in ROUTES {
        let ask = |salt: Option<&str>| cached(&running.client, path, &about("zebra"), salt);
        assert_eq!(ask(Some(path)), 0, "{path}");
        assert_eq!(ask(Some(&format!("not {path}"))), 0, "{path}");
        assert!(ask(Some(path)) > 30, "{path}");
        let mut body = json!({"input": "a", "messages": [{"role": "user", "content": "a"}],
                              "max_tokens": 1, "cache_salt": ""});
        if path == "/v1/completions" {
            body["prompt"] = "a".into();
        }
        running.client.post(path, &body).refuses(400, "param", "cache_salt");
    }
}
