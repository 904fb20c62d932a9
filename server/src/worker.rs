//! The threads that do jobs. Several have one session each, whose executions take turns on the device.

use std::sync::Arc;
use std::thread::JoinHandle;

use qhx::{
    AudioFormat, CancelToken, Embedder, Engine, Error, ErrorKind, Event, FinishReason, Model,
    Prompt, Request, Result, Scoring, Source, SpeakOptions, Times, TranscribeEvent,
    TranscribeOptions, Transcriber, catch_panic, encode_audio, pcm16,
};

use crate::app::Shared;
use crate::audio::GRANULARITIES;
use crate::conversation::{decoded, request_limits};
use crate::error::ApiError;
use crate::queue::{EmbedInput, Job, Outbox, Update, Work};
use crate::registry::Seat;

/// Starts the threads. They end once the queue is closed and empty.
pub(crate) fn start(shared: &Shared) -> Result<Vec<JoinHandle<()>>> {
    let worker = |index| {
        let shared = Arc::clone(shared);
        let thread = std::thread::Builder::new().name(format!("qhx-worker-{index}"));
        thread
            .spawn(move || work(&shared))
            .map_err(|e| Error::caused(ErrorKind::Internal, "the server's threads cannot start", e))
    };
    (0..shared.options.parallel).map(worker).collect()
}

fn work(shared: &Shared) {
    while let Some(mut job) = shared.queue.pop() {
        let done = match job.ticket.is_cancelled() {
            true => Err(ApiError::of_model(&cancelled(), &job.model.name)),
            false => decode(shared, &mut job).and_then(|()| {
                run(shared, &mut job).map_err(|e| ApiError::of_model(&e, &job.model.name))
            }),
        };
        if let Err(e) = done {
            let e = if job.ticket.is_expired() { ApiError::timeout() } else { e };
            // Where nobody waits any more, nobody has to know.
            job.updates.end(Update::Failed(e));
        }
        shared.queue.done(job.client);
        shared.activity.session_back();
    }
}

/// Decodes the images and audio of a conversation into its prompt: here and not before, so that they take the memory of
/// as many requests as are worked on.
fn decode(shared: &Shared, job: &mut Job) -> Result<(), ApiError> {
    let (requests, turns) = match &mut job.work {
        Work::Generate { requests, turns, .. } => (requests.as_mut_slice(), turns.take()),
        Work::Count { request, turns } => {
            (std::slice::from_mut(&mut **request), Some(std::mem::take(turns)))
        }
        _ => return Ok(()),
    };
    let Some(turns) = turns else { return Ok(()) };
    shared.activity.takes_much();
    let of_model = |e: Error| ApiError::of_model(&e, &job.model.name);
    let info = shared.registry.info(&job.model, &shared.metrics).map_err(of_model)?;
    // A decoder that panics costs its request.
    let decoded = catch_panic(|| Ok(decoded(&turns, &info, &job.ticket))).map_err(of_model)??;
    for request in requests {
        if let Prompt::Chat { messages, .. } = &mut request.prompt {
            messages.clone_from(&decoded);
        }
    }
    Ok(())
}

/// Does a job with a session of its model. Whatever happens, the session can be used again, or is closed.
fn run(shared: &Shared, job: &mut Job) -> Result<()> {
    let (registry, parallel) = (&shared.registry, shared.options.parallel);
    let taken = || registry.take(&job.model, &job.history, parallel, &shared.metrics);
    let mut seat = catch_panic(taken)?;
    let mut whole = false;
    let done = catch_panic(|| {
        let done = perform(&mut seat.engine, job);
        whole = true;
        done
    });
    seat.history.clone_from(&job.history);
    let lost = done.as_ref().is_err_and(|e| e.kind() == ErrorKind::Panicked);
    let usable = whole && (!lost || reopen(&mut seat));
    registry.put(&job.model, usable.then_some(seat));
    done
}

/// Opens a host-op that panicked again.
fn reopen(seat: &mut Seat) -> bool {
    let reopened = catch_panic(|| seat.engine.model_mut().reopen());
    reopened.inspect_err(|e| tracing::error!("{}", e.report())).is_ok()
}

fn perform(engine: &mut Engine, job: &mut Job) -> Result<()> {
    let (updates, ticket) = (&job.updates, &job.ticket);
    let update = match &mut job.work {
        Work::Generate { requests, choices, .. } => {
            for (at, request) in requests.iter_mut().enumerate() {
                let seed = request.sampling.seed;
                for choice in 0..*choices {
                    request.sampling.seed = seed.map(|seed| seed.wrapping_add(choice as u64));
                    generate(engine.model_mut(), at * *choices + choice, request, updates)?;
                }
            }
            // The next turn may come to another session.
            return engine.model_mut().keep_state();
        }
        Work::Embed { inputs, truncate, packs } => {
            embed(engine.embedder_mut()?, inputs, (*truncate, *packs), ticket)?
        }
        Work::Transcribe { source, options, streams } => {
            let transcriber = engine.transcriber_mut()?;
            match transcriber.finds_words() {
                Err(e) if options.times == Times::Word => {
                    Update::Failed(ApiError::of_model(&e, &job.model.name).param(GRANULARITIES))
                }
                _ => transcribe(transcriber, source, options, ticket, |text| {
                    if *streams && !updates.send(Update::Heard(text.to_owned())) {
                        ticket.cancel();
                    }
                })?,
            }
        }
        Work::Speak { text, options, format } => {
            speak(engine, text, options, *format, ticket, |update| {
                if !updates.send(update) {
                    ticket.cancel();
                }
            })?
        }
        Work::Rank { query, documents, truncate, instruction } => {
            let model = engine.model_mut();
            let mut scoring = Scoring::of(model)?.truncate(*truncate);
            if let Some(instruction) = instruction {
                scoring = scoring.instruction(instruction.as_str());
            }
            let ranked = scoring.rank(model, query, documents, ticket)?;
            let tokens = ranked.iter().map(|one| one.tokens).sum();
            Update::Ranked { ranked, tokens }
        }
        Work::Count { request, .. } => {
            let model = engine.model_mut();
            let tokens = model.cancellable(ticket, |model| model.encode_request(request))?;
            Update::Counted(tokens.len())
        }
    };
    updates.end(update);
    Ok(())
}

