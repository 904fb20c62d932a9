//! The engine over a host-op that is scripted: no graph, no plugin.

mod grammar;
mod parts;
mod speculative;

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde_json::{Value, json};

use super::*;
use crate::manifest::Manifest;
use crate::op::{
    Call, HostOp, Logits, Modality, OpDescription, OpEntry, OpOpener, OpProvider, OpSource,
    OpenInfo, Placement, Reply, Segment, SnapshotId, Task, Unsupported,
};
use crate::sampling::SamplingParams;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_exec::null::NullBackend;

const VOCAB: usize = 8;

/// Fault of an op.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fault {
    None,
    /// Its position stays after a prompt.
    PromptUncounted,
    /// Its position stays after a token.
    TokenUncounted,
    /// A prompt counts twice.
    CountedTwice,
    TruncateIgnored,
    RestoreIgnored,
    ResetIgnored,
    /// Its state cannot be saved.
    SnapshotFails,
    /// Its logits are no numbers until it is reset.
    NotANumber,
    /// It exports its state, and imports none.
    ImportFails,
    /// It exports no state the first time that it is asked.
    ExportFailsOnce,
}

/// An op that returns the logits that it is given, whatever it consumes.
struct Scripted {
    info: OpenInfo,
    position: usize,
    logits: Vec<f32>,
    fault: Fault,
    /// Number of tokens of every prompt that it consumed.
    prompts: Arc<Mutex<Vec<usize>>>,
    /// Number of states that it was asked for.
    exports: Arc<Mutex<usize>>,
    /// Media placement, if the op takes images and videos.
    eyes: Option<parts::Eyes>,
}

impl Scripted {
    fn new(logits: [f32; VOCAB]) -> Self {
        let info =
            OpenInfo { vocab: VOCAB, max_ctx: 64, can_truncate: true, ..OpenInfo::default() };
        let (logits, prompts, exports) = (logits.to_vec(), Arc::default(), Arc::default());
        let fault = Fault::None;
        Self { info, position: 0, logits, fault, prompts, exports, eyes: None }
    }

    fn with_fault(fault: Fault) -> Self {
        let logits = if fault == Fault::NotANumber { [f32::NAN; VOCAB] } else { RISING };
        Self { fault, ..Self::new(logits) }
    }

    /// An op whose state has no rows to drop.
    fn recurrent(mut self) -> Self {
        (self.info.can_truncate, self.info.can_snapshot) = (false, true);
        self
    }

