//! Prompts that ask rerankers about a document, from their model cards.

use std::path::Path;

use qhx_base::{Error, ErrorKind, Result, files};
use qhx_core::manifest::{Rerank, Verdict};
use serde_json::{Value, json};

/// Bytes of a file that says it.
const MAX_BYTES: u64 = 1 << 20;

/// Prompt of Qwen3-Reranker, from its model card.
pub fn qwen3() -> Rerank {
    let prompt = "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the \
                  Instruct provided. Note that the answer can only be \"yes\" or \"no\".<|im_end|>\n\
                  <|im_start|>user\n<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}<|im_end|>\n\
                  <|im_start|>assistant\n<think>\n\n</think>\n\n";
    let instruction = "Given a web search query, retrieve relevant passages that answer the query";
    Rerank {
        prompt: prompt.to_owned(),
        instruction: instruction.to_owned(),
        verdict: Verdict::Tokens { yes: "yes".to_owned(), no: "no".to_owned() },
    }
}

/// The manifest's `params.rerank`.
pub(crate) fn to_json(rerank: &Rerank) -> Value {
    let Rerank { prompt, instruction, verdict } = rerank;
    let mut json = match verdict {
        Verdict::Tokens { yes, no } => json!({"yes": yes, "no": no}),
        Verdict::Head { sigmoid: true } => json!({"activation": "sigmoid"}),
        _ => json!({"activation": "identity"}),
    };
    for (key, text) in [("prompt", prompt), ("instruction", instruction)] {
        if !text.is_empty() {
            json[key] = json!(text);
        }
    }
    json
}

/// Reads a JSON file with the keys of the manifest's `params.rerank`.
///
/// # Errors
/// When it cannot be read, or is none.
pub fn read(path: &Path) -> Result<Rerank> {
    let invalid = |what: &dyn std::fmt::Display| {
        Error::new(ErrorKind::Usage, format!("{}: {what}", path.display())).hint(
            "expected {\"prompt\": \"… {query} … {document} …\", \"yes\": \"yes\", \"no\": \"no\"}, or of a model with \
             a head \"activation\": \"sigmoid\" in the place of both",
        )
    };
    let bytes = files::read(ErrorKind::Usage, path, MAX_BYTES)?;
    let read: Keys = serde_json::from_slice(&bytes).map_err(|e| invalid(&e))?;
    let Keys { prompt, instruction, yes, no, activation } = read;
    for place in ["{query}", "{document}"] {
        if !prompt.contains(place) {
            return Err(invalid(&format_args!("prompt has no {place}")));
        }
    }
    let verdict = match (yes, no, activation) {
        (Some(yes), Some(no), None) => Verdict::Tokens { yes, no },
        (None, None, Some(activation)) => {
            Verdict::Head { sigmoid: activation == Activation::Sigmoid }
        }
        _ => return Err(invalid(&"neither both of yes and no nor activation, or all of them")),
    };
    Ok(Rerank { prompt, instruction, verdict })
}

/// The keys.
#[derive(Debug, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Keys {
    prompt: String,
    #[serde(default)]
    instruction: String,
    yes: Option<String>,
    no: Option<String>,
    activation: Option<Activation>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum Activation {
    Sigmoid,
    Identity,
}
