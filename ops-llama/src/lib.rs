//! Host-ops of the Llama family: decoders and encoders of plain softmax attention.
//!
//! - [`Generate`] is `llama_generate`: text decoding over graphs with a KV cache, one token at a
//!   time, and over graphs that take several tokens of a prompt at once.
//! - [`DeclaredDecoder`] is `decoder_generate`: the same for any decoder that its manifest declares, with states besides
//!   caches and ropes of its own for sliding layers.
//! - [`Qwen3`], [`Lfm`] and [`Split`] are `qwen3_generate`, `lfm_generate` and `split_generate`, the same under names
//!   that published bundles have.
//! - [`VisionGenerate`] is `vision_generate`: such a decoder that takes images, whole or in tiles.
//! - [`EmbedSharded`] is `llama_embed_sharded`: one vector for a text, or one score for a pair of texts, from an encoder
//!   that is spread over several contexts.
//! - [`smolvlm_op::Generate`] is `smolvlm_generate`: a Llama that takes images in tiles.
//! - [`Siglip`] is `siglip_embed`: one vector for a text or an image, in one space.
//!
//! Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite, OLMo 2, Gemma 2 and 3, LFM2 and LFM2.5 differ only inside
//! their graphs, which these ops do not see.

mod embed;
mod embeddings;
mod generate;
mod modules;
mod of_tokens;
mod pooling;
mod siglip;
#[cfg(test)]
mod tests;
mod vision;

use qhx_kit::decoder::DeclaredDecoder;

pub use embed::EmbedSharded;
pub use generate::{Generate, Lfm, Qwen3, Split};
pub use siglip::Siglip;
pub use vision::VisionGenerate;

qhx_op::register_ops!(
    DeclaredDecoder,
    Generate,
    Qwen3,
    Lfm,
    Split,
    VisionGenerate,
    EmbedSharded,
    Siglip,
    smolvlm_op::Generate,
);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
