//! A generation: from what is asked to an answer.

use std::ffi::c_int;
use std::time::Instant;

use qhx::media::{self, Attached};
use qhx::{
    CancelToken, Embedder, Engine, Error, ErrorKind, Event, FinishReason, Grammar, Message,
    Modality, Model, Prompt, Request, Role, SpeechRules, Times, TranscribeEvent, TranscribeOptions,
    Transcriber,
};
use qhx_text::Content;

use crate::abi;
use crate::callbacks::{Listener, Poll};
use crate::fault::{Fault, Result};
use crate::input::Question;
use crate::output::Answer;

/// Generates, embeds or transcribes, as the bundle does.
pub(crate) fn generate(
    engine: &mut Engine,
    question: Question,
    ticket: &CancelToken,
    poll: Poll,
    listener: &mut Listener,
) -> Result<Answer> {
    let answered = match engine {
        _ if ticket.is_cancelled() => Err(cancelled()),
        Engine::Transcribes(transcriber) if is_transcription(&question) => {
            transcribe(transcriber, &question, ticket, poll, listener)
        }
        _ if question.word_times => Err(Fault::usage(
            "word_times: only a transcription has them, which is asked with audio alone, of a bundle that transcribes",
        )),
        _ if question.vad.is_some() => Err(Fault::usage(
            "vad: only a transcription leaves silence out, which is asked with audio alone, of a bundle that transcribes",
        )),
        Engine::Embeds(embedder) => embed(embedder, &question, ticket),
        engine => write(engine.model_mut(), question, ticket, poll, listener),
    };
    match answered {
        Err(fault) if fault.status == abi::CANCELLED => {
            listener.end();
            let finish = Some(FinishReason::Cancelled);
            Ok(Answer { finish, cancelled: true, ..Answer::default() })
        }
        answered => answered,
    }
}

fn cancelled() -> Fault {
    Error::new(ErrorKind::Cancelled, "cancelled").into()
}

/// Audio alone.
fn is_transcription(question: &Question) -> bool {
    let audio = |media: &qhx::Attachment| media.modality == Modality::Audio;
    question.text.as_ref().is_none_or(String::is_empty)
        && question.system.is_none()
        && question.history.is_empty()
        && question.tokens.is_none()
        && matches!(&question.media[..], [one] if audio(one))
}

/// The vector of a text.
fn embed(embedder: &mut Embedder, question: &Question, ticket: &CancelToken) -> Result<Answer> {
    let start = Instant::now();
    if question.system.is_some() || !question.history.is_empty() || !question.media.is_empty() {
        return Err(Fault::usage(
            "the bundle embeds texts: system_prompt, history and media do not apply",
        ));
    }
    let tokens = match (&question.tokens, &question.text) {
        (Some(_), Some(_)) => return Err(two_prompts()),
        (Some(tokens), None) => tokens.clone(),
        (None, text) => {
            let role = if question.embed_query { Role::Query } else { Role::Document };
            embedder.texts().tokens(text.as_deref().unwrap_or_default(), role)?
        }
    };
    let model = embedder.model_mut();
    let embedding = model.cancellable(ticket, |model| model.embed(&tokens).map(<[f32]>::to_vec))?;
    let prefill_ms = start.elapsed().as_secs_f64() * 1e3;
    Ok(Answer { embedding, prompt: tokens.len(), prefill_ms, ..Answer::default() })
}

/// Transcript of an audio clip.
fn transcribe(
    transcriber: &mut Transcriber,
    question: &Question,
    ticket: &CancelToken,
    poll: Poll,
    listener: &mut Listener,
) -> Result<Answer> {
    let start = Instant::now();
    let Some(audio) = question.media.first() else { return Err(cancelled()) };
    let times = if question.word_times { Times::Word } else { Times::default() };
    let vad = question.vad.as_deref().map(SpeechRules::from_json).transpose();
    let vad = vad.map_err(|e| e.context("vad"))?;
    let options = TranscribeOptions::default().with_times(times).with_max_new(question.max_new);
    transcriber.set_options(&options.with_vad(vad))?;
    let on_event = |_: TranscribeEvent<'_>| poll.ask(ticket);
    let transcript = transcriber.transcribe_with(&audio.source, ticket, on_event);
    if question.salt.is_some() {
        // It begins from nothing, and leaves nothing that others would go on from.
        transcriber.model_mut().reset()?;
    }
    let transcript = transcript?;
    // The words of a chunk change those before them, so that there are no pieces.
    if transcript.text.is_empty() || listener.text(&transcript.text, None) {
        listener.end();
    }
    let last = transcript.chunks.last().map(|chunk| chunk.finish_reason);
    Ok(Answer {
        generated: transcript.chunks.iter().map(|chunk| chunk.tokens).sum(),
        decode_ms: start.elapsed().as_secs_f64() * 1e3,
        finish: last,
        cancelled: transcript.cancelled,
        text: transcript.text,
        words: transcript.words,
        ..Answer::default()
    })
}

