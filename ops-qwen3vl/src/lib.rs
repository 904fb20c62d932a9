//! Host-op of Qwen3-VL and Qwen2.5-VL: [`Generate`] is `qwen3vl_generate`, text over images and videos.
//!
//! The host makes patches of an image and embeds them; the vision graph makes rows of them that stand in the prompt
//! where the image does, and of Qwen3-VL further rows that are added after the decoder's first layers (deepstack).
//! Positions have three axes.

mod deepstack;
mod generate;
#[cfg(test)]
mod tests;

pub use generate::Generate;

qhx_op::register_ops!(Generate);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
