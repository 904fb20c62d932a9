//! The model classes, and the switches in which they differ.

use Bias::{Always, Key, Never, Unless};

/// Presence of biases in projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bias {
    Never,
    Always,
    /// If the configuration says so: `attention_bias`, `mlp_bias`.
    Key,
    /// The same, and where it says nothing.
    Unless,
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
    /// The layers that `layer_types` names, or all but each fourth.
    Most,
    /// The same, or all but each `sliding_window_pattern`-th.
    Pattern,
}

/// Which layers turn queries and keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turned {
    All,
    /// Not those of `no_rope_layers`, or each `no_rope_layer_interval`-th.
    Listed,
    /// Those that slide, where there are such.
    Sliding,
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
    pub turned: Turned,
    /// Full and sliding layers have rotary embeddings of their own, and `rope_scaling` is that of full ones (OLMo 3).
    pub ropes: bool,
    /// Queries grow with the position by `llama_4_scaling_beta` (Ministral 3).
    pub growing: bool,
    /// Embeddings, scores, what layers add, and logits are multiplied by keys (Granite).
    pub multipliers: bool,
    /// gpt-oss's ways: heads have sinks, experts biases and [`crate::kit::Clamp`], and the router has a bias.
    pub sinks: bool,
    /// Pairs of elements that turn stand beside each other (ERNIE 4.5).
    pub pairs: bool,
    /// One key for all biases, `use_bias` (ERNIE 4.5).
    pub one_bias: bool,
    /// Norms of queries and keys come behind rope, and have other names; `alpha` of rope type `dynamic` scales the base
    /// for all lengths (HunYuan).
    pub late_norms: bool,
    /// Gemma's ways: norms' weights are differences from one, embeddings are multiplied by √hidden, GELU in the place
    /// of SiLU.
    pub gemma: bool,
    /// Scores and logits have soft caps, and scores are scaled by 1 / √`query_pre_attn_scalar` (Gemma 2).
    pub caps: bool,
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
    turned: Turned::All,
    ropes: false,
    growing: false,
    multipliers: false,
    sinks: false,
    pairs: false,
    one_bias: false,
    late_norms: false,
    gemma: false,
    caps: false,
};

static CLASSES: [Class; 16] = [
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
        turned: Turned::Listed,
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
        caps: true,
        ..LLAMA
    },
    Class {
        prefix: "Gemma",
        family: "gemma",
        groups: Some(16),
        dim: Some(256),
        tied: true,
        mlp_bias: Never,
        gemma: true,
        ..LLAMA
    },
    Class {
        prefix: "Olmo3",
        family: "olmo3",
        eps: 1e-5,
        rope_theta: 5e5,
        mlp_bias: Never,
        head_norms: HeadNorms::Whole,
        norms: Norms::After,
        sliding: Sliding::Most,
        window: Some(4096),
        ropes: true,
        ..LLAMA
    },
    Class {
        prefix: "Exaone4",
        family: "exaone4",
        groups: Some(32),
        eps: 1e-5,
        qkv_bias: Never,
        o_bias: Never,
        mlp_bias: Never,
        head_norms: HeadNorms::Each,
        norms: Norms::After,
        sliding: Sliding::Pattern,
        window: Some(4096),
        turned: Turned::Sliding,
        ..LLAMA
    },
    Class {
        prefix: "Ministral3",
        family: "ministral3",
        groups: Some(8),
        dim: Some(128),
        eps: 1e-5,
        qkv_bias: Never,
        o_bias: Never,
        mlp_bias: Never,
        sliding: Sliding::All,
        growing: true,
        ..LLAMA
    },
    Class {
        prefix: "Ernie4_5",
        family: "ernie4_5",
        groups: Some(2),
        dim: Some(128),
        eps: 1e-5,
        rope_theta: 5e5,
        tied: true,
        pairs: true,
        one_bias: true,
        ..LLAMA
    },
    Class {
        prefix: "HunYuanDenseV1",
        family: "hunyuan",
        eps: 1e-5,
        mlp_bias: Never,
        head_norms: HeadNorms::Each,
        late_norms: true,
        ..LLAMA
    },
    Class {
        prefix: "GptOss",
        family: "gpt_oss",
        groups: Some(8),
        dim: Some(64),
        eps: 1e-5,
        rope_theta: 1.5e5,
        qkv_bias: Unless,
        o_bias: Unless,
        mlp_bias: Never,
        sliding: Sliding::Alternate,
        window: Some(128),
        sinks: true,
        ..LLAMA
    },
];

/// The end of the `model_type` of a class with experts.
pub(super) const MOE: &str = "_moe";

impl Class {
    /// By the name of the model class: `MistralForCausalLM`, `LlamaBidirectionalModel`, ….
    pub fn of(name: &str) -> Option<&'static Self> {
        let is = |class: &&Self| {
            let rest = name.strip_prefix(class.prefix);
            // The prefix of `Gemma2ForCausalLM` is not `Gemma`.
            rest.is_some_and(|rest| !rest.starts_with(|first: char| first.is_ascii_digit()))
        };
        CLASSES.iter().find(is)
    }

    /// By the `model_type` of a configuration: `mistral`, `qwen3_moe`, ….
    pub fn of_type(name: &str) -> Option<&'static Self> {
        let name = name.strip_suffix(MOE).unwrap_or(name);
        CLASSES.iter().find(|class| class.family == name)
    }
}
