//! The keys of `config.json` that shape the graphs, checked.

use qhx_base::{Error, Result};
use qhx_checkpoint::Checkpoint;
use serde_json::{Value, json};

use super::classes::{Bias, Class, MOE, Norms, Sliding, Turned};
use super::rope::{Growth, Rope};
use crate::kit::{Clamp, ExpertForm, Experts, Heads, Reader};

/// The hidden states between layers of Gemma 2 are those of the reference times this. In published checkpoints the sums
/// there exceed the largest f16, 65,504. Each layer normalises what it reads and what it adds, so the factor stands in
/// the weights of the norms, and the result is the same. In gpt-oss it stands in what layers add.
const RESIDUAL: f32 = 1.0 / 64.0;

/// Sizes and constants of a model.
#[derive(Debug, Clone)]
pub(super) struct Config {
    pub class: &'static Class,
    pub hidden: usize,
    pub vocab: usize,
    pub intermediate: usize,
    pub layers: usize,
    pub heads: Heads,
    pub rope: Rope,
    /// Rotary embedding of sliding layers, where it is another one.
    pub local: Option<Rope>,
    /// Growth of queries with the position, where the context reaches as far.
    pub growth: Option<Growth>,
    /// For each layer whether it turns queries and keys.
    pub turned: Vec<bool>,
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    pub eps: f32,
    pub tied: bool,
    /// For each layer whether it slides over the last positions; the others see all of them.
    pub sliding: Vec<bool>,
    /// Positions that a sliding layer sees, the current one included.
    pub window: Option<usize>,
    /// Multiplies the scores.
    pub scale: f32,
    /// Multiplies the rows of the embedding table.
    pub embed_scale: f32,
    /// Multiplies what attention and MLP add to the hidden states.
    pub added_scale: f32,
    /// Hidden states are those of the reference times this.
    pub residual: f32,
    /// Multiplies the logits.
    pub logits_scale: f32,
    pub score_cap: Option<f32>,
    /// The host applies it.
    pub logits_cap: Option<f32>,
    /// Layers with experts, for classes that have them.
    pub sparse: Option<Sparse>,
}

/// The layers with experts.
#[derive(Debug, Clone)]
pub(super) struct Sparse {
    pub experts: Experts,
    /// For each layer whether it has some.
    pub layers: Vec<bool>,
    /// `norm_topk_prob`
    pub normalize: bool,
    /// Router of a layer, below `mlp`.
    pub router: &'static str,
    /// Rows of gate and up alternate in stacks: see [`crate::kit::ExpertNames`].
    pub interleaved: Option<bool>,
}

impl Sparse {
    /// Reads and checks the keys of `Qwen3MoeConfig`.
    fn read(reader: &Reader<'_>, hidden: usize, layers: usize) -> Result<Self> {
        let step = reader.size_or("decoder_sparse_step", 1)?;
        let dense = match reader.get("mlp_only_layers") {
            None => Vec::new(),
            Some(list) => {
                let number = |value: &Value| value.as_u64().filter(|n| *n < layers as u64);
                let numbers = list.as_array().map(|list| list.iter().map(number));
                let numbers = numbers.and_then(|list| list.collect::<Option<Vec<_>>>());
                let expected = || format!("a list of layers below {layers}");
                numbers.ok_or_else(|| reader.bad("mlp_only_layers", list, &expected()))?
            }
        };
        let sparse =
            |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&(layer as u64));
        let layers: Vec<_> = (0..layers).map(sparse).collect();
        if !layers.contains(&true) {
            return Err(reader.fault(
                "decoder_sparse_step and mlp_only_layers leave no layer with experts, expected one or more".to_owned(),
            ));
        }
        let normalize = reader.flag("norm_topk_prob")?;
        let experts = Experts::read(reader, hidden)?;
        Ok(Self { experts, layers, normalize, router: "gate", interleaved: None })
    }

    /// Reads and checks the keys of `GptOssConfig`. The stacks are those of MXFP4, or of what `transformers` computes
    /// with, in which inputs come before outputs.
    fn gpt_oss(
        reader: &Reader<'_>,
        checkpoint: &Checkpoint,
        hidden: usize,
        layers: usize,
    ) -> Result<Self> {
        let number = |key: &str, default: f64| {
            Ok::<_, Error>(reader.positive(&[key])?.unwrap_or(default) as f32)
        };
        let clamp =
            Clamp { alpha: number("swiglu_alpha", 1.702)?, limit: number("swiglu_limit", 7.0)? };
        let form = ExpertForm { bias: true, clamp: Some(clamp), scale: RESIDUAL };
        let experts = Experts::of(reader, hidden, ["num_local_experts", "intermediate_size"])?;
        let method = checkpoint.config().pointer("/quantization_config/quant_method");
        let packed = method.is_some_and(|method| method == "mxfp4");
        Ok(Self {
            experts: Experts { form, ..experts },
            layers: vec![true; layers],
            normalize: true,
            router: "router",
            interleaved: Some(!packed),
        })
    }
}