    fn consume(&mut self, segments: &[Segment<'_>]) -> Result<()> {
        for segment in segments {
            let next = self.eyes.as_mut().and_then(|eyes| eyes.cancelled_at.as_mut());
            if let (Segment::Tile { index, .. }, Some(at)) = (segment, next)
                && at == index
            {
                *at = u16::MAX;
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            let positions = match (segment, &self.eyes) {
                (Segment::Tokens(tokens), _) => tokens.len(),
                (segment, Some(eyes)) => eyes.see(segment),
                (segment, None) => panic!("{segment:?}"),
            };
            self.prompts.lock().unwrap().push(positions);
            let times = if self.fault == Fault::CountedTwice { 2 } else { 1 };
            self.to(self.position + times * positions, Fault::PromptUncounted);
        }
        Ok(())
    }

    fn to(&mut self, position: usize, unless: Fault) {
        if self.fault != unless {
            self.position = position;
        }
    }
}

/// An error of a call that an op does not have.
fn unsupported(call: &Call<'_>) -> Error {
    let message = format!("the host-op has no call {}", call.name());
    Error::new(ErrorKind::Plugin, message).with_source(Unsupported)
}

impl HostOp for Scripted {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    fn place(&self, segment: Segment<'_>) -> Result<Placement> {
        match &self.eyes {
            Some(eyes) => eyes.place(&segment),
            None => Err(Error::new(ErrorKind::Prompt, "scripted takes text only")),
        }
    }

    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>> {
        match call {
            Call::Reset => {
                self.to(0, Fault::ResetIgnored);
                if self.fault == Fault::NotANumber {
                    self.fault = Fault::None;
                    self.logits.copy_from_slice(&RISING);
                }
            }
            Call::Prefill(segments) => self.consume(segments)?,
            Call::Decode(_) => self.to(self.position + 1, Fault::TokenUncounted),
            Call::Truncate(position) => self.to(position, Fault::TruncateIgnored),
            Call::Snapshot if self.fault == Fault::SnapshotFails => {
                return Err(Error::new(ErrorKind::Plugin, "no memory for a snapshot"));
            }
            Call::Snapshot => return Ok(Reply::Saved(SnapshotId(self.position as u64))),
            Call::Restore(snapshot) => self.to(snapshot.0 as usize, Fault::RestoreIgnored),
            Call::DropSnapshot(_) | Call::Embed(_) => {}
            Call::ExportState => {
                let count = &mut *self.exports.lock().unwrap();
                *count += 1;
                return match self.fault {
                    Fault::SnapshotFails => Err(unsupported(&call)),
                    Fault::ExportFailsOnce if *count == 1 => {
                        Err(Error::new(ErrorKind::Plugin, "it does not fit the memory"))
                    }
                    _ => Ok(Reply::State(self.position.to_le_bytes().to_vec())),
                };
            }
            Call::ImportState { .. } if self.fault == Fault::ImportFails => {
                return Err(Error::new(ErrorKind::Prompt, "the state cannot be imported"));
            }
            Call::ImportState { position, state } => {
                assert_eq!(state, position.to_le_bytes());
                self.position = position;
            }
            _ => return Err(unsupported(&call)),
        }
        Ok(if call.gives_floats() { Reply::Floats(()) } else { Reply::Done })
    }

    fn logits(&self) -> Result<Logits<'_>> {
        Ok(Logits::F32(&self.logits))
    }

    fn values(&self) -> Result<&[f32]> {
        Ok(&self.logits)
    }

    fn position(&self) -> usize {
        self.position
    }
}

/// Provides one op, once.
struct Once(Arc<Mutex<Option<Box<dyn HostOp>>>>);

impl Once {
    fn entry() -> OpEntry {
        let description = OpDescription {
            name: "scripted".to_owned(),
            summary: String::new(),
            version: String::new(),
            tasks: vec![Task::Generate, Task::Embed],
            modalities: vec![Modality::Text],
            params_schema: Value::Null,
        };
        OpEntry { description, source: OpSource::Builtin }
    }
}

impl OpProvider for Once {
    fn list(&self) -> Vec<OpEntry> {
        vec![Self::entry()]
    }

    fn find(&self, _name: &str) -> Result<OpEntry> {
        Ok(Self::entry())
    }