/// Answer to a prompt.
fn write(
    model: &mut Model,
    question: Question,
    ticket: &CancelToken,
    poll: Poll,
    listener: &mut Listener,
) -> Result<Answer> {
    let every_token = question.every_token;
    let top = question.logprobs.unwrap_or(0);
    let mut attached = Vec::with_capacity(question.media.len());
    for attachment in &question.media {
        attached.push(attachment.read(model, None)?);
        poll.ask(ticket);
    }
    let request = request(model, question, &attached)?.cancelled_by(ticket.clone());
    let mut run = model.start(&request)?;
    let mut is_stopped = false;
    loop {
        poll.ask(ticket);
        let goes_on = match run.next_event()? {
            None => break,
            Some(Event::Token { id, text, .. }) if every_token || !text.is_empty() => {
                listener.text(text, Some(id))
            }
            Some(Event::Rest { text }) => listener.text(text, None),
            Some(_) => true,
        };
        if !goes_on {
            is_stopped = true;
            run.stop()?;
            break;
        }
    }
    let generation = run.finish()?;
    if !is_stopped {
        listener.end();
    }
    let finish = if is_stopped { FinishReason::Stop } else { generation.finish_reason };
    Ok(Answer {
        generated: generation.tokens.len(),
        prompt: generation.prompt_tokens,
        reused: generation.reused_tokens,
        prefill_ms: generation.timings.prefill.as_secs_f64() * 1e3,
        decode_ms: generation.timings.decode.as_secs_f64() * 1e3,
        cancelled: finish == FinishReason::Cancelled,
        finish: Some(finish),
        stopped_at: generation.stopped_at,
        text: generation.text,
        tokens: generation.tokens,
        logprobs: generation.logprobs,
        top,
        ..Answer::default()
    })
}

fn two_prompts() -> Fault {
    Fault::usage("text and tokens are given, expected one of them as the prompt")
}

/// The request of the engine.
fn request(model: &Model, question: Question, attached: &[Attached]) -> Result<Request> {
    let Question { text, system, history, tokens, .. } = question;
    let is_conversation = system.is_some() || !history.is_empty();
    let is_plain = question.no_template || tokens.is_some();
    if is_conversation && is_plain {
        return Err(Fault::usage(
            "system_prompt and history need the chat template: leave them out with no_template and tokens",
        ));
    }
    let prompt = match (tokens, text) {
        (Some(_), Some(_)) => return Err(two_prompts()),
        (Some(tokens), None) => media::tokens(tokens, attached),
        (None, None) if attached.is_empty() && history.is_empty() => {
            return Err(Fault::usage(
                "text is NULL, and there is no image or audio: nothing is asked",
            ));
        }
        (None, text) if is_plain || (!is_conversation && !model.can_chat()) => {
            media::content(text.unwrap_or_default(), attached)?.into()
        }
        (None, text) => {
            // Without a question the model goes on with the last answer.
            let goes_on = text.is_none() && attached.is_empty();
            let content: Content = media::content(text.unwrap_or_default(), attached)?;
            let mut messages: Vec<_> = system.into_iter().map(Message::system).collect();
            for (index, text) in history.into_iter().enumerate() {
                messages.push(match index % 2 {
                    0 => Message::user(text),
                    _ => Message::assistant(text),
                });
            }
            if !goes_on {
                messages.push(Message::user(content));
            }
            Prompt::Chat { messages, thinking: question.disable_thinking.then_some(false) }
        }
    };
    let mut request = Request::greedy(prompt, question.max_new)
        .sampling(question.sampling)
        .stops(question.stop)
        .salt(question.salt);
    request.logprobs = question.logprobs;
    request.stop_ids = question.stop_ids;
    structured(request, question.grammar_kind, question.grammar)
}

/// The request, whose answer has to be as a grammar says. Tools of it are shown to the model, too.
fn structured(request: Request, kind: c_int, grammar: Option<String>) -> Result<Request> {
    let text = grammar.unwrap_or_default();
    let grammar = Grammar::of_kind(kind, &text)?;
    let request = match grammar.as_ref().and_then(Grammar::tools) {
        Some(_) => request.template_argument("tools", parse(&text)?),
        None => request,
    };
    Ok(request.grammar(grammar))
}

fn parse(json: &str) -> Result<serde_json::Value> {
    serde_json::from_str(json).map_err(|e| Fault::usage(format!("grammar: {e}")))
}
