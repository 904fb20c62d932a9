//! The host-op of Gemma 4: [`Generate`] is `gemma4_split_generate`.
//!
//! Full layers see all positions, sliding ones the last of a window. Each kind has heads of its own width, rotary
//! tables and a mask of its own, and the caches of sliding layers are rings. The last layers read keys and values of a
//! donor: the kit's state carrier binds the donor's cache and its fresh row to them, so that nothing is copied. Since
//! they write no cache, only the last token of a prompt passes them. Images and audio become rows that stand in a
//! prompt instead of those of tokens.

mod audio;
mod generate;
mod layout;
mod media;
mod per_layer;
#[cfg(test)]
mod tests;
mod tower;
mod vision;

pub use generate::Generate;

qhx_op::register_ops!(Generate);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
