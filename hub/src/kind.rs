//! Bundles and checkpoints.

use serde::{Deserialize, Serialize};

/// Kind of a set of files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A bundle.
    Bundle,
    /// Files that a bundle is made of.
    Checkpoint,
}

impl Kind {
    /// The name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bundle => "bundle",
            Self::Checkpoint => "checkpoint",
        }
    }
}
