//! `/infill`, as llama.cpp's server has it: the text between two others.

use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Map, Value, json};

use crate::completions::Completion;
use crate::error::{Result, broken, json_response};
use crate::fields::Fields;
use crate::generation_request::GENERATION;
use crate::request::{Asked, Context};

pub(crate) async fn infill(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    fields.only("stream", &json!(false))?;
    let model = fields.text("model")?.map(str::to_owned);
    let completion = context.memory.work(|| completion(&fields))?;
    let submit = move |context: Context| completion.submit(&context, model.as_deref());
    let (mut asked, _) = context.blocking(submit).await?;
    asked.answers.collect(asked.pending, &context.tally).await?;
    let answer = asked.answers.answers.first().ok_or_else(broken)?;
    let usage = asked.answers.usage;
    let json = json!({
        "content": answer.text,
        "model": asked.model,
        "stop": true,
        "stop_type": if answer.finish_reason() == Some("length") { "limit" } else { "eos" },
        "tokens_evaluated": usage.prompt,
        "tokens_cached": usage.cached,
        "tokens_predicted": usage.completion,
        "truncated": false,
    });
    Ok(json_response(StatusCode::OK, &json))
}

/// The request in the words of `/v1/completions`.
fn completion(fields: &Fields<'_>) -> Result<Completion> {
    let mut request = Map::new();
    for name in GENERATION {
        if let Some(value) = fields.get(name) {
            request.insert(name.to_owned(), value.clone());
        }
    }
    // Texts of other files stand before it.
    let mut before = String::new();
    for (at, extra) in fields.list("input_extra")?.into_iter().flatten().enumerate() {
        let extra = Fields::of(extra, &format!("input_extra[{at}]"))?;
        before.push_str(extra.text("text")?.unwrap_or_default());
        before.push('\n');
    }
    for name in ["input_prefix", "prompt"] {
        before.push_str(fields.text(name)?.unwrap_or_default());
    }
    request.insert("prompt".to_owned(), before.into());
    request.insert("suffix".to_owned(), fields.text("input_suffix")?.unwrap_or_default().into());
    let count = fields.get("n_predict").filter(|count| count.as_i64().is_none_or(|n| n >= 0));
    request.insert("max_tokens".to_owned(), count.cloned().unwrap_or(Value::from(128)));
    Completion::read_infill(&Fields::new(&request))
}
