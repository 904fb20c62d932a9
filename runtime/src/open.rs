//! The short ways to a bundle and from it to what is done with it.

use std::path::Path;

use qhx_base::Result;
use qhx_core::engine::Model;

use crate::bundle::Bundle;
use crate::chat::Chat;
use crate::embedder::Embedder;
use crate::reranker::Reranker;
use crate::runtime::Runtime;
use crate::speaker::Speaker;
use crate::transcriber::Transcriber;

impl Bundle {
    /// Reads the manifest at `path`: a bundle's folder, a manifest, or a manifest's name in its folder. Of a folder
    /// with the bundles of several architectures it is the one for this machine's device; see [`Runtime::bundle`].
    ///
    /// # Errors
    /// When there is no manifest, or it is invalid. A checkpoint or a GGUF file is told apart: it has to be forged
    /// first.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        Self::open_with_root(path, None)
    }

    /// Same as [`Bundle::open`], with the folder that the manifest's paths resolve against.
    ///
    /// # Errors
    /// Errors of [`Bundle::open`], and when that folder is not there.
    pub fn open_with_root(path: impl AsRef<Path>, root: Option<&Path>) -> Result<Self> {
        Runtime::default().bundle(path.as_ref(), root)
    }

    /// Opens the model with the defaults of a [`Runtime`].
    ///
    /// # Errors
    /// Errors of [`Runtime::load`].
    pub fn model(&self) -> Result<Model> {
        Runtime::default().load(self)
    }

    /// Opens the model for a conversation.
    ///
    /// # Errors
    /// Errors of [`Runtime::load`] and [`Chat::new`].
    pub fn chat(&self) -> Result<Chat> {
        Chat::new(self.model()?)
    }

    /// Opens the model to embed texts, with the prefixes that the manifest declares.
    ///
    /// # Errors
    /// Errors of [`Runtime::load`] and [`Embedder::new`].
    pub fn embedder(&self) -> Result<Embedder> {
        Embedder::new(self.model()?)
    }

    /// Opens the model to score documents, as the manifest declares.
    ///
    /// # Errors
    /// Errors of [`Runtime::load`] and [`Reranker::new`].
    pub fn reranker(&self) -> Result<Reranker> {
        Reranker::new(self.model()?)
    }

    /// Opens the model to speak, as the manifest declares.
    ///
    /// # Errors
    /// Errors of [`Runtime::load`] and [`Speaker::new`].
    pub fn speaker(&self) -> Result<Speaker> {
        Speaker::new(self.model()?)
    }

    /// Opens the model to transcribe audio, as the manifest declares.
    ///
    /// # Errors
    /// Errors of [`Runtime::load`] and [`Transcriber::new`].
    pub fn transcriber(&self) -> Result<Transcriber> {
        Transcriber::new(self.model()?)
    }
}
