//! Texts with their prefixes to tokens.

use std::sync::Arc;

use qhx_core::engine::Model;
use qhx_core::text::Tokenizer;
use qhx_core::trace::{self, Trace};
use qhx_core::{CancelToken, Error, ErrorKind, Result};

use super::args::Role;

/// What turns a text into what the encoder takes. A clone may do so on another thread while the model works.
#[derive(Debug, Clone)]
pub(crate) struct Prefixed {
    tokenizer: Tokenizer,
    query: String,
    document: String,
    truncate: bool,
    /// Tokens of the longest text that the encoder takes.
    longest: usize,
    cancel: CancelToken,
    trace: Option<Arc<Trace>>,
}

impl Prefixed {
    /// For an open model. A prefix that is not given is the manifest's.
    pub fn new(
        model: &Model,
        query: Option<String>,
        document: Option<String>,
        truncate: bool,
    ) -> Result<Self> {
        let Some(tokenizer) = model.tokenizer() else {
            return Err(Error::new(
                ErrorKind::Prompt,
                format!(
                    "{}: the bundle has no tokenizer, so a text cannot become tokens",
                    model.manifest().path.display()
                ),
            )
            .hint("name tokenizer.json in artifacts.tokenizer"));
        };
        let said = |key: &str| {
            let value = model.manifest().params.rest.get(key).and_then(|v| v.as_str());
            value.unwrap_or_default().to_owned()
        };
        Ok(Self {
            tokenizer: tokenizer.clone(),
            query: query.unwrap_or_else(|| said("query_prefix")),
            document: document.unwrap_or_else(|| said("document_prefix")),
            truncate,
            longest: model.info().max_ctx,
            cancel: model.cancel_token().clone(),
            trace: model.trace().cloned(),
        })
    }

    /// What is put before texts of a role.
    pub fn prefix(&self, role: Role) -> &str {
        match role {
            Role::Query => &self.query,
            Role::Document => &self.document,
        }
    }

    /// The tokens of a text, at most as many as the encoder takes.
    pub fn tokens(&self, text: &str, role: Role) -> Result<Vec<u32>> {
        let _span = trace::span(self.trace.as_ref(), "tokenize");
        let text = [self.prefix(role), text].concat();
        if self.truncate {
            return self.tokenizer.encode_truncated(&text, self.longest, &self.cancel);
        }
        let split = "split the text, or cut it with --truncate";
        let tokens = self.tokenizer.encode_within(&text, true, self.longest, &self.cancel);
        let tokens = tokens.map_err(|e| match e.kind() {
            ErrorKind::Prompt => e.hint(split),
            _ => e,
        })?;
        if tokens.len() > self.longest {
            let (found, longest) = (tokens.len(), self.longest);
            return Err(Error::new(
                ErrorKind::Prompt,
                format!("{found} tokens, the encoder takes at most {longest}"),
            )
            .hint(split));
        }
        Ok(tokens)
    }
}
