//! Qwen3-ASR (`Qwen3ASRForConditionalGeneration`): a tower whose rows stand in a prompt for audio, and Qwen3's decoder.
//!
//! Arithmetic: `transformers`, `models/qwen3_asr/modeling_qwen3_asr.py` (Qwen team 2026, arXiv 2601.21337).
//! Convolutions see chunks of C frames, a second, each for itself, and make r = 13 rows of it; rows attend to each
//! other in windows of several chunks. A tower has one graph for each length of clips, of K chunks:
//!
//! | graph | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|---|
//! | `audio`, or `audio<K>` | `mel` | `[K · C, mels]` | log-mel frames; zeros behind the clip |
//! | | `keep` | `[K · r, 1]` | 1 for each row of the clip, 0 behind it |
//! | | → `rows` | `[K · r, hidden]` | what stands in the prompt |
//! | `decode`, `prefill<P>` | as those of Llama-like models | | |
//! | `lmhead` | `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |

use std::ops::Range;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{BinaryOp, Conv2d, Elem, Graph, TensorId};
use qhx_graph::weight::{Storage, Weight, held};
use qhx_types::MASK_VALUE;
use serde_json::{Map, Value, json};

use super::choices::numbers;
use crate::kit::{
    Attend, AttendInputs, Attention, Decoder, DecoderParams, ENCODER_WEIGHTS, Heads, Layers, Mlp,
    Processor, Reader, Step, check_shape, decoder, encoder_precision, filters, kept_mask,
    one_or_many, prefill_rows, sized,
};
use crate::recipe::{ContextPlan, Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

const CLASSES: [&str; 1] = ["Qwen3ASRForConditionalGeneration"];
const WINDOWS: RecipeOption = RecipeOption {
    name: "windows",
    values: &[],
    help: "seconds of the audio that the tower's graphs take at once; 8,30 by default. Each clip goes through the \
           shortest that holds it, a longer one is cut into pieces of the longest",
};
const DEFAULT_WINDOWS: [usize; 2] = [8, 30];
const MAX_WINDOW: usize = 120;
/// Samples of a second, of a frame, and between frames.
const RATE: usize = 16_000;
const FRAME: usize = 400;
const HOP: usize = 160;
/// Convolutions, each of which halves frames and mels.
const HALVINGS: usize = 3;
/// Epsilon of the tower's norms, which the configuration does not have.
const EPS: f32 = 1e-5;
/// Longest wavelength of the positions in a chunk.
const TIMESCALE: f64 = 10_000.0;
/// Tokens that prefill graphs take by default: a short clip, and 30 s of audio in a few chunks.
const PREFILL: [usize; 2] = [16, 128];
/// The template of published checkpoints, which says the same of every clip.
const PROMPT: &str = "<|im_start|>system\n{prompt}<|im_end|>\n<|im_start|>user\n<|audio_start|>{audio}<|audio_end|>\
                      <|im_end|>\n<|im_start|>assistant\n{language}";
/// Token behind which the words of an answer are.
const WORDS: &str = "<asr_text>";
/// Names of the languages, by their codes: `LANGUAGE_CODE_TO_NAME`.
const LANGUAGES: [(&str, &str); 30] = [
    ("ar", "Arabic"),
    ("cs", "Czech"),
    ("da", "Danish"),
    ("de", "German"),
    ("el", "Greek"),
    ("en", "English"),
    ("es", "Spanish"),
    ("fa", "Persian"),
    ("fi", "Finnish"),
    ("fil", "Filipino"),
    ("fr", "French"),
    ("hi", "Hindi"),
    ("hu", "Hungarian"),
    ("id", "Indonesian"),
    ("it", "Italian"),
    ("ja", "Japanese"),
    ("ko", "Korean"),
    ("mk", "Macedonian"),
    ("ms", "Malay"),
    ("nl", "Dutch"),
    ("pl", "Polish"),
    ("pt", "Portuguese"),
    ("ro", "Romanian"),
    ("ru", "Russian"),
    ("sv", "Swedish"),
    ("th", "Thai"),
    ("tr", "Turkish"),
    ("vi", "Vietnamese"),
    ("yue", "Cantonese"),
    ("zh", "Chinese"),
];

register_recipe!(
    RecipeEntry::new(&CLASSES, recipe)
        .tasks(&[Task::Transcribe])
        .prefill_graphs()
        .smaller_contexts()
        .options(&[WINDOWS, ENCODER_WEIGHTS])
);

/// Fields of `text_config` that are read: Qwen3's decoder.
#[derive(Debug, Clone, Copy)]
pub(super) struct Text {
    pub(super) hidden: usize,
    pub(super) vocab: usize,
    pub(super) layers: usize,
    pub(super) heads: Heads,
    inner: usize,
    pub(super) eps: f32,
    bias: bool,
    pub(super) rope_theta: f64,
    pub(super) positions: Option<usize>,
    pub(super) tied: bool,
}

/// Fields of `audio_config` that are read.
#[derive(Debug, Clone, Copy)]
struct Tower {
    width: usize,
    layers: usize,
    heads: usize,
    inner: usize,
    mels: usize,
    channels: usize,
    /// Frames of a chunk.
    chunk: usize,
    /// Chunks whose rows see each other.
    together: usize,
}

impl Text {
    pub(super) fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::part(checkpoint, "text_config")?;
        reader.only("hidden_act", &json!("silu"))?;
        reader.only("use_sliding_window", &json!(false))?;
        let hidden = reader.size_or("hidden_size", 2048)?;
        let heads = reader.heads(hidden, Some(8), Some(128))?;
        let layers = reader.layers_or(28)?;
        reader.kinds("layer_types", layers, &[("full_attention", ())])?;
        Ok(Self {
            hidden,
            vocab: reader.size("vocab_size")?,
            layers,
            heads,
            inner: reader.size_or("intermediate_size", 6144)?,
            eps: reader.epsilon(&["rms_norm_eps"], 1e-6)?,
            bias: reader.flag_or("attention_bias", false)?,
            rope_theta: reader.rope_theta(10_000.0)?,
            positions: reader.maybe_size("max_position_embeddings")?,
            tied: reader.tied(true)?,
        })
    }

    /// Parameters of the manifest.
    pub(super) fn params(&self, max_ctx: usize) -> Map<String, Value> {
        let Self { hidden, vocab, layers, heads, rope_theta, .. } = *self;
        DecoderParams { hidden, vocab, layers, heads, rope_theta }.map(max_ctx)
    }
}

