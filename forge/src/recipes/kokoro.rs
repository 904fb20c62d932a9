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
//! LSTMs, embeddings, durations, sines and both Fourier transforms are computed by the host-op, in f32. What it reads for
//! that is one file of f32 (`host_values`). Instance norms are over the frames of the clip alone.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use qhx_core::{DType, Error, ErrorKind, Result, files};
use serde_json::{Map, Value, json};

use super::choices::numbers;
use crate::builder::GraphBuilder;
use crate::checkpoint::Checkpoint;
use crate::graph::{BinaryOp, Conv1d, Elem, Graph, ReduceOp, TensorId, UnaryOp};
use crate::kit::{Layers, MatrixFile, Reader, matrices, object, one_or_many};
use crate::progress::Progress;
use crate::recipe::{ContextPlan, Recipe, RecipeOptions, TableFile, TableSource, Tables, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};
use crate::weight::{RowSource, Storage, Weight};

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
/// Epsilon of `InstanceNorm1d` and of the LayerNorms that are no ALBERT's.
const EPS: f32 = 1e-5;
/// Epsilon of ALBERT's.
const ALBERT_EPS: f32 = 1e-12;
/// Slopes of LeakyReLUs: of blocks, of the generator, and in front of its last convolution.
const SLOPES: [f32; 3] = [0.2, 0.1, 0.01];
/// Added to the scores of what lies behind the symbols.
const HIDDEN: f32 = -30_000.0;
/// Symbols that a text is rather cut behind.
const PAUSES: &str = " ,.;:!?—…";
/// Longest lexicon that is read.
const MAX_LEXICON: u64 = 64 << 20;
/// Layers that a configuration may have.
const MAX_LAYERS: usize = 64;

register_recipe!(
    RecipeEntry::new(&["KModel"], recipe).tasks(&[Task::Speak]).options(&[WINDOWS, LEXICON])
);

/// What is read of `config.json`.
#[derive(Debug)]
struct Config {
    hidden: usize,
    style: usize,
    layers: usize,
    /// Symbols of the vocabulary.
    tokens: usize,
    durations: usize,
    /// Symbols that a convolution of the text encoder sees; odd.
    kernel: usize,
    /// Channels of the decoder, and those of the symbols that each of its blocks sees again.
    wide: usize,
    narrow: usize,
    /// Channels that the generator begins with.
    initial: usize,
    rates: [usize; 2],
    /// Kernels and dilations of the residual blocks.
    blocks: Vec<(usize, [usize; 3])>,
    fft: usize,
    hop: usize,
    albert: Albert,
    symbols: BTreeMap<String, u32>,
}

#[derive(Debug)]
struct Albert {
    width: usize,
    embedding: usize,
    heads: usize,
    inner: usize,
    layers: usize,
    positions: usize,
}

