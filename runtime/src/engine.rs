//! A model as its bundle means it to be used: it generates, embeds, transcribes or speaks.

use qhx_base::{Result, error};
use qhx_core::engine::Model;
use qhx_core::op::Task;

use crate::embedder::{self, Embedder};
use crate::speaker::Speaker;
use crate::transcriber::{TranscribeOptions, Transcriber};

/// A model with a state, and what is done with it: what a handle of another language stands for.
#[derive(Debug)]
pub enum Engine {
    /// Generates.
    Plain(Box<Model>),
    /// Embeds texts.
    Embeds(Box<Embedder>),
    /// Transcribes audio, and generates.
    Transcribes(Box<Transcriber>),
    /// Speaks.
    Speaks(Box<Speaker>),
}

impl Engine {
    /// Wraps an open model for the task of its bundle.
    ///
    /// # Errors
    /// Errors of [`Embedder::new`], [`Transcriber::new`] and [`Speaker::new`].
    pub fn new(model: Model) -> Result<Self> {
        let generates = model.op().description.tasks.contains(&Task::Generate);
        if model.info().embedding_dim > 0 && !generates && model.tokenizer().is_some() {
            return Ok(Self::Embeds(Box::new(Embedder::new(model)?)));
        }
        if model.manifest().params.transcription.is_some() {
            return Ok(Self::Transcribes(Box::new(Transcriber::new(model)?)));
        }
        if model.manifest().params.speech.is_some() {
            return Ok(Self::Speaks(Box::new(Speaker::new(model)?)));
        }
        Ok(Self::Plain(Box::new(model)))
    }

    /// The model.
    pub fn model(&self) -> &Model {
        match self {
            Self::Plain(model) => model,
            Self::Embeds(embedder) => embedder.model(),
            Self::Transcribes(transcriber) => transcriber.model(),
            Self::Speaks(speaker) => speaker.model(),
        }
    }

    /// The model, to generate.
    pub fn model_mut(&mut self) -> &mut Model {
        match self {
            Self::Plain(model) => model,
            Self::Embeds(embedder) => embedder.model_mut(),
            Self::Transcribes(transcriber) => transcriber.model_mut(),
            Self::Speaks(speaker) => speaker.model_mut(),
        }
    }

    /// The embedder.
    ///
    /// # Errors
    /// When the bundle is for something else.
    pub fn embedder_mut(&mut self) -> Result<&mut Embedder> {
        match self {
            Self::Embeds(embedder) => Ok(embedder),
            other => Err(embedder::no_embedder(other.model())),
        }
    }

    /// The speaker.
    ///
    /// # Errors
    /// When the bundle is for something else.
    pub fn speaker_mut(&mut self) -> Result<&mut Speaker> {
        match self {
            Self::Speaks(speaker) => Ok(speaker),
            other => {
                let path = other.model().manifest().path.display();
                Err(error!(Usage, "{path}: the bundle does not speak"))
            }
        }
    }

    /// The transcriber.
    ///
    /// # Errors
    /// When the manifest does not declare what asks the model for the words.
    pub fn transcriber_mut(&mut self) -> Result<&mut Transcriber> {
        match self {
            Self::Transcribes(transcriber) => Ok(transcriber),
            other => {
                let manifest = other.model().manifest();
                TranscribeOptions::default().instruction(manifest)?;
                Err(error!(Usage, "{}: the bundle embeds texts", manifest.path.display()))
            }
        }
    }
}
