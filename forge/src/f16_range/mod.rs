//! Values of a graph within f16, in which the NPU computes.
//!
//! | module | holds |
//! |---|---|
//! | [`measure`] | largest values of graphs and the worth of weights' inputs, and the rescaling that makes values fit |
//! | `rescale` | powers of two in weights |

pub mod measure;
pub(crate) mod rescale;

pub use rescale::Fold;
