//! States of conversations that take turns.

use serde_json::{Value, json};

use crate::bundles::{Running, golden, keeping, language, options, recurrent};

/// Two conversations in turns, of which the first comes back, on a server with `parallel` sessions. Returns how many
/// tokens its first prompt had, and how many its second one did not consume again.
fn come_back(running: &Running, tiny: &str) -> (u64, u64) {
    let ask = |messages: &[Value]| {
        let body = json!({"messages": messages, "temperature": 0});
        running.client.post("/v1/chat/completions", &body).status(200).json()
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
        let answer = running.client.post("/v1/chat/completions", &body).status(200).json();
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
