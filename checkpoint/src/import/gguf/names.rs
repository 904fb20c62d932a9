//! llama.cpp's names of tensors, and what its converter changes in them (`gguf-py/gguf/constants.py`, `conversion/`).

/// A model class as llama.cpp names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Llama and Mistral.
    Llama,
    Qwen2,
    Qwen3,
    Qwen3Moe,
    /// Qwen2.5-VL.
    Qwen2Vl,
    Qwen3Vl,
    Qwen35,
    Gemma3,
    Gemma4,
    Lfm2,
    Phi3,
    PhiMoe,
    SmolLm3,
    Granite,
    /// OLMo 2 and 3.
    Olmo2,
    Gemma,
    Gemma2,
    Exaone4,
    /// Ministral 3, and Mistral Small from 3.1 on.
    Mistral3,
    Lfm2Moe,
    GptOss,
    GraniteHybrid,
    FalconH1,
    NemotronH,
    NemotronHMoe,
    Qwen3Next,
    Ernie45,
    HunYuanDense,
}

/// The order of a tensor's rows, or of its columns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Order {
    Same,
    /// The rows of each head, two halves that rotate together, were interleaved (`LlamaModel.permute`). The number of
    /// heads is the value of this key.
    Rotated(&'static str),
    /// Heads of values follow that of each key head, and in the file the first of each, then the second of each
    /// (`_reorder_v_heads`). Of `elements` each, or of as many as the state has.
    ValueHeads {
        /// After the queries and keys.
        after_keys: bool,
        /// One element a head.
        single: bool,
    },
}

/// Changes that the converter made to a tensor beyond renaming it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Change {
    pub rows: Order,
    pub columns: Order,
    pub values: Values,
    pub shape: Shape,
}

/// Change that the converter made to the dimensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shape {
    Same,
    /// A dimension of one was removed before the last of a filter.
    Squeezed,
    /// One dimension became two.
    Folded,
    /// A matrix of one row may have lost its first dimension.
    Row,
}

impl Shape {
    /// Dimensions of the Hugging Face checkpoint's tensor.
    pub fn undo(self, mut shape: Vec<usize>) -> Vec<usize> {
        match self {
            Self::Squeezed if shape.len() == 2 => shape.insert(1, 1),
            Self::Folded => shape = vec![shape.iter().product()],
            Self::Row if shape.len() == 1 => shape.insert(0, 1),
            _ => {}
        }
        shape
    }
}

/// Change that the converter made to the values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Values {
    Same,
    /// One was added (`Gemma3Model.norm_shift`).
    PlusOne,
    /// The negative exponential was taken (`A_log`).
    MinusExp,
}

impl Change {
    const NONE: Self =
        Self { rows: Order::Same, columns: Order::Same, values: Values::Same, shape: Shape::Same };

    const fn rows(rows: Order) -> Self {
        Self { rows, ..Self::NONE }
    }
}

/// A tensor of the Hugging Face checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Named {
    /// By its name.
    Whole(String, Change),
    /// Experts one after the other: what stands before and after an expert's number.
    Experts(String, &'static str),
    /// Follows from the configuration.
    Derived,
}