impl Tower {
    fn read(reader: &Reader<'_>, hidden: usize) -> Result<Self> {
        reader.only("activation_function", &json!("gelu"))?;
        reader.only("scale_embedding", &json!(false))?;
        reader.only("output_dim", &json!(hidden))?;
        // The class counts 13 rows for a chunk, whatever this is.
        reader.only("n_window", &json!(50))?;
        let width = reader.size_or("d_model", 1024)?;
        let heads = reader.size_or("encoder_attention_heads", 16)?;
        let half = reader.size_or("n_window", 50)?;
        let together = reader.size_or("n_window_infer", 800)?;
        let layers = match reader.get("encoder_layers") {
            Some(_) => reader.bounded("encoder_layers", 256)?,
            None => 24,
        };
        let rows = halved(2 * half);
        let positions = reader.size_or("max_position_embeddings", 13)?;
        let legal = width.is_multiple_of(heads)
            && width.is_multiple_of(2)
            && together.is_multiple_of(2 * half)
            && positions >= rows;
        if !legal {
            return Err(reader.fault(format!(
                "d_model {width}, encoder_attention_heads {heads}, n_window {half}, n_window_infer {together}, \
                 max_position_embeddings {positions}: expected an even width that the heads divide, a multiple of two \
                 n_window, and a position for each of {rows} rows"
            )));
        }
        Ok(Self {
            width,
            layers,
            heads,
            inner: reader.size_or("encoder_ffn_dim", 4096)?,
            mels: reader.size_or("num_mel_bins", 128)?,
            channels: reader.size_or("downsample_hidden_size", 480)?,
            chunk: 2 * half,
            together: together / (2 * half),
        })
    }

