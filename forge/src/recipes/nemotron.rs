//! Nemotron speech streaming: `NemotronAsrStreamingForRNNT`, and `Nemotron3_5AsrForRNNT` with a language.
//!
//! Arithmetic: `transformers`, `models/nemotron_asr_streaming/modeling_nemotron_asr_streaming.py` and
//! `models/nemotron3_5_asr/modeling_nemotron3_5_asr.py`: a FastConformer that is given its audio in chunks
//! ([`super::fastconformer::Stream`]), and a transducer (Graves 2012, arXiv 1211.3711), whose graphs are Parakeet's.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::{Checkpoint, read_json};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::TensorId;
use qhx_graph::weight::held;
use serde_json::{Map, Value, json};

use super::choices::number;
use super::fastconformer::{Audio, Defaults, EPS, Sizes, Stream};
use super::parakeet::{Transducer, joint, predictor};
use crate::kit::{ENCODER_WEIGHTS, Layers, Processor, Reader, encoder_precision, object};
use crate::recipe::{ContextPlan, Precision, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

/// Rows that a chunk waits for.
const LOOKAHEAD: RecipeOption = RecipeOption {
    name: "lookahead",
    values: &[],
    help: "rows of 80 ms that a row sees ahead, which words come later by: the checkpoint's default, or the largest of \
           13, 6, 1 and 0 with which they come within a second",
};
/// Language that a model is asked for.
const LANGUAGE: RecipeOption = RecipeOption {
    name: "language",
    values: &[],
    help: "language of a model that is asked for one (Nemotron 3.5), as its processor_config.json names it, such as \
           de-DE; found by the model unless given",
};
/// The model with a language.
const ASKED: &str = "Nemotron3_5AsrForRNNT";
/// Numbers that published checkpoints were trained with.
const LOOKAHEADS: [usize; 4] = [13, 6, 1, 0];
/// The most rows ahead.
const MAX_LOOKAHEAD: usize = 255;

register_recipe!(
    RecipeEntry::new(&["NemotronAsrStreamingForRNNT", ASKED], recipe)
        .tasks(&[Task::Transcribe])
        .options(&[LOOKAHEAD, LANGUAGE, ENCODER_WEIGHTS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(|name| vec![name.to_owned()]);
    let whole = Reader::whole(checkpoint);
    let encoder = Reader::part(checkpoint, "encoder_config")?;
    let sizes = &Sizes::read(&encoder, &Defaults { layers: 24, mels: 80, scale_input: true })?;
    let transducer = Transducer::read(&whole, false)?;
    let vocab = whole.size("vocab_size")?;
    let blank = whole.get("blank_token_id").map_or(Some(vocab as u64 - 1), Value::as_u64);
    let Some(blank) = blank.filter(|id| *id < vocab as u64) else {
        return Err(whole.fault(format!("blank_token_id: expected a token below {vocab}")));
    };
    if sizes.halvings < 2 {
        return Err(encoder.fault("subsampling_factor 2, expected 4 or more".to_owned()));
    }
    if options.shards != 1 {
        let what =
            format!("{} shards, expected 1: the encoder stands in one context", options.shards);
        return Err(Error::new(ErrorKind::Usage, what).hint("leave --shards out"));
    }
    let language = Language::read(checkpoint, &whole, options)?;
    Processor::audio(checkpoint)?.only("/mel_filters_dtype", &json!("float32"))?;
    let Audio { front_end, preemphasis, .. } = Audio::read(checkpoint, sizes, options)?;
    let size = |key: &str| front_end[key].as_u64().unwrap_or(1) as f64;
    let row = size("hop") * f64::from(1u32 << sizes.halvings) / size("rate");

    let window = encoder.size_or("sliding_window", 71)?;
    let own = match encoder.get("default_num_lookahead_tokens") {
        None => LOOKAHEADS[0],
        Some(found) => {
            let rows = found.as_u64().filter(|rows| *rows <= MAX_LOOKAHEAD as u64);
            let expected = "a number of rows up to 255";
            rows.ok_or_else(|| encoder.bad("default_num_lookahead_tokens", found, expected))?
                as usize
        }
    };
    let soon = |ahead: &usize| (ahead + 1) as f64 * row < 1.0;
    let usual = [own].into_iter().chain(LOOKAHEADS).find(soon).unwrap_or(own);
    let ahead = number(options, LOOKAHEAD.name, 0..=MAX_LOOKAHEAD)?.unwrap_or(usual);
    let rows = ahead + 1;
    let past = (window - 1) / rows * rows;
    if past == 0 {
        return Err(encoder.fault(format!(
            "sliding_window {window}: a row sees {} before it, expected at least those of a chunk, {rows}",
            window - 1
        )));
    }

    let (precision, note) = encoder_precision(options);
    let stream = Stream { layers: Layers::new(checkpoint, precision, EPS), sizes, rows, past };
    let mut b = GraphBuilder::new("encoder");
    let mut y = stream.encode(&mut b)?;
    if let Some(language) = &language {
        y = language.ask(&mut b, &stream.layers, sizes.hidden, y)?;
    }
    let y = stream.layers.linear(&mut b, y, "encoder_projector", transducer.width, true)?;
    b.output("y", y)?;
    let encoder = ContextPlan::new("encoder".to_owned(), precision, vec![b.finish()?]);
    let mut contexts = vec![encoder.once()];
    let mut plan_params = Map::new();
    plan_params.insert("encoder".to_owned(), json!("encoder"));
    for graph in [predictor(checkpoint, transducer)?, joint(checkpoint, vocab, transducer)?] {
        plan_params.insert(graph.name().to_owned(), json!(graph.name()));
        contexts.push(ContextPlan::alone(graph));
    }
    let params = object(json!({
        "hidden": transducer.width,
        "vocab": vocab,
        "n_layers": sizes.layers,
        "n_heads": sizes.heads,
        "audio": {
            "front_end": front_end,
            "preemphasis": preemphasis,
            "halvings": sizes.halvings,
            "rows": rows,
            "past": past,
            "blank": blank,
        },
        "transducer": transducer.steps(checkpoint, blank as usize),
        "transcription": {"window": rows as f64 * row},
    }));
    let embed = checkpoint.matrix("decoder.embedding.weight", [vocab, transducer.width])?;
    Ok(Recipe::new("nemotron", "nemotron_transcribe", contexts, plan_params)
        .notes(note.into_iter().collect())
        .embed(embed)
        .params(params))
}

/// The language that a model is asked for: one of several inputs that is 1, beside each row of the encoder.
struct Language {
    id: usize,
    count: usize,
    /// Width of the layer that mixes it with the rows.
    inner: usize,
}

impl Language {
    fn read(
        checkpoint: &Checkpoint,
        reader: &Reader<'_>,
        options: &RecipeOptions,
    ) -> Result<Option<Self>> {
        let wanted = options.choice(LANGUAGE.name);
        if checkpoint.architecture() != Some(ASKED) {
            let Some(wanted) = wanted else { return Ok(None) };
            let what =
                format!("recipe option language: {wanted:?}, and the model is asked for none");
            return Err(Error::new(ErrorKind::Usage, what).hint("leave it out"));
        }
        let count = reader.size_or("num_prompts", 128)?;
        let inner = reader.size_or("prompt_intermediate_size", 2048)?;
        let own = match reader.get("default_prompt_id") {
            None => Some(101),
            Some(found) => found.as_u64(),
        };
        let id = match wanted {
            None => own,
            Some(name) => {
                let file = checkpoint.dir().join("processor_config.json");
                let names = read_json(&file)?["prompt_dictionary"].take();
                let Some(id) = names[name].as_u64() else {
                    let known: Vec<&str> = names
                        .as_object()
                        .into_iter()
                        .flatten()
                        .map(|(name, _)| name.as_str())
                        .collect();
                    let what = format!(
                        "recipe option language: {name:?} is not in the prompt_dictionary of {}",
                        file.display()
                    );
                    return Err(Error::new(ErrorKind::Usage, what)
                        .hint(format!("it knows {}", known.join(", "))));
                };
                Some(id)
            }
        };
        let Some(id) = id.filter(|id| *id < count as u64) else {
            let what = format!("default_prompt_id: expected a number below num_prompts, {count}");
            return Err(reader.fault(what));
        };
        Ok(Some(Self { id: id as usize, count, inner }))
    }

    /// `Nemotron3_5AsrPromptProjector`. The weights of the input that is 1 are a part of the bias.
    fn ask(
        &self,
        b: &mut GraphBuilder,
        layers: &Layers<'_>,
        hidden: usize,
        y: TensorId,
    ) -> Result<TensorId> {
        let (all, name) = (hidden + self.count, "prompt_projector.linear_1");
        let weight = layers.checkpoint.values(&format!("{name}.weight"), &[self.inner, all])?;
        let mut bias = layers.checkpoint.values(&format!("{name}.bias"), &[self.inner])?;
        let mut rows = Vec::with_capacity(self.inner * hidden);
        for (bias, row) in bias.iter_mut().zip(weight.chunks_exact(all)) {
            *bias += row[hidden + self.id];
            rows.extend_from_slice(&row[..hidden]);
        }
        let weight =
            Precision::Fp16.weight(held(format!("{name}.weight"), [self.inner, hidden], rows));
        let h = b.linear("prompt", y, weight, Some(bias))?;
        let h = b.relu(h)?;
        layers.linear(b, h, "prompt_projector.linear_2", hidden, true)
    }
}
