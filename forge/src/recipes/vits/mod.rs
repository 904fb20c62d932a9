//! VITS: a voice, from symbols to samples. `VitsModel` of `transformers`, and voices of Piper, which are ONNX files.
//!
//! Kim et al. 2021, arXiv 2106.06103; the vocoder is HiFi-GAN (Kong et al. 2020, arXiv 2010.05646). The graphs hold
//! what is matmuls and convolutions. N symbols become T frames of as many samples as the rates multiply to:
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `encoder`, or `encoder<N>` | `x` | `[N, hidden]` | embedded symbols, times √hidden |
//! | | `keep` | `[N, 1]` | 1 for each symbol, 0 behind them |
//! | | → `y` | `[N, hidden]` | what durations are made of |
//! | | → `stats` | `[N, 2 · flow]` | means and logarithms of deviations of frames |
//! | `voice`, or `voice<T>` | `x` | `[T, flow]` | frames with noise |
//! | | `keep` | `[T, 1]` | 1 for each frame |
//! | | `style` | `[1, speaker]` | embedding of the speaker, where there are several |
//! | | → `samples` | `[T, hop]` | |
//!
//! Embeddings, durations and their flows are computed by the host-op, in f32. What it reads for that is one file of f32
//! (`host_values`). A text of more frames than the longest graph takes goes through it in parts, which overlap by as
//! many frames as a sample depends on, so that the parts have the samples of the whole.

mod config;
mod files;
mod host;
mod names;
mod text;
mod voice;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::weight::held;
use serde_json::{Map, json};

use super::choices::{numbers, windows};
use super::vocoder::Convolutions;
use crate::kit::{Layers, MatrixFile, matrices, object, one_or_many};
use crate::recipe::{ContextPlan, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};
use config::{Config, Durations};
use files::{Script, VOICES};

/// Lengths of clips.
const WINDOWS: RecipeOption = RecipeOption {
    name: "windows",
    values: &[],
    help: "seconds of audio that the graphs make at once; 3,10 by default. What is said goes through the shortest that \
           holds it; what is longer goes through the longest in parts",
};
/// Lengths of texts.
const SYMBOLS: RecipeOption = RecipeOption {
    name: "symbols",
    values: &[],
    help: "symbols that the graphs take at once, those between phonemes included; 128,512 by default. A sentence of more \
           is cut behind a pause",
};
const DEFAULT_WINDOWS: [usize; 2] = [3, 10];
const DEFAULT_SYMBOLS: [usize; 2] = [128, 512];
const MAX_WINDOW: usize = 30;
const MAX_SYMBOLS: usize = 2048;
/// Class that voices of Piper are known by.
const PIPER: &str = "PiperVoice";

register_recipe!(
    RecipeEntry::new(&["VitsModel", PIPER], recipe)
        .tasks(&[Task::Speak])
        .options(&[WINDOWS, SYMBOLS])
);

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(names::names);
    let piper = checkpoint.architecture() == Some(PIPER);
    let config = if piper { Config::of_tensors(checkpoint) } else { Config::read(checkpoint) }?;
    let script = if piper {
        Script::of_piper(checkpoint, &config)
    } else {
        Script::of_tokenizer(checkpoint, &config)
    }?;
    if options.shards != 1 {
        let what = format!("{} shards, expected 1: no graph has layers to spread", options.shards);
        return Err(Error::new(ErrorKind::Usage, what));
    }
    let (hop, around) = (config.hop(), config.context());
    let seconds = windows(options, MAX_WINDOW, &DEFAULT_WINDOWS)?;
    let frames: Vec<_> =
        seconds.iter().map(|s| (s * config.rate).div_ceil(hop) + 2 * around).collect();
    let lengths = numbers(options, SYMBOLS.name, 8..=MAX_SYMBOLS)?
        .unwrap_or_else(|| DEFAULT_SYMBOLS.to_vec());
    let model = Model {
        layers: Layers::new(checkpoint, options.precision, config.eps),
        convs: Convolutions::new(checkpoint),
        checkpoint,
        config: &config,
    };
    let mut plan_params = Map::new();
    let mut contexts = Vec::new();
    for (key, sizes) in [("encoder", &lengths), ("voice", &frames)] {
        let (mut graphs, mut names) = (Vec::new(), Vec::new());
        for size in sizes {
            let name = if sizes.len() == 1 { key.to_owned() } else { format!("{key}{size}") };
            graphs.push(match key {
                "encoder" => model.encoder(&name, *size)?,
                _ => model.voice(&name, *size)?,
            });
            names.push(name);
        }
        plan_params.insert(key.to_owned(), one_or_many(names));
        contexts.push(ContextPlan::new(key.to_owned(), options.precision, graphs).once());
    }
    for unused in ["posterior_encoder", "duration_predictor.flows.1"]
        .iter()
        .map(|part| (*part).to_owned())
        .chain(
            ["conv_pre", "conv_proj", "conv_dds", "flows"]
                .map(|part| format!("duration_predictor.post_{part}")),
        )
    {
        checkpoint.leave_out(&unused);
    }
    let values = model.host_values()?;
    let len = values.len();
    let host = MatrixFile::in_f32("host", "host", held("host", [len, 1], values));
    let durations = match config.durations {
        Durations::Plain { inner, kernel } => json!({"inner": inner, "kernel": kernel}),
        Durations::Stochastic { kernel, layers, flows, bins, tail } => {
            json!({"flows": flows, "kernel": kernel, "layers": layers, "bins": bins, "tail": tail})
        }
    };
    // Symbols between phonemes and around them count as well.
    let longest = lengths.last().copied().unwrap_or_default();
    let around_text = script.front.len() + script.back.len();
    let limit = longest.saturating_sub(around_text) / if script.blank.is_some() { 2 } else { 1 };
    let Config {
        hidden, flow, tokens, layers, heads, speakers, speaker, rate, length, noise, ..
    } = config;
    let params = object(json!({
        "hidden": hidden,
        "vocab": tokens,
        "n_layers": layers,
        "n_heads": heads,
        "max_ctx": VOICES + limit,
        "speech": {
            "rate": rate,
            "voices": script.voices,
            "symbols": script.symbols,
            "script": script.kind,
            "limit": limit,
            "front": script.front,
            "back": script.back,
            "blank": script.blank,
            "hop": hop,
            "flow": flow,
            "around": around,
            "speakers": speakers,
            "speaker": speaker,
            "length": length,
            "noise": noise,
            "durations": durations,
        },
    }));
    let recipe = Recipe::new("vits", "vits_speak", contexts, plan_params).params(params);
    Ok(recipe.tables(vec![matrices("speech", vec![host])]).without_tokenizer())
}

/// Makes graphs. Tensors of frames are `[1, channels, frames]`.
struct Model<'a> {
    layers: Layers<'a>,
    convs: Convolutions<'a>,
    checkpoint: &'a Checkpoint,
    config: &'a Config,
}