    fn opener(&self, _name: &str) -> Result<OpOpener> {
        let op = Arc::clone(&self.0);
        Ok(Arc::new(move |_| Ok(op.lock().unwrap().take().unwrap())))
    }
}

/// A model of `op`. `manifest` may add parameters and artifacts, whose files lie in `folder`.
fn open_in(folder: &Path, op: impl HostOp + 'static, manifest: Value) -> Result<Model> {
    let mut all = json!({
        "schema_version": 1,
        "host_only": true,
        "model": {"name": "scripted"},
        "artifacts": {},
        "plan": {"steps": [{"host": "scripted"}]}
    });
    for (key, value) in manifest.as_object().unwrap() {
        all[key] = value.clone();
    }
    let manifest = Manifest::from_value(&folder.join("scripted.json"), all, Some(folder))?;
    let ops = Once(Arc::new(Mutex::new(Some(Box::new(op)))));
    let backend = Arc::new(NullBackend::new(Vec::new()));
    Model::open(ModelOptions::new(manifest, backend, &ops).threads(1).keep_states(1 << 20))
}

fn open(op: impl HostOp + 'static) -> Model {
    open_in(&std::env::temp_dir(), op, json!({})).unwrap()
}

/// A template that ends the messages with the word `b` when an answer is asked for.
const TEMPLATE: &str = "{% for m in messages %}{% if m.content is string %}{{ m.content }} {% else %}\
    {% for part in m.content %}{% if part.type == 'text' %}{{ part.text }} {% elif m.role == 'user' %}\
    {{ '<' + part.type + '>' }} {% endif %}{% endfor %}{% endif %}{% endfor %}\
    {% if add_generation_prompt %}b{% endif %}";

/// Opens a model with a tokenizer of words for some ids, and with [`TEMPLATE`].
fn open_with_words(op: impl HostOp + 'static, words: &[(&str, u32)]) -> Model {
    let folder = tempfile::tempdir().unwrap();
    with_words(folder.path(), op, words)
}

/// The same with its files in `folder`.
fn with_words(folder: &Path, op: impl HostOp + 'static, words: &[(&str, u32)]) -> Model {
    let special = words.iter().filter(|(word, _)| word.starts_with('<'));
    let added = |(word, id): &(&str, u32)| {
        json!({"id": id, "content": word, "special": true, "single_word": false,
               "lstrip": false, "rstrip": false, "normalized": false})
    };
    let added: Vec<_> = special.map(added).collect();
    let words: Value = words.iter().map(|(word, id)| ((*word).to_owned(), json!(id))).collect();
    let tokenizer = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "decoder": {"type": "Fuse"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "a"}
    });
    let config = json!({"chat_template": TEMPLATE});
    std::fs::write(folder.join("tokenizer.json"), tokenizer.to_string()).unwrap();
    std::fs::write(folder.join("tokenizer_config.json"), config.to_string()).unwrap();
    let manifest = json!({"artifacts": {"tokenizer": "tokenizer.json"}});
    open_in(folder, op, manifest).unwrap()
}

const LETTERS: [(&str, u32); VOCAB] =
    [("a", 0), ("b", 1), ("c", 2), ("d", 3), ("e", 4), ("f", 5), ("g", 6), ("h", 7)];

fn request(tokens: &[u32], max_new: usize) -> Request {
    Request::greedy(Prompt::Tokens(tokens.to_vec()), max_new)
}

fn sampled(tokens: &[u32], max_new: usize) -> Request {
    let sampling = SamplingParams { temperature: 2.0, seed: Some(3), ..SamplingParams::default() };
    Request { sampling, ..request(tokens, max_new) }
}

fn generate(model: &mut Model, request: &Request) -> Result<Generation> {
    model.generate(request, &mut |_| ControlFlow::Continue(()))
}

/// The last of the logits are the largest.
const RISING: [f32; VOCAB] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0];

#[test]
fn padding_of_the_vocabulary_is_never_chosen() {
    let rows = |input_vocab| {
        let mut op = Scripted::new(RISING);
        op.info.input_vocab = input_vocab;
        op
    };
    let said_by_op = || open(rows(5));
    let said_by_manifest =
        || open_in(&std::env::temp_dir(), rows(0), json!({"params": {"vocab": 5}})).unwrap();
    for mut model in [said_by_op(), said_by_manifest()] {
        assert_eq!(generate(&mut model, &request(&[1], 3)).unwrap().tokens, [4, 4, 4]);
        let tokens = generate(&mut model, &sampled(&[1], 60)).unwrap().tokens;
        assert!(tokens.iter().all(|&id| id < 5) && tokens.contains(&2), "{tokens:?}");
        let error = generate(&mut model, &request(&[5], 1)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Prompt);
        assert!(error.message().contains("token 5 is outside the model's vocabulary of 5"));
    }
    assert_eq!(generate(&mut open(rows(0)), &request(&[1], 1)).unwrap().tokens, [7]);
}

