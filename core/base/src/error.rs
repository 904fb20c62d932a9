//! The error type of the workspace: what failed, what was found and expected, and a likely fix.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use crate::escape::shown;
use crate::names;

/// Result with [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Kind of failure. Decides the exit code of the command line. Its name is stable; it is used in JSON output and across
/// the plugin interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// An option or argument does not make sense.
    Usage,
    /// The manifest is missing, not JSON, or declares something invalid.
    Manifest,
    /// A file of the bundle is missing, truncated, or not what it claims to be.
    Artifact,
    /// A runtime library is missing, or is not one.
    Runtime,
    /// A context binary will not load on this device or with this library.
    Context,
    /// A graph or one of its tensors is missing or has the wrong shape or dtype.
    Graph,
    /// A plugin is missing, incompatible, or misbehaved.
    Plugin,
    /// The prompt cannot be used: empty, too long, not UTF-8, of an unknown modality.
    Prompt,
    /// Executing a graph failed.
    Execute,
    /// The device restarted or is gone: what was loaded on it has to be opened again.
    DeviceLost,
    /// A host-op panicked. It returns nothing more until it is opened again.
    Panicked,
    /// The caller asked for the work to stop.
    Cancelled,
    /// Reading or writing failed outside the bundle.
    Io,
    /// A fault of qhx itself.
    Internal,
}

impl ErrorKind {
    /// The documented process exit code for this kind.
    pub const fn exit_code(self) -> u8 {
        match self {
            Self::Usage => 2,
            Self::Manifest => 3,
            Self::Artifact => 4,
            Self::Runtime => 5,
            Self::Context => 6,
            Self::Graph => 7,
            Self::Plugin | Self::Panicked => 8,
            Self::Prompt => 9,
            Self::Execute => 10,
            Self::Io => 11,
            Self::DeviceLost => 12,
            Self::Internal => 70,
            Self::Cancelled => 130,
        }
    }
}

names! {
    ErrorKind:
    Usage = "usage",
    Manifest = "manifest",
    Artifact = "artifact",
    Runtime = "runtime",
    Context = "context",
    Graph = "graph",
    Plugin = "plugin",
    Prompt = "prompt",
    Execute = "execute",
    DeviceLost = "device_lost",
    Panicked = "panicked",
    Cancelled = "cancelled",
    Io = "io",
    Internal = "internal",
}

/// A failure that a user can act on.
///
/// The message names the file, tensor or option with what was found and expected, with what the
/// cause reported; the hint is one likely fix. `Display` gives the message. Whoever prints for people
/// takes [`Error::report`], which adds the hint.
///
/// [`source`](StdError::source) is the cause, where it came from elsewhere: a [`std::io::Error`], a
/// [`serde_json::Error`], an error of another library. Since the message has its words, a printed
/// chain would say them twice: sources are there to be downcast.
///
/// Messages quote untrusted input. Whatever an error is given passes through
/// [`crate::escape::shown`]: message and hint are one line each, of bounded length, and cannot
/// steer a terminal.
#[derive(Debug, Clone)]
pub struct Error(Box<Inner>);

#[derive(Debug, Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    hint: Option<String>,
    code: Option<u64>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

/// The cause of an error about a prompt or text that has more positions than the context holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the context holds {max}")]
pub struct TooLong {
    /// Positions that the context holds.
    pub max: usize,
}

/// Message of the system about a failure, without its number, which adds nothing to the words.
pub fn why(error: &std::io::Error) -> String {
    let mut why = error.to_string();
    if let (Some(end), Some(_)) = (why.rfind(" (os error "), error.raw_os_error()) {
        why.truncate(end);
    }
    why
}

