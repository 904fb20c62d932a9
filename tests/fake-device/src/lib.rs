//! A QNN provider in between: hands each call on to the real libQnnHtp, and on the way counts it,
//! checks it, delays it, or answers in its place.
//!
//! The emulator of x86-64 executes everything, but it knows no faults and no registered memory, and
//! forgives much. This library is opened in its place (`QHX_QNN_HTP`) and shows what happens
//! when a call fails, when the DSP restarts, or when a context does not fit. It also stands for
//! libcdsprpc: `rpcmem_alloc` and its kin give memory of the system with a file descriptor.
//!
//! | variable | meaning |
//! |---|---|
//! | `QHX_FAKE_REAL` | the real libQnnHtp.so; without it the file that `QHX_QNN_HTP` names |
//! | `QHX_FAKE_PLAN` | file with a [`Plan`] as JSON, read when the library is opened |
//! | `QHX_FAKE_REPORT` | file that a [`Report`] is written to as JSON, when the process ends or a call begins to hang |
//!
//! A test in the same process sets the plan and reads the report through [`Control`].
//!
//! It checks these rules for callers, and each breach is a line of [`Report::violations`]:
//! - No handle is used before it was made or after it was freed, and none is freed twice.
//! - No two threads are in calls on one graph or one context at a time.
//! - A tensor of registered memory names a handle that is registered with the graph's context and as
//!   large as the tensor; memory is not freed while it is registered.
//! - A context that shares another one's spill-fill buffer names one that is open and has as many bytes, is freed
//!   before it, and no two of them execute at a time.
//! - Objects that are never freed stay in [`Report::alive`].

mod plan;
pub use plan::{Bytes, Chip, Plan, Report, Rule, Then, is_spared};

#[cfg(any(target_os = "linux", target_os = "android"))]
mod control;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod groups;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod memory;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod power;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod provider;
#[cfg(any(target_os = "linux", target_os = "android"))]
mod state;

#[cfg(any(target_os = "linux", target_os = "android"))]
pub use control::Control;
