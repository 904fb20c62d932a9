//! Texts with their prefixes to vectors.

use qhx_core::engine::Model;
use qhx_core::{Error, ErrorKind, Result};

use super::args::Role;
use super::prefixed::Prefixed;

/// A model that embeds, and what makes tokens of texts.
#[derive(Debug)]
pub(crate) struct Encoder {
    model: Model,
    texts: Prefixed,
}

impl Encoder {
    /// Wraps an open model. A prefix that is not given is the manifest's.
    pub fn new(
        model: Model,
        query: Option<String>,
        document: Option<String>,
        truncate: bool,
    ) -> Result<Self> {
        if model.info().embedding_dim == 0 {
            return Err(Error::new(
                ErrorKind::Usage,
                format!(
                    "{}: host-op {:?} does not embed",
                    model.manifest().path.display(),
                    model.op().description.name
                ),
            )
            .hint("make the bundle with `qhx forge --task embed`"));
        }
        let texts = Prefixed::new(&model, query, document, truncate)?;
        Ok(Self { model, texts })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What makes tokens of texts.
    pub fn texts(&self) -> &Prefixed {
        &self.texts
    }

    /// The vector of a text.
    pub fn embed(&mut self, text: &str, role: Role) -> Result<&[f32]> {
        let tokens = self.texts.tokens(text, role)?;
        self.model.embed(&tokens)
    }

    /// The vectors of texts, given as their tokens: see [`Model::embed_each`].
    pub fn embed_each(
        &mut self,
        tokens: &[Vec<u32>],
        done: impl FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        self.model.embed_each(tokens, done)
    }
}
