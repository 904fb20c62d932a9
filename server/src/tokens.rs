//! `/tokenize`: the tokens of a text or of a conversation.

use axum::Extension;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::Response;
use qhx::CancelToken;
use serde_json::{Value, json};

use crate::error::{ApiError, Result, json_response};
use crate::fields::Fields;
use crate::request::Context;

pub(crate) async fn tokenize(
    Extension(context): Extension<Context>,
    request: Request,
) -> Result<Response> {
    let map = context.object(request).await?;
    let value = context.blocking(move |context| count(&context, &Fields::new(&map))).await?;
    Ok(json_response(StatusCode::OK, &value))
}

fn count(context: &Context, fields: &Fields<'_>) -> Result<Value> {
    let shared = &context.shared;
    let model = shared.registry.find(fields.text("model")?)?;
    let of_model = |e| ApiError::of_model(&e, &model.name);
    let info = shared.registry.info(model, &shared.metrics).map_err(of_model)?;
    let texts = &info.texts;
    let text = fields.text("prompt")?.or(fields.text("content")?);
    let tokens = match (text, fields.list("messages")?) {
        (Some(text), None) => {
            let special = fields.flag("add_special_tokens")?.unwrap_or(true);
            let tokenizer = texts.tokenizer().ok_or_else(|| {
                ApiError::bad("model", "it has no tokenizer").code("model_not_supported")
            })?;
            tokenizer.encode(text, special).map_err(of_model)?
        }
        (None, Some(_)) => {
            let ask = crate::ask::Ask::of_chat(fields)?;
            let text = ask.render(texts, &CancelToken::new()).map_err(of_model)?;
            match texts.tokenizer() {
                // The template spells what a tokenizer would put around the text.
                Some(tokenizer) => tokenizer.encode(&text, false).map_err(of_model)?,
                None => Vec::new(),
            }
        }
        _ => {
            return Err(ApiError::bad("prompt", "expected either a text or messages")
                .code("missing_required_parameter"));
        }
    };
    Ok(json!({
        "model": model.name,
        "count": tokens.len(),
        "max_model_len": texts.max_ctx(),
        "tokens": tokens,
    }))
}
