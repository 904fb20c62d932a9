//! Kokoro: a voice. `KModel` of the package `kokoro` 0.9.4, from phonemes to audio.
//!
//! Arithmetic: `kokoro/model.py`, `modules.py`, `istftnet.py` (StyleTTS 2, Li et al. 2023, arXiv 2306.07691; iSTFTNet,
//! Kaneko et al. 2022, arXiv 2203.02395), and `AlbertModel` of `transformers` (Lan et al. 2019, arXiv 1909.11942). The
//! graphs hold what is matmuls and convolutions. N symbols become T frames of 600 samples:
//!
//! | graph | tensor | shape | |
//! |---|---|---|---|
//! | `albert`, or `albert<N>` | `x` → `y` | `[N, width]` | the layer that the model repeats |
//! | | `keep` | `[N, 1]` | 1 for each symbol, 0 behind them |
//! | `symbols`, or `symbols<N>` | `x` → `y` | `[N, hidden]` | convolutions over embedded symbols |
//! | | `keep` | `[N, 1]` | |
//! | `prosody`, or `prosody<T>` | `x` | `[T, hidden]` | frames behind the LSTM that F0 and N share |
//! | | `style` | `[1, style]` | second half of a voice's row |
//! | | `keep`, `fill` | `[T, 1]`, `[1, 2]` | 1 for each frame; T and the longest length over those of the clip |
//! | | → `curves` | `[2, 2 · T]` | F0 in Hz, and N |
//! | `voice`, or `voice<T>` | `x`, `style`, `keep`, `fill` | as above | symbols in frames; first half of a voice's row |
//! | | `curves` | `[2, T]` | F0 and N behind their convolutions |
//! | | `source` | `[fft + 2, 120 · T + 6]` | spectrum and phase of the sines, with 3 frames of zeros in front |
//! | | → `spectrum` | `[fft + 2, 120 · T + 1]` | logarithm of the magnitude, and what the phase is the sine of |
//!
//! LSTMs, embeddings, durations, sines and both Fourier transforms are computed by the host-op, in f32. What it reads
//! for that is one file of f32 (`host_values`). Instance norms are over the frames of the clip alone.

mod config;
mod files;
mod host;
mod kitten;
mod layers;
mod prosody;
mod text;
mod voice;

use serde_json::{Map, Value, json};

use super::choices::windows;
use super::vocoder::Convolutions;
use crate::kit::{Layers, MatrixFile, matrices, object, one_or_many};
use crate::recipe::{ContextPlan, Recipe, RecipeOptions, Tables, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};
use config::Config;
use files::{Voices, lexicon, voices};
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::graph::Graph;
use qhx_graph::weight::held;

/// Lengths of clips.
const WINDOWS: RecipeOption = RecipeOption {
    name: "windows",
    values: &[],
    help: "seconds of audio that the graphs make at once; 3,10 by default. What is said goes through the shortest that \
           holds it; what is longer is cut at a space",
};
/// Words and their phonemes.
const LEXICON: RecipeOption = RecipeOption {
    name: "lexicon",
    values: &[],
    help: "files of words and their phonemes with commas between them, such as us_gold.json of misaki; the first that has \
           a word says it. Without, rules of English letters do",
};
const DEFAULT_WINDOWS: [usize; 2] = [3, 10];
/// A graph of a name and a length.
type MakeGraph<'a> = &'a dyn Fn(&str, usize) -> Result<Graph>;

const MAX_WINDOW: usize = 30;
/// Samples of a second.
const RATE: usize = 24_000;
/// Values of F0 in a frame.
const CURVE: usize = 2;
/// Symbols of the shorter graphs.
const SHORT: usize = 128;
/// Sines of the source: F0 and its overtones.
const SINES: usize = 9;
/// Epsilon of ALBERT's.
const ALBERT_EPS: f32 = 1e-12;
/// Symbols that a text is rather cut behind.
const PAUSES: &str = " ,.;:!?—…";

/// Languages of voices by the first letters of their names, as espeak-ng calls them; English voices have a lexicon.
const LANGUAGES: [(char, &str); 5] =
    [('e', "es"), ('f', "fr-fr"), ('h', "hi"), ('i', "it"), ('p', "pt-br")];
/// Languages whose phonemes nothing here makes.
const OTHERS: [(char, &str); 2] = [('j', "Japanese (misaki)"), ('z', "Chinese (misaki)")];

register_recipe!(
    RecipeEntry::new(&["KModel"], kokoro).tasks(&[Task::Speak]).options(&[WINDOWS, LEXICON])
);
register_recipe!(
    RecipeEntry::new(&["KittenTTS"], kitten).tasks(&[Task::Speak]).options(&[WINDOWS])
);

fn kokoro(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    // Published checkpoints have the names of a model that was trained on several devices.
    let checkpoint = &checkpoint.renamed(|name| {
        let wrapped = name.split_once('.').map(|(part, rest)| format!("{part}.module.{rest}"));
        [Some(name.to_owned()), wrapped].into_iter().flatten().collect()
    });
    let config = Config::read(checkpoint)?;
    let voices = voices(checkpoint, &config)?;
    let scripts: Vec<_> = voices.names.iter().map(|name| script(name)).collect();
    let lexicon = options.choice(LEXICON.name).map(lexicon).transpose()?;
    let own = object(json!({"script": scripts}));
    recipe(checkpoint, options, &config, (voices, own), lexicon)
}

