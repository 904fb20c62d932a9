//! `/v1/embeddings`.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use qhx::{Modality, Role, Source, norm};
use serde_json::{Map, Value, json};

use crate::conversation::{Part, url_part};
use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::{Fields, tokens, wrong};
use crate::pending::Pending;
use crate::queue::{EmbedInput, Update, Work};
use crate::registry::Ability;
use crate::request::{Asked, Context};

/// Vectors of a response that is written where it keeps no other request waiting.
const MANY: usize = 64;

/// Texts of one request.
pub(crate) const MAX_INPUTS: usize = 2048;

/// Vectors of a request.
pub(crate) struct Embedded {
    pub model: String,
    pub vectors: Vec<Vec<f32>>,
    /// Tokens of all texts.
    pub tokens: usize,
}

pub(crate) async fn embed(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let base64 = match fields.text("encoding_format")? {
        None | Some("float") => false,
        Some("base64") => true,
        Some(_) => return Err(fields.wrong("encoding_format", "float or base64")),
    };
    let Embedded { model, vectors, tokens } = vectors(&context, &fields).await?;
    let respond = || {
        let data = vectors.iter().enumerate().map(|(index, vector)| {
            let embedding = if base64 { encoded(vector) } else { vector.clone().into() };
            json!({"object": "embedding", "index": index, "embedding": embedding})
        });
        let json = json!({
            "object": "list",
            "data": data.collect::<Vec<_>>(),
            "model": model,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
        });
        json_response(StatusCode::OK, &json)
    };
    Ok(written(vectors.len(), respond))
}

/// The response with some vectors. Many take time to write, for which no other request waits.
pub(crate) fn written(vectors: usize, respond: impl FnOnce() -> Response) -> Response {
    if vectors > MANY { tokio::task::block_in_place(respond) } else { respond() }
}

/// Has a model embed the inputs.
pub(crate) async fn vectors(context: &Context, fields: &Fields<'_>) -> Result<Embedded> {
    let model = context.shared.registry.able(fields.text("model")?, Ability::Embed)?;
    let unsupported = [
        "instruction",
        "late_chunking",
        "messages",
        "prompt_name",
        "task",
        "truncate_prompt_tokens",
    ];
    fields.unsupported(&unsupported)?;
    fields.only("normalize", &json!(true))?;
    let role = match fields.text("input_type")? {
        None | Some("document" | "search_document") => Role::Document,
        Some("query" | "search_query") => Role::Query,
        Some(_) => return Err(fields.wrong("input_type", "query or document")),
    };
    let input = fields.get("input").ok_or_else(|| fields.missing("input"))?;
    let inputs = context.memory.work(|| inputs(input, role))?;
    let allowed = fields.flag("allow_token_ids")?.unwrap_or(false);
    if !allowed && inputs.iter().any(|input| matches!(input, EmbedInput::Tokens(_))) {
        let message = "these are ids of tokens, and clients send those of another model's tokenizer: send texts \
                       (check_embedding_ctx_length=False of LangChain's OpenAIEmbeddings), or allow_token_ids with ids \
                       of this model, as /tokenize gives them";
        return Err(ApiError::bad("input", message).code("unsupported"));
    }
    let truncate = fields.flag("truncate")?.unwrap_or(false);
    let dimensions = fields.count("dimensions", 1, u32::MAX.into())?;
    let of = Arc::clone(&model);
    let info = context.blocking(move |context| context.info(&of)).await?;
    if let Some(wanted) = dimensions.filter(|wanted| *wanted > info.dimensions) {
        let message = format!("expected at most {}, found {wanted}", info.dimensions);
        return Err(ApiError::bad("dimensions", message).code("invalid_value"));
    }
    let work = Work::Embed { inputs, truncate, packs: context.shared.options.packs };
    let pending = Pending::submit(context, &model, Vec::new(), context.ticket(), work)?;
    let Update::Vectors { mut vectors, tokens } = pending.only().await? else {
        return Err(broken());
    };
    context.tally.update(|record| record.prompt_tokens = tokens);
    if let Some(count) = dimensions {
        vectors.iter_mut().for_each(|vector| *vector = shortened(vector, count));
    }
    Ok(Embedded { model: model.name.clone(), vectors, tokens })
}

/// A text, an image, tokens, or a list of them.
fn inputs(value: &Value, role: Role) -> Result<Vec<EmbedInput>> {
    let expected = "a string, an image as {\"type\": \"image_url\", …}, a list of these, a list of token ids, or a \
                    list of such lists";
    let bad = || wrong("input", expected, value);
    let input = |value: &Value| match value {
        Value::String(text) => Ok(EmbedInput::Text(text.clone(), role)),
        Value::Object(part) if part.contains_key("image_url") => image(part).map(EmbedInput::Image),
        value => {
            let tokens = tokens(value).filter(|tokens| !tokens.is_empty());
            tokens.map(EmbedInput::Tokens).ok_or_else(bad)
        }
    };
    let inputs: Vec<_> = match value {
        Value::Array(list) if !list.first().is_some_and(Value::is_u64) => {
            list.iter().map(input).collect::<Result<_>>()?
        }
        value => vec![input(value)?],
    };
    if inputs.is_empty() {
        return Err(bad());
    }
    if inputs.len() > MAX_INPUTS {
        let message = format!("expected at most {MAX_INPUTS}, found {}", inputs.len());
        return Err(ApiError::bad("input", message).code("invalid_value"));
    }
    Ok(inputs)
}

/// An image as a part of a message has it: `{"type": "image_url", "image_url": {"url": "data:…"}}`.
fn image(part: &Map<String, Value>) -> Result<Source> {
    let part = Fields::new(part);
    let url = match part.get("image_url") {
        Some(Value::String(url)) => Some(url.as_str()),
        _ => part.object("image_url")?.and_then(|image| image.text("url").ok().flatten()),
    };
    let url = url.ok_or_else(|| part.missing("image_url"))?;
    match url_part(Modality::Image, url, "input")? {
        Part::Media(attachment) => Ok(attachment.source),
        _ => Err(broken()),
    }
}

/// The first values of a vector, of norm 1 again.
fn shortened(vector: &[f32], count: usize) -> Vec<f32> {
    let vector = vector.get(..count).unwrap_or(vector);
    let norm = norm(vector).max(f64::MIN_POSITIVE);
    vector.iter().map(|value| (f64::from(*value) / norm) as f32).collect()
}

/// Values of 4 bytes, the lowest first.
fn encoded(vector: &[f32]) -> Value {
    let bytes: Vec<u8> = vector.iter().flat_map(|value| value.to_le_bytes()).collect();
    STANDARD.encode(bytes).into()
}