fn generate(model: &mut Model, choice: usize, request: &Request, updates: &Outbox) -> Result<()> {
    let mut run = model.start(request)?;
    let beginning = run.beginning();
    let send = |update| {
        if !updates.send(update) {
            request.cancel.cancel();
        }
    };
    send(Update::Started);
    while let Some(event) = run.next_event()? {
        let text = event.text().unwrap_or_default().to_owned();
        match event {
            Event::Token { id, logprobs, .. } => {
                let logprobs = logprobs.cloned();
                send(Update::Token { choice, id: Some(id), text, logprobs });
            }
            Event::Rest { .. } => send(Update::Token { choice, id: None, text, logprobs: None }),
            Event::Prefilled { tokens, reused } => {
                send(Update::Prefilled { choice, tokens, reused, beginning });
            }
            _ => {}
        }
    }
    let generation = Box::new(run.finish()?);
    if generation.finish_reason == FinishReason::Cancelled {
        return Err(cancelled());
    }
    send(Update::Finished { choice, generation });
    Ok(())
}

fn cancelled() -> Error {
    Error::new(ErrorKind::Cancelled, "cancelled")
}

/// Short texts share graphs, unless each is to have the same bits whatever comes with it.
fn embed(
    embedder: &mut Embedder,
    inputs: &[EmbedInput],
    (truncate, packs): (bool, bool),
    ticket: &CancelToken,
) -> Result<Update> {
    let of_input = |index: usize| move |e: Error| e.context(format_args!("input {index}"));
    let texts = embedder.texts().clone().truncating(truncate);
    let mut vectors = vec![Vec::new(); inputs.len()];
    let (mut places, mut tokens) = (Vec::new(), Vec::new());
    for (index, input) in inputs.iter().enumerate() {
        ticket.check()?;
        match input {
            EmbedInput::Image(source) => {
                let image = texts.pixels(source, &request_limits()).map_err(of_input(index))?;
                let embedded = embedder
                    .model_mut()
                    .cancellable(ticket, |model| model.embed_media(&image).map(<[f32]>::to_vec));
                vectors[index] = embedded.map_err(of_input(index))?;
                continue;
            }
            EmbedInput::Text(text, role) => {
                tokens.push(texts.tokens(text, *role).map_err(of_input(index))?);
            }
            EmbedInput::Tokens(ids) => {
                tokens.push(texts.fitting(ids.clone()).map_err(of_input(index))?);
            }
        }
        places.push(index);
    }
    let mut done = 0;
    let together = if packs { tokens.len() } else { 1 };
    let embedded = embedder.model_mut().cancellable(ticket, |model| {
        tokens.chunks(together.max(1)).try_for_each(|some| {
            model.embed_each(some, |_, vector| {
                vectors[places[done]] = vector.to_vec();
                done += 1;
                Ok(())
            })
        })
    });
    embedded.map_err(|e| of_input(places.get(done).copied().unwrap_or_default())(e))?;
    Ok(Update::Vectors { vectors, tokens: tokens.iter().map(Vec::len).sum() })
}

fn transcribe(
    transcriber: &mut Transcriber,
    source: &Source,
    options: &TranscribeOptions,
    ticket: &CancelToken,
    mut heard: impl FnMut(&str),
) -> Result<Update> {
    transcriber.set_options(&transcriber.fitting(options))?;
    let transcript = transcriber.transcribe_with(source, ticket, |event| {
        if let TranscribeEvent::Text(text) = event {
            heard(text);
        }
    })?;
    if transcript.cancelled {
        return Err(cancelled());
    }
    Ok(Update::Transcribed(Box::new(transcript)))
}

fn speak(
    engine: &mut Engine,
    text: &str,
    options: &SpeakOptions,
    format: Option<AudioFormat>,
    ticket: &CancelToken,
    send: impl Fn(Update),
) -> Result<Update> {
    let speaker = engine.speaker_mut()?;
    let rate = speaker.rate();
    let mut samples = Vec::new();
    let spoken = speaker.speak_with(text, options, ticket, |part| {
        match format {
            Some(_) => samples.extend_from_slice(part),
            None => send(Update::Said { bytes: pcm16(part), rate }),
        }
        Ok(())
    })?;
    if spoken.cancelled {
        return Err(cancelled());
    }
    Ok(Update::Spoken(match format {
        Some(format) => encode_audio(&samples, rate, format)?,
        None => Vec::new(),
    }))
}