fn kitten(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let checkpoint = &checkpoint.renamed(kitten::names);
    kitten::leave_out(checkpoint);
    let config = kitten::config(checkpoint)?;
    let voices = kitten::voices(checkpoint, &config)?;
    recipe(checkpoint, options, &config, voices, None)
}

/// The recipe with the parameters of speech that are a model's own.
fn recipe(
    checkpoint: &Checkpoint,
    options: &RecipeOptions,
    config: &Config,
    (voices, own): (Voices, Map<String, Value>),
    lexicon: Option<Tables>,
) -> Result<Recipe> {
    if options.shards != 1 {
        let what = format!("{} shards, expected 1: no graph has layers to spread", options.shards);
        return Err(Error::new(ErrorKind::Usage, what));
    }
    let seconds = windows(options, MAX_WINDOW, &DEFAULT_WINDOWS)?;
    let frames: Vec<_> = seconds.iter().map(|s| (s * RATE).div_ceil(config.samples())).collect();
    let positions = config.albert.positions;
    let lengths = if positions > SHORT { vec![SHORT, positions] } else { vec![positions] };
    let model = Model {
        layers: Layers::new(checkpoint, options.precision, ALBERT_EPS),
        checkpoint,
        config,
        convs: Convolutions::new(checkpoint),
    };
    let mut plan_params = Map::new();
    let mut context = |key: &str, parts: &[(&str, &[usize], MakeGraph<'_>)]| {
        let mut graphs = Vec::new();
        for (name, sizes, make) in parts {
            let mut names = Vec::new();
            for size in *sizes {
                let name =
                    if sizes.len() == 1 { (*name).to_owned() } else { format!("{name}{size}") };
                graphs.push(make(&name, *size)?);
                names.push(name);
            }
            plan_params.insert((*name).to_owned(), one_or_many(names));
        }
        Ok::<_, Error>(ContextPlan::new(key.to_owned(), options.precision, graphs).once())
    };
    let contexts = vec![
        context(
            "text",
            &[
                ("albert", &lengths, &|name, size| model.albert(name, size)),
                ("symbols", &lengths, &|name, size| model.symbols(name, size)),
            ],
        )?,
        context("prosody", &[("prosody", &frames, &|name, size| model.prosody(name, size))])?,
        context("voice", &[("voice", &frames, &|name, size| model.voice(name, size))])?,
    ];
    checkpoint.leave_out("bert.pooler");
    checkpoint.leave_out("bert.embeddings.position_ids");
    let host = model.host_values()?;
    let held =
        |name: &str, values: Vec<f32>, cols: usize| held(name, [values.len() / cols, cols], values);
    let files = vec![
        MatrixFile::in_f32("host", "host", held("host", host, 1)),
        MatrixFile::in_f32("voices", "voices", held("voices", voices.values, 2 * config.style)),
    ];
    let Config { hidden, style, layers, tokens, durations, fft, hop, ref albert, .. } = *config;
    let pause = |symbol: &str| PAUSES.contains(symbol);
    let breaks: Vec<_> =
        config.symbols.iter().filter(|(symbol, _)| pause(symbol)).map(|(_, id)| id).collect();
    let tail = own.get("tail").and_then(Value::as_array).map_or(0, Vec::len);
    let mut params = object(json!({
        "hidden": hidden,
        "vocab": tokens,
        "n_layers": albert.layers,
        "n_heads": albert.heads,
        "max_ctx": positions,
        "speech": {
            "rate": RATE,
            "voices": voices.names,
            "symbols": config.symbols,
            "breaks": breaks,
            "limit": positions.saturating_sub(2 + tail),
            "rows": voices.rows,
            "style": style,
            "layers": layers,
            "durations": durations,
            "albert": {"layers": albert.layers, "embedding": albert.embedding, "positions": positions},
            "source": {
                "sines": SINES, "samples": config.samples() / CURVE, "fft": fft, "hop": hop,
                "lead": config.rates[1] / 2,
                "amplitude": 0.1, "noise": 0.003, "voiced": 10.0, "convolved": config.convolved,
            },
        },
    }));
    if let Some(Value::Object(speech)) = params.get_mut("speech") {
        speech.extend(own);
    }
    let recipe = Recipe::new("kokoro", "kokoro_speak", contexts, plan_params).params(params);
    let tables = [matrices("speech", files)].into_iter().chain(lexicon);
    Ok(recipe.tables(tables.collect()).without_tokenizer())
}

/// Step from texts to phonemes for a voice: `af_heart` is English, `ef_dora` Spanish.
fn script(voice: &str) -> Value {
    let letter = voice.split_once('_').and_then(|(kind, _)| kind.chars().next());
    let named = |(known, _): &&(char, &str)| letter == Some(*known);
    if let Some((_, language)) = LANGUAGES.iter().find(named) {
        return json!({"by": "espeak", "voice": language, "joined": true});
    }
    let other = OTHERS.iter().find(named);
    other.map_or_else(|| json!({"by": "lexicon"}), |(_, of)| json!({"by": "phonemes", "of": of}))
}

/// Makes graphs. Tensors of frames are `[1, channels, frames]`.
struct Model<'a> {
    layers: Layers<'a>,
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    convs: Convolutions<'a>,
}