impl Error {
    /// An error of `kind` with `message`.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        let message = safe(message.into());
        Self(Box::new(Inner { kind, message, hint: None, code: None, source: None }))
    }

    /// A failure of `what` with its cause: the message is `what: source`.
    pub fn caused(
        kind: ErrorKind,
        what: impl fmt::Display,
        source: impl StdError + Send + Sync + 'static,
    ) -> Self {
        Self::new(kind, format!("{what}: {source}")).with_source(source)
    }

    /// An I/O failure on `path`.
    pub fn io(kind: ErrorKind, path: &Path, error: std::io::Error) -> Self {
        let why = why(&error);
        Self::new(kind, format!("{}: {why}", path.display())).with_source(error)
    }

    /// An error whose message is its cause's own words.
    // No `From`: a second one would make the type of `?` ambiguous elsewhere.
    pub fn of(kind: ErrorKind, source: impl StdError + Send + Sync + 'static) -> Self {
        Self::new(kind, source.to_string()).with_source(source)
    }

    /// A tensor's size is no number of bytes.
    pub fn size(source: impl StdError + Send + Sync + 'static) -> Self {
        Self::of(ErrorKind::Graph, source)
    }

    /// Adds one likely fix.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.0.hint = Some(safe(hint.into()));
        self
    }

    /// Puts `context` in front of the message: `context: message`.
    #[must_use]
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.0.message = safe(format!("{}: {}", shown(&context.to_string()), self.0.message));
        self
    }

    /// Replaces the message; everything else stays.
    #[must_use]
    pub fn with_message(mut self, message: impl Into<String>) -> Self {
        self.0.message = safe(message.into());
        self
    }

    /// Is of `kind` instead; everything else stays.
    #[must_use]
    pub fn with_kind(mut self, kind: ErrorKind) -> Self {
        self.0.kind = kind;
        self
    }

    /// Keeps the number a foreign library returned.
    #[must_use]
    pub fn with_code(mut self, code: u64) -> Self {
        self.0.code = Some(code);
        self
    }

    /// Keeps the cause, whose words the message has already.
    #[must_use]
    pub fn with_source(mut self, source: impl StdError + Send + Sync + 'static) -> Self {
        self.0.source = Some(Arc::new(source));
        self
    }

    /// Kind of failure.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// The message without the hint.
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// The likely fix, when one is known.
    pub fn hint_text(&self) -> Option<&str> {
        self.0.hint.as_deref()
    }

    /// The number a foreign library returned, when there was one.
    pub fn code(&self) -> Option<u64> {
        self.0.code
    }

    /// True if the cause is of this type, such as [`TooLong`].
    pub fn is_caused_by<C: StdError + 'static>(&self) -> bool {
        StdError::source(self).is_some_and(|cause| cause.is::<C>())
    }

    /// Message and hint, for people: the hint stands on a second line.
    pub fn report(&self) -> Report<'_> {
        Report(self)
    }
}

/// An [`Error`] of a kind, with a message as of [`format!`].
///
/// ```
/// let error = qhx_base::error!(Usage, "option top_p: found {}, expected at most 1", 1.5);
/// assert_eq!(error.kind(), qhx_base::ErrorKind::Usage);
/// assert_eq!(error.message(), "option top_p: found 1.5, expected at most 1");
/// ```
#[macro_export]
macro_rules! error {
    ($kind:ident, $($message:tt)+) => {
        $crate::Error::new($crate::ErrorKind::$kind, ::std::format!($($message)+))
    };
}

/// Returns an [`Error`] of a kind, with a message as of [`format!`].
///
/// ```
/// fn check(top_k: usize) -> qhx_base::Result<()> {
///     if top_k > 100 {
///         qhx_base::bail!(Usage, "option top_k: found {top_k}, expected at most 100");
///     }
///     Ok(())
/// }
/// assert_eq!(check(101).unwrap_err().message(), "option top_k: found 101, expected at most 100");
/// ```
#[macro_export]
macro_rules! bail {
    ($kind:ident, $($message:tt)+) => {
        return ::std::result::Result::Err($crate::error!($kind, $($message)+))
    };
}

/// An [`Error`] for people: [`Error::report`].
#[derive(Debug, Clone, Copy)]
pub struct Report<'a>(&'a Error);

impl fmt::Display for Report<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)?;
        match self.0.hint_text() {
            Some(hint) => write!(f, "\n  hint: {hint}"),
            None => Ok(()),
        }
    }
}

/// A text that may be shown.
fn safe(text: String) -> String {
    match shown(&text) {
        Cow::Borrowed(_) => text,
        Cow::Owned(safe) => safe,
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|source| source as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_part_of_an_error_steers_a_terminal_or_fills_the_screen() {
        let hostile = format!("\u{1b}[2J\nerror: all is well\u{202e}{}", "x".repeat(1 << 20));
        let error = Error::new(ErrorKind::Prompt, format!("name {hostile} is unknown"))
            .context(&hostile)
            .context("bundle/manifest.json")
            .hint(&hostile);
        assert_eq!(error.to_string(), error.message());
        let text = error.report().to_string();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(!text.contains(['\u{1b}', '\u{202e}']), "{text}");
        assert!(text.len() < 3 * crate::escape::MAX_SHOWN, "{} bytes", text.len());
        assert!(
            error.message().starts_with("bundle/manifest.json: \\u{1b}[2J\\nerror: "),
            "{text}"
        );
        assert!(error.message().ends_with(" is unknown"), "{text}");
    }

    #[test]
    fn a_cause_is_reported_once_and_stays_as_source() {
        let denied = std::io::Error::from(std::io::ErrorKind::PermissionDenied);
        let error = Error::io(ErrorKind::Artifact, Path::new("a.bin"), denied)
            .hint("look at its rights")
            .context("context \"decode\"");
        // Clones and contexts keep the cause; what prints the chain's head alone misses nothing.
        let error: Box<dyn StdError> = Box::new(error.clone());
        assert_eq!(error.to_string(), "context \"decode\": a.bin: permission denied");
        let cause = error.source().and_then(|e| e.downcast_ref::<std::io::Error>()).unwrap();
        assert_eq!(cause.kind(), std::io::ErrorKind::PermissionDenied);
        let own = Error::new(ErrorKind::Prompt, "the prompt is empty");
        assert!(own.source().is_none());
        assert_eq!(own.report().to_string(), "the prompt is empty");
    }
}
