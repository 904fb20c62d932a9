//! Context binaries on Qualcomm's Hexagon NPU, through libQnnHtp and libQnnSystem.
//!
//! | module | does |
//! |---|---|
//! | [`library`](Library) | opens the two libraries |
//! | [`info`](BinaryInfo) | reads a context binary's metadata without loading it |
//! | [`probe`] | has a child process read that metadata |
//! | [`preflight`] | says in words why a binary will not load |
//! | [`backend`](QnnBackend) | executes context binaries |
//! | [`compose`] | makes context binaries |
//! | `gate` | keeps compiling and executing apart within one process |
//! | [`stdout`] | keeps the libraries' chatter out of the results |
//!
//! The libraries are loaded at run time from paths that the user gives; on x86-64 they hold an
//! emulator of the NPU. The layouts of their C interface are written down in `sys` and asserted
//! at compile time. Handles are owned by types that free them in the right order; nothing outside
//! this module sees one.

mod backend;
pub mod codes;
pub mod compose;
mod context;
mod device;
mod gate;
mod info;
mod library;
mod log;
mod metadata;
mod power;
mod preflight;
pub mod probe;
mod profile;
pub mod stdout;
mod types;

pub use backend::{QnnBackend, QnnOptions};
pub use context::{ContextConfig, Priority};
pub use device::{Device, Platform, Target};
pub use info::{BinaryGraph, BinaryInfo, BinaryTensor, GraphFigures};
pub use library::{ApiVersion, Library, SystemLibrary};
pub use log::LogLevel;
pub use power::PerfMode;
pub use preflight::{Destination, preflight};
pub use profile::{ProfileEvent, ProfileLevel, ProfileRecord};
mod read;
