//! From audio to log-mel features, the rows that an audio encoder takes.
//!
//! The host gives mono samples ([`qhx_op::Segment::Audio`]) at the rate that the op asks for. An op, in
//! this order:
//!
//! 1. checks them once: [`Clip::new`];
//! 2. splits what is longer than the encoder takes into chunks: [`pieces`];
//! 3. computes features: [`LogMel::write`], planned in `open`.
//!
//! A front end of another kind is put together from [`Stft`], [`MelFilters`] and [`Log`].

mod clip;
mod log_mel;
mod mel;
mod stft;

pub use clip::{Clip, pieces};
pub use log_mel::{FrontEnd, Log, LogMel, limit_range};
pub use mel::{MelFilters, MelOptions, MelScale};
pub use stft::{Edge, Spectrum, Stft, Window};
