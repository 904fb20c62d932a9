//! Finds, checks, loads and lists host-op plugins and adapts them to the engine.
//!
//! [`Plugins`] implements [`qhx_core::op::OpProvider`]: it knows the ops linked into the program
//! and those of every plugin found in the documented places, and opens them by name. A plugin that
//! cannot be used is remembered with the reason, which the error for an unknown op repeats.

mod adapter;
mod load;
mod registry;
pub mod search;
mod services;

pub use load::{LoadError, LoadErrorKind, Plugin};
pub use registry::{PluginStatus, Plugins};
pub use search::PluginOptions;

/// Version of the plugin interface that this program speaks.
pub fn interface_version() -> &'static str {
    load::interface_version()
}