impl Config {
    /// Reads and checks, for a context of `max_ctx` tokens.
    pub fn read(checkpoint: &Checkpoint, class: &'static Class, max_ctx: usize) -> Result<Self> {
        let reader = Reader::new(checkpoint);
        let sees_prompt = checkpoint.architecture() == Some("PaliGemmaForConditionalGeneration");
        activation(&reader, class, sees_prompt)?;
        let hidden = reader.size("hidden_size")?;
        let layers = reader.layers()?;
        let heads = reader.heads(hidden, class.groups, class.dim)?;
        let bias = |bias: Bias, key: &str| match bias {
            Bias::Never => Ok(false),
            Bias::Always => Ok(true),
            Bias::Key => reader.flag(if class.one_bias { "use_bias" } else { key }),
            Bias::Unless => reader.flag_or(key, true),
        };
        let mut turned = turned(&reader, class, layers)?;
        let (sliding, window) = sliding(&reader, class, &turned)?;
        if class.turned == Turned::Sliding && window.is_some() {
            turned.clone_from(&sliding);
        }
        let number = |applies: bool, key: &str, default: f64| match applies {
            true => Ok(reader.positive(&[key])?.unwrap_or(default)),
            false => Ok(default),
        };
        let multiplier = |key: &str| number(class.multipliers, key, 1.0).map(|value| value as f32);
        let cap = |key: &str, default: f64| match class.caps && !is_null(&reader, key) {
            true => Ok(Some(number(true, key, default)? as f32)),
            false => Ok(None),
        };
        let scale = match (class.caps, class.multipliers) {
            (true, _) => (1.0 / number(true, "query_pre_attn_scalar", 256.0)?.sqrt()) as f32,
            (_, true) => multiplier("attention_multiplier")?,
            _ => heads.scale(),
        };
        let embed_scale = match class.gemma {
            true => reader.in_model_type((hidden as f64).sqrt() as f32, "bfloat16")?,
            false => multiplier("embedding_multiplier")?,
        };
        let kind = reader.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let with_experts = class.sinks
            || kind.ends_with(MOE)
            || checkpoint.architecture().is_some_and(|class| class.contains("Moe"));
        let sparse = with_experts.then(|| match class.sinks {
            true => Sparse::gpt_oss(&reader, checkpoint, hidden, layers),
            false => Sparse::read(&reader, hidden, layers),
        });
        Ok(Self {
            class,
            hidden,
            vocab: reader.size("vocab_size")?,
            // Without a dense layer nobody needs it.
            intermediate: match with_experts {
                true => reader.size_or("intermediate_size", 1)?,
                false => reader.size("intermediate_size")?,
            },
            layers,
            heads,
            rope: Rope::read(&reader, class, heads.dim, max_ctx)?,
            local: match class.ropes && sliding.contains(&true) {
                true => Some(Rope::read_local(&reader, class, heads.dim, max_ctx)?),
                false => None,
            },
            growth: Growth::read(&reader, class, max_ctx)?,
            turned,
            qkv_bias: bias(class.qkv_bias, "attention_bias")?,
            o_bias: bias(class.o_bias, "attention_bias")?,
            mlp_bias: bias(class.mlp_bias, "mlp_bias")?,
            eps: reader.epsilon(&["rms_norm_eps"], class.eps)?,
            tied: reader.tied(class.tied)?,
            sliding,
            window,
            scale,
            embed_scale,
            added_scale: multiplier("residual_multiplier")?,
            residual: if class.sinks || class.gemma && class.norms == Norms::Both {
                RESIDUAL
            } else {
                1.0
            },
            logits_scale: 1.0 / multiplier("logits_scaling")?,
            score_cap: cap("attn_logit_softcapping", 50.0)?,
            logits_cap: cap("final_logit_softcapping", 30.0)?,
            sparse: sparse.transpose()?,
        })
    }

    /// The window of sliding layers, where a context of `max_ctx` tokens is longer than that.
    pub fn window_within(&self, max_ctx: usize) -> Option<usize> {
        self.window.filter(|window| *window < max_ctx && self.sliding.contains(&true))
    }

