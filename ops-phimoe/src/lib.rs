//! The host-op of the PhiMoE family: decoders whose feed-forward part is a few of many experts.
//!
//! [`Generate`] is `phimoe_generate`. Per layer and token: a graph of attention and router, the choice
//! of two experts on the host ([`qhx_kit::experts::sparsemixer`]), a graph that runs both experts with their weights as
//! inputs, all by [`qhx_kit::experts`]. Prompts can go through graphs that take many tokens at once.

mod generate;
mod names;
#[cfg(test)]
mod tests;

pub use generate::Generate;

qhx_op::register_ops!(Generate);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
