//! Fillers for the inputs that the host computes: embedding rows, rotary tables, masks.
//!
//! Each reads width and dtype (f16 or f32) from the tensor when it is made and reports what does not fit.
//! Graphs of one step share buffers where their inputs are alike. Filling allocates nothing, and writes
//! only what changes.
//!
//! | for | open | each step |
//! |---|---|---|
//! | `cos`, `sin`, or a second pair with a base of its own | [`Rope::from_params`] or [`Rope::new`], [`Rope::named`], [`Rope::bind_all`] | [`RopeTables::fill`] |
//! | linear, Llama 3 or proportional scaling | [`Rope::scaled`] | |
//! | M-RoPE: positions of time, height and width | [`Rope::sectioned`] | [`RopeTables::fill_at`] |
//! | `cmask` of all earlier positions | [`CausalMask::new`], [`CausalMask::bind`] | [`StepMask::fill`] |
//! | a mask of another name, a window, ring caches | [`CausalMask::named`], [`CausalMask::window`], [`CausalMask::ring`] | [`StepMask::fill`] |
//! | an encoder's mask | [`PaddingMask::bind_all`] | [`PaddingMask::fill`] |
//! | several texts in one graph of an encoder | [`PaddingMask::bind_all`], [`Rope::bind_all`] | [`PaddingMask::fill_texts`], [`RopeTables::fill_texts`] |
//! | `x`: rows of a table, scaled or not | [`Embedding::open`] or [`Embedding::open_at`], [`Embedding::scaled`], [`Embedding::bind`] | [`Embedding::fill`] |
//! | anything else | [`FloatInput::require`] or [`FloatInput::bind_all`] | [`FloatInput::write`], [`FloatInput::fill`] |
//!
//! Caches, rings and donors are in [`crate::state`].

mod embedding;
mod input;
mod mask;
mod padding;
mod rope;

pub use embedding::Embedding;
pub use input::FloatInput;
pub use mask::{CausalMask, MASK_VALUE, StepMask};
pub use padding::PaddingMask;
pub use rope::{Rope, RopeParams, RopeScaling, RopeTables, Sections};
