//! What a request brings: who asks, and its body.

use std::sync::Arc;

use axum::body::{Body, HttpBody as _};
use axum::extract::Request;
use axum::http::{HeaderMap, StatusCode, header};
use serde_json::{Map, Value};
use std::future::poll_fn;
use std::pin::Pin;
use tokio::time::timeout;

use crate::app::Shared;
use crate::error::{ApiError, Result, broken};
use crate::tally::Tally;

/// How many times the largest body is read and dropped, so that a client that sends more sees the answer.
const DRAINED: usize = 8;

/// What every handler works with.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub shared: Shared,
    /// Who asks: a hash of the key, or of the address.
    pub client: u64,
    pub tally: Arc<Tally>,
}

impl Context {
    /// The body as a JSON object.
    pub(crate) async fn object(&self, request: Request) -> Result<Map<String, Value>> {
        let kind = media_type(request.headers());
        if !is_json(&kind) {
            let message = format!("content-type: found {kind:?}, expected application/json");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
                .param("content-type")
                .code("unsupported_media_type"));
        }
        let bytes = self.bytes(request).await?;
        let value = serde_json::from_slice(&bytes).map_err(|e| {
            ApiError::malformed(format!("the body is not JSON: {e}")).code("malformed_json")
        })?;
        let Value::Object(map) = value else {
            let message = "the body is JSON, but no object";
            return Err(ApiError::malformed(message).code("malformed_json"));
        };
        let model = map.get("model").and_then(Value::as_str).map(str::to_owned);
        self.tally.update(|record| record.model = model);
        self.tally.prompt(|| text_of(&map));
        Ok(map)
    }

    /// Does work that takes time, such as reading media or loading a model, where it keeps no other request waiting.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let context = self.clone();
        let done = tokio::task::spawn_blocking(move || work(context)).await;
        done.unwrap_or_else(|_| Err(broken()))
    }

    /// The body, within the limits.
    pub(crate) async fn bytes(&self, request: Request) -> Result<Vec<u8>> {
        let options = &self.shared.options;
        let read = read(request.into_body(), options.max_body);
        timeout(options.read_limit, read).await.unwrap_or_else(|_| {
            let seconds = options.read_limit.as_secs_f32();
            let message = format!("the body did not come within {seconds} s");
            Err(ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("request_timeout"))
        })
    }
}

/// What a request asks, for the log.
fn text_of(map: &Map<String, Value>) -> String {
    let fields = ["messages", "prompt", "input"];
    let field = fields.iter().find_map(|name| map.get(*name));
    field.map_or(String::new(), Value::to_string)
}

/// Without parameters.
pub(crate) fn media_type(headers: &HeaderMap) -> String {
    let value = headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let kind = value.and_then(|value| value.split(';').next()).unwrap_or_default();
    kind.trim().chars().take(80).collect::<String>().to_ascii_lowercase()
}

fn is_json(kind: &str) -> bool {
    kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
}

async fn read(mut body: Body, max: usize) -> Result<Vec<u8>> {
    let declared = body.size_hint().lower();
    let (mut bytes, mut total) = (Vec::new(), 0usize);
    if declared > (max as u64).saturating_mul(DRAINED as u64) {
        return Err(too_large(max));
    }
    while let Some(frame) = poll_fn(|cx| Pin::new(&mut body).poll_frame(cx)).await {
        let frame = frame.map_err(|_| ApiError::malformed("the body was cut off"))?;
        let Ok(data) = frame.into_data() else { continue };
        total = total.saturating_add(data.len());
        if total > max.saturating_mul(DRAINED) {
            break;
        }
        if total <= max {
            bytes.extend_from_slice(&data);
        } else {
            bytes = Vec::new();
        }
    }
    if total > max { Err(too_large(max)) } else { Ok(bytes) }
}

fn too_large(max: usize) -> ApiError {
    let message = format!("the body is larger than {max} bytes");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("request_too_large")
}
