//! Archives of NeMo (`.nemo`): a tar of `model_config.yaml`, `model_weights.ckpt`, a file of `torch.save`, and the
//! files of tokenizers, under the names that the configuration has for them.

mod archive;
mod config;
mod pieces;
mod yaml;

use qhx_base::artifacts::Mapped;
use qhx_graph::onnx::Message;
use serde_json::{Value, json};

use super::torch::{self, Found};
use archive::Archive;
use pieces::Piece;

/// Class of a model whose decoder takes an encoder's rows in its prompt, as its `config.json` names it.
pub(crate) const SPEECH_LM: &str = "NeMoSpeechLMForConditionalGeneration";
/// Key of the factor of what an adapter within such a checkpoint adds.
pub(crate) const LORA_SCALE: &str = "lora_scale";

type Read<T> = Result<T, String>;

const CONFIG: &str = "model_config.yaml";
const WEIGHTS: &str = "model_weights.ckpt";
/// Longest configuration that is read; those of models that list their tokens are hundreds of kilobytes.
const MAX_CONFIG: usize = 16 << 20;

/// An archive as the files of a checkpoint of `transformers`.
#[derive(Debug)]
pub(crate) struct Model {
    /// `config.json`.
    pub config: Value,
    /// `processor_config.json`.
    pub processor: Value,
    /// `tokenizer.json`.
    pub tokenizer: Vec<u8>,
    /// The tensors, under their names in `transformers`; bytes are those of the archive.
    pub tensors: Vec<Found>,
}

impl Model {
    /// Reads an archive.
    pub(crate) fn read(map: &Mapped) -> Read<Self> {
        let archive = Archive::open(map)?;
        let text = std::str::from_utf8(archive.bytes(CONFIG, MAX_CONFIG)?);
        let text = text.map_err(|_| format!("{CONFIG} is not UTF-8"))?;
        let config = yaml::read(text).map_err(|what| format!("{CONFIG}: {what}"))?;
        let (pieces, languages) = vocabulary(&archive, &config)?;
        let texts: Vec<_> = pieces.iter().map(|piece| piece.text.as_str()).collect();
        let place = archive.place(WEIGHTS)?;
        let weights = map.bytes().get(place.clone()).unwrap_or_default();
        let found = torch::tensors(weights).map_err(|what| format!("{WEIGHTS}: {what}"))?;
        let tensors = found.into_iter().filter_map(|tensor| {
            let bytes = tensor.bytes.start + place.start..tensor.bytes.end + place.start;
            Some(Found { name: config::name(&tensor.name)?, bytes, ..tensor })
        });
        let wrong = |what| format!("{CONFIG}: {what}");
        Ok(Self {
            config: config::of(&config, &texts, &languages).map_err(wrong)?,
            processor: json!({"feature_extractor": config::features(&config).map_err(wrong)?}),
            tokenizer: pieces::tokenizer(&pieces)?,
            tensors: tensors.collect(),
        })
    }
}

/// `config.json` of a [`SPEECH_LM`] and the decoder's, as those of `transformers`: configuration and processor.
pub(crate) fn speech_lm(config: &Value, llm: Value) -> Read<[Value; 2]> {
    config::speech_lm(config, llm)
}

/// Name in `transformers` of a tensor of a [`SPEECH_LM`]; none for one that is left out.
pub(crate) fn name_of_speech_lm(name: &str) -> Option<String> {
    config::name_of_speech_lm(name)
}

/// The pieces of all vocabularies behind each other, and the languages that have one.
fn vocabulary(archive: &Archive, config: &Value) -> Read<(Vec<Piece>, Vec<String>)> {
    let tokenizer = config.get("tokenizer").unwrap_or(&Value::Null);
    let read = |part: &Value, at: &str| {
        let path = part.get("model_path").and_then(Value::as_str).unwrap_or_default();
        let name = path.strip_prefix("nemo:").ok_or_else(|| {
            format!("{CONFIG}: {at}.model_path is {path:?}, expected the name of a file of the archive behind \"nemo:\"")
        })?;
        let message = Message::new(archive.map().clone()).within(archive.place(name)?);
        pieces::read(message).map_err(|what| format!("{name}: {what}"))
    };
    let kind = tokenizer.get("type").and_then(Value::as_str).unwrap_or_default();
    match (kind, tokenizer.get("langs").and_then(Value::as_object)) {
        ("bpe", _) => Ok((read(tokenizer, "tokenizer")?, Vec::new())),
        ("agg", Some(languages)) => {
            let mut pieces = Vec::new();
            for (language, part) in languages {
                pieces.extend(read(part, &format!("tokenizer.langs.{language}"))?);
            }
            let own = languages.keys().filter(|language| *language != config::SPECIAL);
            Ok((pieces, own.cloned().collect()))
        }
        _ => Err(format!(
            "{CONFIG}: tokenizer.type is {kind:?}, expected \"bpe\", or \"agg\" with langs"
        )),
    }
}
