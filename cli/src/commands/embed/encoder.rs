//! Texts with their prefixes to vectors.

use qhx_core::engine::Model;
use qhx_core::{Error, ErrorKind, Result, trace};

use super::args::Role;

/// A model that embeds, and what is put before texts.
#[derive(Debug)]
pub(crate) struct Encoder {
    model: Model,
    query: String,
    document: String,
    truncate: bool,
    text: String,
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
        let said = |key: &str| {
            let value = model.manifest().params.rest.get(key).and_then(|v| v.as_str());
            value.unwrap_or_default().to_owned()
        };
        let query = query.unwrap_or_else(|| said("query_prefix"));
        let document = document.unwrap_or_else(|| said("document_prefix"));
        Ok(Self { model, query, document, truncate, text: String::new() })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// What is put before texts of a role.
    pub fn prefix(&self, role: Role) -> &str {
        match role {
            Role::Query => &self.query,
            Role::Document => &self.document,
        }
    }

    /// The vector of a text.
    pub fn embed(&mut self, text: &str, role: Role) -> Result<&[f32]> {
        let Some(tokenizer) = self.model.tokenizer() else {
            return Err(Error::new(
                ErrorKind::Prompt,
                format!(
                    "{}: the bundle has no tokenizer, so a text cannot become tokens",
                    self.model.manifest().path.display()
                ),
            )
            .hint("name tokenizer.json in artifacts.tokenizer"));
        };
        self.text.clear();
        self.text.push_str(match role {
            Role::Query => &self.query,
            Role::Document => &self.document,
        });
        self.text.push_str(text);
        let tokenize = trace::span(self.model.trace(), "tokenize");
        let (longest, cancel) = (self.model.info().max_ctx, self.model.cancel_token());
        let tokens = if self.truncate {
            tokenizer.encode_truncated(&self.text, longest, cancel)?
        } else {
            let split = "split the text, or cut it with --truncate";
            let tokens = tokenizer.encode_within(&self.text, true, longest, cancel);
            let tokens = tokens.map_err(|e| match e.kind() {
                ErrorKind::Prompt => e.hint(split),
                _ => e,
            })?;
            if tokens.len() > longest {
                let found = tokens.len();
                return Err(Error::new(
                    ErrorKind::Prompt,
                    format!("{found} tokens, the encoder takes at most {longest}"),
                )
                .hint(split));
            }
            tokens
        };
        drop(tokenize);
        self.model.embed(&tokens)
    }
}
