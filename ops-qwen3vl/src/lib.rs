//! Host-op of Qwen3-VL: [`Generate`] is `qwen3vl_generate`, text over pictures and videos.
//!
//! The host makes patches of a picture and embeds them; the vision graph makes rows of them that stand in the prompt
//! where the picture does, and further rows that are added after the decoder's first layers (deepstack). Positions have
//! three axes.

mod deepstack;
mod generate;

pub use generate::Generate;

qhx_op::register_ops!(Generate);
