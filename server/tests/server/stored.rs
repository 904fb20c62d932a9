//! Responses that later ones go on from, and conversations that are longer than the context.

use serde_json::{Value, json};

use crate::bundles::{Running, golden, language, options, shared};
use crate::client::{Client, with};

const ROUTE: &str = "/v1/responses";

fn body(input: Value, more: Value) -> Value {
    with(
        json!({"model": "language", "input": input, "temperature": 0, "max_output_tokens": 8}),
        more,
    )
}

fn text(response: &Value) -> Value {
    response["output"][0]["content"][0]["text"].clone()
}

fn stored(client: &Client, method: &str, response: &Value, more: &str) -> crate::client::Response {
    let id = response["id"].as_str().expect("a response has an id");
    client.send(method, &format!("{ROUTE}/{id}{more}"), b"")
}

#[test]
fn a_response_goes_on_from_a_stored_one() {
    let client = &shared().client;
    let first = client.ask(ROUTE, &body(json!("Hello"), json!({"instructions": "Be brief."})));
    assert_eq!((&first["store"], &first["previous_response_id"]), (&json!(true), &Value::Null));
    let more = json!({"previous_response_id": first["id"]});
    let second = client.ask(ROUTE, &body(json!("And the sea?"), more.clone()));
    assert_eq!(second["previous_response_id"], first["id"]);
    let user = |text: &str| json!({"role": "user", "content": text});
    let said = json!({"role": "assistant", "content": text(&first)});
    let spoken = json!([user("Hello"), said, user("And the sea?")]);
    let whole = client.ask(ROUTE, &body(spoken, json!({"store": false})));
    let tokens = |response: &Value| response["usage"]["input_tokens"].clone();
    assert_eq!((text(&second), tokens(&second)), (text(&whole), tokens(&whole)));
    // The same by the items' own ids, and from a stream.
    let items = stored(client, "GET", &first, "/input_items").status(200).json();
    assert_eq!(items["data"][0]["content"][0]["text"], "Hello");
    let by_id = |id: &Value| json!({"type": "item_reference", "id": id});
    let input =
        json!([by_id(&items["first_id"]), by_id(&first["output"][0]["id"]), user("And the sea?")]);
    assert_eq!(text(&client.ask(ROUTE, &body(input, json!({})))), text(&whole));
    let streamed = body(json!("And the sea?"), with(more, json!({"stream": true})));
    let events = client.post(ROUTE, &streamed).status(200).chunks();
    let streamed = &events.last().unwrap()["response"];
    assert_eq!(stored(client, "GET", streamed, "").status(200).json(), *streamed);
    let third = |from: &Value| {
        let more = json!({"previous_response_id": from["id"]});
        let third = client.ask(ROUTE, &body(json!("Why?"), more));
        (text(&third), tokens(&third))
    };
    assert_eq!(third(streamed), third(&second));
    // What is forgotten stays with those that went on from it.
    assert_eq!(stored(client, "DELETE", &first, "").status(200).json()["deleted"], true);
    for more in ["", "/input_items"] {
        stored(client, "GET", &first, more).refuses(404, "code", "response_not_found");
    }
    stored(client, "DELETE", &first, "").refuses(404, "code", "response_not_found");
    third(&second);
    let unstored = body(json!("a"), json!({"previous_response_id": whole["id"]}));
    client.post(ROUTE, &unstored).refuses(400, "code", "previous_response_not_found");
    let twice =
        json!([by_id(&second["output"][0]["id"]), by_id(&second["output"][0]["id"]), user("Why?")]);
    client.post(ROUTE, &body(twice, json!({}))).refuses(400, "param", "input[1].id");
    let gone = json!([by_id(&json!("msg_none"))]);
    client.post(ROUTE, &body(gone, json!({}))).refuses(400, "param", "input[0].id");
}

#[test]
fn a_response_is_stored_for_its_key_alone() {
    let keys = ["one".to_owned(), "two".to_owned()];
    let running = Running::start(options([("language", language())]).api_keys(keys));
    let [one, two] = ["one", "two"].map(|key| running.client.clone().with("x-api-key", key));
    let first = one.ask(ROUTE, &body(json!("Hello"), json!({})));
    stored(&one, "GET", &first, "").status(200);
    stored(&two, "GET", &first, "").refuses(404, "code", "response_not_found");
    let on = body(json!("And?"), json!({"previous_response_id": first["id"]}));
    two.post(ROUTE, &on).refuses(400, "param", "previous_response_id");
    one.post(ROUTE, &on).status(200);
}

#[test]
fn the_oldest_messages_are_left_out_where_that_is_asked_for() {
    let client = &shared().client;
    let turn = |at: usize| {
        let role = if at.is_multiple_of(2) { "user" } else { "assistant" };
        json!({"role": role, "content": format!("The sky is blue, and the sea is number {at}.")})
    };
    let turns: Vec<_> = (0..31).map(turn).collect();
    let ask = |from: usize, truncation: &str| {
        let more = json!({"truncation": truncation, "instructions": "Be brief."});
        client.post(ROUTE, &body(turns[from..].into(), more))
    };
    ask(0, "disabled").refuses(400, "code", "context_length_exceeded");
    let cut = ask(0, "auto").status(200).json();
    let tokens = |response: &Value| response["usage"]["input_tokens"].as_u64().unwrap();
    // All but as many as needed, in pairs.
    let kept = (0..31).step_by(2).find(|from| {
        let answer = ask(*from, "disabled");
        answer.status == 200 && tokens(&answer.json()) <= 192
    });
    let kept = ask(kept.unwrap(), "disabled").json();
    assert_eq!((tokens(&cut), text(&cut)), (tokens(&kept), text(&kept)));
    assert_eq!(cut["truncation"], "auto");
    // Calls behind the only question go, and the question stays.
    let call = |at: usize| {
        let id = at.to_string();
        json!([
            {"type": "function_call", "call_id": id, "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": id, "output": format!("number {at} is blue")},
        ])
    };
    let mut input = vec![json!({"role": "user", "content": "What is blue?"})];
    (0..60).for_each(|at| input.extend(call(at).as_array().unwrap().clone()));
    let more = json!({"truncation": "auto"});
    let cut = client.ask(ROUTE, &body(input.clone().into(), more));
    assert!((60..=192).contains(&tokens(&cut)), "{cut}");
    client.post(ROUTE, &body(input.into(), json!({}))).refuses(
        400,
        "code",
        "context_length_exceeded",
    );
}

#[test]
fn a_predicted_answer_changes_nothing() {
    let (_, user, answer) = golden("llama3-tiny", "sky");
    let client = &shared().client;
    for content in [json!(answer), json!([{"type": "text", "text": "something else"}])] {
        let chat = json!({"model": "language", "temperature": 0, "messages": [{"role": "user", "content": user}],
                          "prediction": {"type": "content", "content": content}});
        let json = client.ask("/v1/chat/completions", &chat);
        assert_eq!(json["choices"][0]["message"]["content"], answer);
        let details = &json["usage"]["completion_tokens_details"];
        assert!(details["accepted_prediction_tokens"].is_u64(), "{details}");
    }
    for (prediction, param) in [
        (json!("text"), "prediction"),
        (json!({"type": "guess", "content": ""}), "prediction.type"),
        (json!({"type": "content", "content": 3}), "prediction.content"),
    ] {
        let chat = json!({"model": "language", "messages": [{"role": "user", "content": "a"}], "prediction": prediction});
        client.post("/v1/chat/completions", &chat).refuses(400, "param", param);
    }
}
