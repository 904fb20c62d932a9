//! What is behind a model's handle: what its sessions share.

use std::sync::{Mutex, PoisonError};

use qhx::{Engine, Sessions};

use crate::fault::Result;

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
            None => Ok(Engine::new(self.sessions.open()?)?),
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