impl Config {
    fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let whole = Reader::whole(checkpoint);
        let reader = Reader::part(checkpoint, "plbert")?;
        reader.only("hidden_act", &json!("gelu_new"))?;
        reader.only("num_hidden_groups", &json!(1))?;
        reader.only("inner_group_num", &json!(1))?;
        let albert = Albert {
            width: reader.size("hidden_size")?,
            embedding: reader.size_or("embedding_size", 128)?,
            heads: reader.size("num_attention_heads")?,
            inner: reader.size("intermediate_size")?,
            layers: reader.layers()?,
            positions: reader.bounded("max_position_embeddings", 1 << 14)?,
        };
        if !albert.width.is_multiple_of(albert.heads) || albert.positions < 3 {
            return Err(reader.fault(format!(
                "hidden_size {}, num_attention_heads {}, max_position_embeddings {}: expected a width that the heads \
                 divide, and 3 positions or more",
                albert.width, albert.heads, albert.positions
            )));
        }
        let net = Reader::part(checkpoint, "istftnet")?;
        let list = |key: &str| -> Result<Vec<usize>> {
            let found = net.get(key).unwrap_or(&Value::Null);
            let size =
                |value: &Value| value.as_u64().filter(|n| (1..=64).contains(n)).map(|n| n as usize);
            let sizes = found.as_array().and_then(|list| list.iter().map(size).collect());
            sizes.ok_or_else(|| net.bad(key, found, "a list of numbers from 1 to 64"))
        };
        let rates = list("upsample_rates")?;
        let kernels = list("upsample_kernel_sizes")?;
        let doubled = rates.iter().map(|rate| 2 * rate).eq(kernels.iter().copied());
        let (&[first, last], true) = (&rates[..], doubled) else {
            return Err(net.fault(format!(
                "upsample_rates {rates:?}, upsample_kernel_sizes {kernels:?}: expected two rates, and kernels of twice them"
            )));
        };
        let (fft, hop) =
            (net.bounded("gen_istft_n_fft", 4096)?, net.bounded("gen_istft_hop_size", 4096)?);
        let initial = net.bounded("upsample_initial_channel", 1 << 14)?;
        if first % 2 + last % 2 + fft % 2 + initial % 4 > 0 || hop > fft {
            return Err(net.fault(format!(
                "upsample_rates {rates:?}, gen_istft_n_fft {fft}, gen_istft_hop_size {hop}, upsample_initial_channel \
                 {initial}: expected even numbers, a hop of at most the transform, and channels that 4 divides"
            )));
        }
        let key = "resblock_dilation_sizes";
        let found = net.get(key).unwrap_or(&Value::Null);
        let dilations: Option<Vec<[usize; 3]>> = serde_json::from_value(found.clone()).ok();
        let legal = |sizes: &Vec<[usize; 3]>| sizes.iter().flatten().all(|n| (1..=64).contains(n));
        let dilations =
            dilations.filter(legal).ok_or_else(|| net.bad(key, found, "lists of three numbers"))?;
        let kernels = list("resblock_kernel_sizes")?;
        if kernels.len() != dilations.len()
            || kernels.is_empty()
            || kernels.iter().any(|k| k % 2 == 0)
        {
            return Err(net.bad(
                key,
                found,
                "one list for each of resblock_kernel_sizes, which are odd",
            ));
        }
        let hidden = whole.bounded("hidden_dim", 1 << 14)?;
        let kernel = whole.bounded("text_encoder_kernel_size", 63)?;
        if hidden % 2 > 0 || kernel % 2 == 0 {
            return Err(whole.fault(format!(
                "hidden_dim {hidden}, text_encoder_kernel_size {kernel}: expected an even and an odd number"
            )));
        }
        let tokens = whole.size("n_token")?;
        let found = whole.get("vocab").unwrap_or(&Value::Null);
        let symbols: Option<BTreeMap<String, u32>> = serde_json::from_value(found.clone()).ok();
        let symbols = symbols.filter(|symbols| symbols.values().all(|id| (*id as usize) < tokens));
        let symbols = symbols.ok_or_else(|| {
            whole.fault(format!(
                "vocab: expected an object of symbols with numbers below n_token, {tokens}"
            ))
        })?;
        Ok(Self {
            hidden,
            style: whole.bounded("style_dim", 1 << 12)?,
            layers: whole.bounded("n_layer", MAX_LAYERS)?,
            tokens,
            durations: whole.bounded("max_dur", 1 << 12)?,
            kernel,
            wide: 2 * whole.bounded("max_conv_dim", 1 << 12)?,
            narrow: whole.bounded("dim_in", 1 << 12)?,
            initial,
            rates: [first, last],
            blocks: kernels.into_iter().zip(dilations).collect(),
            fft,
            hop,
            albert,
            symbols,
        })
    }

    /// Samples of a frame.
    fn samples(&self) -> usize {
        CURVE * self.rates[0] * self.rates[1] * self.hop
    }
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    // Published checkpoints have the names of a model that was trained on several devices.
    let checkpoint = &checkpoint.renamed(|name| {
        let wrapped = name.split_once('.').map(|(part, rest)| format!("{part}.module.{rest}"));
        [Some(name.to_owned()), wrapped].into_iter().flatten().collect()
    });
    let config = Config::read(checkpoint)?;
    if options.shards != 1 {
        let what = format!("{} shards, expected 1: no graph has layers to spread", options.shards);
        return Err(Error::new(ErrorKind::Usage, what));
    }
    let asked = numbers(options, WINDOWS.name, 1..=MAX_WINDOW)?;
    let seconds = asked.unwrap_or_else(|| DEFAULT_WINDOWS.to_vec());
    let frames: Vec<_> = seconds.iter().map(|s| (s * RATE).div_ceil(config.samples())).collect();
    let positions = config.albert.positions;
    let lengths = if positions > SHORT { vec![SHORT, positions] } else { vec![positions] };
    let model = Model {
        layers: Layers::new(checkpoint, options.precision, ALBERT_EPS),
        checkpoint,
        config: &config,
        held: RefCell::default(),
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
    let (names, rows, voices) = voices(checkpoint, &config)?;
    let held = |name: &str, values: Vec<f32>, cols: usize| -> Arc<dyn RowSource> {
        Arc::new(Held { name: name.to_owned(), shape: [values.len() / cols, cols], values })
    };
    let files = vec![
        MatrixFile::in_f32("host", "host", held("host", host, 1)),
        MatrixFile::in_f32("voices", "voices", held("voices", voices, 2 * config.style)),
    ];
    let Config { hidden, style, layers, tokens, durations, fft, hop, ref albert, .. } = config;
    let pause = |symbol: &str| PAUSES.contains(symbol);
    let breaks: Vec<_> =
        config.symbols.iter().filter(|(symbol, _)| pause(symbol)).map(|(_, id)| id).collect();
    let params = object(json!({
        "hidden": hidden,
        "vocab": tokens,
        "n_layers": albert.layers,
        "n_heads": albert.heads,
        "max_ctx": positions,
        "speech": {
            "rate": RATE,
            "voices": names,
            "symbols": config.symbols,
            "breaks": breaks,
            "limit": positions - 2,
            "rows": rows,
            "style": style,
            "layers": layers,
            "durations": durations,
            "albert": {"layers": albert.layers, "embedding": albert.embedding, "positions": positions},
            "source": {
                "sines": SINES, "samples": config.samples() / CURVE, "fft": fft, "hop": hop,
                "lead": config.rates[1] / 2,
                "amplitude": 0.1, "noise": 0.003, "voiced": 10.0,
            },
        },
    }));
    let recipe = Recipe::new("kokoro", "kokoro_speak", contexts, plan_params).params(params);
    let lexicon = options.choice(LEXICON.name).map(lexicon).transpose()?;
    let tables = [matrices("speech", files)].into_iter().chain(lexicon);
    Ok(recipe.tables(tables.collect()).without_tokenizer())
}