/// With the class of the configuration that the metadata makes; none for one whose metadata does not say all.
const ARCHITECTURES: [(&str, Architecture, &str); 28] = [
    ("llama", Architecture::Llama, "LlamaForCausalLM"),
    ("qwen2", Architecture::Qwen2, "Qwen2ForCausalLM"),
    ("qwen3", Architecture::Qwen3, "Qwen3ForCausalLM"),
    ("qwen3moe", Architecture::Qwen3Moe, "Qwen3MoeForCausalLM"),
    ("qwen2vl", Architecture::Qwen2Vl, "Qwen2_5_VLForConditionalGeneration"),
    ("qwen3vl", Architecture::Qwen3Vl, "Qwen3VLForConditionalGeneration"),
    ("qwen35", Architecture::Qwen35, "Qwen3_5ForCausalLM"),
    ("gemma3", Architecture::Gemma3, "Gemma3ForCausalLM"),
    ("gemma4", Architecture::Gemma4, ""),
    ("lfm2", Architecture::Lfm2, "Lfm2ForCausalLM"),
    ("phi3", Architecture::Phi3, "Phi3ForCausalLM"),
    ("phimoe", Architecture::PhiMoe, "PhimoeForCausalLM"),
    ("smollm3", Architecture::SmolLm3, "SmolLM3ForCausalLM"),
    ("granite", Architecture::Granite, "GraniteForCausalLM"),
    ("olmo2", Architecture::Olmo2, "Olmo2ForCausalLM"),
    ("gemma", Architecture::Gemma, "GemmaForCausalLM"),
    ("gemma2", Architecture::Gemma2, "Gemma2ForCausalLM"),
    ("exaone4", Architecture::Exaone4, "Exaone4ForCausalLM"),
    ("mistral3", Architecture::Mistral3, "Ministral3ForCausalLM"),
    ("lfm2moe", Architecture::Lfm2Moe, "Lfm2MoeForCausalLM"),
    ("gpt-oss", Architecture::GptOss, "GptOssForCausalLM"),
    ("granitehybrid", Architecture::GraniteHybrid, "GraniteMoeHybridForCausalLM"),
    ("falcon-h1", Architecture::FalconH1, "FalconH1ForCausalLM"),
    ("nemotron_h", Architecture::NemotronH, "NemotronHForCausalLM"),
    ("nemotron_h_moe", Architecture::NemotronHMoe, "NemotronHForCausalLM"),
    ("qwen3next", Architecture::Qwen3Next, "Qwen3NextForCausalLM"),
    ("ernie4_5", Architecture::Ernie45, "Ernie4_5ForCausalLM"),
    ("hunyuan-dense", Architecture::HunYuanDense, "HunYuanDenseV1ForCausalLM"),
];

/// Parts of a layer whose names differ by architecture, the first that is there.
type Table = &'static [(&'static str, &'static str)];

const LAYER: Table = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
const GEMMA: Table = &[
    ("ffn_norm", "pre_feedforward_layernorm"),
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
    ("inp_gate", "per_layer_input_gate"),
    ("proj", "per_layer_projection"),
    ("post_norm", "post_per_layer_input_norm"),
    ("layer_output_scale", "layer_scalar"),
];
const OLMO2: Table = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("post_ffw_norm", "post_feedforward_layernorm"),
];
const HUNYUAN: Table =
    &[("attn_q_norm", "self_attn.query_layernorm"), ("attn_k_norm", "self_attn.key_layernorm")];