    /// Rows of a chunk.
    fn rows(&self) -> usize {
        halved(self.chunk)
    }
}

/// Steps of convolutions that each halve `size`, rounded up.
fn halved(size: usize) -> usize {
    (0..HALVINGS).fold(size, |size, _| size.div_ceil(2))
}

/// Names of tensors: those of the decoder are asked for without its prefix.
fn names(name: &str) -> Vec<String> {
    if name.starts_with("audio_tower.") || name.starts_with("multi_modal_projector.") {
        return vec![format!("model.{name}"), name.to_owned()];
    }
    ["model.language_model.", "model.", ""].map(|prefix| format!("{prefix}{name}")).to_vec()
}

fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions) -> Result<Recipe> {
    let text = Text::read(checkpoint)?;
    let Text { hidden, vocab, layers: count, .. } = text;
    let tower = Tower::read(&Reader::part(checkpoint, "audio_config")?, hidden)?;
    let token = Reader::whole(checkpoint).size_or("audio_token_id", 151_676)?;
    check_shape(options, count, text.positions)?;
    let transcription = transcription(checkpoint)?;
    let checkpoint = &checkpoint.renamed(names);
    let front_end = front_end(checkpoint, &tower)?;
    let layers = Layers::decoder(checkpoint, options, text.eps);
    let Decoder { mut contexts, mut plan_params } = decoder(
        options,
        count,
        &prefill_rows(options, &PREFILL)?,
        |name, range, step| run(&layers, &text, name, range, step),
        layers.lmhead(hidden, vocab, text.tied, None)?,
    )?;
    let (precision, note) = encoder_precision(options);
    let windows = numbers(options, WINDOWS.name, 1..=MAX_WINDOW)?;
    let windows = windows.unwrap_or_else(|| DEFAULT_WINDOWS.to_vec());
    let mut chunks: Vec<usize> =
        windows.iter().map(|s| (s * RATE / HOP).div_ceil(tower.chunk)).collect();
    chunks.dedup();
    let (mut graphs, mut names) = (Vec::new(), Vec::new());
    for &chunks_here in &chunks {
        let name = sized("audio", chunks_here, chunks.len());
        let layers = Layers::new(checkpoint, precision, EPS);
        let audio = Audio { layers, tower, hidden, chunks: chunks_here };
        graphs.push(audio.graph(&name)?);
        names.push(name);
    }
    contexts.insert(0, ContextPlan::new("audio".to_owned(), precision, graphs).once());
    plan_params.insert("audio".to_owned(), one_or_many(names));
    let mut params = text.params(options.max_ctx);
    params.insert(
        "audio".to_owned(),
        json!({
            "front_end": front_end,
            "token_id": token,
            "chunk": tower.chunk,
            "halvings": HALVINGS,
            "least": least(checkpoint)?,
        }),
    );
    params.insert("transcription".to_owned(), Value::Object(transcription));
    Ok(Recipe::new("qwen3_asr", "qwen3_asr_transcribe", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .notes(note.into_iter().collect()))
}

/// `Qwen3ASRFeatureExtractor`, whose frames are centred and whose last one is left out.
fn front_end(checkpoint: &Checkpoint, tower: &Tower) -> Result<Value> {
    let processor = Processor::audio(checkpoint)?;
    for (key, only) in [
        ("/sampling_rate", json!(RATE)),
        ("/n_fft", json!(FRAME)),
        ("/hop_length", json!(HOP)),
        ("/feature_size", json!(tower.mels)),
        ("/n_window", json!(tower.chunk / 2)),
        ("/dither", json!(0.0)),
    ] {
        processor.only(key, &only)?;
    }
    Ok(json!({
        "rate": RATE,
        "frame": FRAME,
        "hop": HOP,
        "fft": FRAME,
        "window": "periodic_hann",
        "left": FRAME / 2,
        "span": FRAME / 2 + HOP,
        "edge": "reflect",
        "spectrum": "power",
        "filters": {"mels": tower.mels, "min_hz": 0.0, "max_hz": 8000.0, "scale": "slaney", "area_norm": true},
        "log": {"log10_max": 1e-10},
    }))
}

/// `min_length` of the processor: samples of a clip, with silence behind those that it has.
fn least(checkpoint: &Checkpoint) -> Result<u64> {
    let processor = Processor::audio(checkpoint)?;
    match processor.get("/min_length") {
        None => Ok(8000),
        Some(found) => found
            .as_u64()
            .filter(|least| *least < 1 << 20)
            .ok_or_else(|| processor.bad("/min_length", "a number of samples")),
    }
}

fn transcription(checkpoint: &Checkpoint) -> Result<Map<String, Value>> {
    let languages: Map<String, Value> =
        LANGUAGES.iter().map(|(code, name)| ((*code).to_owned(), json!(name))).collect();
    let mut found = Map::new();
    found.insert("prompt".to_owned(), json!(PROMPT));
    found.insert("languages".to_owned(), Value::Object(languages));
    // Of a synthetic model there is no vocabulary.
    if checkpoint.seed().is_none() {
        let Some(token) = checkpoint.tokenizer()?.token_to_id(WORDS) else {
            let path = checkpoint.dir().join("tokenizer.json");
            let what = format!(
                "{}: no token {WORDS}, expected the one behind which the words are",
                path.display()
            );
            return Err(Error::new(ErrorKind::Artifact, what)
                .hint("take the file of the published checkpoint"));
        };
        let answer = json!({"before": "language ", "behind": WORDS, "token": token});
        found.insert("answer".to_owned(), answer);
    }
    Ok(found)
}

/// Makes a graph of the tower, for clips of as many chunks.
struct Audio<'a> {
    layers: Layers<'a>,
    tower: Tower,
    hidden: usize,
    chunks: usize,
}