/// A lexicon as a file of the bundle: the JSON objects of all files as one.
fn lexicon(files: &str) -> Result<Tables> {
    let mut words = Map::new();
    for file in files.split(',').rev() {
        let path = std::path::Path::new(file.trim());
        let bytes = files::read(ErrorKind::Usage, path, MAX_LEXICON)?;
        let found: Map<String, Value> = serde_json::from_slice(&bytes).map_err(|e| {
            let what = format!("{}: no lexicon, expected a JSON object of words", path.display());
            Error::caused(ErrorKind::Usage, what, e)
        })?;
        words.extend(found);
    }
    let bytes = serde_json::to_vec(&words)
        .map_err(|e| Error::caused(ErrorKind::Internal, "the lexicon", e))?;
    // Not `.json`, which a manifest ends in.
    let file =
        TableFile { field: "words".to_owned(), name: "lexicon.words".to_owned(), dtype: None };
    Ok(Tables { key: "lexicon".to_owned(), files: vec![file], source: Arc::new(Bytes(bytes)) })
}

/// A file as it is.
#[derive(Debug)]
struct Bytes(Vec<u8>);

impl TableSource for Bytes {
    fn bytes(&self) -> u64 {
        self.0.len() as u64
    }

    fn write(&self, files: &mut [&mut dyn Write], progress: &mut dyn Progress) -> Result<()> {
        for file in files {
            file.write_all(&self.0).map_err(|e| Error::caused(ErrorKind::Io, "the lexicon", e))?;
        }
        progress.advance(self.bytes());
        Ok(())
    }
}

/// The names of the voices, the rows that each has, and their values. Row n is that of n + 1 symbols: the style of the
/// decoder, and that of the prosody behind it.
fn voices(checkpoint: &Checkpoint, config: &Config) -> Result<(Vec<String>, usize, Vec<f32>)> {
    let width = 2 * config.style;
    if checkpoint.seed().is_some() {
        let rows = config.albert.positions - 2;
        return Ok((vec!["drawn".to_owned()], rows, checkpoint.values("voice", &[rows * width])?));
    }
    let folder = checkpoint.dir().join("voices");
    let files = std::fs::read_dir(&folder).map_err(|e| {
        Error::io(ErrorKind::Artifact, &folder, e).hint(
            "a voice of the model is a file voices/NAME.pt beside config.json; download them, too",
        )
    })?;
    let files = files.filter_map(|entry| Some(entry.ok()?.path()));
    let mut files: Vec<PathBuf> =
        files.filter(|file| file.extension().is_some_and(|end| end == "pt")).collect();
    files.sort();
    let (mut names, mut all, mut rows) = (Vec::new(), Vec::new(), None::<usize>);
    for file in &files {
        let fail =
            |what: String| Error::new(ErrorKind::Artifact, format!("{}: {what}", file.display()));
        let one = Checkpoint::open_torch(file)?;
        let shape = one.stored("").map(|(_, shape)| shape).unwrap_or_default();
        let expected = match (&shape[..], rows) {
            (&[found, 1, last], None) => last == width && found > 0,
            (&[found, 1, last], Some(rows)) => last == width && found == rows,
            _ => false,
        };
        if !expected {
            return Err(fail(format!(
                "holds a tensor {shape:?}, expected [{}, 1, {width}]",
                rows.map_or_else(|| "lengths".to_owned(), |rows: usize| rows.to_string())
            )));
        }
        rows = Some(shape[0]);
        all.extend(one.values("", &shape)?);
        names.push(file.file_stem().unwrap_or_default().to_string_lossy().into_owned());
    }
    let Some(rows) = rows else {
        return Err(Error::new(
            ErrorKind::Artifact,
            format!("{}: holds no voice, a file .pt", folder.display()),
        ));
    };
    Ok((names, rows, all))
}

/// The frames of a graph at one of its rates.
#[derive(Debug, Clone, Copy)]
struct Level {
    len: usize,
    /// `[1, 1, len]`: 1 in the clip, 0 behind it.
    keep: TensorId,
    /// `[1, 1, 1]`: `len` over the frames of the clip.
    fill: TensorId,
}

/// Makes graphs. Tensors of frames are `[1, channels, frames]`.
struct Model<'a> {
    layers: Layers<'a>,
    checkpoint: &'a Checkpoint,
    config: &'a Config,
    /// Weights that graphs of several lengths have, by name.
    held: RefCell<BTreeMap<String, Arc<dyn RowSource>>>,
}

