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

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{BinaryOp, Conv2d, Elem, Graph, TensorId};
use qhx_graph::weight::{Storage, Weight, held};
use qhx_types::MASK_VALUE;
use serde_json::{Map, Value, json};

use super::choices::windows;
use super::llama::decoder_part;
use crate::kit::{
    Attend, Attention, ENCODER_WEIGHTS, Heads, Layers, Processor, Reader, encoder_precision,
    filters, kept_mask, prefill_rows, sized,
};
use crate::recipe::{Recipe, RecipeOptions, Task};
use crate::register_recipe;
use crate::registry::{RecipeEntry, RecipeOption};

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
    RecipeEntry::new(&["Qwen3ASRForConditionalGeneration"], recipe)
        .tasks(&[Task::Transcribe])
        .prefill_graphs()
        .smaller_contexts()
        .options(&[WINDOWS, ENCODER_WEIGHTS])
);

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
        let layers = reader.layers_of("encoder_layers", 24)?;
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
    let hidden = Reader::part(checkpoint, "text_config")?.size("hidden_size")?;
    let tower = Tower::read(&Reader::part(checkpoint, "audio_config")?, hidden)?;
    let transcription = transcription(checkpoint)?;
    let checkpoint = &checkpoint.renamed(names);
    let front_end = front_end(checkpoint, &tower)?;
    let windows = windows(options, MAX_WINDOW, &DEFAULT_WINDOWS)?;
    let mut chunks: Vec<usize> =
        windows.iter().map(|s| (s * RATE / HOP).div_ceil(tower.chunk)).collect();
    chunks.dedup();
    let layers = Layers::new(checkpoint, encoder_precision(options).0, EPS);
    let graph = |here: &usize| {
        let audio = Audio { layers, tower, hidden, chunks: *here };
        audio.graph(&sized("audio", *here, chunks.len()))
    };
    let graphs = chunks.iter().map(graph).collect::<Result<_>>()?;
    let mut recipe = behind_tower("qwen3_asr", graphs, checkpoint, options)?;
    let audio = json!({
        "front_end": front_end,
        "token_id": Reader::whole(checkpoint).size_or("audio_token_id", 151_676)?,
        "chunk": tower.chunk,
        "halvings": HALVINGS,
        "least": least(checkpoint)?,
    });
    recipe.params.insert("audio".to_owned(), audio);
    recipe.params.insert("transcription".to_owned(), Value::Object(transcription));
    Ok(recipe)
}

/// Qwen3's decoder behind `graphs` of a tower, whose rows stand in a prompt for audio.
pub(super) fn behind_tower(
    family: &str,
    graphs: Vec<Graph>,
    checkpoint: &Checkpoint,
    options: &RecipeOptions,
) -> Result<Recipe> {
    // The host-op runs no other form of a decoder.
    let reader = Reader::new(checkpoint);
    reader.only("model_type", &json!("qwen3"))?;
    reader.only("use_sliding_window", &json!(false))?;
    let prefill = Some(prefill_rows(options, &PREFILL)?);
    let decoder = decoder_part(checkpoint, &RecipeOptions { prefill, ..options.clone() })?;
    let (precision, note) = encoder_precision(options);
    let mut recipe = decoder.ahead("audio", precision, graphs).notes(note.into_iter().collect());
    family.clone_into(&mut recipe.family);
    "qwen3_asr_transcribe".clone_into(&mut recipe.host_op);
    Ok(recipe)
}

/// `Qwen3ASRFeatureExtractor`, whose frames are centred and whose last one is left out.
fn front_end(checkpoint: &Checkpoint, tower: &Tower) -> Result<Value> {
    let processor = Processor::audio(checkpoint)?;
    processor.only_all([
        ("/sampling_rate", json!(RATE)),
        ("/n_fft", json!(FRAME)),
        ("/hop_length", json!(HOP)),
        ("/feature_size", json!(tower.mels)),
        ("/n_window", json!(tower.chunk / 2)),
        ("/dither", json!(0.0)),
        ("/padding_value", json!(0.0)),
    ])?;
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
