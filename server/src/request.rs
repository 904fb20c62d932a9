//! Content of a request: its client and its body.

use std::sync::Arc;
use std::time::Instant;

use axum::body::{Body, HttpBody as _};
use axum::extract::{FromRequest, Request};
use axum::http::{HeaderMap, StatusCode, header};
use qhx::CancelToken;
use serde_json::{Map, Value};
use std::future::poll_fn;
use std::pin::Pin;
use tokio::time::timeout;

use crate::app::Shared;
use crate::error::{ApiError, Result, broken};
pub(crate) use crate::memory::Memory;
use crate::options::ServerOptions;
use crate::registry::{Info, Served};
use crate::request_metrics::Tally;

/// Number of bodies of the largest size that are read and dropped, so that a client that sends more sees the answer.
const DRAINED: usize = 8;

/// Bodies of more bytes leave memory that goes back to the system once nobody asks.
const NOTED: usize = 1 << 20;

/// Context of every handler.
#[derive(Debug, Clone)]
pub(crate) struct Context {
    pub shared: Shared,
    /// Client that asks: a hash of the key, or of the address.
    pub client: u64,
    /// Number of the server's key that it asks with.
    pub key: Option<u64>,
    pub tally: Arc<Tally>,
    pub memory: Memory,
}

/// Context of a request whose body is a JSON object.
#[derive(Debug)]
pub(crate) struct Asked {
    pub context: Context,
    pub map: Map<String, Value>,
}

impl<S: Sync> FromRequest<S> for Asked {
    type Rejection = ApiError;

    async fn from_request(request: Request, _: &S) -> Result<Self> {
        let context = request.extensions().get::<Context>().cloned().ok_or_else(broken)?;
        Ok(Self { map: context.object(request).await?, context })
    }
}

impl Context {
    async fn object(&self, request: Request) -> Result<Map<String, Value>> {
        let kind = media_type(request.headers());
        // Ollama's clients leave the type out, and curl sends a form's. Pages of other origins are refused before.
        if !is_json(&kind) && !request.uri().path().starts_with("/api/") {
            let message = format!("content-type: found {kind:?}, expected application/json");
            return Err(ApiError::new(StatusCode::UNSUPPORTED_MEDIA_TYPE, message)
                .param("content-type")
                .code("unsupported_media_type"));
        }
        let bytes = self.bytes(request).await?;
        let budget = &self.shared.memory;
        self.in_time(self.memory.take_values(budget, &bytes), no_memory).await?;
        let parse = || serde_json::from_slice(&bytes);
        let value: Value = self.memory.work(parse).map_err(|e| {
            ApiError::malformed(format!("the body is not JSON: {e}")).code("malformed_json")
        })?;
        drop(bytes);
        let Value::Object(map) = value else {
            let message = "the body is JSON, but no object";
            return Err(ApiError::malformed(message).code("malformed_json"));
        };
        let model = map.get("model").and_then(Value::as_str).map(str::to_owned);
        self.tally.update(|record| record.model = model);
        self.tally.prompt(|| text_of(&map));
        Ok(map)
    }

    /// Ends the work of this request: when its time is up, and once the server ends.
    pub(crate) fn ticket(&self) -> CancelToken {
        let deadline = Instant::now() + self.shared.options.time_limit;
        CancelToken::any(vec![self.shared.queue.cancel.clone()]).until(deadline)
    }

    /// Facts about a model, which is loaded where it never was: it takes time.
    pub(crate) fn info(&self, model: &Served) -> Result<Arc<Info>> {
        let info = self.shared.registry.info(model, &self.shared.metrics);
        info.map_err(|e| ApiError::of_model(&e, &model.name))
    }

    /// Salt of the states that a generation goes on from: its key, unless all share theirs, and the `cache_salt` that
    /// it asks for.
    pub(crate) fn salt(&self, asked: Option<&str>) -> Option<String> {
        let key = self.key.filter(|_| !self.shared.options.share_states);
        (key.is_some() || asked.is_some()).then(|| format!("{key:?} {asked:?}"))
    }

    /// Does work that takes time, such as loading a model, where it keeps no other request waiting.
    pub(crate) async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(Self) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let context = self.clone();
        let done = tokio::task::spawn_blocking(move || work(context)).await;
        done.unwrap_or_else(|_| Err(broken()))
    }

    /// The body, within the limits. It is read once there is memory for it.
    pub(crate) async fn bytes(&self, request: Request) -> Result<Vec<u8>> {
        let ServerOptions { max_body, read_limit, .. } = self.shared.options;
        let body = request.into_body();
        let declared = body.size_hint().exact().and_then(|bytes| usize::try_from(bytes).ok());
        let expected = declared.unwrap_or(max_body);
        if expected > NOTED {
            self.shared.activity.takes_much();
        }
        if expected <= max_body {
            self.in_time(self.memory.take(&self.shared.memory, expected), no_memory).await?;
        }
        let late = || {
            let message = format!("the body did not come within {} s", read_limit.as_secs_f32());
            ApiError::new(StatusCode::REQUEST_TIMEOUT, message).code("request_timeout")
        };
        self.in_time(read(body, max_body), late).await?
    }

    /// Waits as long as a client may take to send its request.
    pub(crate) async fn in_time<T>(
        &self,
        work: impl Future<Output = T>,
        late: impl FnOnce() -> ApiError,
    ) -> Result<T> {
        timeout(self.shared.options.read_limit, work).await.map_err(|_| late())
    }
}

pub(crate) fn no_memory() -> ApiError {
    ApiError::later("requests under way leave no memory for it; try again later", "no_memory")
}

/// Text of a request, for the log.
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
