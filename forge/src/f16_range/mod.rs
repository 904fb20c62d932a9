//! Values of a graph within f16, in which the NPU computes.
//!
//! | module | holds |
//! |---|---|
//! | [`vision`] | hidden states of vision towers, measured on an image and scaled down where they grow |
//! | [`decoder`] | largest values of a decoder, measured on texts, and the rescaling that makes them fit |
//! | `rescale` | powers of two in weights |

pub mod decoder;
pub(crate) mod rescale;
pub mod vision;

pub use rescale::Fold;
