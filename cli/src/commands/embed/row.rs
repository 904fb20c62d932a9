//! One text of the input, and its vector in the output.

use serde::Serialize;

use qhx::Role;

/// Bytes of the longest line, and of the longest text of a table. No encoder takes a text near it.
pub(crate) const MAX_LINE: usize = 4 << 20;

/// One text.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Row {
    /// Place in the input, from 0.
    pub index: u64,
    pub text: String,
    pub role: Role,
}

/// One line of the output.
#[derive(Debug, Serialize)]
pub(crate) struct Vector<'a> {
    pub index: u64,
    pub text: &'a str,
    pub embedding: &'a [f32],
}
