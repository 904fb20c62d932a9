//! The changes of a checkpoint's weights, by tensor.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::weight::RowSource;

use super::merged::{Change, Merged};

/// Changes that adapters make to a checkpoint.
#[derive(Debug, Clone, Default)]
pub(crate) struct Changes {
    /// By the tensors' names in the checkpoint, in the order of the adapters.
    pub(super) of: BTreeMap<String, Vec<Change>>,
    /// Tensors that an adapter has whole.
    pub(super) replaced: BTreeSet<String>,
}

impl Changes {
    /// The tensor `key` with what is changed of it. Errors when it is not read as the matrix that adapters change.
    pub fn merged(&self, key: &str, source: Arc<dyn RowSource>) -> Result<Arc<dyn RowSource>> {
        let Some(changes) = self.of.get(key) else { return Ok(source) };
        let [rows, cols] = source.shape();
        if let Some(other) = changes.iter().find(|change| change.shape() != [rows, cols]) {
            let what = format!(
                "tensor {key} is read as [{rows}, {cols}], and an adapter changes it as {:?}",
                other.shape()
            );
            return Err(Error::new(ErrorKind::Artifact, what)
                .hint("merge the adapter with PEFT, and take that checkpoint"));
        }
        Ok(Arc::new(Merged { source, changes: changes.clone() }))
    }
}
