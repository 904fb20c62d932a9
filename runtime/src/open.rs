//! The short ways from a bundle to what is done with it.

use qhx_core::Result;
use qhx_core::engine::Model;

use crate::bundle::Bundle;
use crate::chat::Chat;
use crate::embedder::Embedder;
use crate::runtime::Runtime;
use crate::transcriber::Transcriber;

impl Bundle {
    /// Opens the model with the defaults of a [`Runtime`].
    ///
    /// # Errors
    /// As [`Runtime::load`].
    pub fn model(&self) -> Result<Model> {
        Runtime::default().load(self)
    }

    /// Opens the model for a conversation.
    ///
    /// # Errors
    /// As [`Runtime::load`] and [`Chat::new`].
    pub fn chat(&self) -> Result<Chat> {
        Chat::new(self.model()?)
    }

    /// Opens the model to embed texts, with the prefixes that the manifest declares.
    ///
    /// # Errors
    /// As [`Runtime::load`] and [`Embedder::new`].
    pub fn embedder(&self) -> Result<Embedder> {
        Embedder::new(self.model()?)
    }

    /// Opens the model to transcribe audio, as the manifest declares.
    ///
    /// # Errors
    /// As [`Runtime::load`] and [`Transcriber::new`].
    pub fn transcriber(&self) -> Result<Transcriber> {
        Transcriber::new(self.model()?)
    }
}
