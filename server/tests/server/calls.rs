//! Calls of tools and reasoning as models write them: a host-op says what a test has it say.

use std::sync::{Mutex, MutexGuard, PoisonError};

use qhx_op::{
    DType, Error, Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Segment, Task,
    View,
};
use qhx_text::Tokenizer;
use serde_json::{Value, json};

use crate::bundles::{Running, changed, language, options};
use crate::client::with;

const ROUTE: &str = "/v1/chat/completions";
/// Tokens of the model.
const VOCAB: usize = 1024;
/// Ends each prompt.
const GO: &str = "<|go|>";
/// Special tokens of the model, besides its own.
const MARKS: [&str; 8] = [
    GO,
    "<|tool_call>",
    "<tool_call|>",
    "<|tool_response>",
    "<|\"|>",
    "<|channel>",
    "<channel|>",
    "<|end|>",
];

/// The tokens that the model says next, and the id of the token that its prompts end with.
static SCRIPT: Mutex<(Vec<u32>, u32)> = Mutex::new((Vec::new(), 0));
/// Tests, one at a time.
static ONE: Mutex<()> = Mutex::new(());

/// A host-op that says the script.
struct Scripted {
    logits: View,
    tokens: Vec<u32>,
}

impl Scripted {
    fn next(&mut self, host: &mut Host, tokens: &[u32]) -> View {
        self.tokens.extend(tokens);
        let script = SCRIPT.lock().unwrap_or_else(PoisonError::into_inner);
        let (script, go) = &*script;
        let said = self.tokens.iter().rev().position(|token| token == go).unwrap_or(0);
        let next = script.get(said).copied().unwrap_or_default() as usize;
        let bytes = host.bytes_mut(self.logits.buffer);
        bytes.fill(0);
        bytes[4 * next..][..4].copy_from_slice(&1e3_f32.to_le_bytes());
        self.logits
    }
}

