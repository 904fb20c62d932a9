//! Errors that a client receives when its request fails.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use qhx::{Error, ErrorKind, TooLong};
use serde_json::{Value, json};

/// Seconds after which a client that was refused may try again.
const RETRY_AFTER: u32 = 2;

/// Characters of a message in the log.
const LOGGED: usize = 400;

/// A failed request.
#[derive(Debug, Clone)]
pub(crate) struct ApiError {
    pub status: StatusCode,
    message: String,
    /// The field of the request that is wrong.
    param: Option<String>,
    code: Option<&'static str>,
    /// Bytes at the message's end that are not for the log: what the client sent.
    unlogged: usize,
}

/// Result with [`ApiError`].
pub(crate) type Result<T, E = ApiError> = std::result::Result<T, E>;

impl ApiError {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None, code: None, unlogged: 0 }
    }

    /// A field of the request is not what it should be.
    pub(crate) fn bad(param: impl Into<String>, message: impl std::fmt::Display) -> Self {
        let param = param.into();
        let error = Self::new(StatusCode::BAD_REQUEST, format!("{param}: {message}"));
        Self { param: Some(param), ..error }
    }

    /// The request as a whole is not what it should be.
    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(crate) fn code(self, code: &'static str) -> Self {
        Self { code: Some(code), ..self }
    }

    pub(crate) fn param(self, param: impl Into<String>) -> Self {
        Self { param: Some(param.into()), ..self }
    }

    /// With what the client sent, which the log does not have.
    pub(crate) fn found(mut self, found: &str) -> Self {
        let more = format!(", found {found}");
        self.message.push_str(&more);
        Self { unlogged: more.len(), ..self }
    }

    /// Code and message for the log, on one line and without texts of the request.
    pub(crate) fn reason(&self) -> String {
        let logged = self.message.len().saturating_sub(self.unlogged);
        let message: String =
            self.message.get(..logged).unwrap_or_default().chars().take(LOGGED).collect();
        match self.code {
            Some(code) => format!("{code}: {message}"),
            None => message,
        }
    }

    /// The request took longer than it may.
    pub(crate) fn timeout() -> Self {
        let message = "the request took longer than the server allows";
        Self::new(StatusCode::GATEWAY_TIMEOUT, message).code("timeout")
    }

    /// The server does not take further requests.
    pub(crate) fn stopping() -> Self {
        Self::later("the server is stopping", "stopping")
    }

    /// Error of a model that may be asked again later.
    pub(crate) fn later(message: impl Into<String>, code: &'static str) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, message).code(code)
    }

    /// Error of work with a model. Details for the operator alone, such as paths, go to the log.
    pub(crate) fn of_model(error: &Error, name: &str) -> Self {
        let client = |status| Self::new(status, plain(error.message(), name));
        match error.kind() {
            ErrorKind::Prompt if error.is_caused_by::<TooLong>() => {
                let mut shown = client(StatusCode::BAD_REQUEST).code("context_length_exceeded");
                if let Some(hint) = error.hint_text() {
                    shown.message.push_str("; ");
                    shown.message.push_str(hint);
                }
                shown
            }
            ErrorKind::Prompt | ErrorKind::Usage => client(StatusCode::BAD_REQUEST),
            ErrorKind::Cancelled => Self::later(format!("{name}: cancelled"), "cancelled"),
            _ if error.is_caused_by::<NoRoom>() => {
                let message = format!("{name}: models in use leave no memory for it");
                Self::later(message, "no_memory")
            }
            kind => {
                tracing::error!("model {name}: {}", error.report());
                if kind == ErrorKind::DeviceLost {
                    let message =
                        format!("{name}: the NPU restarted and did not come back in time");
                    return Self::later(message, kind.name());
                }
                let message = match kind {
                    ErrorKind::Panicked => "the model's host-op failed; it is opened again",
                    _ => "the model failed; the server's log says why",
                };
                let message = format!("{name}: {message}");
                Self::new(StatusCode::INTERNAL_SERVER_ERROR, message).code(kind.name())
            }
        }
    }

    /// The kind of error in OpenAI's words.
    fn kind(&self) -> &'static str {
        match self.status {
            StatusCode::UNAUTHORIZED => "authentication_error",
            StatusCode::FORBIDDEN => "permission_error",
            StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "server_error",
            _ => "invalid_request_error",
        }
    }

    /// The kind of error in Anthropic's words.
    fn anthropic_kind(&self) -> &'static str {
        match self.status {
            StatusCode::NOT_FOUND => "not_found_error",
            StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
            StatusCode::GATEWAY_TIMEOUT => "timeout_error",
            StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
            status if status.is_server_error() => "api_error",
            _ => self.kind(),
        }
    }

    /// The body: OpenAI's `error`, and beside it the `type` that Anthropic's clients look for.
    pub(crate) fn json(&self) -> Value {
        self.of_kind(self.kind())
    }

    /// The body on Anthropic's routes.
    pub(crate) fn anthropic(&self) -> Value {
        self.of_kind(self.anthropic_kind())
    }

    /// The body on Ollama's routes.
    pub(crate) fn ollama(&self) -> Value {
        json!({"error": self.message})
    }

    fn of_kind(&self, kind: &str) -> Value {
        json!({
            "type": "error",
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            },
        })
    }
}

/// The cause of an error of a model that does not fit the memory beside those in use.
#[derive(Debug)]
pub(crate) struct NoRoom;

impl std::fmt::Display for NoRoom {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("models in use leave no memory")
    }
}

impl std::error::Error for NoRoom {}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        Self::of_model(&error, "the server")
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = json_response(self.status, &self.json());
        let again =
            matches!(self.status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE);
        if again {
            response.headers_mut().insert(header::RETRY_AFTER, RETRY_AFTER.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let scheme = HeaderValue::from_static("Bearer");
            response.headers_mut().insert(header::WWW_AUTHENTICATE, scheme);
        }
        // For the record, and for Anthropic's routes.
        response.extensions_mut().insert(self);
        response
    }
}

/// A response of JSON.
pub(crate) fn json_response(status: StatusCode, value: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

/// A message without the paths of this machine, which stand before a colon: what is in the bundle's place is its name.
fn plain(message: &str, name: &str) -> String {
    let is_path = |word: &&str| std::path::Path::new(word.trim_end_matches(':')).is_absolute();
    match message.split_once(": ") {
        Some((path, rest)) if is_path(&path) => format!("{name}: {rest}"),
        _ => message.to_owned(),
    }
}

/// The error of a job that ended without a result.
pub(crate) fn broken() -> ApiError {
    let message = "the work ended without a result; the server's log says why";
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_see_no_paths_and_no_inner_failures() {
        let error = Error::new(ErrorKind::Usage, "/srv/a b/tiny.json: the model does not chat");
        let shown = ApiError::of_model(&error, "tiny").json();
        assert_eq!(shown["error"]["message"], "tiny: the model does not chat");
        let error = Error::new(ErrorKind::Artifact, "/srv/tiny/a.bin: cut short");
        let shown = ApiError::of_model(&error, "tiny");
        assert_eq!(shown.status, StatusCode::INTERNAL_SERVER_ERROR);
        assert!(!shown.json().to_string().contains("/srv"), "{shown:?}");
    }
}
