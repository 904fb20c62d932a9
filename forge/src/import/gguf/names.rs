//! llama.cpp's names of tensors, and what its converter changes in them (`gguf-py/gguf/constants.py`,
//! `convert_hf_to_gguf.py`).

/// A model class as llama.cpp names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Llama and Mistral.
    Llama,
    Qwen2,
    Qwen3,
    Gemma3,
}

/// What the converter did to a tensor beyond naming it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    None,
    /// The rows of each head, two halves that rotate together, were interleaved (`LlamaModel.permute`). The number of
    /// heads is the value of this key.
    Rotated(&'static str),
    /// One was added (`Gemma3Model.norm_shift`).
    PlusOne,
}

impl Architecture {
    /// Those that are read, for messages.
    pub const NAMES: &'static str = "llama, qwen2, qwen3 or gemma3";

    pub fn of(name: &str) -> Option<Self> {
        match name {
            "llama" => Some(Self::Llama),
            "qwen2" => Some(Self::Qwen2),
            "qwen3" => Some(Self::Qwen3),
            "gemma3" => Some(Self::Gemma3),
            _ => None,
        }
    }

    pub const fn name(self) -> &'static str {
        match self {
            Self::Llama => "llama",
            Self::Qwen2 => "qwen2",
            Self::Qwen3 => "qwen3",
            Self::Gemma3 => "gemma3",
        }
    }

    /// A key of the metadata: `llama.attention.head_count`.
    pub fn key(self, key: &str) -> String {
        format!("{}.{key}", self.name())
    }

    /// The name of the tensor `name` in the Hugging Face checkpoint, and what was done to it; none for tensors that
    /// no recipe looks for.
    pub fn tensor(self, name: &str) -> Option<(String, Change)> {
        let (stem, kind) = name.rsplit_once('.')?;
        if !matches!(kind, "weight" | "bias") {
            return None;
        }
        let whole = match stem {
            "token_embd" => Some("model.embed_tokens"),
            "output_norm" => Some("model.norm"),
            "output" => Some("lm_head"),
            _ => None,
        };
        if let Some(whole) = whole {
            return Some((format!("{whole}.{kind}"), self.change(stem)));
        }
        let (layer, part) = stem.strip_prefix("blk.")?.split_once('.')?;
        let layer: u32 = layer.parse().ok()?;
        let gemma = self == Self::Gemma3;
        let theirs = match part {
            "attn_norm" => "input_layernorm",
            "ffn_norm" if gemma => "pre_feedforward_layernorm",
            "ffn_norm" => "post_attention_layernorm",
            "post_attention_norm" if gemma => "post_attention_layernorm",
            "post_ffw_norm" if gemma => "post_feedforward_layernorm",
            "attn_q" => "self_attn.q_proj",
            "attn_k" => "self_attn.k_proj",
            "attn_v" => "self_attn.v_proj",
            "attn_output" => "self_attn.o_proj",
            "attn_q_norm" => "self_attn.q_norm",
            "attn_k_norm" => "self_attn.k_norm",
            "ffn_gate" => "mlp.gate_proj",
            "ffn_up" => "mlp.up_proj",
            "ffn_down" => "mlp.down_proj",
            _ => return None,
        };
        Some((format!("model.layers.{layer}.{theirs}.{kind}"), self.change(part)))
    }

    fn change(self, part: &str) -> Change {
        match (self, part) {
            (Self::Llama, "attn_q") => Change::Rotated("attention.head_count"),
            (Self::Llama, "attn_k") => Change::Rotated("attention.head_count_kv"),
            (Self::Gemma3, part) if part.ends_with("norm") => Change::PlusOne,
            _ => Change::None,
        }
    }
}