impl Model<'_> {
    /// `AlbertLayer`.
    fn albert(&self, name: &str, rows: usize) -> Result<Graph> {
        let Albert { width, heads, inner, .. } = self.config.albert;
        let at = |part: &str| format!("bert.encoder.albert_layer_groups.0.albert_layers.0.{part}");
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, width])?;
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        // 0 for symbols, and below every score for what lies behind them.
        let hidden = b.scale(keep, -HIDDEN)?;
        let offset = b.scalar(hidden, HIDDEN)?;
        let hidden = b.add(hidden, offset)?;
        let mask = b.reshape(hidden, &[1, 1, rows])?;
        b.scope("attn");
        let dim = width / heads;
        let project = |b: &mut GraphBuilder, part: &str| {
            let y = self.layers.linear(b, x, &at(part), width, true)?;
            let y = b.reshape(y, &[rows, heads, dim])?;
            b.transpose(y, &[1, 0, 2])
        };
        let q = project(&mut b, "attention.query")?;
        let q = b.scale(q, 1.0 / (dim as f32).sqrt())?;
        let [k, v] = [project(&mut b, "attention.key")?, project(&mut b, "attention.value")?];
        let scores = b.matmul(q, k, true)?;
        let scores = b.add(scores, mask)?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, v, false)?;
        let mixed = b.transpose(mixed, &[1, 0, 2])?;
        let mixed = b.reshape(mixed, &[rows, width])?;
        let mixed = self.layers.linear(&mut b, mixed, &at("attention.dense"), width, true)?;
        let h = b.add(x, mixed)?;
        let h = self.layers.layer_norm(&mut b, h, &at("attention.LayerNorm"))?;
        b.scope("mlp");
        let names = [&at("ffn")[..], &at("ffn_output")[..]];
        let y = self.layers.feed_forward(&mut b, h, names, inner, |b, x| b.gelu_tanh(x))?;
        let y = b.add(y, h)?;
        let y = self.layers.layer_norm(&mut b, y, &at("full_layer_layer_norm"))?;
        b.output("y", y)?;
        b.finish()
    }

    /// `TextEncoder` between its embedding and its LSTM.
    fn symbols(&self, name: &str, rows: usize) -> Result<Graph> {
        let Config { hidden, kernel, layers, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[rows, hidden])?;
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        for layer in 0..layers {
            b.scope(format!("l{layer}"));
            let at = format!("text_encoder.cnn.{layer}");
            let x = b.transpose(h, &[1, 0])?;
            let x = b.reshape(x, &[1, hidden, rows])?;
            let conv = Conv1d { padding: [kernel / 2; 2], ..Conv1d::new(kernel) };
            let x = self.conv(&mut b, x, &format!("{at}.0"), [hidden, hidden], conv, true)?;
            let x = b.reshape(x, &[hidden, rows])?;
            let x = b.transpose(x, &[1, 0])?;
            let [gamma, beta] = ["gamma", "beta"]
                .map(|part| self.checkpoint.values(&format!("{at}.1.{part}"), &[hidden]));
            let (gamma, beta) = (b.row("gamma", gamma?)?, b.row("beta", beta?)?);
            let x = b.layer_norm(x, EPS, gamma, beta)?;
            let x = leaky(&mut b, x, SLOPES[0])?;
            h = b.mul(x, keep)?;
        }
        b.output("y", h)?;
        b.finish()
    }

    /// The chains of `ProsodyPredictor.F0Ntrain` behind their LSTM.
    fn prosody(&self, name: &str, frames: usize) -> Result<Graph> {
        let Config { hidden, style, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[frames, hidden])?;
        let style = b.input("style", Elem::Activation, &[1, style])?;
        let ([frame, curve], _) = levels(&mut b, frames)?;
        let x = by_channels(&mut b, x)?;
        let mut curves = Vec::new();
        for part in ["F0", "N"] {
            let at = |block: usize| format!("predictor.{part}.{block}");
            b.scope(part.to_lowercase());
            let h = self.block(&mut b, x, style, &at(0), [hidden; 2], [frame; 2])?;
            let h = self.block(&mut b, h, style, &at(1), [hidden, hidden / 2], [frame, curve])?;
            let h = self.block(&mut b, h, style, &at(2), [hidden / 2; 2], [curve; 2])?;
            let name = format!("predictor.{part}_proj");
            let weight = self.checkpoint.rows(&format!("{name}.weight"), &[1, hidden / 2, 1])?;
            let bias = self.checkpoint.values(&format!("{name}.bias"), &[1])?;
            let weight = Weight::new(weight, Storage::Float);
            let y = b.conv1d("proj", h, weight, Some(bias), Conv1d::new(1))?;
            curves.push(b.reshape(y, &[1, curve.len])?);
        }
        let curves = b.concat(&curves, 0)?;
        b.output("curves", curves)?;
        b.finish()
    }

    /// `Decoder` and its `Generator`, without what is before its first convolution over the source and behind its last.
    fn voice(&self, name: &str, frames: usize) -> Result<Graph> {
        let Config { hidden, style, wide, narrow, initial, rates, fft, ref blocks, .. } =
            *self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[frames, hidden])?;
        let style = b.input("style", Elem::Activation, &[1, style])?;
        let curves = b.input("curves", Elem::Activation, &[2, frames])?;
        let (bins, fine) = (fft + 2, CURVE * frames * rates[0] * rates[1]);
        let lead = rates[1] / 2;
        let source = b.input("source", Elem::Activation, &[bins, fine + rates[1]])?;
        let ([frame, curve], fills) = levels(&mut b, frames)?;
        let coarse = finer(&mut b, curve, rates[0])?;
        let last = {
            let level = finer(&mut b, coarse, rates[1])?;
            let one = b.constant("one", Elem::Activation, &[1, 1, 1], vec![1.0])?;
            let keep = b.concat(&[one, level.keep], 2)?;
            Level { len: level.len + 1, keep, fill: number(&mut b, fills, 1)? }
        };
        let x = by_channels(&mut b, x)?;
        let curves = b.reshape(curves, &[1, 2, frames])?;
        let h = b.concat(&[x, curves], 1)?;
        b.scope("encode");
        let mut h =
            self.block(&mut b, h, style, "decoder.encode", [hidden + 2, wide], [frame; 2])?;
        let again =
            self.conv(&mut b, x, "decoder.asr_res.0", [narrow, hidden], Conv1d::new(1), true)?;
        let again = b.mul(again, frame.keep)?;
        for block in 0..4 {
            b.scope(format!("decode{block}"));
            h = b.concat(&[h, again, curves], 1)?;
            let (to, level) = if block == 3 { (initial, curve) } else { (wide, frame) };
            let sizes = [wide + narrow + 2, to];
            h = self.block(
                &mut b,
                h,
                style,
                &format!("decoder.decode.{block}"),
                sizes,
                [frame, level],
            )?;
        }
        let source = b.reshape(source, &[1, bins, fine + rates[1]])?;
        let mut channels = initial;
        for (stage, level) in [coarse, last].into_iter().enumerate() {
            let at = |part: &str, index: usize| format!("decoder.generator.{part}.{index}");
            let (from, rate) = (channels, rates[stage]);
            channels /= 2;
            b.scope(format!("source{stage}"));
            let (seen, conv, kernel) = match stage {
                0 => (source, Conv1d { stride: rates[1], ..Conv1d::new(2 * rates[1]) }, 7),
                _ => (b.slice(source, 2, lead, lead + fine + 1)?, Conv1d::new(1), 11),
            };
            let name = at("noise_convs", stage);
            let weight =
                self.checkpoint.rows(&format!("{name}.weight"), &[channels, bins, conv.kernel])?;
            let bias = self.checkpoint.values(&format!("{name}.bias"), &[channels])?;
            let seen =
                b.conv1d("conv", seen, Weight::new(weight, Storage::Float), Some(bias), conv)?;
            let seen = b.mul(seen, level.keep)?;
            let block = (kernel, [1, 3, 5]);
            let seen = self.residual(
                &mut b,
                [seen, style],
                &at("noise_res", stage),
                channels,
                block,
                level,
            )?;
            b.scope(format!("up{stage}"));
            h = leaky(&mut b, h, SLOPES[1])?;
            h = self.up(&mut b, h, &at("ups", stage), [channels, from], rate)?;
            if stage == 1 {
                // The second frame again in front of the first.
                let second = b.slice(h, 2, 1, 2)?;
                h = b.concat(&[second, h], 2)?;
            }
            h = b.mul(h, level.keep)?;
            h = b.add(h, seen)?;
            let mut sum = None;
            for (index, block) in blocks.iter().enumerate() {
                let index = stage * blocks.len() + index;
                b.scope(format!("res{index}"));
                let y = self.residual(
                    &mut b,
                    [h, style],
                    &at("resblocks", index),
                    channels,
                    *block,
                    level,
                )?;
                sum = Some(match sum {
                    None => y,
                    Some(sum) => b.add(sum, y)?,
                });
            }
            let sum = sum.unwrap_or(h);
            h = b.scale(sum, 1.0 / blocks.len() as f32)?;
        }
        b.scope("post");
        let h = leaky(&mut b, h, SLOPES[2])?;
        let conv = Conv1d { padding: [3, 3], ..Conv1d::new(7) };
        let h =
            self.conv(&mut b, h, "decoder.generator.conv_post", [bins, channels], conv, true)?;
        let h = b.reshape(h, &[bins, fine + 1])?;
        b.output("spectrum", h)?;
        b.finish()
    }

    /// `AdainResBlk1d`: frames of the first level, of `inputs` channels, become those of the second, of `outputs`. They are 0
    /// behind the clip.
    fn block(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        style: TensorId,
        at: &str,
        [inputs, outputs]: [usize; 2],
        [from, to]: [Level; 2],
    ) -> Result<TensorId> {
        let up = from.len != to.len;
        let three = Conv1d { padding: [1, 1], ..Conv1d::new(3) };
        let h = self.adain(b, x, style, &format!("{at}.norm1"), inputs, from)?;
        let mut h = leaky(b, h, SLOPES[0])?;
        if up {
            h = b.mul(h, from.keep)?;
            h = self.pool(b, h, &format!("{at}.pool"), inputs)?;
        }
        h = b.mul(h, to.keep)?;
        h = self.conv(b, h, &format!("{at}.conv1"), [outputs, inputs], three, true)?;
        h = b.mul(h, to.keep)?;
        h = self.adain(b, h, style, &format!("{at}.norm2"), outputs, to)?;
        h = leaky(b, h, SLOPES[0])?;
        h = b.mul(h, to.keep)?;
        h = self.conv(b, h, &format!("{at}.conv2"), [outputs; 2], three, true)?;
        h = b.mul(h, to.keep)?;
        let mut direct = x;
        if up {
            direct = interleave(b, direct, direct)?;
        }
        if inputs != outputs {
            direct = self.conv(
                b,
                direct,
                &format!("{at}.conv1x1"),
                [outputs, inputs],
                Conv1d::new(1),
                false,
            )?;
        }
        let sum = b.add(h, direct)?;
        b.scale(sum, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// `AdaINResBlock1`.
    fn residual(
        &self,
        b: &mut GraphBuilder,
        [mut x, style]: [TensorId; 2],
        at: &str,
        channels: usize,
        (kernel, dilations): (usize, [usize; 3]),
        level: Level,
    ) -> Result<TensorId> {
        for (index, dilation) in dilations.into_iter().enumerate() {
            let mut h = x;
            for (which, dilation) in [(1, dilation), (2, 1)] {
                let part = |name: &str| format!("{at}.{name}{which}.{index}");
                h = self.adain(b, h, style, &part("adain"), channels, level)?;
                h = self.snake(b, h, &part("alpha"), channels)?;
                h = b.mul(h, level.keep)?;
                let padding = [(kernel - 1) * dilation / 2; 2];
                let conv = Conv1d { padding, dilation, ..Conv1d::new(kernel) };
                h = self.conv(b, h, &part("convs"), [channels; 2], conv, true)?;
                h = b.mul(h, level.keep)?;
            }
            x = b.add(h, x)?;
        }
        Ok(x)
    }

    /// `AdaIN1d` (Huang and Belongie 2017, arXiv 1703.06868): each channel without mean and of variance 1 over the clip,
    /// scaled and shifted by the style. `x` is 0 behind the clip, what is returned is not.
    fn adain(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        style: TensorId,
        at: &str,
        channels: usize,
        level: Level,
    ) -> Result<TensorId> {
        let weight = self
            .checkpoint
            .matrix(&format!("{at}.fc.weight"), [2 * channels, self.config.style])?;
        let mut bias = self.checkpoint.values(&format!("{at}.fc.bias"), &[2 * channels])?;
        bias.iter_mut().take(channels).for_each(|gamma| *gamma += 1.0);
        let name = graph_name(at);
        let styled = b.linear(
            &format!("{name}_fc"),
            style,
            Weight::new(weight, Storage::Float),
            Some(bias),
        )?;
        let part = |b: &mut GraphBuilder, at: usize| {
            let part = b.slice(styled, 1, at * channels, (at + 1) * channels)?;
            b.reshape(part, &[1, channels, 1])
        };
        let (mut gamma, mut beta) = (part(b, 0)?, part(b, 1)?);
        // Few checkpoints have these: the norm was trained without.
        if self.checkpoint.has(&format!("{at}.norm.weight")) {
            let mut values = |part: &str| -> Result<TensorId> {
                let values = self.checkpoint.values(&format!("{at}.norm.{part}"), &[channels])?;
                b.constant(&format!("{name}_{part}"), Elem::Activation, &[1, channels, 1], values)
            };
            let (weight, bias) = (values("weight")?, values("bias")?);
            let shift = b.mul(gamma, bias)?;
            beta = b.add(beta, shift)?;
            gamma = b.mul(gamma, weight)?;
        }
        let over_clip = |b: &mut GraphBuilder, x: TensorId| {
            let mean = b.reduce(ReduceOp::Mean, x, 2)?;
            b.mul(mean, level.fill)
        };
        let mean = over_clip(b, x)?;
        let centred = b.sub(x, mean)?;
        let centred = b.mul(centred, level.keep)?;
        let squares = b.mul(centred, centred)?;
        let variance = over_clip(b, squares)?;
        let eps = b.scalar(variance, EPS)?;
        let variance = b.add(variance, eps)?;
        let scale = b.unary(UnaryOp::Rsqrt, variance)?;
        let scale = b.mul(scale, gamma)?;
        let y = b.mul(centred, scale)?;
        b.add(y, beta)
    }

    /// `x + sin²(a·x) / a` (Ziyin et al. 2020, arXiv 2006.08195).
    fn snake(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        channels: usize,
    ) -> Result<TensorId> {
        let mut alpha = self.checkpoint.values(name, &[1, channels, 1])?;
        if self.checkpoint.seed().is_some() {
            // Drawn ones may be 0.
            alpha.fill(1.0);
        }
        let inverse: Vec<_> = alpha.iter().map(|a| 1.0 / a).collect();
        if inverse.iter().any(|value| !value.is_finite()) {
            let what = format!("tensor {name} holds 0, expected numbers to divide by");
            return Err(Error::new(ErrorKind::Artifact, what));
        }
        let name = graph_name(name);
        let mut constant = |end: &str, values| {
            b.constant(&format!("{name}_{end}"), Elem::Activation, &[1, channels, 1], values)
        };
        let (alpha, inverse) = (constant("a", alpha)?, constant("inverse", inverse)?);
        let sine = b.mul(x, alpha)?;
        let sine = b.unary(UnaryOp::Sin, sine)?;
        let square = b.mul(sine, sine)?;
        let square = b.mul(square, inverse)?;
        b.add(x, square)
    }

    /// A convolution with weight norm.
    fn conv(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        [outputs, inputs]: [usize; 2],
        conv: Conv1d,
        biased: bool,
    ) -> Result<TensorId> {
        let weight = self.hold(at, || {
            let values = self.normed(at, &[outputs, inputs, conv.kernel])?;
            Ok(([outputs, inputs * conv.kernel], values))
        })?;
        let bias = biased.then(|| self.checkpoint.values(&format!("{at}.bias"), &[outputs]));
        b.conv1d(&graph_name(at), x, Weight::new(weight, Storage::Float), bias.transpose()?, conv)
    }

    /// `ConvTranspose1d` with a kernel of twice its stride and weight norm, `[1, from, frames]` to
    /// `[1, to, frames · rate]`: each frame and the one before it give as many as the rate, of which half a rate is cut
    /// off at both ends.
    fn up(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        [to, from]: [usize; 2],
        rate: usize,
    ) -> Result<TensorId> {
        let weight = self.hold(at, || {
            let values = self.normed(at, &[from, to, 2 * rate])?;
            let mut turned = vec![0.0; values.len()];
            for (input, of_input) in values.chunks_exact(to * 2 * rate).enumerate() {
                for (row, value) in of_input.iter().enumerate() {
                    let (output, step) = (row / (2 * rate), row % (2 * rate));
                    // The frame before gives the second half of what it spreads to.
                    let (step, tap) = if step < rate { (step, 1) } else { (step - rate, 0) };
                    turned[((output * rate + step) * from + input) * 2 + tap] = *value;
                }
            }
            Ok(([to * rate, from * 2], turned))
        })?;
        let len = b.width(x)?;
        let bias = self.checkpoint.values(&format!("{at}.bias"), &[to])?;
        let bias = bias.iter().flat_map(|value| std::iter::repeat_n(*value, rate)).collect();
        let conv = Conv1d { padding: [1, 1], ..Conv1d::new(2) };
        let y =
            b.conv1d(&graph_name(at), x, Weight::new(weight, Storage::Float), Some(bias), conv)?;
        let y = b.reshape(y, &[to, rate, len + 1])?;
        let y = b.transpose(y, &[0, 2, 1])?;
        let y = b.reshape(y, &[1, to, (len + 1) * rate])?;
        b.slice(y, 2, rate / 2, rate / 2 + len * rate)
    }

    /// `ConvTranspose1d` of each channel by itself: kernel 3, stride 2, two frames for each.
    fn pool(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        channels: usize,
    ) -> Result<TensorId> {
        let values = self.normed(at, &[channels, 1, 3])?;
        let bias = self.checkpoint.values(&format!("{at}.bias"), &[channels])?;
        let name = graph_name(at);
        let constant = |b: &mut GraphBuilder, part: &str, values: Vec<f32>| {
            b.constant(&format!("{name}_{part}"), Elem::Activation, &[1, channels, 1], values)
        };
        let tap = |at: usize| values.iter().skip(at).step_by(3).copied().collect::<Vec<_>>();
        let bias = constant(b, "bias", bias)?;
        let taps =
            [constant(b, "0", tap(0))?, constant(b, "1", tap(1))?, constant(b, "2", tap(2))?];
        let len = b.width(x)?;
        let next = b.slice(x, 2, 1, len)?;
        let none = b.constant(
            &format!("{name}_none"),
            Elem::Activation,
            &[1, channels, 1],
            vec![0.0; channels],
        )?;
        let next = b.concat(&[next, none], 2)?;
        let even = b.mul(x, taps[1])?;
        let even = b.add(even, bias)?;
        let odd = b.mul(x, taps[2])?;
        let following = b.mul(next, taps[0])?;
        let odd = b.add(odd, following)?;
        let odd = b.add(odd, bias)?;
        interleave(b, even, odd)
    }

    /// A weight with weight norm (Salimans and Kingma 2016, arXiv 1602.07868): `v`, each of its first dimension of the
    /// length `g`.
    fn normed(&self, at: &str, shape: &[usize]) -> Result<Vec<f32>> {
        let new = format!("{at}.parametrizations.weight.original1");
        let names = match self.checkpoint.has(&new) {
            true => [format!("{at}.parametrizations.weight.original0"), new],
            false => [format!("{at}.weight_g"), format!("{at}.weight_v")],
        };
        let [lengths, values] = &names;
        let lengths = self.checkpoint.values(lengths, &[shape[0], 1, 1])?;
        let mut values = self.checkpoint.values(values, shape)?;
        let rest = shape.iter().skip(1).product::<usize>().max(1);
        for (row, length) in values.chunks_exact_mut(rest).zip(lengths) {
            let norm = row.iter().map(|v| f64::from(*v) * f64::from(*v)).sum::<f64>().sqrt();
            let factor = if norm > 0.0 { (f64::from(length) / norm) as f32 } else { 0.0 };
            row.iter_mut().for_each(|value| *value *= factor);
        }
        Ok(values)
    }

    /// A weight that was made of the checkpoint's, once for all graphs.
    fn hold(
        &self,
        name: &str,
        make: impl FnOnce() -> Result<([usize; 2], Vec<f32>)>,
    ) -> Result<Arc<dyn RowSource>> {
        if let Some(held) = self.held.borrow().get(name) {
            return Ok(Arc::clone(held));
        }
        let (shape, values) = make()?;
        let held: Arc<dyn RowSource> =
            Arc::new(Held { name: format!("{name}.weight"), shape, values });
        self.held.borrow_mut().insert(name.to_owned(), Arc::clone(&held));
        Ok(held)
    }

    /// What the host-op computes with, one tensor behind the other, in the order in which it reads them.
    fn host_values(&self) -> Result<Vec<f32>> {
        let Config { hidden, style, layers, tokens, durations, ref albert, .. } = *self.config;
        let &Albert { width, embedding, positions, .. } = albert;
        let mut all = Vec::new();
        let checkpoint = self.checkpoint;
        let values = |name: &str, shape: &[usize]| checkpoint.values(name, shape);
        let lstm = |all: &mut Vec<f32>, at: &str, inputs: usize| -> Result<()> {
            let size = hidden / 2;
            for end in ["", "_reverse"] {
                let part =
                    |part: &str, shape: &[usize]| values(&format!("{at}.{part}_l0{end}"), shape);
                all.extend(part("weight_ih", &[4 * size, inputs])?);
                all.extend(part("weight_hh", &[4 * size, size])?);
                let own = part("bias_hh", &[4 * size])?;
                all.extend(part("bias_ih", &[4 * size])?.iter().zip(own).map(|(a, b)| a + b));
            }
            Ok(())
        };
        let linear = |all: &mut Vec<f32>, at: &str, shape: [usize; 2]| -> Result<()> {
            all.extend(values(&format!("{at}.weight"), &shape)?);
            all.extend(values(&format!("{at}.bias"), &shape[..1])?);
            Ok(())
        };
        all.extend(values("bert.embeddings.word_embeddings.weight", &[tokens, embedding])?);
        // Every symbol is of the first type.
        let kinds = values("bert.embeddings.token_type_embeddings.weight", &[2, embedding])?;
        let places = values("bert.embeddings.position_embeddings.weight", &[positions, embedding])?;
        all.extend(
            places.iter().zip(kinds[..embedding].iter().cycle()).map(|(place, kind)| place + kind),
        );
        for part in ["weight", "bias"] {
            all.extend(values(&format!("bert.embeddings.LayerNorm.{part}"), &[embedding])?);
        }
        linear(&mut all, "bert.encoder.embedding_hidden_mapping_in", [width, embedding])?;
        linear(&mut all, "bert_encoder", [hidden, width])?;
        all.extend(values("text_encoder.embedding.weight", &[tokens, hidden])?);
        lstm(&mut all, "text_encoder.lstm", hidden)?;
        for layer in 0..layers {
            let at = |part: usize| format!("predictor.text_encoder.lstms.{part}");
            lstm(&mut all, &at(2 * layer), hidden + style)?;
            linear(&mut all, &format!("{}.fc", at(2 * layer + 1)), [2 * hidden, style])?;
        }
        lstm(&mut all, "predictor.lstm", hidden + style)?;
        linear(&mut all, "predictor.duration_proj.linear_layer", [durations, hidden])?;
        lstm(&mut all, "predictor.shared", hidden + style)?;
        for part in ["F0_conv", "N_conv"] {
            let at = format!("decoder.{part}");
            all.extend(self.normed(&at, &[1, 1, 3])?);
            all.extend(values(&format!("{at}.bias"), &[1])?);
        }
        linear(&mut all, "decoder.generator.m_source.l_linear", [1, SINES])?;
        Ok(all)
    }
}

/// `max(x, slope · x)`.
fn leaky(b: &mut GraphBuilder, x: TensorId, slope: f32) -> Result<TensorId> {
    let low = b.scale(x, slope)?;
    b.binary(BinaryOp::Max, x, low)
}

/// `[rows, channels]` as `[1, channels, rows]`.
fn by_channels(b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
    let &[rows, channels] = b.shape(x)? else {
        return Err(Error::new(ErrorKind::Internal, "frames of other than two dimensions"));
    };
    let x = b.transpose(x, &[1, 0])?;
    b.reshape(x, &[1, channels, rows])
}

/// `[1, channels, frames]` twice: a frame of the one and a frame of the other, in turns.
fn interleave(b: &mut GraphBuilder, even: TensorId, odd: TensorId) -> Result<TensorId> {
    let &[_, channels, len] = b.shape(even)? else {
        return Err(Error::new(ErrorKind::Internal, "frames of other than three dimensions"));
    };
    let [even, odd] = [b.reshape(even, &[channels, len, 1])?, b.reshape(odd, &[channels, len, 1])?];
    let both = b.concat(&[even, odd], 2)?;
    b.reshape(both, &[1, channels, 2 * len])
}

/// The inputs `keep` and `fill` as the levels of frames and of curves, and `fill` itself.
fn levels(b: &mut GraphBuilder, frames: usize) -> Result<([Level; 2], TensorId)> {
    let keep = b.input("keep", Elem::Activation, &[frames, 1])?;
    let fill = b.input("fill", Elem::Activation, &[1, 2])?;
    let keep = b.reshape(keep, &[1, 1, frames])?;
    let frame = Level { len: frames, keep, fill: number(b, fill, 0)? };
    Ok(([frame, finer(b, frame, CURVE)?], fill))
}

/// A number of a row.
fn number(b: &mut GraphBuilder, fill: TensorId, which: usize) -> Result<TensorId> {
    let one = b.slice(fill, 1, which, which + 1)?;
    b.reshape(one, &[1, 1, 1])
}

/// A level of as many frames for each.
fn finer(b: &mut GraphBuilder, level: Level, times: usize) -> Result<Level> {
    let len = level.len * times;
    let keep = b.reshape(level.keep, &[level.len, 1])?;
    let keep = b.concat(&vec![keep; times], 1)?;
    Ok(Level { len, keep: b.reshape(keep, &[1, 1, len])?, fill: level.fill })
}

/// The last parts of a tensor's name, as a name in a graph.
fn graph_name(at: &str) -> String {
    let mut parts: Vec<_> = at.rsplit('.').take(2).collect();
    parts.reverse();
    parts.join("_")
}

/// A matrix that was made of tensors of the checkpoint.
#[derive(Debug)]
struct Held {
    name: String,
    shape: [usize; 2],
    values: Vec<f32>,
}

impl RowSource for Held {
    fn name(&self) -> &str {
        &self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        let from = first.saturating_mul(self.shape[1]);
        let values = self.values.get(from..from.saturating_add(out.len())).ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("{}: no rows from {first} on", self.name))
        })?;
        out.copy_from_slice(values);
        Ok(())
    }
}
