//! The keys of `config.json` that shape the graphs, checked. Published checkpoints (4.57) spell the rotary embedding
//! as `rope_theta` and `rope_scaling`, those that `transformers` 5 writes as `rope_parameters`.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use serde_json::json;

use crate::kit::{Heads, Reader};
use crate::recipes::vision::{Vision, section};

/// The class of Qwen2.5-VL.
pub(super) const QWEN2_5: &str = "Qwen2_5_VLForConditionalGeneration";
/// The class of Qwen2-VL.
pub(super) const QWEN2: &str = "Qwen2VLForConditionalGeneration";
/// The class of PaddleOCR-VL.
pub(super) const PADDLE: &str = "PaddleOCRVLForConditionalGeneration";
/// `mrope_section` of Qwen2.5-VL and Qwen2-VL where no key says it (`Qwen2VLRotaryEmbedding`).
const SECTION: [usize; 3] = [16, 24, 24];

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct Config {
    /// `model.family` of the manifest.
    pub family: &'static str,
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: Heads,
    /// Queries and keys have norms of their own.
    pub head_norms: bool,
    pub rope_theta: f64,
    /// Pairs of a head that turn by time, row and column.
    pub section: [usize; 3],
    /// These take turns.
    pub interleaved: bool,
    pub qkv_bias: bool,
    pub out_bias: bool,
    pub mlp_bias: bool,
    pub eps: f32,
    pub tied: bool,
    pub max_positions: Option<usize>,
    pub vision: Vision,
}

impl Config {
    /// Reads and checks.
    pub fn read(checkpoint: &Checkpoint) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        reader.only("hidden_act", &json!("silu"))?;
        let hidden = reader.size("hidden_size")?;
        let layers = reader.layers()?;
        let class = checkpoint.architecture().unwrap_or_default();
        // The decoder of the first two is Qwen2's, that of the third ERNIE 4.5's.
        let older = Some(class).filter(|class| [QWEN2, QWEN2_5, PADDLE].contains(class));
        // `Qwen2VLTextConfig` has eight groups where the key is absent, `PaddleOCRTextConfig` heads of 128.
        let paddle = class == PADDLE;
        let groups = older.map(|_| if paddle { 2 } else { 8 });
        let heads = reader.heads(hidden, groups, paddle.then_some(128))?;
        let vocab = reader.size("vocab_size")?;
        let common = Self {
            family: "qwen3vl",
            hidden,
            vocab,
            intermediate: reader.size("intermediate_size")?,
            layers,
            heads,
            head_norms: true,
            rope_theta: 0.0,
            section: SECTION,
            interleaved: true,
            qkv_bias: true,
            out_bias: false,
            mlp_bias: false,
            eps: reader.epsilon(&["rms_norm_eps"], if older.is_some() { 1e-5 } else { 1e-6 })?,
            tied: reader.tied(paddle)?,
            max_positions: reader.maybe_size("max_position_embeddings")?,
            vision: match older {
                Some(PADDLE) => Vision::of_paddle(checkpoint, [hidden, vocab])?,
                Some(QWEN2) => Vision::of_qwen2(checkpoint, [hidden, vocab])?,
                Some(_) => Vision::windowed(checkpoint, [hidden, vocab])?,
                None => Vision::read(checkpoint, [hidden, layers, vocab])?,
            },
        };
        reader.kinds("layer_types", layers, &[("full_attention", ())])?;
        if older.is_some() {
            let (family, theta) = match class {
                PADDLE => ("paddleocr_vl", 5e5),
                QWEN2 => ("qwen2_vl", 1e6),
                _ => ("qwen2_5_vl", 1e6),
            };
            if !paddle {
                reader.only("use_sliding_window", &json!(false))?;
            }
            let bias = !paddle || reader.flag("use_bias")?;
            return Ok(Self {
                family,
                head_norms: false,
                // Of old the type of this rope was "mrope".
                rope_theta: reader.rope_theta_of(&["default", "mrope"], theta)?,
                section: section(&reader, heads.dim / 2, Some(SECTION))?,
                interleaved: false,
                qkv_bias: bias,
                out_bias: paddle && bias,
                mlp_bias: paddle && bias,
                ..common
            });
        }
        let rope_theta = reader.rope_theta(0.0)?;
        if rope_theta == 0.0 {
            return Err(reader.fault("rope_theta is missing, expected a number".to_owned()));
        }
        let bias = reader.flag("attention_bias")?;
        Ok(Self {
            rope_theta,
            section: section(&reader, heads.dim / 2, None)?,
            qkv_bias: bias,
            out_bias: bias,
            ..common
        })
    }
}
