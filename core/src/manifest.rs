//! The bundle's manifest.

/// A run plan: placeholder until the parser lands.
#[derive(Debug, Clone)]
pub struct Manifest {
    /// The whole document, unknown keys included.
    pub raw: serde_json::Value,
}
