//! What is behind a model's handle: what its sessions share.

use std::sync::{Mutex, PoisonError};

use qhx::{Embedder, Sessions, TranscribeOptions, Transcriber};
use qhx_core::op::Task;

use crate::fault::Result;

/// A model with a state, and what is done with it.
pub(crate) enum Engine {
    /// Generates.
    Plain(Box<qhx::Model>),
    /// Embeds texts.
    Embeds(Box<Embedder>),
    /// Transcribes audio, and generates.
    Transcribes(Box<Transcriber>),
}

impl Engine {
    fn new(model: qhx::Model) -> Result<Self> {
        let generates = model.op().description.tasks.contains(&Task::Generate);
        if model.info().embedding_dim > 0 && !generates && model.tokenizer().is_some() {
            return Ok(Self::Embeds(Box::new(Embedder::new(model)?)));
        }
        if model.manifest().params.transcription.is_some() {
            let transcriber = Transcriber::with_options(model, &TranscribeOptions::default())?;
            return Ok(Self::Transcribes(Box::new(transcriber)));
        }
        Ok(Self::Plain(Box::new(model)))
    }

    pub(crate) fn model_mut(&mut self) -> &mut qhx::Model {
        match self {
            Self::Plain(model) => model,
            Self::Embeds(embedder) => embedder.model_mut(),
            Self::Transcribes(transcriber) => transcriber.model_mut(),
        }
    }
}

/// An open bundle.
pub(crate) struct Model {
    sessions: Sessions,
    /// A state that no session has: opening another one takes memory.
    spare: Mutex<Option<Engine>>,
}

impl Model {
    pub(crate) fn new(model: qhx::Model) -> Result<Self> {
        let sessions = model.sessions();
        Ok(Self { sessions, spare: Mutex::new(Some(Engine::new(model)?)) })
    }

    fn spare(&self) -> std::sync::MutexGuard<'_, Option<Engine>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A state for a session.
    pub(crate) fn take(&self) -> Result<Engine> {
        let spare = self.spare().take();
        match spare {
            Some(engine) => Ok(engine),
            None => Engine::new(self.sessions.open()?),
        }
    }

    /// Takes back the state of a session that ends.
    pub(crate) fn give_back(&self, mut engine: Engine) {
        // Not where a spare is there already, nor where it cannot be reset.
        if self.spare().is_none() && engine.model_mut().reset().is_ok() {
            *self.spare() = Some(engine);
        }
    }
}
