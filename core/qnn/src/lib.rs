//! Context binaries on Qualcomm's Hexagon NPU, through libQnnHtp and libQnnSystem.
//!
//! | module | does |
//! |---|---|
//! | [`library`](Library) | opens the two libraries |
//! | [`info`](BinaryInfo) | reads a context binary's metadata without loading it |
//! | [`probe`] | has a child process read that metadata |
//! | [`preflight`] | explains why a binary will not load |
//! | `causes` | explains why the device cannot be used |
//! | [`backend`](QnnBackend) | opens context binaries, whose graphs `graph` executes |
//! | `session` | opens the device, and opens it again after the DSP restarted |
//! | `thermal` | reads temperatures of the NPU |
//! | `registered` | puts inputs and outputs into memory that the DSP reads and writes in place |
//! | [`compose`] | makes context binaries |
//! | `gate` | keeps compiling and executing apart within one process |
//! | [`stdout`] | keeps the libraries' chatter out of the results |
//!
//! The libraries are loaded at run time from paths that the user gives; on x86-64 they hold an
//! emulator of the NPU. The layouts of their C interface are those of `qhx-qnn-sys`. Nothing outside
//! this crate sees a handle.
//!
//! # Contract with the libraries
//! Guarantees of this crate to the libraries, and its assumptions about them. SAFETY comments cite the clauses by name;
//! those of memory bound to graphs are in [`qhx_exec::backend`].
//!
//! | clause | who | what |
//! |---|---|---|
//! | *handles* | this crate | A handle is passed while it is alive: the type that owns it keeps the owners of what it was made from (graph, context, device, backend, log), and frees it once, in its `drop`, before theirs. |
//! | *arguments* | this crate | What an argument points to, lists and texts included, is laid out as `qhx-qnn-sys` says and lives during the call. Lists of configurations end with NULL. |
//! | | the library | It reads arguments within the call and keeps no pointer to them (measured for the bytes of constants and of binaries). |
//! | *answers* | this crate | Pointers for answers are valid for writing. An answer is read only where the status says success. |
//! | | the library | It writes no more than the type, or the length that it is given. |
//! | *texts* | the library | A text is NULL or ends with NUL, and lives as long as what it describes. It is copied at once. |
//! | *lists* | the library | A pointer with a count leads to that many entries. |
//! | *tables* | the library | A provider has the head, and the function table that its version says. Both, and the table of clock control, stay where they are: a library is never unloaded. |
//! | *threads* | the library | It locks what it shares: every function may be called from any thread, but for what `gate` keeps apart. |
//!
//! A context binary may be hostile, and the system library passes on what stands in it. Of such a
//! description *texts* and *lists* do not hold: `metadata` checks every number and pointer as far as
//! that can be done, and [`probe`] has a child process do it.

mod backend;
mod batch;
mod causes;
pub mod codes;
pub mod compose;
mod context;
mod device;
mod format;
mod gate;
mod graph;
mod info;
mod integers;
mod library;
mod log;
mod metadata;
mod opening;
mod power;
mod preflight;
pub mod probe;
mod profile;
mod profile_trace;
mod read;
mod registered;
mod rpcmem;
mod session;
mod target;
mod thermal;
mod types;

pub use backend::{QnnBackend, QnnOptions};
pub use causes::SKEL_FOLDERS;
pub use context::{ContextConfig, Priority};
pub use device::{Device, Platform};
pub use info::{BinaryGraph, BinaryInfo, BinaryTensor, GraphFigures};
pub use library::{ApiVersion, HTP_FILE, Library, SYSTEM_FILE, SystemLibrary};
pub use log::LogLevel;
pub use power::PerfMode;
pub use preflight::{Destination, Verdict, preflight, runs_on, verdict};
pub use profile::{ProfileEvent, ProfileLevel, ProfileRecord};
pub use qhx_base::stdout;
pub use registered::MemoryMode;
pub use target::{SOCS, Soc, Target};