impl Audio<'_> {
    fn graph(&self, name: &str) -> Result<Graph> {
        let Tower { width, layers: count, heads, inner, .. } = self.tower;
        let rows = self.chunks * self.tower.rows();
        let mut b = GraphBuilder::new(name);
        b.scope("conv");
        let mut h = self.convolutions(&mut b)?;
        b.scope("mask");
        let keep = b.input("keep", Elem::Activation, &[rows, 1])?;
        let mask = self.mask(&mut b, keep, rows)?;
        let attend = Attend { mask: Some(mask), ..Attend::whole(rows) };
        let heads = Heads { query: heads, groups: heads, dim: width / heads };
        for layer in 0..count {
            let at = format!("audio_tower.layers.{layer}");
            b.scope(format!("l{layer}_attn"));
            let normed =
                self.layers.layer_norm(&mut b, h, &format!("{at}.self_attn_layer_norm"))?;
            let attention = Attention {
                bias: [true; 3],
                out: "out_proj",
                out_bias: true,
                cached: false,
                ..Attention::new(format!("{at}.self_attn"), layer, heads)
            };
            let mixed = self.layers.attention(&mut b, normed, &attention, &attend)?;
            h = b.add(h, mixed)?;
            b.scope(format!("l{layer}_mlp"));
            let normed = self.layers.layer_norm(&mut b, h, &format!("{at}.final_layer_norm"))?;
            let [first, second] = ["fc1", "fc2"].map(|part| format!("{at}.{part}"));
            let parts = [first.as_str(), second.as_str()];
            let out = self.layers.feed_forward(&mut b, normed, parts, inner, GraphBuilder::gelu)?;
            h = b.add(h, out)?;
        }
        b.scope("final");
        let h = self.layers.layer_norm(&mut b, h, "audio_tower.ln_post")?;
        let h = self.layers.linear(&mut b, h, "multi_modal_projector.linear_1", width, true)?;
        let h = b.gelu(h)?;
        let h =
            self.layers.linear(&mut b, h, "multi_modal_projector.linear_2", self.hidden, true)?;
        b.output("rows", h)?;
        b.finish()
    }

    /// Convolutions over chunks of frames, each for itself, and their positions. Rows are time and columns mels, where
    /// the checkpoint has it the other way round.
    fn convolutions(&self, b: &mut GraphBuilder) -> Result<TensorId> {
        let Tower { width, mels, channels, chunk, .. } = self.tower;
        let checkpoint = self.layers.checkpoint;
        let mel = b.input("mel", Elem::Activation, &[self.chunks * chunk, mels])?;
        let mut x = b.reshape(mel, &[self.chunks, 1, chunk, mels])?;
        let halving = Conv2d { stride: [2, 2], padding: [[1, 1]; 2], ..Conv2d::new([3, 3]) };
        for step in 1..=HALVINGS {
            let inputs = if step == 1 { 1 } else { channels };
            let name = format!("audio_tower.conv2d{step}");
            let (weight, bias) = filters(checkpoint, &name, &[channels, inputs, 3, 3])?;
            let turned =
                |filter: &[f32]| (0..9).map(|at| filter[at % 3 * 3 + at / 3]).collect::<Vec<_>>();
            let values = weight.to_f32()?.chunks_exact(9).flat_map(turned).collect();
            let values = held(format!("{name}.weight"), [channels, inputs * 9], values);
            let weight = Weight::new(values, Storage::Float);
            x = b.conv2d(&format!("conv{step}"), x, weight, Some(bias), halving)?;
            x = b.gelu(x)?;
        }
        let (rows, bands) = (self.tower.rows(), halved(mels));
        let x = b.transpose(x, &[0, 2, 1, 3])?;
        let x = b.reshape(x, &[self.chunks * rows, channels * bands])?;
        let x = self.layers.linear(b, x, "audio_tower.conv_out", width, false)?;
        let half = width / 2;
        let step = TIMESCALE.ln() / (half.max(2) - 1) as f64;
        let frequencies: Vec<f32> =
            (0..half).map(|at| ((-step) as f32 * at as f32).exp()).collect();
        let position = |row: usize| {
            let angles = frequencies.iter().map(move |frequency| f64::from(row as f32 * frequency));
            let sines = angles.clone().map(f64::sin);
            sines.chain(angles.map(f64::cos)).map(|value| value as f32)
        };
        let positions = (0..self.chunks * rows).flat_map(|row| position(row % rows)).collect();
        let shape = [self.chunks * rows, width];
        let positions = b.constant("positions", Elem::Activation, &shape, positions)?;
        b.add(x, positions)
    }

    /// Hides rows behind the clip, and those of other windows.
    fn mask(&self, b: &mut GraphBuilder, keep: TensorId, rows: usize) -> Result<TensorId> {
        let kept = kept_mask(b, keep)?;
        let kept = b.reshape(kept, &[1, 1, 1, rows])?;
        if self.chunks <= self.tower.together {
            return Ok(kept);
        }
        let window = self.tower.together * self.tower.rows();
        let hides = |at: usize| at / rows / window != at % rows / window;
        let values = (0..rows * rows).map(|at| if hides(at) { MASK_VALUE } else { 0.0 }).collect();
        let windows = b.constant("windows", Elem::Activation, &[1, 1, rows, rows], values)?;
        b.binary(BinaryOp::Min, windows, kept)
    }
}

/// Tokens through the layers of `range`.
pub(super) fn run(
    layers: &Layers<'_>,
    config: &Text,
    name: &str,
    range: Range<usize>,
    step: Step,
) -> Result<Graph> {
    let last = range.end == config.layers;
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[step.rows, config.hidden])?;
    let attend = Attend::inputs(&mut b, &AttendInputs::of(config.heads.dim, step))?;
    for layer in range {
        let name = format!("layers.{layer}");
        let attention = Attention {
            norms: Some(["q_norm", "k_norm"]),
            bias: [config.bias; 3],
            out_bias: config.bias,
            ..Attention::new(format!("{name}.self_attn"), layer, config.heads)
        };
        let mlp = Mlp::new(format!("{name}.mlp"), config.inner);
        h = layers.block(&mut b, h, &name, &attention, &mlp, &attend)?;
    }
    if last {
        b.scope("final");
        h = layers.norm(&mut b, h, "norm")?;
    }
    b.output("y", h)?;
    b.finish()
}