const LFM2: Table = &[
    ("ffn_gate_inp", "feed_forward.gate"),
    ("exp_probs_b", "feed_forward.expert_bias"),
    ("attn_norm", "operator_norm"),
    ("ffn_norm", "ffn_norm"),
    ("attn_output", "self_attn.out_proj"),
    ("attn_q_norm", "self_attn.q_layernorm"),
    ("attn_k_norm", "self_attn.k_layernorm"),
    ("ffn_gate", "feed_forward.w1"),
    ("ffn_down", "feed_forward.w2"),
    ("ffn_up", "feed_forward.w3"),
    ("shortconv.conv", "conv.conv"),
    ("shortconv.in_proj", "conv.in_proj"),
    ("shortconv.out_proj", "conv.out_proj"),
];
const PHI: Table = &[
    ("attn_qkv", "self_attn.qkv_proj"),
    ("ffn_up", "mlp.gate_up_proj"),
    ("ffn_gate_inp", "block_sparse_moe.gate"),
];
const QWEN35: Table = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_qkv", "linear_attn.in_proj_qkv"),
    ("attn_gate", "linear_attn.in_proj_z"),
    ("ssm_alpha", "linear_attn.in_proj_a"),
    ("ssm_beta", "linear_attn.in_proj_b"),
    ("ssm_a", "linear_attn.A_log"),
    ("ssm_dt", "linear_attn.dt_bias"),
    ("ssm_conv1d", "linear_attn.conv1d"),
    ("ssm_norm", "linear_attn.norm"),
    ("ssm_out", "linear_attn.out_proj"),
];
/// Mamba-2 below `mamba`.
const MAMBA: Table = &[
    ("ssm_in", "mamba.in_proj"),
    ("ssm_conv1d", "mamba.conv1d"),
    ("ssm_dt", "mamba.dt_bias"),
    ("ssm_a", "mamba.A_log"),
    ("ssm_d", "mamba.D"),
    ("ssm_norm", "mamba.norm"),
    ("ssm_out", "mamba.out_proj"),
];
const GRANITE_HYBRID: Table = &[
    ("ffn_gate", "shared_mlp.gate_proj"),
    ("ffn_up", "shared_mlp.up_proj"),
    ("ffn_down", "shared_mlp.output_linear"),
    ("ffn_gate_shexp", "shared_mlp.gate_proj"),
    ("ffn_up_shexp", "shared_mlp.up_proj"),
    ("ffn_down_shexp", "shared_mlp.output_linear"),
    ("ffn_gate_inp", "block_sparse_moe.router"),
];
const FALCON_H1: Table = &[
    ("ffn_norm", "pre_ff_layernorm"),
    ("ffn_gate", "feed_forward.gate_proj"),
    ("ffn_up", "feed_forward.up_proj"),
    ("ffn_down", "feed_forward.down_proj"),
];
const NEMOTRON_H: Table = &[
    ("attn_norm", "norm"),
    ("attn_q", "mixer.q_proj"),
    ("attn_k", "mixer.k_proj"),
    ("attn_v", "mixer.v_proj"),
    ("attn_output", "mixer.o_proj"),
    ("ssm_in", "mixer.in_proj"),
    ("ssm_conv1d", "mixer.conv1d"),
    ("ssm_dt", "mixer.dt_bias"),
    ("ssm_a", "mixer.A_log"),
    ("ssm_d", "mixer.D"),
    ("ssm_norm", "mixer.norm"),
    ("ssm_out", "mixer.out_proj"),
    ("ffn_up", "mixer.up_proj"),
    ("ffn_down", "mixer.down_proj"),
    ("ffn_gate_inp", "mixer.gate"),
    ("exp_probs_b", "mixer.gate.e_score_correction_bias"),
    ("ffn_up_shexp", "mixer.shared_experts.up_proj"),
    ("ffn_down_shexp", "mixer.shared_experts.down_proj"),
];
/// The first files have the projections as the checkpoint has them.
const QWEN3NEXT: Table = &[
    ("ssm_in", "linear_attn.in_proj_qkvz"),
    ("ssm_ba", "linear_attn.in_proj_ba"),
    ("ffn_gate_inp", "mlp.gate"),
    ("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    ("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    ("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    ("ffn_down_shexp", "mlp.shared_expert.down_proj"),
];
const MODEL: Table = &[
    ("token_embd", "model.embed_tokens"),
    ("output_norm", "model.norm"),
    ("output", "lm_head"),
    ("per_layer_token_embd", "model.embed_tokens_per_layer"),
    ("per_layer_model_proj", "model.per_layer_model_projection"),
    ("per_layer_proj_norm", "model.per_layer_projection_norm"),
];
/// LFM2's norm after the layers had the name of another one.
const LFM2_MODEL: Table =
    &[("token_embd_norm", "model.embedding_norm"), ("output_norm", "model.embedding_norm")];
/// Names of the norm after the layers.
const FALCON_MODEL: Table = &[("output_norm", "model.final_layernorm")];
const NEMOTRON_MODEL: Table = &[("output_norm", "model.norm_f")];
/// Tensors that a checkpoint has in its configuration.
const DERIVED: [&str; 4] =
    ["rope_freqs", "rope_factors_long", "rope_factors_short", "attn_rot_embd"];
/// Parts with one number a head, or for all of a layer, that are no weight in the Hugging Face checkpoint.
const BARE: [&str; 6] =
    ["ssm_a", "ssm_d", "ssm_dt", "exp_probs_b", "layer_output_scale", "attn_sinks"];
/// Experts' matrices of PhiMoE and LFM2-MoE, and of Qwen3-MoE.
const PHI_EXPERTS: Table = &[
    ("ffn_gate_exps", ".w1.weight"),
    ("ffn_down_exps", ".w2.weight"),
    ("ffn_up_exps", ".w3.weight"),
];
const QWEN_EXPERTS: Table = &[
    ("ffn_gate_exps", ".gate_proj.weight"),
    ("ffn_down_exps", ".down_proj.weight"),
    ("ffn_up_exps", ".up_proj.weight"),
];
const EXPERT_BIASES: Table = &[
    ("ffn_gate_exps", ".gate_proj.bias"),
    ("ffn_down_exps", ".down_proj.bias"),
    ("ffn_up_exps", ".up_proj.bias"),
];
const GPT_OSS: Table = &[
    ("post_attention_norm", "post_attention_layernorm"),
    ("attn_sinks", "self_attn.sinks"),
    ("ffn_gate_inp", "mlp.router"),
];

impl Architecture {
    /// Names of the supported architectures, for messages.
    pub const NAMES: &'static str = "llama, qwen2, qwen3, qwen3moe, qwen2vl, qwen3vl, qwen35, gemma3, gemma4, lfm2, phi3, \
                                     phimoe, smollm3, granite, olmo2, gemma, gemma2, exaone4, mistral3, lfm2moe, gpt-oss, ernie4_5, hunyuan-dense, \
                                     granitehybrid, falcon-h1, nemotron_h, nemotron_h_moe or qwen3next";

    pub fn of(name: &str) -> Option<Self> {
        ARCHITECTURES.iter().find(|(known, ..)| *known == name).map(|(_, found, _)| *found)
    }

    fn names(self) -> [&'static str; 2] {
        let row = ARCHITECTURES.iter().find(|(_, known, _)| *known == self);
        row.map_or(["", ""], |(name, _, class)| [name, class])
    }

    pub fn name(self) -> &'static str {
        self.names()[0]
    }

    /// The class of its `config.json`; none where the metadata does not say all of that.
    pub fn class(self) -> Option<&'static str> {
        Some(self.names()[1]).filter(|class| !class.is_empty())
    }

    pub fn is_lfm2(self) -> bool {
        matches!(self, Self::Lfm2 | Self::Lfm2Moe)
    }

    /// A key of the metadata: `llama.attention.head_count`.
    pub fn key(self, key: &str) -> String {
        format!("{}.{key}", self.name())
    }

    /// The tensor `name` in the Hugging Face checkpoint; none for one that no table has. Layers from `layers` on
    /// predict further tokens (MTP).
    pub fn tensor(self, name: &str, layers: usize) -> Option<Named> {
        let (stem, kind) = match name.rsplit_once('.') {
            Some((stem, kind @ ("weight" | "bias"))) => (stem, Some(kind)),
            _ => (name, None),
        };
        let whole = |name: String, part: &str| {
            let bare = BARE.contains(&part);
            let name = match kind.filter(|_| !bare) {
                Some(kind) => format!("{name}.{kind}"),
                // Falcon-H1's has no `.weight`.
                None if part == "ffn_norm" => format!("{name}.weight"),
                None => name,
            };
            Named::Whole(name, self.change(part))
        };
        let Some((layer, part)) = stem.strip_prefix("blk.").and_then(|rest| rest.split_once('.'))
        else {
            if DERIVED.contains(&stem) {
                return Some(Named::Derived);
            }
            let own = match self {
                Self::Lfm2 | Self::Lfm2Moe => LFM2_MODEL,
                Self::FalconH1 => FALCON_MODEL,
                Self::NemotronH | Self::NemotronHMoe => NEMOTRON_MODEL,
                _ => &[],
            };
            return Some(whole(look_up(&[own, MODEL], stem)?.to_owned(), stem));
        };
        let layer: usize = layer.parse().ok()?;
        if DERIVED.contains(&part) {
            return Some(Named::Derived);
        }
        if layer >= layers {
            return Some(Named::Whole(format!("mtp.layers.{layer}.{part}"), Change::NONE));
        }
        let prefix = format!("model.layers.{layer}");
        let (block, experts) = match self {
            Self::PhiMoe => ("block_sparse_moe", PHI_EXPERTS),
            Self::Lfm2Moe => ("feed_forward", PHI_EXPERTS),
            Self::GptOss if kind == Some("bias") => ("mlp", EXPERT_BIASES),
            Self::Qwen3Moe | Self::Qwen3Next | Self::GptOss => ("mlp", QWEN_EXPERTS),
            Self::GraniteHybrid => ("block_sparse_moe", QWEN_EXPERTS),
            Self::NemotronHMoe => ("mixer", QWEN_EXPERTS),
            _ => ("", &[][..]),
        };
        if let Some(end) = look_up(&[experts], part) {
            return Some(Named::Experts(format!("{prefix}.{block}.experts."), end));
        }
        let further: Table = match self {
            Self::GraniteHybrid | Self::FalconH1 => MAMBA,
            Self::Qwen3Next => QWEN35,
            _ => &[],
        };
        let own: Table = match self {
            Self::GraniteHybrid => GRANITE_HYBRID,
            Self::FalconH1 => FALCON_H1,
            Self::NemotronH | Self::NemotronHMoe => NEMOTRON_H,
            Self::Qwen3Next => QWEN3NEXT,
            Self::Gemma2 | Self::Gemma3 | Self::Gemma4 => GEMMA,
            Self::Olmo2 | Self::Exaone4 => OLMO2,
            Self::Lfm2 | Self::Lfm2Moe => LFM2,
            Self::Phi3 | Self::PhiMoe => PHI,
            Self::GptOss => GPT_OSS,
            Self::HunYuanDense => HUNYUAN,
            Self::Qwen35 => QWEN35,
            Self::Qwen3Moe => &[("ffn_gate_inp", "mlp.gate")],
            _ => &[],
        };
        Some(whole(format!("{prefix}.{}", look_up(&[own, further, LAYER], part)?), part))
    }

    fn change(self, part: &str) -> Change {
        let plus_one = Change { values: Values::PlusOne, ..Change::NONE };
        let minus_exp = Change { values: Values::MinusExp, ..Change::NONE };
        let shaped = |shape| Change { shape, ..Change::NONE };
        if self == Self::Qwen35
            && let Some(change) = change_of_value_heads(part)
        {
            return change;
        }
        match (self, part) {
            (
                Self::Llama
                | Self::SmolLm3
                | Self::Granite
                | Self::Mistral3
                | Self::GraniteHybrid
                | Self::NemotronH
                | Self::NemotronHMoe,
                "attn_q" | "attn_k",
            ) => Change::rows(Order::Rotated(match part {
                "attn_q" => "attention.head_count",
                _ => "attention.head_count_kv",
            })),
            (Self::Qwen35 | Self::Qwen3Next, "ssm_norm") => Change::NONE,
            (Self::Qwen3Next, "ssm_a") => minus_exp,
            (Self::Qwen3Next, "ffn_gate_inp_shexp") => shaped(Shape::Row),
            (_, "ssm_a") => Change { shape: Shape::Folded, ..minus_exp },
            (_, "ssm_d" | "ssm_norm") => shaped(Shape::Folded),
            (_, "ssm_conv1d" | "shortconv.conv") => shaped(Shape::Squeezed),
            (Self::Gemma | Self::Gemma2 | Self::Gemma3 | Self::Qwen35 | Self::Qwen3Next, part)
                if part.ends_with("norm") =>
            {
                plus_one
            }
            _ => Change::NONE,
        }
    }
}

/// Changes of `_LinearAttentionVReorderBase`.
fn change_of_value_heads(part: &str) -> Option<Change> {
    let heads = |after_keys: bool, single: bool| Order::ValueHeads { after_keys, single };
    let rows = |after_keys, single| Change::rows(heads(after_keys, single));
    match part {
        "attn_qkv" => Some(rows(true, false)),
        "attn_gate" => Some(rows(false, false)),
        "ssm_alpha" | "ssm_beta" | "ssm_dt" => Some(rows(false, true)),
        "ssm_a" => Some(Change { values: Values::MinusExp, ..rows(false, true) }),
        "ssm_conv1d" => Some(Change { shape: Shape::Squeezed, ..rows(true, false) }),
        "ssm_out" => Some(Change { columns: heads(false, false), ..Change::NONE }),
        _ => None,
    }
}

fn look_up(tables: &[Table], name: &str) -> Option<&'static str> {
    let mut entries = tables.iter().flat_map(|table| table.iter());
    entries.find(|(theirs, _)| *theirs == name).map(|(_, ours)| *ours)
}
