//! From an image to what a vision tower takes: sizes, resizing, normalising, patches, positions.
//!
//! The host gives RGB8 pixels ([`qhx_op::Segment::Image`]). An op, in this order:
//!
//! 1. checks them once: [`Image::new`];
//! 2. chooses a size: [`smart_resize`], [`smart_resize_video`], [`aspect_ratio_preserving_size`], or its graph's own;
//! 3. resizes: [`Resizer::resize`];
//! 4. cuts patches, and normalises on the way: [`Patchify::write`] with a [`Normalisation`];
//! 5. embeds the patches: [`crate::kernels::Linear`], with learned positions added
//!    ([`resample_positions`], [`add_axial_positions`]);
//! 6. fills rotary tables: [`axial_rope`].
//!
//! For towers of two kinds all of this is done. [`SquareEncoder`] takes images of one square size, or tiles of them,
//! through a graph that embeds patches itself, and [`DeclaredImages`] puts them into prompts. Where the host embeds
//! them, [`VisionEncoder`] goes from an image to rows for a decoder, [`VisionPrompts`] puts them into prompts, and
//! [`Mrope`] gives them positions.
//!
//! Buffers belong to the caller, who makes them once. Results are those of the processors of
//! `transformers`, to the bit up to step 4.

mod declared;
mod encoder;
mod image;
mod mrope;
mod normalise;
mod patchify;
mod positions;
mod prompt;
mod resize;
mod size;
mod square;
mod tiles;

pub use declared::DeclaredImages;
pub use encoder::{Features, VisionEncoder};
pub use image::Image;
pub use mrope::Mrope;
pub use normalise::Normalisation;
pub use patchify::{Grid, PatchLayout, Patchify};
pub use positions::{
    AxialOrder, add_axial_positions, axial_rope, pool_mean, resample_antialiased, resample_areas,
    resample_positions, window_numbers,
};
pub use prompt::{EncodedImage, VisionPrompt, VisionPrompts, VisionTokens, text_only};
pub use resize::{Filter, Resizer};
pub use size::{Size, aspect_ratio_preserving_size, smart_resize, smart_resize_video};
use size::{grown_in_turn, within_longest};
pub use square::SquareEncoder;
pub use tiles::{Cutter, Tiles, Tiling, WholeImage};
