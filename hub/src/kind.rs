//! Bundles and checkpoints.

use serde::{Deserialize, Serialize};

/// What files make up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    /// A bundle.
    Bundle,
    /// What a bundle is made of.
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
