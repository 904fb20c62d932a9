//! The host-op of the PhiMoE family: decoders whose feed-forward part is a few of many experts.
//!
//! [`Generate`] is `phimoe_generate`. Per layer and token: a graph of attention and router, the choice
//! of two experts on the host ([`sparsemixer`]), a graph that runs both experts with their weights as
//! inputs. The weights of all experts stay in a mapped file; only those of chosen experts are touched.
//! Prompts can go through graphs that take many tokens at once, each expert once per layer over the
//! tokens that chose it.

mod ffn;
mod generate;
mod layers;
mod names;
mod pair;
mod prefill;
mod route;
mod spans;
mod table;

pub use generate::Generate;
pub use route::{Choice, sparsemixer};

qhx_op::register_ops!(Generate);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
