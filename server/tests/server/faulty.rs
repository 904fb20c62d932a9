//! Models that fail, and what that costs whom.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use qhx_op::{
    DType, Error, Generator, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Port, Result,
    Segment, Task, View,
};
use serde_json::json;

use crate::bundles::{Running, changed, language, options};

/// A host-op over the graph of the language model that gives logits, which panics at a token or never ends.
struct Faulty<const ENDLESS: bool> {
    graph: GraphId,
    logits: View,
    position: usize,
}

impl<const ENDLESS: bool> Op for Faulty<ENDLESS> {
    fn describe() -> OpDescription {
        let name = if ENDLESS { "test_endless" } else { "test_panics" };
        OpDescription {
            name: name.to_owned(),
            summary: "fails on purpose".to_owned(),
            version: "0.0.1".to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: json!({}),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        if !ENDLESS && OPENING.load(Ordering::Relaxed) {
            panic!("it cannot be opened");
        }
        let name: String = host.value("/plan/params/step")?.unwrap_or_default();
        let graph = host.require_graph("/plan/params/step", &name)?;
        for index in 0..host.graph(graph).inputs.len() {
            host.allocate_for(graph, Port::Input(index))?;
        }
        for index in 0..host.graph(graph).outputs.len() {
            host.allocate_for(graph, Port::Output(index))?;
        }
        let port = Port::Output(host.graph(graph).require_output("logits")?);
        let len = host.tensor(graph, port).elements();
        let buffer = host.allocate(len * DType::F32.size())?;
        let logits = View { buffer, dtype: DType::F32, offset: 0, len };
        Ok(Self { graph, logits, position: 0 })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { vocab: self.logits.len, max_ctx: 200, ..OpenInfo::default() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl<const ENDLESS: bool> Generator for Faulty<ENDLESS> {
    fn reset(&mut self, _: &mut Host) -> Result<()> {
        self.position = 0;
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        for segment in segments {
            let Segment::Tokens(tokens) = segment else {
                return Err(Error::prompt("text only"));
            };
            self.position += tokens.len();
        }
        loop {
            host.execute(self.graph)?;
            if !ENDLESS {
                return Ok(self.logits);
            }
        }
    }

    fn decode(&mut self, _: &mut Host, token: u32) -> Result<View> {
        panic!("token {token} goes wrong");
    }
}

/// Sessions of the op that panics panic when they are opened.
static OPENING: AtomicBool = AtomicBool::new(false);

/// Tests of that op, one at a time.
static PANICKING: Mutex<()> = Mutex::new(());

qhx_op::register_ops!(Faulty<false>, Faulty<true>);

/// The language model's bundle with another host-op.
fn bundle(op: &str) -> PathBuf {
    changed(language(), op, |manifest| {
        manifest["plan"]["params"]["step"] = manifest["plan"]["params"]["lmhead"].clone();
        manifest["plan"]["steps"] = json!([{"host": op}]);
    })
}

#[test]
fn an_op_that_panics_costs_its_request_and_nobody_else() {
    let _one = PANICKING.lock().unwrap_or_else(PoisonError::into_inner);
    let failing = bundle("test_panics");
    let running =
        Running::start(options([("failing", failing.as_path()), ("language", language())]));
    let client = &running.client;
    let body = |model: &str, max: usize| json!({"model": model, "prompt": "The capital", "temperature": 0, "max_tokens": max});
    let text = || {
        let json = client.ask("/v1/completions", &body("language", 5));
        json["choices"][0]["text"].clone()
    };
    let before = text();
    for _ in 0..3 {
        let error = client.post("/v1/completions", &body("failing", 5)).status(500).error();
        assert_eq!((&error["code"], &error["type"]), (&json!("panicked"), &json!("server_error")));
        assert!(!error["message"].as_str().unwrap().contains("goes wrong"), "{error}");
        // Its first token needs no decode: the op is open again.
        client.post("/v1/completions", &body("failing", 1)).status(200);
        assert_eq!(text(), before);
    }
    let mut streamed = body("failing", 5);
    streamed["stream"] = true.into();
    let events = client.post("/v1/completions", &streamed).status(200).chunks();
    assert_eq!(events.last().unwrap()["error"]["code"], "panicked");
}

#[test]
fn a_prompt_that_never_ends_is_stopped_with_its_client() {
    let endless = bundle("test_endless");
    let bundles = [("endless", endless.as_path()), ("language", language())];
    let running = Running::start(options(bundles).parallel(1));
    let client = &running.client;
    let body = |model: &str| json!({"model": model, "prompt": "The capital", "max_tokens": 1});
    let stream = client.post_open("/v1/completions", &body("endless"));
    client.until("qhx_requests_running 1");
    drop(stream);
    client.post("/v1/completions", &body("language")).status(200);
}

#[test]
fn a_session_that_does_not_open_leaves_its_model_free() {
    let _one = PANICKING.lock().unwrap_or_else(PoisonError::into_inner);
    let failing = bundle("test_panics");
    let bundles = [("failing", failing.as_path()), ("language", language())];
    let running = Running::start(options(bundles).memory(1));
    let ask = |model: &str, text: &str| {
        let messages = json!([{"role": "user", "content": text}]);
        let body = json!({"model": model, "messages": messages, "max_tokens": 1});
        running.client.post("/v1/chat/completions", &body)
    };
    ask("failing", "A loaf of bread").status(200);
    OPENING.store(true, Ordering::Relaxed);
    let error = ask("failing", "Rain in the night").status(500).error();
    OPENING.store(false, Ordering::Relaxed);
    assert_eq!(error["code"], "panicked");
    // The budget holds one model: the other one has to go for it.
    ask("language", "Hello").status(200);
}
