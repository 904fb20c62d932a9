//! Shared code of the bindings for languages with objects and exceptions: Python and Kotlin.
//!
//! A language's package writes options and requests as JSON, and hands bytes over beside it. Its native part converts
//! those, waits as the language has to, and makes exceptions of faults; all else is here.
//!
//! | module | holds |
//! |---|---|
//! | `model` | a model: opened, asked, with the vectors and transcripts that it returns |
//! | `stream` | a generation that goes on as it is asked to |
//! | `turns` | who may use a model now, and waiting for work on a thread of its own |
//! | `request`, `media` | what a model is asked, and what comes with it |
//! | `fault` | why something failed |

mod fault;
mod media;
mod model;
mod request;
mod stream;
mod turns;

pub use fault::{Ended, Fault, Result, Waited};
pub use media::{Given, Item};
pub use model::{About, Loaded, Vectors, open};
pub use request::{Answer, RequestJson};
pub use stream::Stream;
pub use turns::{Caller, Shared};
