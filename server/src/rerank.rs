//! `/v1/rerank`: which documents answer a query.

use axum::http::StatusCode;
use axum::response::Response;
use qhx::Ranked;
use serde_json::{Value, json};

use crate::embeddings::MAX_INPUTS;
use crate::error::{ApiError, Result, broken, json_response};
use crate::fields::{Fields, wrong};
use crate::ids;
use crate::pending::Pending;
use crate::queue::{Update, Work};
use crate::registry::Ability;
use crate::request::Asked;

pub(crate) async fn rerank(Asked { context, map }: Asked) -> Result<Response> {
    let fields = Fields::new(&map);
    let model = context.shared.registry.able(fields.text("model")?, Ability::Rerank)?;
    let unsupported = [
        "max_chunks_per_doc",
        "max_tokens_per_doc",
        "rank_fields",
        "raw_scores",
        "truncate_prompt_tokens",
    ];
    fields.unsupported(&unsupported)?;
    let query = fields.needed("query")?.to_owned();
    let documents = documents(&fields)?;
    let top = fields.count("top_n", 1, u32::MAX.into())?.unwrap_or(usize::MAX);
    let return_documents = fields.flag("return_documents")?.unwrap_or(false);
    let truncate = fields.flag("truncate")?.unwrap_or(false);
    let instruction = fields.text("instruction")?.map(str::to_owned);
    if instruction.is_some() && !model.takes_instruction() {
        let message = format!("{} is asked by a prompt without one: leave it out", model.name);
        return Err(ApiError::bad("instruction", message).code("unsupported"));
    }
    let work = Work::Rank { query, documents: documents.clone(), truncate, instruction };
    let pending = Pending::submit(&context, &model, Vec::new(), context.ticket(), work)?;
    let Update::Ranked { ranked, tokens } = pending.only().await? else { return Err(broken()) };
    context.tally.update(|record| record.prompt_tokens = tokens);
    let result = |one: &Ranked| {
        let mut result = json!({"index": one.index, "relevance_score": one.score});
        if let Some(text) = documents.get(one.index).filter(|_| return_documents) {
            result["document"] = json!({"text": text});
        }
        result
    };
    let results: Vec<_> = ranked.iter().take(top).map(result).collect();
    let json = json!({
        "id": ids::new("rerank-"),
        "object": "list",
        "model": model.name,
        "results": results,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    });
    Ok(json_response(StatusCode::OK, &json))
}

/// `documents`, or `texts` as some clients call them: strings, or objects with a `text`.
fn documents(fields: &Fields<'_>) -> Result<Vec<String>> {
    let texts = fields.get("documents").is_none() && fields.get("texts").is_some();
    let name = if texts { "texts" } else { "documents" };
    let list = fields.list(name)?.ok_or_else(|| fields.missing(name))?;
    if list.is_empty() || list.len() > MAX_INPUTS {
        let message = format!("expected 1 to {MAX_INPUTS} documents, found {}", list.len());
        return Err(ApiError::bad(name, message).code("invalid_value"));
    }
    let text = |(at, value): (usize, &Value)| {
        let text = value.as_str().or_else(|| value.get("text")?.as_str());
        let place = format!("{name}[{at}]");
        let expected = "a string, or an object with text";
        text.map(str::to_owned).ok_or_else(|| wrong(&place, expected, value))
    };
    list.iter().enumerate().map(text).collect()
}
