//! The native part of the Kotlin library `dev.qhx`: what its object `Native` declares as `external`.
//!
//! Models and calls are numbers to Kotlin, of tables that know which are live. Texts are arrays of UTF-8, so that all
//! code points survive, and requests are JSON. Nothing here calls back into Kotlin but to make an exception, on the
//! thread that called: threads of the library never enter the virtual machine.
//!
//! | module | holds |
//! |---|---|
//! | `exports` | the functions that the virtual machine looks up |
//! | `calls` | what they do: models, and calls that can be cancelled |
//! | `handles` | the tables |
//! | `values` | arrays of Java from and to values |
//! | `fault` | faults as exceptions |

mod builtin;
mod calls;
mod exports;
mod fault;
mod handles;
mod values;
