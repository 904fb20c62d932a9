//! qhx-core: manifests, the trait of host-ops, sampling and the generation engine.
//!
//! The crate knows nothing of model families. What only one family needs is a host-op
//! ([`op::HostOp`]), selected by name in the bundle's manifest.

pub mod dump;
pub mod engine;
pub mod manifest;
pub mod npy;
pub mod op;
pub mod sampling;
pub mod stop;

pub use manifest::Manifest;
