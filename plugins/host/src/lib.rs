//! Finds, checks, loads and lists host-op plugins and adapts them to the engine.
//!
//! [`Plugins`] implements [`qhx_core::op::OpProvider`]: it knows the ops linked into the program
//! and those of every plugin found in the documented places ([`search`]), and opens them by name.
//! A plugin that cannot be used is remembered with the reason, which the error for an unknown op
//! repeats.
//!
//! A plugin is native code with all rights of the process. [`store::Store`] installs plugins into
//! a folder with a [`lock`] of hashes, [`trust`] decides whose files are accepted, [`probe`] tries a
//! plugin in a child process first, and [`survey()`] lists what is there without running any of it.

mod adapter;
mod errors;
mod header;
mod load;
pub mod lock;
mod names;
mod nearest;
#[cfg(feature = "params-schema")]
mod params;
pub mod probe;
mod registry;
pub mod search;
mod services;
pub mod store;
mod survey;
pub mod trust;
mod views;

pub use load::{LoadError, LoadErrorKind, Plugin};
pub use nearest::nearest;
pub use probe::Prober;
pub use registry::{PluginStatus, Plugins};
pub use search::PluginOptions;
pub use store::Store;
pub use survey::{Listed, Status, survey};

/// Version of the plugin interface that this program speaks.
pub fn interface_version() -> &'static str {
    header::interface_version()
}