#[test]
fn a_token_that_the_tokenizer_does_not_know_is_never_chosen() {
    let words = [("a", 0), ("b", 1), ("c", 3)];
    let mut model = open_with_words(Scripted::new(RISING), &words);
    assert_eq!(generate(&mut model, &request(&[1], 2)).unwrap().tokens, [3, 3]);
    let tokens = generate(&mut model, &sampled(&[1], 60)).unwrap().tokens;
    assert!(tokens.iter().all(|id| [0, 1, 3].contains(id)) && tokens.contains(&1), "{tokens:?}");
    // A token that ends the answer is not turned into text.
    let stop = Request { stop_ids: vec![6], ..request(&[1], 3) };
    let generation = generate(&mut model, &stop).unwrap();
    assert_eq!((generation.tokens, generation.finish_reason), (vec![6], FinishReason::Stop));

    let mut model = open_with_words(Scripted::new(RISING), &[("a", 100)]);
    let error = generate(&mut model, &request(&[1], 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Artifact);
    assert!(error.message().contains("none of the 8 tokens"), "{error}");
}

#[test]
fn an_op_whose_position_is_not_what_it_consumed_is_named() {
    let says = |error: Error, words: &str| {
        assert_eq!(error.kind(), ErrorKind::Plugin, "{error}");
        let all = ["\"scripted\"", words, "report it to its author"];
        assert!(all.iter().all(|words| error.report().to_string().contains(words)), "{error}");
    };
    let (forgot, twice) = ("it forgot to commit", "it consumed more positions than `place` said");
    for (fault, words, hint) in [
        (Fault::PromptUncounted, "prefill at position 0 its position is 0, expected 3", forgot),
        (Fault::CountedTwice, "prefill at position 0 its position is 6, expected 3", twice),
        (Fault::TokenUncounted, "decode at position 3 its position is 3, expected 4", forgot),
    ] {
        let mut model = open(Scripted::with_fault(fault));
        let error = generate(&mut model, &request(&[1, 2, 3], 2)).unwrap_err();
        assert!(error.hint_text().unwrap().starts_with(hint), "{error}");
        says(error, words);
    }
    // A second prompt that departs from the first.
    let mut model = open(Scripted::with_fault(Fault::TruncateIgnored));
    generate(&mut model, &request(&[1, 2, 3], 2)).unwrap();
    let error = generate(&mut model, &request(&[1, 2, 4], 2)).unwrap_err();
    says(error, "its position is 4, expected 2");
    let mut model = open(Scripted::with_fault(Fault::ResetIgnored));
    generate(&mut model, &request(&[1, 2, 3], 2)).unwrap();
    says(model.reset().unwrap_err(), "after reset its position is 4, expected 0");

    let mut model = open(Scripted::with_fault(Fault::RestoreIgnored).recurrent());
    let op = model.op_mut();
    op.prefill(&[Segment::Tokens(&[1, 2])]).unwrap();
    let saved = op.snapshot().unwrap();
    op.decode(3).unwrap();
    says(op.restore(saved).unwrap_err(), "its position is 3, expected 2");
}

#[test]
fn logits_that_are_wrong_are_named_with_the_op() {
    let mut op = Scripted::new(RISING);
    op.info.vocab = VOCAB - 1;
    let error = generate(&mut open(op), &request(&[1], 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Plugin);
    let words = "host-op \"scripted\": prefill gave 8 logits, but its info says 7";
    assert!(error.message().contains(words), "{error}");

    let mut op = Scripted::new(RISING);
    op.info.vocab = 0;
    let error = generate(&mut open(op), &request(&[1], 1)).unwrap_err();
    assert!(error.message().contains("its info says 0 logits"), "{error}");

    let mut op = Scripted::new(RISING);
    op.logits[6] = f32::NAN;
    let error = generate(&mut open(op), &request(&[1, 2], 1)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Execute);
    let words = "host-op \"scripted\", logits, position 2: the logit of token 6 is NaN";
    assert!(error.message().contains(words), "{error}");
}

/// Asks a conversation of `messages` for two tokens.
fn chat(model: &mut Model, messages: &[&str]) -> Generation {
    let roles = ["user", "assistant"].into_iter().cycle();
    let messages = messages.iter().zip(roles).map(|(text, role)| Message::new(role, *text));
    let prompt = Prompt::Chat { messages: messages.collect(), thinking: None };
    generate(model, &Request::greedy(prompt, 2)).unwrap()
}

#[test]
fn a_chat_prompt_is_split_only_where_the_state_is_saved() {
    let turns = |op: Scripted| {
        let prompts = Arc::clone(&op.prompts);
        let mut model = open_with_words(op, &LETTERS);
        let reused: Vec<_> = [&["a c"][..], &["a c"], &["a c", "d", "e"]]
            .iter()
            .map(|messages| chat(&mut model, messages).reused_tokens)
            .collect();
        let prompts = prompts.lock().unwrap().clone();
        (reused, prompts)
    };
    // The prompts are "a c b", the same again, and "a c d e b".
    assert_eq!(turns(Scripted::new(RISING)), (vec![0, 2, 2], vec![3, 1, 3]));
    let saved = (vec![0, 2, 2], vec![2, 1, 1, 2, 1]);
    assert_eq!(turns(Scripted::new(RISING).recurrent()), saved);
    let mut neither = Scripted::new(RISING);
    neither.info.can_truncate = false;
    assert_eq!(turns(neither), (vec![0, 0, 0], vec![3, 3, 5]));
}

#[test]
fn a_state_that_cannot_be_saved_costs_only_its_reuse() {
    let op = Scripted::with_fault(Fault::SnapshotFails).recurrent();
    let mut model = open_with_words(op, &LETTERS);
    for _ in 0..2 {
        let generation = chat(&mut model, &["a c"]);
        assert_eq!((generation.tokens, generation.reused_tokens), (vec![7, 7], 0));
    }
}

#[test]
fn a_state_that_cannot_be_kept_costs_only_its_reuse() {
    let reused = |op: Scripted| {
        let mut model = open(op);
        [1, 2, 1].map(|first| {
            let prompt = Prompt::Tokens([first].into_iter().chain([3; 40]).collect());
            let generation = generate(&mut model, &Request::greedy(prompt, 2)).unwrap();
            assert_eq!(generation.tokens, [7, 7]);
            generation.reused_tokens
        })
    };
    for op in [Scripted::new, |logits| Scripted::new(logits).recurrent()] {
        // Of the recurrent one there is a state after the answer only, which is no beginning of the prompt.
        let expected = if op(RISING).info.can_truncate { 40 } else { 0 };
        assert_eq!(reused(op(RISING)), [0, 0, expected]);
        for fault in [Fault::SnapshotFails, Fault::ImportFails] {
            assert_eq!(reused(Scripted { fault, ..op(RISING) }), [0, 0, 0], "{fault:?}");
        }
    }
}

/// Positions that each of some prompts of 40 tokens found, by their first tokens.
fn reused<const N: usize>(model: &mut Model, firsts: [(u32, Option<&str>); N]) -> [usize; N] {
    firsts.map(|(first, salt)| {
        let prompt = Prompt::Tokens([first].into_iter().chain([3; 40]).collect());
        let request = Request::greedy(prompt, 2).salt(salt.map(str::to_owned));
        let generation = generate(model, &request).unwrap();
        assert_eq!(generation.tokens, [7, 7]);
        generation.reused_tokens
    })
}

#[test]
fn an_export_that_fails_once_keeps_later_states() {
    let op = Scripted::with_fault(Fault::ExportFailsOnce);
    let mut model = open(op);
    // The first state is lost when the second prompt comes; that one is kept when the third does.
    let firsts = [1, 2, 1, 2].map(|first| (first, None));
    assert_eq!(reused(&mut model, firsts), [0, 0, 0, 40]);
    let op = Scripted::with_fault(Fault::SnapshotFails);
    let exports = Arc::clone(&op.exports);
    reused(&mut open(op), firsts);
    assert_eq!(*exports.lock().unwrap(), 1, "what it cannot do at all is asked for once");
}

#[test]
fn a_salt_keeps_its_states_from_others() {
    let salts = [None, Some("a"), Some("b"), Some("a"), Some("a"), None];
    let found = reused(&mut open(Scripted::new(RISING)), salts.map(|salt| (1, salt)));
    assert_eq!(found, [0, 0, 0, 40, 40, 40]);
}

#[test]
fn an_imported_state_stays_in_its_session() {
    let mut from = open(Scripted::new(RISING));
    reused(&mut from, [(1, None)]);
    let state = from.export_state().unwrap();
    let mut model = open(Scripted::new(RISING));
    model.import_state(&state).unwrap();
    // It is gone on from, and not kept when it is left or behind its next answer.
    assert_eq!(reused(&mut model, [(1, None)]), [40]);
    model.keep_state().unwrap();
    assert_eq!(reused(&mut model, [(2, None), (1, None)]), [0, 0]);
    // What was consumed here is.
    assert_eq!(reused(&mut model, [(2, None), (1, None)]), [40, 40]);
}

#[test]
fn a_state_that_is_not_handed_over_is_computed_again() {
    let two = |prompt: Fault, tokens: Fault| {
        let ops = [prompt, tokens].map(|fault| Scripted { fault, ..Scripted::new(RISING) });
        let consumed = ops.each_ref().map(|op| Arc::clone(&op.prompts));
        let [prompt, tokens] = ops.map(|op| Box::new(op) as Box<dyn HostOp>);
        let both = split_op::SplitOp::new((prompt, "npu"), (tokens, "cpu"), None).unwrap();
        (open(both), consumed)
    };
    let long = |tokens: usize| request(&vec![1; tokens], 3);
    // Back to where prompts are consumed, as with values that are beyond its f16.
    let (mut model, [on_prompts, on_tokens]) = two(Fault::ImportFails, Fault::None);
    let first = generate(&mut model, &long(10)).unwrap();
    assert_eq!((first.tokens.len(), first.timings.hand_overs.count), (3, 1));
    let second = generate(&mut model, &long(50)).unwrap();
    assert_eq!((second.tokens, second.reused_tokens), (vec![7, 7, 7], 0));
    assert_eq!(*on_prompts.lock().unwrap(), [10, 50]);
    assert!(on_tokens.lock().unwrap().is_empty());
    // To where tokens are consumed: all goes there.
    let (mut model, [on_prompts, on_tokens]) = two(Fault::None, Fault::ImportFails);
    for (tokens, reused) in [(40, 0), (45, 40)] {
        let found = generate(&mut model, &long(tokens)).unwrap();
        assert_eq!((found.tokens, found.reused_tokens), (vec![7, 7, 7], reused));
    }
    assert_eq!(*on_prompts.lock().unwrap(), [40]);
    assert_eq!(*on_tokens.lock().unwrap(), [40, 5]);
}

#[test]
fn the_turn_after_non_finite_logits_starts_from_nothing() {
    let cut_back = Scripted::with_fault(Fault::NotANumber);
    let recurrent = Scripted::with_fault(Fault::NotANumber).recurrent();
    for op in [cut_back, recurrent] {
        let mut model = open_with_words(op, &LETTERS);
        let prompt = Prompt::Chat { messages: vec![Message::new("user", "a c")], thinking: None };
        let error = generate(&mut model, &Request::greedy(prompt, 2)).unwrap_err();
        assert!(error.message().contains("NaN"), "{error}");
        let generation = chat(&mut model, &["a c"]);
        assert_eq!((generation.tokens, generation.reused_tokens), (vec![7, 7], 0));
    }
}

#[test]
fn cancelling_tokenization_cancels_the_generation() {
    let mut op = Scripted::new(RISING);
    op.info.max_ctx = 1 << 20;
    let prompts = Arc::clone(&op.prompts);
    let mut model = open_with_words(op, &LETTERS);
    // Long enough to be tokenized beside what waits for it.
    let mut long = Request::greedy(Prompt::Text("a ".repeat(100_000)), 2);
    long.cancel.cancel();
    let generation = generate(&mut model, &long).unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert!(generation.tokens.is_empty() && prompts.lock().unwrap().is_empty());
    long.cancel = CancelToken::new();
    assert_eq!(generate(&mut model, &long).unwrap().tokens, [7, 7], "the next one runs");
}

#[test]
fn a_stop_text_that_is_a_special_token_ends_the_answer() {
    let words = [("a", 0), ("b", 1), ("</s>", 7)];
    let mut model = open_with_words(Scripted::new(RISING), &words);
    let stop = Request { stop: vec!["</s>".to_owned()], ..request(&[1], 3) };
    let generation = generate(&mut model, &stop).unwrap();
    assert_eq!((generation.tokens, generation.finish_reason), (vec![7], FinishReason::Stop));
    assert_eq!(generation.text, "");
    let other = Request { stop: vec!["a".to_owned()], ..request(&[1], 2) };
    assert_eq!(generate(&mut model, &other).unwrap().tokens, [7, 7]);
}

#[test]
fn crossed_cancels_each_stop_their_own_request() {
    let op = Scripted::new(RISING);
    let prompts = Arc::clone(&op.prompts);
    let mut model = open(op);
    let (first, second, third) = (request(&[1], 3), request(&[2], 3), request(&[3], 3));
    // The second is cancelled while it waits for its turn, the first one after its end.
    let cancel_second = &mut |_: Event<'_>| {
        second.cancel.cancel();
        ControlFlow::Continue(())
    };
    let generation = model.generate(&first, cancel_second).unwrap();
    assert_eq!((generation.finish_reason, generation.tokens.len()), (FinishReason::Length, 3));
    first.cancel.cancel();
    let generation = generate(&mut model, &second).unwrap();
    assert_eq!(generation.finish_reason, FinishReason::Cancelled);
    assert_eq!(*prompts.lock().unwrap(), [1], "the second one was consumed");
    // The third is cancelled while it runs, by a ticket of its own.
    let mut after = |event: Event<'_>| {
        if matches!(event, Event::Token { .. }) {
            third.cancel.cancel();
        }
        ControlFlow::Continue(())
    };
    let generation = model.generate(&third, &mut after).unwrap();
    assert_eq!((generation.finish_reason, generation.tokens.len()), (FinishReason::Cancelled, 1));
    assert_eq!(generate(&mut model, &request(&[4], 2)).unwrap().tokens, [7, 7]);
}

