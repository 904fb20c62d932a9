//! State behind a model's handle, which its sessions share.

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
        let is_there = self.spare().is_some();
        // Without the lock: resetting may log, and what is called with that may open a session.
        if !is_there && engine.model_mut().reset().is_ok() {
            // Another session may have given its state back meanwhile.
            let earlier = self.spare().replace(engine);
            drop(earlier);
        }
    }
}
