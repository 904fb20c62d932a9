//! Encoder checkpoints, recognised by the files of `sentence-transformers` beside them.
//!
//! Checkpoints of this kind are laid out in several ways; no single file is depended on.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_core::manifest::{Rerank, Verdict};
use serde_json::Value;

use super::modules::{DOCUMENT_PREFIX, Dense, Modules, QUERY_PREFIX};
use super::{read, unsupported};
use crate::kit::Reader;
use crate::recipe::RecipeOptions;
use crate::registry::RecipeOption;

/// Conversion of a text to a vector.
#[derive(Debug)]
pub(in crate::recipes) struct Encoder {
    pub causal: bool,
    pub modules: Modules,
    pub query_prefix: String,
    pub document_prefix: String,
    /// Prompt about a query and a document, for models that score them.
    pub rerank: Option<Rerank>,
}

impl Encoder {
    /// Reads what there is beside the checkpoint of a model with `hidden` values a row. `causal`: a token sees only
    /// those before it.
    pub fn read(
        checkpoint: &Checkpoint,
        options: &RecipeOptions,
        hidden: usize,
        causal: bool,
    ) -> Result<Self> {
        Self::read_centred(checkpoint, options, hidden, causal, false)
    }

    /// Same as [`Encoder::read`], for a model whose vectors are `centred` before the first of their values become
    /// vectors.
    pub fn read_centred(
        checkpoint: &Checkpoint,
        options: &RecipeOptions,
        hidden: usize,
        causal: bool,
        centred: bool,
    ) -> Result<Self> {
        let prompts = read(&checkpoint.dir().join("config_sentence_transformers.json"))?;
        let modules = Modules::read(checkpoint, options, hidden, causal, centred)?;
        let declared = prompts.as_ref().and_then(|p| p.get("prompts")).and_then(Value::as_object);
        let prompt = |key: &str| declared?.get(key)?.as_str().map(str::to_owned);
        let asked = |option: &RecipeOption| option.choice(options).map(str::to_owned);
        let document = asked(&DOCUMENT_PREFIX).or_else(|| prompt("document"));
        let document = document.or_else(|| prompt("passage"));
        let prompted = declared.is_some_and(|all| all.values().any(|prompt| prompt != ""));
        if prompted && modules.without_prompt {
            return Err(unsupported(
                &checkpoint.dir().join("1_Pooling/config.json"),
                "include_prompt is false, but a vector here is made of a prompt's tokens, too",
            ));
        }
        Ok(Self {
            causal,
            modules,
            query_prefix: asked(&QUERY_PREFIX).or_else(|| prompt("query")).unwrap_or_default(),
            document_prefix: document.unwrap_or_default(),
            rerank: None,
        })
    }

    /// A reranker: the rows of a text are pooled, and pass the layers of a head that ends in one value. `prompt` is how
    /// query and document become a text; without it they are a pair of texts, as the tokenizer lays it out.
    ///
    /// The value becomes a score as `CrossEncoder` of `sentence-transformers` has it: by a sigmoid, unless the
    /// configuration has another `activation_fn`.
    pub fn scoring(
        checkpoint: &Checkpoint,
        causal: bool,
        pooling: &'static str,
        head: &[Dense<'_>],
        prompt: Option<&str>,
    ) -> Result<Self> {
        let reader = Reader::whole(checkpoint);
        let labels = reader.get("id2label").and_then(Value::as_object).map(serde_json::Map::len);
        let labels = labels.map_or_else(|| reader.maybe_size("num_labels"), |n| Ok(Some(n)))?;
        if let Some(labels) = labels.filter(|labels| *labels != 1) {
            return Err(reader
                .fault(format!("id2label or num_labels has {labels} labels, expected 1, a score"))
                .hint("a classifier of several labels ranks nothing"));
        }
        let saved = read(&checkpoint.dir().join("config_sentence_transformers.json"))?;
        let saved = saved.as_ref().and_then(|saved| saved.get("activation_fn"));
        let named = reader.first(&[
            "sentence_transformers.activation_fn",
            "sbert_ce_default_activation_function",
        ]);
        let named = named.or_else(|| Some(("activation_fn", saved?)));
        let sigmoid =
            match named.map(|(key, value)| (key, value, value.as_str().unwrap_or_default())) {
                None | Some((_, Value::Null, _)) => true,
                Some((_, _, name)) if name.ends_with(".Sigmoid") => true,
                Some((_, _, name)) if name.ends_with(".Identity") => false,
                Some((key, value, _)) => {
                    return Err(reader.bad(key, value, "Sigmoid or Identity of torch.nn"));
                }
            };
        Ok(Self {
            causal,
            modules: Modules::head(checkpoint, pooling, head)?,
            query_prefix: String::new(),
            document_prefix: String::new(),
            rerank: Some(Rerank {
                prompt: prompt.unwrap_or_default().to_owned(),
                verdict: Verdict::Head { sigmoid },
                ..Rerank::default()
            }),
        })
    }
}

/// Longest text, in tokens, that `sentence-transformers` gives the checkpoint.
pub(in crate::recipes) fn max_text(checkpoint: &Checkpoint) -> Result<Option<usize>> {
    let file = read(&checkpoint.dir().join("sentence_bert_config.json"))?;
    let declared = file.as_ref().and_then(|f| f.get("max_seq_length")).and_then(Value::as_u64);
    Ok(declared.and_then(|n| usize::try_from(n).ok()).filter(|n| *n > 0))
}

/// True when every token sees every other one.
pub(in crate::recipes) fn bidirectional(config: &Value) -> bool {
    let text = |pointer: &str| config.pointer(pointer).and_then(Value::as_str).unwrap_or_default();
    let class = text("/architectures/0").to_ascii_lowercase();
    let kind = text("/model_type");
    config.get("is_causal") == Some(&Value::Bool(false))
        || config.get("use_bidirectional_attention") == Some(&Value::Bool(true))
        || class.contains("bidirectional")
        || kind == "mistralbidirectional"
        || kind.ends_with("_bidirec")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::bidirectional;

    #[test]
    fn any_of_the_known_signs_makes_an_encoder_bidirectional() {
        for config in [
            json!({"is_causal": false}),
            json!({"use_bidirectional_attention": true}),
            json!({"architectures": ["MistralBiDirectionalModel"]}),
            json!({"architectures": ["LlamaBidirectionalModel"]}),
            json!({"model_type": "mistralbidirectional"}),
            json!({"model_type": "llama_bidirec"}),
        ] {
            assert!(bidirectional(&config), "{config}");
        }
        assert!(!bidirectional(&json!({"architectures": ["MistralModel"], "is_causal": true})));
    }
}