impl Op for Scripted {
    fn describe() -> OpDescription {
        OpDescription {
            name: "test_scripted".to_owned(),
            summary: "says what a test has it say".to_owned(),
            version: "0.0.1".to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: json!({}),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let buffer = host.allocate(VOCAB * DType::F32.size())?;
        let logits = View { buffer, dtype: DType::F32, offset: 0, len: VOCAB };
        Ok(Self { logits, tokens: Vec::new() })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { vocab: VOCAB, input_vocab: VOCAB, max_ctx: 4000, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Scripted {
    fn reset(&mut self, _: &mut Host) -> Result<()> {
        self.tokens.clear();
        Ok(())
    }

    fn position(&self) -> usize {
        self.tokens.len()
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        for segment in segments {
            let Segment::Tokens(tokens) = segment else { return Err(Error::prompt("text only")) };
            self.next(host, tokens);
        }
        Ok(self.logits)
    }

    fn decode(&mut self, host: &mut Host, token: u32) -> Result<View> {
        Ok(self.next(host, &[token]))
    }
}

qhx_op::register_ops!(Scripted);

/// A server over a model with a chat template, whose answers a test gives.
struct Model {
    running: Running,
    tokenizer: Tokenizer,
    _one: MutexGuard<'static, ()>,
}

impl Model {
    fn new(name: &str, template: &str) -> Self {
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let manifest = changed(language(), name, |manifest| {
            manifest["plan"]["steps"] = json!([{"host": "test_scripted"}]);
            manifest["params"]["eos_token_id"] = json!([VOCAB - 1]);
        });
        std::fs::write(manifest.with_file_name("chat_template.jinja"), template).unwrap();
        let path = manifest.with_file_name("tokenizer.json");
        let mut file: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let added = file["added_tokens"].as_array_mut().unwrap();
        for (at, mark) in MARKS.iter().enumerate() {
            let id = VOCAB - MARKS.len() + at;
            added.push(with(added[0].clone(), json!({"id": id, "content": mark})));
        }
        std::fs::write(&path, file.to_string()).unwrap();
        let tokenizer = Tokenizer::from_file(&path).unwrap();
        let running = Running::start(options([("model", manifest.as_path())]));
        Self { running, tokenizer, _one: one }
    }

    /// Has the model say this.
    fn says(&self, text: &str) {
        let mut tokens = self.tokenizer.encode(text, false).unwrap();
        tokens.push(VOCAB as u32 - 1);
        let go = self.tokenizer.token_to_id(GO).unwrap();
        *SCRIPT.lock().unwrap() = (tokens, go);
    }

    /// The answer to a request with tools, whole and streamed, which is the same.
    fn answer(&self, says: &str, more: Value) -> Value {
        self.says(says);
        let function = |name: &str| {
            let parameters = json!({"type": "object", "properties": {
                "city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]});
            json!({"type": "function", "function": {"name": name, "parameters": parameters}})
        };
        let body = json!({"messages": [{"role": "user", "content": "Rain?"}],
                          "tools": [function("weather"), function("time")], "temperature": 0});
        let body = with(body, more);
        let whole = self.running.client.ask(ROUTE, &body);
        let message = &whole["choices"][0]["message"];
        let calls = message["tool_calls"].as_array().cloned().unwrap_or_default();
        let call = |call: &Value| {
            let arguments = call["function"]["arguments"].as_str().unwrap();
            let arguments: Value = serde_json::from_str(arguments).unwrap();
            json!([call["function"]["name"], arguments])
        };
        let found = json!({
            "reasoning": message.get("reasoning_content"),
            "text": message["content"],
            "calls": calls.iter().map(call).collect::<Vec<_>>(),
            "finish": whole["choices"][0]["finish_reason"],
        });
        let chunks = self.running.client.post(ROUTE, &with(body, json!({"stream": true}))).chunks();
        let deltas: Vec<_> = chunks.iter().map(|chunk| &chunk["choices"][0]["delta"]).collect();
        let joined = |field: &str| {
            let all: String = deltas.iter().filter_map(|delta| delta[field].as_str()).collect();
            if all.is_empty() { Value::Null } else { all.into() }
        };
        let streamed = deltas.iter().filter_map(|delta| delta["tool_calls"].as_array()).flatten();
        let streamed: Vec<_> = streamed.collect();
        assert!(streamed.iter().enumerate().all(|(at, call)| call["index"] == at), "{streamed:?}");
        assert_eq!(streamed.iter().map(|one| call(one)).collect::<Value>(), found["calls"]);
        assert_eq!(joined("reasoning_content"), found["reasoning"]);
        let text = found["text"].as_str().filter(|text| !text.is_empty());
        assert_eq!(joined("content").as_str(), text);
        found
    }
}

/// A model whose calls have special tokens.
fn special() -> Model {
    let template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}\
         {% for message in messages %}{{ message.content }}{% for call in message.tool_calls or [] %}\
         <|tool_call>call:{% endfor %}{% endfor %}{# <|channel>thought <channel|> #}<|go|>";
    Model::new("scripted-special", template)
}

#[test]
fn calls_between_special_tokens_are_answered() {
    let model = special();
    let call = |name: &str, city: &str| {
        format!("<|tool_call>call:{name}{{city:<|\"|>{city}<|\"|>}}<tool_call|>")
    };
    let (weather, time) = (call("weather", "Oslo, {N}"), call("time", "Rome"));
    let is = |reasoning: Value, text: Value, calls: Value| {
        let finish = if calls == json!([]) { "stop" } else { "tool_calls" };
        json!({"reasoning": reasoning, "text": text, "calls": calls, "finish": finish})
    };
    let (oslo, rome) =
        (json!(["weather", {"city": "Oslo, {N}"}]), json!(["time", {"city": "Rome"}]));
    for (says, expected) in [
        ("It rains.".to_owned(), is(json!(null), "It rains.".into(), json!([]))),
        (weather.clone(), is(json!(null), json!(null), json!([oslo]))),
        (format!("{weather}{time}"), is(json!(null), json!(null), json!([oslo, rome]))),
        (format!("Let me see.\n{weather}"), is(json!(null), "Let me see.".into(), json!([oslo]))),
        (
            format!("<|channel>thought\nHm, both.\n<channel|>{weather}{time}"),
            is("Hm, both.".into(), json!(null), json!([oslo, rome])),
        ),
        (
            format!("<|channel>thought\n<channel|>Well.{time}<|tool_response>never"),
            is(json!(null), "Well.".into(), json!([rome])),
        ),
        (
            "<|channel>thought\nthoughts<channel|>It <|channel>thought\nor not<channel|>rains."
                .to_owned(),
            is("thoughtsor not".into(), "It rains.".into(), json!([])),
        ),
        ("It rains.<channel|>".to_owned(), is(json!(null), "It rains.".into(), json!([]))),
        (
            "<|channel>thought\n<channel|>It rains.<|channel>thought\n<channel|>".to_owned(),
            is(json!(null), "It rains.".into(), json!([])),
        ),
        (
            "<|channel><|channel>thought\n<channel|>It rains.".to_owned(),
            is(json!(null), "It rains.".into(), json!([])),
        ),
        (
            format!("<|channel>thought\nSo {weather}? No.<channel|>{time}"),
            is("So call:weather{city:Oslo, {N}}? No.".into(), json!(null), json!([rome])),
        ),
        (format!("<|channel>thought\nSo {weather}"), is("So".into(), json!(null), json!([oslo]))),
        ("<|channel>thought\nSo".to_owned(), is("So".into(), "".into(), json!([]))),
        ("calling: call".to_owned(), is(json!(null), "calling: call".into(), json!([]))),
    ] {
        assert_eq!(model.answer(&says, json!({})), expected, "{says}");
    }
    // Calls that must come, and one at most.
    let required = json!({"tool_choice": "required"});
    assert_eq!(model.answer(&weather, required), is(json!(null), json!(null), json!([oslo])));
    let single = json!({"parallel_tool_calls": false});
    assert_eq!(model.answer(&format!("{weather}{time}"), single)["calls"], json!([oslo]));
    // Cut within the second call.
    let tokens = model.tokenizer.encode(&format!("{weather}{time}"), false).unwrap().len();
    let cut = model.answer(&format!("{weather}{time}"), json!({"max_tokens": tokens - 3}));
    assert_eq!((&cut["calls"], &cut["finish"]), (&json!([oslo]), &json!("length")));
    for max in 1..model.tokenizer.encode(&weather, false).unwrap().len() - 1 {
        assert_eq!(model.answer(&weather, json!({"max_tokens": max}))["calls"], json!([]), "{max}");
    }
}

#[test]
fn calls_in_elements_are_answered() {
    let template = "{% for message in messages %}{{ message.content }}{% endfor %}\
         {% if tools %}{# <think> </think> <tool_call> <parameter= #}{% endif %}<|go|>";
    let model = Model::new("scripted-elements", template);
    let call = |city: &str| {
        format!(
            "<tool_call>\n<function=weather>\n<parameter=city>\n{city}\n</parameter>\n</function>\n</tool_call>"
        )
    };
    for city in ["Oslo", "12", "<b>{\"a\": 1}</b>\n</parameter> it", "{}"] {
        let says = format!("<think>\nHm: <b>.\n</think>\n\nLet me see.\n{}", call(city));
        let expected = json!({"reasoning": "Hm: <b>.", "text": "Let me see.", "finish": "tool_calls",
                              "calls": [["weather", {"city": city}]]});
        assert_eq!(model.answer(&says, json!({})), expected, "{city}");
    }
    // Within reasoning that does not end.
    let says = format!("<think>\nSo I call it.\n{}", call("Oslo"));
    let found = model.answer(&says, json!({}));
    assert_eq!(found["reasoning"], "So I call it.");
    assert_eq!(found["calls"], json!([["weather", {"city": "Oslo"}]]));
    // Which goes on, and ends.
    let says = format!("<think>\nSo {}? No.\n</think>\n\n{}", call("Oslo"), call("Rome"));
    let found = model.answer(&says, json!({}));
    assert_eq!(found["reasoning"], format!("So {}? No.", call("Oslo")));
    assert_eq!(found["calls"], json!([["weather", {"city": "Rome"}]]));
    // Without the first mark, and with arguments in another order.
    let says = format!("Let me call it.\n{}", call("Oslo").replace("<tool_call>\n", ""));
    let found = model.answer(&says, json!({}));
    assert_eq!(
        (&found["text"], &found["calls"]),
        (&json!("Let me call it."), &json!([["weather", {"city": "Oslo"}]]))
    );
    let says = call("Oslo")
        .replace("<parameter=city>", "<parameter=days>\n2\n</parameter>\n<parameter=city>");
    assert_eq!(
        model.answer(&says, json!({}))["calls"],
        json!([["weather", {"days": 2, "city": "Oslo"}]])
    );
    let says = format!("{}\n{}", call("Oslo"), call("Rome"));
    let calls = json!([["weather", {"city": "Oslo"}], ["weather", {"city": "Rome"}]]);
    assert_eq!(model.answer(&says, json!({}))["calls"], calls);
}

/// The grammar of a custom tool binds the model where its format writes texts as they are.
#[test]
fn the_input_of_a_custom_tool_is_of_its_grammar() {
    let model = special();
    let tool = |syntax: &str, definition: &str| {
        let format = json!({"type": "grammar", "syntax": syntax, "definition": definition});
        let more = json!({"tools": [{"type": "custom", "name": "patch", "format": format}], "input": "Go",
                          "temperature": 0, "tool_choice": "required"});
        let written = "<|tool_call>call:patch{input:<|\"|>aXb\nc<|\"|>}<tool_call|>";
        model.says(written);
        model.running.client.post("/v1/responses", &more)
    };
    let input = |syntax: &str, definition: &str| {
        let answer = tool(syntax, definition).status(200).json();
        let item = answer["output"][0].clone();
        assert_eq!(item["type"], "custom_tool_call", "{answer}");
        item["input"].as_str().unwrap().to_owned()
    };
    assert_eq!(input("lark", "start: /[a-zX]+/ \"\\n\" \"c\""), "aXb\nc");
    assert_eq!(input("regex", "[a-zX\\n]+"), "aXb\nc");
    // Another text than the model's own.
    assert!(input("lark", "start: \"+\" /[ab]/").starts_with('+'));
    assert!(input("regex", "[0-9]").len() == 1);
    for (syntax, definition) in [("lark", "start: ("), ("regex", "(")] {
        let error = tool(syntax, definition).status(400).error();
        assert!(error["message"].as_str().unwrap().contains("patch"), "{error}");
    }
    tool("bnf", "a").refuses(400, "param", "tools[0].format.syntax");
}

#[test]
fn many_tools_and_tools_named_like_marks_are_called() {
    let model = special();
    let names: Vec<_> = (0..500)
        .map(|at| format!("t{at}"))
        .chain(["call", "tool_call", "thought", "channel"].map(str::to_owned))
        .collect();
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false});
    let tool = |name: &String| json!({"type": "function", "function": {"name": name, "parameters": schema}});
    let tools: Vec<_> = names.iter().map(tool).collect();
    for name in ["t499", "call", "tool_call", "thought"] {
        for choice in ["auto", "required"] {
            let says = format!("<|tool_call>call:{name}{{a:7}}<tool_call|>");
            let found = model.answer(&says, json!({"tools": tools, "tool_choice": choice}));
            assert_eq!(found["calls"], json!([[name, {"a": 7}]]), "{choice}");
        }
    }
    let wrong = json!([{"type": "function", "function": {"name": "<tool_call|>"}}]);
    let body = json!({"messages": [{"role": "user", "content": "a"}], "tools": wrong});
    model.running.client.post(ROUTE, &body).refuses(400, "param", "tools");
}
