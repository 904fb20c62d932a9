//! Errors of host-ops.

use std::fmt;

use qhx_types::{MissingTensor, SizeError};

use crate::abi::RawError;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of failure. The host turns it into its own kinds and exit codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct ErrorCode(pub u32);

impl ErrorCode {
    /// A fault of the op, or one that fits nothing else.
    pub const INTERNAL: Self = Self(0);
    /// The manifest declares something it may not.
    pub const MANIFEST: Self = Self(1);
    /// A file of the bundle is missing or not what it claims to be.
    pub const ARTIFACT: Self = Self(2);
    /// A graph or tensor is missing or has the wrong shape or dtype.
    pub const GRAPH: Self = Self(3);
    /// The prompt cannot be used.
    pub const PROMPT: Self = Self(4);
    /// Executing a graph failed.
    pub const EXECUTE: Self = Self(5);
    /// The host asked for the work to stop.
    pub const CANCELLED: Self = Self(6);
    /// The op does not do this.
    pub const UNSUPPORTED: Self = Self(7);
    /// The op panicked.
    pub const PANIC: Self = Self(8);
    /// A context will not load.
    pub const CONTEXT: Self = Self(9);
}

/// A failure with a message that names what was found and what was expected.
///
/// An error of one of the host's services knows which of the host's errors it is. When an op answers
/// with it, also with [context](Error::context), the user sees the host's own kind, hint and code.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Error {
    code: ErrorCode,
    message: String,
    /// The host's number of it, 0 for an error of the op's own.
    token: u64,
}

impl Error {
    /// An error with `code` and `message`.
    pub fn new(code: ErrorCode, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), token: 0 }
    }

    /// Puts `context` in front of the message: `context: message`.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// The manifest declares something it may not.
    pub fn manifest(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::MANIFEST, message)
    }

    /// A graph or tensor is missing or has the wrong shape or dtype.
    pub fn graph(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::GRAPH, message)
    }

    /// The prompt cannot be used.
    pub fn prompt(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::PROMPT, message)
    }

    /// A file of the bundle is missing or not what it claims to be.
    pub fn artifact(message: impl Into<String>) -> Self {
        Self::new(ErrorCode::ARTIFACT, message)
    }

    /// The op does not do this.
    pub fn unsupported(what: &str) -> Self {
        Self::new(ErrorCode::UNSUPPORTED, format!("this host-op does not support {what}"))
    }

    /// Kind of this failure.
    pub fn code(&self) -> ErrorCode {
        self.code
    }

    /// The message.
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

impl From<MissingTensor> for Error {
    fn from(missing: MissingTensor) -> Self {
        Self::graph(format!(
            "{missing}. If the graph calls it otherwise, say so in the manifest: plan.params.tensors \
             {{\"{}\": \"name in the graph\"}}",
            missing.role
        ))
    }
}

impl From<SizeError> for Error {
    fn from(error: SizeError) -> Self {
        Self::graph(error.to_string())
    }
}

impl From<Error> for RawError {
    fn from(error: Error) -> Self {
        Self { code: error.code.0, message: error.message.into(), token: error.token }
    }
}

impl From<RawError> for Error {
    fn from(raw: RawError) -> Self {
        Self { code: ErrorCode(raw.code), message: raw.message.into(), token: raw.token }
    }
}