#[test]
fn a_ticket_stops_an_execution_only_while_its_work_runs() {
    let mut model = open(Scripted::new(RISING));
    let (ticket, seen) = (CancelToken::new(), model.space.cancel.clone());
    ticket.cancel();
    assert!(model.cancellable(&ticket, |_| seen.is_cancelled()));
    assert!(!seen.is_cancelled(), "the next work is not stopped");
    let other = CancelToken::new();
    assert!(model.cancellable(&ticket, |m| m.cancellable(&other, |_| seen.is_cancelled())));
    // What goes on beside the model keeps its ticket.
    let kept = model.cancellable(&other, |m| m.space.cancel.current());
    other.cancel();
    assert!(kept.is_cancelled() && !seen.is_cancelled());
    model.cancel_token().cancel();
    assert!(seen.is_cancelled(), "the model's own ends everything");
}

#[test]
fn stop_texts_are_checked_before_anything_runs() {
    for (stop, words) in [("", "a stop string is empty"), ("x", "\"x\" would never be found")] {
        let op = Scripted::new(RISING);
        let prompts = Arc::clone(&op.prompts);
        let stop = Request { stop: vec![stop.to_owned()], ..request(&[1], 1) };
        let error = generate(&mut open(op), &stop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert!(error.message().contains(words), "{error}");
        assert!(prompts.lock().unwrap().is_empty(), "the prompt was consumed");
    }
}

/// Events as words, until `broken` of them came.
fn events(model: &mut Model, request: &Request, broken: usize) -> (Vec<String>, Generation) {
    let mut seen = Vec::new();
    let generation = model.generate(request, &mut |event| {
        seen.push(match event {
            Event::Prefilled { tokens, .. } => format!("prompt {tokens}"),
            Event::Token { id, text, .. } => format!("token {id} {text}"),
            Event::Rest { text } => format!("rest {text}"),
        });
        if seen.len() == broken { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    });
    (seen, generation.unwrap())
}

#[test]
fn held_back_text_is_an_event_and_none_follows_a_break() {
    let mut model = open_with_words(Scripted::new(RISING), &LETTERS);
    let request = Request { stop: vec!["hx".to_owned()], ..request(&[1], 3) };
    let all = ["prompt 1", "token 7 ", "token 7 h", "token 7 h", "rest h"];
    let (seen, generation) = events(&mut model, &request, usize::MAX);
    assert_eq!((seen, generation.text.as_str()), (all.map(str::to_owned).to_vec(), "hhh"));
    for broken in 1..=4 {
        let (seen, generation) = events(&mut model, &request, broken);
        assert_eq!(seen, all[..broken], "a break at event {broken}");
        assert_eq!(generation.finish_reason, FinishReason::Cancelled);
        assert_eq!(generation.tokens.len(), broken - 1);
    }
}

#[test]
fn a_run_executes_only_what_is_asked_for() {
    let op = Scripted::new(RISING);
    let prompts = Arc::clone(&op.prompts);
    let mut model = open_with_words(op, &LETTERS);
    let request = Request { stop: vec!["hx".to_owned()], ..request(&[1], 3) };
    let mut run = model.start(&request).unwrap();
    assert!(prompts.lock().unwrap().is_empty(), "nothing is executed before the first event");
    assert!(matches!(run.next_event(), Ok(Some(Event::Prefilled { tokens: 1, reused: 0 }))));
    assert_eq!(*prompts.lock().unwrap(), [1]);
    assert!(matches!(run.next_event(), Ok(Some(Event::Token { id: 7, text: "", .. }))));
    // The pieces of the text, from here on.
    let pieces: Vec<_> = run.by_ref().map(Result::unwrap).collect();
    assert_eq!(pieces, ["h", "h", "h"]);
    assert!(run.next().is_none());
    let generation = run.finish().unwrap();
    assert_eq!((generation.text.as_str(), generation.tokens.len()), ("hhh", 3));
    assert_eq!(generation.finish_reason, FinishReason::Length);
    // As a loop over events does.
    assert_eq!(generation.tokens, generate(&mut model, &request).unwrap().tokens);
}

#[test]
fn a_run_that_is_dropped_or_cancelled_keeps_its_state() {
    let mut model = open(Scripted::new(RISING));
    let mut run = model.start(&request(&[1, 2], 8)).unwrap();
    for _ in 0..3 {
        run.next_event().unwrap();
    }
    drop(run);
    // The token chosen last was not consumed.
    let next = generate(&mut model, &request(&[1, 2, 7, 7], 1)).unwrap();
    assert_eq!(next.reused_tokens, 3);
    let mut run = model.start(&request(&[1, 2], 8)).unwrap();
    run.next_event().unwrap();
    run.cancel_token().clone().cancel();
    assert!(run.next_event().unwrap().is_none());
    assert_eq!(run.finish().unwrap().finish_reason, FinishReason::Cancelled);
    let mut run = model.start(&request(&[1], 2)).unwrap();
    run.stop().unwrap();
    let stopped = run.finish().unwrap();
    assert_eq!((stopped.finish_reason, stopped.tokens.len()), (FinishReason::Cancelled, 0));
}

#[test]
fn an_error_is_returned_once_and_ends_the_run() {
    let mut wrong = RISING;
    wrong[2] = f32::NAN;
    let mut model = open_with_words(Scripted::new(wrong), &LETTERS);
    let mut run = model.start(&request(&[1], 3)).unwrap();
    assert_eq!(run.next().unwrap().unwrap_err().kind(), ErrorKind::Execute);
    assert!(run.next().is_none());
    assert!(run.finish().is_err());
}

#[test]
fn an_embedding_that_is_zero_or_not_finite_is_an_error() {
    assert_eq!(open(Scripted::new(RISING)).embed(&[1]).unwrap(), RISING);
    for (wrong, words) in [
        ([0.0, 1.0, f32::NAN, 0.0, 0.0, 0.0, 0.0, 0.0], "value 2 of the embedding's 8 is NaN"),
        ([f32::NEG_INFINITY; VOCAB], "value 0 of the embedding's 8 is -inf"),
        ([0.0, -0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0], "all 8 values of the embedding are 0"),
    ] {
        let error = open(Scripted::new(wrong)).embed(&[1]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Execute);
        let all = ["host-op \"scripted\"", words, "`qhx verify`"];
        assert!(all.iter().all(|words| error.report().to_string().contains(words)), "{error}");
    }
}
