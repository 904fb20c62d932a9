//! The native part of the Python package `qhx`: what its classes call, as the module `qhx._qhx`.
//!
//! `open` loads a bundle and returns the functions of its model; they take and return plain values and JSON. Classes,
//! options and documentation are Python's (`python/qhx`).
//!
//! | module | holds |
//! |---|---|
//! | `module` | the entry point, which the interpreter calls |
//! | `model` | a model's functions |
//! | `fault` | faults as Python's exceptions, and how a thread of Python waits |
//!
//! The work itself is done in `qhx-bindings`.

#[cfg(feature = "builtin-ops")]
mod builtin;
mod fault;
mod model;
mod module;
