//! A model: opened, asked, with the vectors and transcripts that it returns.

use std::path::PathBuf;
use std::sync::Arc;

use qhx::{
    CallerOptions, CancelToken, Engine, Error, ErrorKind, Modality, Role, SpeechRules, Times,
    TranscribeEvent, TranscribeOptions, Transcript, catch_panic,
};
use serde::Serialize;

use crate::fault::{Ended, Fault, Result, Waited};
use crate::media::Item;
use crate::request::{Answer, RequestJson};
use crate::turns::{Caller, Shared, on_thread, receive};

/// Description of an open model.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct About {
    /// The model's name.
    pub name: String,
    /// The manifest's path.
    pub manifest: PathBuf,
    /// Host-op that runs the model's steps.
    pub host_op: String,
    /// Modalities that prompts may hold.
    pub modalities: Vec<Modality>,
    /// Backend that executes the graphs.
    pub backend: String,
    /// Why that was taken.
    pub backend_reason: String,
    /// Backend that executes the tokens of answers, if one was asked for.
    pub decoder: Option<String>,
    /// Why that was taken.
    pub decoder_reason: Option<String>,
    /// Positions that the context holds.
    pub max_ctx: usize,
    /// Values of a vector; 0 where the model does not embed.
    pub embedding_dim: usize,
    /// True if it has a chat template.
    pub can_chat: bool,
}

/// An open model and its description.
#[derive(Debug)]
pub struct Loaded {
    /// The model.
    pub shared: Arc<Shared>,
    /// Description of the model.
    pub about: About,
}

/// Loads a bundle with options of JSON; `ticket` cancels that.
///
/// # Errors
/// When the bundle is damaged, nothing here can execute it, or an option makes no sense.
pub fn open<C: Caller>(
    caller: &C,
    bundle: PathBuf,
    options: String,
    ticket: &CancelToken,
) -> Waited<Loaded, C::Stop> {
    let cancel = ticket.clone();
    let mut loading = on_thread(move |_| catch_panic(|| load(bundle, &options, cancel)))?;
    receive(caller, &mut loading, ticket, |_| true)?.map_err(Ended::Fault)
}

fn load(bundle: PathBuf, options: &str, cancel: CancelToken) -> Result<Loaded> {
    let wrong = |e| Error::caused(ErrorKind::Usage, "the options", e);
    let options: CallerOptions = serde_json::from_str(options).map_err(wrong)?;
    let runtime = options.decide()?.builder().cancel(cancel).build();
    let bundle = runtime.bundle(bundle, None)?;
    let mut why = String::new();
    let model =
        runtime.load_checked(&bundle, |_| Ok(()), |_, reason| reason.clone_into(&mut why))?;
    let (info, op) = (model.info(), &model.op().description);
    let about = About {
        name: model.manifest().model.name.clone(),
        manifest: model.manifest().path.clone(),
        host_op: op.name.clone(),
        modalities: op.modalities.clone(),
        backend: model.backend().name.clone(),
        backend_reason: why,
        decoder: model.decoder().map(|decoder| decoder.backend.name.clone()),
        decoder_reason: model.decoder().map(|decoder| decoder.reason.clone()),
        max_ctx: info.max_ctx,
        embedding_dim: info.embedding_dim,
        can_chat: model.can_chat(),
    };
    Ok(Loaded { shared: Shared::new(Engine::new(model)?), about })
}

/// Vectors of texts, one behind the other.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Vectors {
    /// All values.
    pub values: Vec<f32>,
    /// Values of one vector.
    pub dim: usize,
}

impl Shared {
    /// Answers a request at once; `ticket` cancels it.
    ///
    /// # Errors
    /// When the model is in use by a stream or closed, the request makes no sense, or the host-op fails.
    pub fn generate<C: Caller>(
        self: &Arc<Self>,
        caller: &C,
        ticket: &CancelToken,
        asked: RequestJson,
        items: Vec<Item>,
    ) -> Waited<Answer, C::Stop> {
        self.turn(caller, ticket, false)?.finish(caller, move |engine, ticket| {
            let model = engine.model_mut();
            let question = asked.question(model, &items, ticket)?;
            let generation = model.start(&question.request)?.finish()?;
            Ok(question.answer(&model.texts(), generation)?)
        })
    }

    /// The vectors of texts, whose role is a word of [`Role`]; `ticket` cancels it.
    ///
    /// # Errors
    /// Errors of [`Shared::generate`], when the bundle does not embed, and when a text is too long and must not be
    /// truncated.
    pub fn embed<C: Caller>(
        self: &Arc<Self>,
        caller: &C,
        ticket: &CancelToken,
        texts: Vec<String>,
        role: &str,
        truncate: bool,
    ) -> Waited<Vectors, C::Stop> {
        let role: Role = role.parse().map_err(|e| Fault::usage(format!("option role: {e}")))?;
        self.turn(caller, ticket, false)?.finish(caller, move |engine, ticket| {
            let embedder = engine.embedder_mut()?;
            let (prefixed, dim) =
                (embedder.texts().clone().truncating(truncate), embedder.dimensions());
            let mut values = Vec::with_capacity(texts.len().saturating_mul(dim));
            let done = |_: usize, vector: &[f32]| {
                values.extend_from_slice(vector);
                Ok(())
            };
            embedder.model_mut().cancellable(ticket, |model| {
                let tokens = |(index, text): (usize, &String)| {
                    let tokens = prefixed.tokens(text, role);
                    tokens.map_err(|e| too_long(e, truncate).context(format_args!("text {index}")))
                };
                let tokens = texts.iter().enumerate().map(tokens);
                model.embed_each(&tokens.collect::<qhx::Result<Vec<_>>>()?, done)
            })?;
            Ok(Vectors { values, dim })
        })
    }

    /// The words of an audio clip, of `max_new` tokens a chunk at most; `ticket` cancels it. With `vad`, rules of
    /// speech as JSON, the model is given speech alone.
    ///
    /// # Errors
    /// The errors of [`Shared::generate`], and when the bundle does not transcribe, does not find the times, or this is
    /// no audio.
    pub fn transcribe<C: Caller>(
        self: &Arc<Self>,
        caller: &C,
        ticket: &CancelToken,
        audio: Item,
        max_new: Option<usize>,
        times: Times,
        vad: Option<String>,
    ) -> Waited<Transcript, C::Stop> {
        let Item::File(audio) = audio else { return Err(Fault::usage("expected audio").into()) };
        self.turn(caller, ticket, false)?.finish(caller, move |engine, ticket| {
            let transcriber = engine.transcriber_mut().map_err(|e| {
                e.hint("give the audio to chat, or declare params.transcription in the manifest")
            })?;
            let vad = vad.as_deref().map(SpeechRules::from_json).transpose();
            let vad = vad.map_err(|e| e.context("option vad"))?;
            let options = TranscribeOptions::default().with_times(times).with_vad(vad);
            let max_new = max_new.unwrap_or(options.max_new);
            transcriber.set_options(&options.with_max_new(max_new))?;
            let on_event = |_: TranscribeEvent<'_>| {};
            Ok(transcriber.transcribe_with(&audio.source, ticket, on_event)?)
        })
    }
}

/// The hint of a text that is too long, in words of options.
fn too_long(error: Error, truncate: bool) -> Error {
    match error.kind() {
        ErrorKind::Prompt if !truncate => error.hint("split the text, or give the option truncate"),
        _ => error,
    }
}