    /// True of a layer that is apart from those that see all of the context, with caches of `ring` rows.
    pub fn slides(&self, layer: usize, ring: Option<usize>) -> bool {
        ring.is_some() && self.sliding.get(layer) == Some(&true)
    }

    /// [`Self::window_within`]; or the context, where sliding layers have a rotary embedding of their own and are apart
    /// for that.
    pub fn local_window(&self, max_ctx: usize) -> Option<usize> {
        self.window_within(max_ctx).or(self.local.as_ref().map(|_| max_ctx))
    }
}

/// Checks the activation of the MLPs, and that tokens see those before them alone.
fn activation(reader: &Reader<'_>, class: &Class, sees_prompt: bool) -> Result<()> {
    if !class.gemma {
        return reader.only("hidden_act", &json!("silu"));
    }
    // Prompts of PaliGemma see themselves, which is the host's affair.
    if !sees_prompt {
        reader.only("use_bidirectional_attention", &json!(false))?;
    }
    reader.only("hidden_activation", &json!("gelu_pytorch_tanh"))?;
    match reader.get("hidden_act") {
        // The first configurations of Gemma say so, and mean the approximation.
        Some(act) if !class.caps && *act != "gelu" => {
            reader.only("hidden_act", &json!("gelu_pytorch_tanh"))
        }
        _ => Ok(()),
    }
}

/// True for a key that is there with the value null.
fn is_null(reader: &Reader<'_>, key: &str) -> bool {
    reader.has(key) && reader.get(key).is_none()
}

/// For each layer whether it turns queries and keys.
fn turned(reader: &Reader<'_>, class: &Class, layers: usize) -> Result<Vec<bool>> {
    if class.turned != Turned::Listed {
        return Ok(vec![true; layers]);
    }
    let flags = [(0, false), (1, true)];
    let interval = reader.size_or("no_rope_layer_interval", 4)?;
    let Some(list) = reader.get("no_rope_layers") else {
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    let list = list.as_array().map_or(&[][..], Vec::as_slice);
    let flag = |value: &Value| {
        let found = flags.iter().find(|(number, _)| value.as_u64() == Some(*number));
        found
            .map(|(_, turned)| *turned)
            .ok_or_else(|| reader.bad("no_rope_layers", value, "0 or 1"))
    };
    let list: Vec<bool> = list.iter().map(flag).collect::<Result<_>>()?;
    if list.len() != layers {
        return Err(reader.fault(format!(
            "no_rope_layers has {} entries, expected {layers} (num_hidden_layers)",
            list.len()
        )));
    }
    Ok(list)
}

/// For each layer whether it slides, and the positions that such a layer sees.
fn sliding(
    reader: &Reader<'_>,
    class: &Class,
    turned: &[bool],
) -> Result<(Vec<bool>, Option<usize>)> {
    let layers = turned.len();
    let none = (vec![false; layers], None);
    let switched = matches!(class.sliding, Sliding::Upper | Sliding::Unturned);
    let off = switched && !reader.flag("use_sliding_window")?;
    if class.sliding == Sliding::Never {
        return Ok(none);
    }
    let window = match is_null(reader, "sliding_window") {
        true => None,
        false => reader.maybe_size("sliding_window")?.or(class.window),
    };
    let names = [("sliding_attention", true), ("full_attention", false)];
    let declared = match class.sliding {
        Sliding::All => None,
        _ => reader.kinds("layer_types", layers, &names)?,
    };
    let (false, Some(_)) = (off, window) else {
        if declared.is_some_and(|kinds| kinds.contains(&true)) {
            return Err(reader.fault(
                "layer_types has sliding_attention, but use_sliding_window or sliding_window says that no layer \
                 slides"
                    .to_owned(),
            ));
        }
        return Ok(none);
    };
    let first = reader.maybe_size("max_window_layers").map(|first| first.unwrap_or(28));
    let kinds = match (declared, class.sliding) {
        (Some(kinds), _) => kinds,
        (None, Sliding::Upper) => {
            let first = first?;
            (0..layers).map(|layer| layer >= first).collect()
        }
        (None, Sliding::Unturned) => turned.iter().map(|turned| !turned).collect(),
        (None, Sliding::Alternate) => (0..layers).map(|layer| layer.is_multiple_of(2)).collect(),
        (None, Sliding::Most) => (1..=layers).map(|layer| !layer.is_multiple_of(4)).collect(),
        (None, Sliding::Pattern) => {
            let pattern = reader.size_or("sliding_window_pattern", 4)?;
            (1..=layers).map(|layer| !layer.is_multiple_of(pattern)).collect()
        }
        (None, Sliding::All | Sliding::Never) => vec![true; layers],
    };
    Ok((kinds, window))
}
