//! `/tokenize`: the tokens of a text or of a conversation.

use std::sync::Arc;

use axum::http::StatusCode;
use axum::response::Response;
use qhx::{CancelToken, TextPipeline};
use serde_json::{Value, json};
use tokio::time::{Instant, timeout_at};

use crate::error::{ApiError, Result, json_response};
use crate::fields::Fields;
use crate::generation_request::Ask;
use crate::registry::Served;
use crate::request::{Asked, Context};

/// Contexts that a text which is only counted may fill.
const CONTEXTS: usize = 16;

/// Bytes of a token, generously: a text of more bytes is refused before it is tokenized.
const TOKEN: usize = 8;

/// Bytes that are tokenized however small the context is.
const ALWAYS: usize = 64 << 10;

pub(crate) async fn tokenize(Asked { context, map }: Asked) -> Result<Response> {
    let count =
        move |context: Context, ticket: &CancelToken| count(&context, &Fields::new(&map), ticket);
    let value = context.tokenizing(count).await?;
    Ok(json_response(StatusCode::OK, &value))
}

/// A ticket that ends with what waits for it.
struct Waiting(CancelToken);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

impl Context {
    /// Tokenizes beside the queue: a few at a time, until the client leaves or the time is up.
    pub(crate) async fn tokenizing<T: Send + 'static>(
        &self,
        work: impl FnOnce(Self, &CancelToken) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let waiting = Waiting(self.ticket());
        let until = Instant::now() + self.shared.options.time_limit;
        let place = timeout_at(until, Arc::clone(&self.shared.tokenizing).acquire_owned());
        let place = place.await.map_err(|_| ApiError::timeout())?;
        let ticket = waiting.0.clone();
        let work = move |context| {
            let done = work(context, &ticket);
            drop(place);
            done
        };
        let done = self.blocking(work).await;
        if waiting.0.is_expired() { done.map_err(|_| ApiError::timeout()) } else { done }
    }
}

fn count(context: &Context, fields: &Fields<'_>, ticket: &CancelToken) -> Result<Value> {
    let model = &context.shared.registry.find(fields.text("model")?)?;
    let text = fields.text("prompt")?.or(fields.text("content")?);
    let tokens = match (text, fields.list("messages")?) {
        (Some(text), None) => {
            let special = fields.flag("add_special_tokens")?.unwrap_or(true);
            let info = context.info(model)?;
            if info.texts.tokenizer().is_none() {
                let message = "it has no tokenizer";
                return Err(ApiError::bad("model", message).code("model_not_supported"));
            }
            encode(&info.texts, model, text, special, ticket)?
        }
        (None, Some(_)) => of_conversation(context, model, &Ask::of_chat(fields)?, ticket)?,
        _ => {
            return Err(ApiError::bad("prompt", "expected either a text or messages")
                .code("missing_required_parameter"));
        }
    };
    Ok(json!({
        "model": model.name,
        "count": tokens.len(),
        "max_model_len": context.info(model)?.texts.max_ctx(),
        "tokens": tokens,
    }))
}

/// The tokens of a conversation of texts.
pub(crate) fn of_conversation(
    context: &Context,
    model: &Served,
    ask: &Ask,
    ticket: &CancelToken,
) -> Result<Vec<u32>> {
    let info = context.info(model)?;
    let texts = &info.texts;
    let bytes = ask.turns.iter().map(|turn| turn.texts().len()).sum();
    check_size(bytes, texts)?;
    let ask = ask.clone().accommodated(&info, ticket);
    let text = ask.render(texts, ticket).map_err(|e| ApiError::of_model(&e, &model.name))?;
    // The template spells what a tokenizer would put around the text.
    encode(texts, model, &text, false, ticket)
}

/// The tokens of a text, none without a tokenizer.
fn encode(
    texts: &TextPipeline,
    model: &Served,
    text: &str,
    special: bool,
    ticket: &CancelToken,
) -> Result<Vec<u32>> {
    check_size(text.len(), texts)?;
    let Some(tokenizer) = texts.tokenizer() else { return Ok(Vec::new()) };
    let max = texts.max_ctx().saturating_mul(CONTEXTS).max(ALWAYS);
    let tokens = tokenizer.encode_within(text, special, max, ticket);
    tokens.map_err(|e| ApiError::of_model(&e, &model.name))
}

fn check_size(bytes: usize, texts: &TextPipeline) -> Result<()> {
    let max = texts.max_ctx().saturating_mul(CONTEXTS * TOKEN).max(ALWAYS);
    if bytes <= max {
        return Ok(());
    }
    let message = format!(
        "a text of {bytes} bytes, expected at most {max}: {CONTEXTS} times what the context may hold"
    );
    Err(ApiError::malformed(message).code("context_length_exceeded"))
}
