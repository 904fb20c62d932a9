//! The native part of the Python package `qhx`: what its classes call, as the module `qhx._qhx`.
//!
//! `open` loads a bundle and returns the functions of its model; they take and return plain values and JSON. Classes,
//! options and documentation are Python's (`python/qhx`).
//!
//! | module | holds |
//! |---|---|
//! | `module` | the entry point, which the interpreter calls |
//! | `model` | a model's functions |
//! | `stream` | a generation that goes on as it is asked to |
//! | `turns` | who may use a model now, and waiting for work on a thread of its own |
//! | `request`, `media` | what a model is asked, and what comes with it |
//! | `fault` | errors as Python's exceptions |

#[cfg(feature = "builtin-ops")]
mod builtin;
mod fault;
mod media;
mod model;
mod module;
mod request;
mod stream;
mod turns;
