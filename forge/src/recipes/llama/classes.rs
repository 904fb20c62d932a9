//! The model classes, and the switches in which they differ.

use Bias::{Always, Key, Never};

/// Presence of biases in projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bias {
    Never,
    Always,
    /// If the configuration says so: `attention_bias`, `mlp_bias`.
    Key,
}

/// Norms of queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HeadNorms {
    None,
    /// One for each head.
    Each,
    /// One for all heads together.
    Whole,
}

/// Positions of the norms in a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Norms {
    /// Before attention and MLP.
    Before,
    /// After them, before their results are added.
    After,
    Both,
}

/// Which layers see only the last positions, where the configuration says of how many (`sliding_window`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sliding {
    Never,
    All,
    /// With `use_sliding_window`: those of `layer_types`, or those from `max_window_layers` on.
    Upper,
    /// With `use_sliding_window`: those of `layer_types`, or those without rope.
    Unturned,
    /// The layers that `layer_types` names, or every other one from the first on.
    Alternate,
}

/// Properties of a model class that its `config.json` does not declare.
#[derive(Debug)]
pub(super) struct Class {
    /// Prefix of the class names: `Mistral` of `MistralForCausalLM`, `MistralModel`, ….
    pub prefix: &'static str,
    /// `model.family` of the manifest.
    pub family: &'static str,
    /// Default of `num_key_value_heads`; none for one for each head.
    pub groups: Option<usize>,
    /// Default of `head_dim`; none for heads that together are as wide as a hidden state.
    pub dim: Option<usize>,
    /// Default of `rms_norm_eps`.
    pub eps: f32,
    /// Default of the rotary embedding's base.
    pub rope_theta: f64,
    /// Default of `tie_word_embeddings`.
    pub tied: bool,
    pub qkv_bias: Bias,
    pub o_bias: Bias,
    pub mlp_bias: Bias,
    /// `qkv_proj` and `gate_up_proj` hold several projections, and a head may turn in part (Phi-3).
    pub joined: bool,
    pub head_norms: HeadNorms,
    pub norms: Norms,
    pub sliding: Sliding,
    /// Default of `sliding_window`, where the key is absent.
    pub window: Option<usize>,
    /// Layers of `no_rope_layers` do not turn queries and keys, or each `no_rope_layer_interval`-th.
    pub unturned: bool,
    /// Embeddings, scores, what layers add, and logits are multiplied by keys (Granite).
    pub multipliers: bool,
    /// Gemma's ways: norms' weights are differences from one, embeddings are multiplied by √hidden, GELU in the place
    /// of SiLU, scores and logits with soft caps, scores scaled by 1 / √`query_pre_attn_scalar`.
    pub gemma: bool,
}

/// Llama itself, from which the others differ.
const LLAMA: Class = Class {
    prefix: "Llama",
    family: "llama",
    groups: None,
    dim: None,
    eps: 1e-6,
    rope_theta: 1e4,
    tied: false,
    qkv_bias: Key,
    o_bias: Key,
    mlp_bias: Key,
    joined: false,
    head_norms: HeadNorms::None,
    norms: Norms::Before,
    sliding: Sliding::Never,
    window: None,
    unturned: false,
    multipliers: false,
    gemma: false,
};

static CLASSES: [Class; 9] = [
    LLAMA,
    Class {
        prefix: "Mistral",
        family: "mistral",
        groups: Some(8),
        qkv_bias: Never,
        o_bias: Never,
        mlp_bias: Never,
        sliding: Sliding::All,
        window: Some(4096),
        ..LLAMA
    },
    Class {
        prefix: "Qwen2",
        family: "qwen2",
        groups: Some(32),
        qkv_bias: Always,
        o_bias: Never,
        mlp_bias: Never,
        sliding: Sliding::Upper,
        window: Some(4096),
        ..LLAMA
    },
    Class {
        prefix: "Qwen3",
        family: "qwen3",
        groups: Some(32),
        dim: Some(128),
        mlp_bias: Never,
        head_norms: HeadNorms::Each,
        sliding: Sliding::Upper,
        window: Some(4096),
        ..LLAMA
    },
    Class {
        prefix: "Phi3",
        family: "phi3",
        eps: 1e-5,
        qkv_bias: Never,
        o_bias: Never,
        mlp_bias: Never,
        joined: true,
        sliding: Sliding::All,
        ..LLAMA
    },
    Class {
        prefix: "SmolLM3",
        family: "smollm3",
        groups: Some(4),
        rope_theta: 2e6,
        tied: true,
        sliding: Sliding::Unturned,
        unturned: true,
        ..LLAMA
    },
    Class { prefix: "Granite", family: "granite", multipliers: true, ..LLAMA },
    Class {
        prefix: "Olmo2",
        family: "olmo2",
        eps: 1e-5,
        mlp_bias: Never,
        head_norms: HeadNorms::Whole,
        norms: Norms::After,
        ..LLAMA
    },
    Class {
        prefix: "Gemma2",
        family: "gemma2",
        groups: Some(4),
        dim: Some(256),
        tied: true,
        mlp_bias: Never,
        norms: Norms::Both,
        sliding: Sliding::Alternate,
        window: Some(4096),
        gemma: true,
        ..LLAMA
    },
];

/// The end of the `model_type` of a class with experts.
pub(super) const MOE: &str = "_moe";

impl Class {
    /// By the name of the model class: `MistralForCausalLM`, `LlamaBidirectionalModel`, ….
    pub fn of(name: &str) -> Option<&'static Self> {
        CLASSES.iter().find(|class| name.starts_with(class.prefix))
    }

    /// By the `model_type` of a configuration: `mistral`, `qwen3_moe`, ….
    pub fn of_type(name: &str) -> Option<&'static Self> {
        let name = name.strip_suffix(MOE).unwrap_or(name);
        CLASSES.iter().find(|class| class.family == name)
    }
}
