//! Events of the protocol: a line of JSON, data that is JSON as well, and a payload.

use axum::http::StatusCode;
use serde_json::{Map, Value, json};
use tokio::io::{AsyncBufRead, AsyncBufReadExt as _, AsyncReadExt as _};

use super::Fault;
use crate::error::{ApiError, Result};

/// Greatest sizes of an event's parts in bytes.
const MAX_HEADER: usize = 64 << 10;
const MAX_DATA: usize = 256 << 10;
const MAX_PAYLOAD: usize = 1 << 20;

/// An event of a client.
#[derive(Debug, Default)]
pub(super) struct Event {
    pub kind: String,
    pub data: Map<String, Value>,
    pub payload: Vec<u8>,
}

fn malformed(message: impl Into<String>) -> ApiError {
    ApiError::malformed(message).code("malformed_event")
}

fn too_large(what: &str, max: usize, found: &Value) -> ApiError {
    let message = format!("{what}: expected a whole number from 0 to {max}, found {found}");
    ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, message).code("event_too_large")
}

/// Reads the next event. After an error nobody knows where the next one begins.
pub(super) async fn read(reader: &mut (impl AsyncBufRead + Unpin)) -> Result<Event, Fault> {
    let mut line = Vec::new();
    let mut bounded = reader.take(MAX_HEADER as u64);
    bounded.read_until(b'\n', &mut line).await?;
    if line.last() != Some(&b'\n') {
        return Err(match line.len() {
            MAX_HEADER => {
                malformed(format!("expected a line of at most {MAX_HEADER} bytes")).into()
            }
            _ => Fault::Left,
        });
    }
    let expected = "expected a line with a JSON object whose type is a string";
    let header: Value = serde_json::from_slice(&line).map_err(|_| malformed(expected))?;
    let Some(kind) = header["type"].as_str() else { return Err(malformed(expected).into()) };
    let mut event = Event { kind: kind.to_owned(), ..Event::default() };
    let size = |name: &str, max: usize| match &header[name] {
        Value::Null => Ok(0),
        value => {
            let size = value.as_u64().and_then(|size| usize::try_from(size).ok());
            size.filter(|size| *size <= max).ok_or_else(|| too_large(name, max, value))
        }
    };
    let (data, payload) = (size("data_length", MAX_DATA)?, size("payload_length", MAX_PAYLOAD)?);
    if let Some(inline) = header["data"].as_object() {
        event.data.clone_from(inline);
    }
    if data > 0 {
        let mut bytes = vec![0; data];
        reader.read_exact(&mut bytes).await?;
        let more: Map<String, Value> = serde_json::from_slice(&bytes)
            .map_err(|_| malformed("data_length: expected a JSON object of that many bytes"))?;
        event.data.extend(more);
    }
    event.payload = vec![0; payload];
    reader.read_exact(&mut event.payload).await?;
    Ok(event)
}

/// The bytes of an event.
pub(super) fn written(kind: &str, data: &Value, payload: &[u8]) -> Vec<u8> {
    let data = data.to_string();
    let header = json!({"type": kind, "data_length": data.len(), "payload_length": payload.len()});
    [format!("{header}\n{data}").as_bytes(), payload].concat()
}
