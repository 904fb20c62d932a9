//! qhx runs bundles on the Hexagon NPU, on its emulator and on the CPU: what an app links.
//!
//! ```no_run
//! let mut model = qhx::Bundle::open("qwen35/v81")?.model()?;
//! for piece in model.complete("The capital of France is")? {
//!     print!("{}", piece?);
//! }
//! # Ok::<(), qhx::Error>(())
//! ```
//!
//! | type | what it is |
//! |---|---|
//! | [`Bundle`] | a bundle that was found: its manifest is read |
//! | [`Runtime`] | what bundles are opened with: backend, libraries, plugins, threads |
//! | [`Model`] | an open bundle: contexts, host-op, tokenizer, one state |
//! | [`Run`] | a generation under way, which goes on as far as it is asked to |
//! | [`Chat`] | a conversation, whose state stays between turns |
//! | [`Embedder`] | texts to vectors, with the prefixes of the bundle |
//! | [`Transcriber`] | audio of any length to text |
//! | [`Speaker`] | texts to audio |
//! | [`Reranker`] | how well documents answer a query |
//! | [`Engine`] | one of those above, as the bundle is meant: what a binding to another language holds |
//! | [`TextPipeline`] | tokenizer, chat template and limits, usable while a generation runs |
//!
//! The modules [`golden`], [`plugins`], [`hub`] and [`vars`] are for programs that manage bundles. Benchmarks, corpora,
//! suites, looks at bundles and machines, and the installation of libraries are in the crate `qhx-tools`.
//!
//! Nothing here prints, exits, installs a signal handler or starts a process unasked. All that takes time can be
//! cancelled from another thread, within one graph execution ([`CancelToken`]). Errors are one type with a kind, a
//! message and a likely fix ([`Error`]). A model may be moved to another thread.

pub mod backends;
pub mod builtin;
mod bundle;
pub mod cache;
mod caller_options;
mod catch_panic;
mod chat;
mod decode_on;
mod embedder;
mod engine;
pub mod folders;
pub mod golden;
pub mod hub;
pub mod libraries;
pub mod machines;
pub mod media;
pub mod models;
pub mod npu_files;
mod open;
pub mod plugins;
pub mod prepared;
mod reranker;
mod runtime;
mod settings;
pub mod skels;
mod speaker;
mod transcriber;
pub mod vars;
mod wave;

pub use backends::Chosen;
pub use bundle::{Bundle, not_forged};
pub use caller_options::{CallerOptions, ResolvedOptions};
pub use catch_panic::catch_panic;
pub use chat::{Chat, ChatRun, is_left_out};
pub use decode_on::{positions, varied_tokens};
pub use embedder::{EmbedOptions, Embedder, Prefixed, Role, TokenVectors, cosine, norm};
pub use engine::Engine;
pub use libraries::LibraryFiles;
pub use media::{Attached, Attachment};
pub use reranker::{Ranked, Reranker, Scoring};
pub use runtime::{Runtime, RuntimeBuilder};
pub use settings::{BackendChoice, DecodeOn, DeviceOptions};
pub use speaker::{Lexicon, SentenceSplitter, SpeakOptions, Speaker, Spoken};
pub use transcriber::{
    Chunk, Live, Note, Scores, TIMES, Times, TranscribeEvent, TranscribeLimits, TranscribeOptions,
    Transcriber, Transcript, Turn, srt, vtt,
};

pub use qhx_cpu::{Activations, Caches, CpuOptions};

pub use qhx_base::{CancelToken, Error, ErrorKind, Result, TooLong};
pub use qhx_core::Manifest;
pub use qhx_core::engine::{
    Content, ContentPart, DecodeBackend, Event, FinishReason, Generation, Grammar, Message, Model,
    Part, Prompt, PromptToken, Request, Run, Sessions, Speculate, TextPipeline, Timings,
};
pub use qhx_core::manifest::Script;
pub use qhx_core::op::{MediaRules, Modality, OpDescription, Task};
pub use qhx_core::sampling::{SamplingParams, TokenLogprobs};
pub use qhx_media::{
    AUDIO_FORMATS, AudioFormat, Limits, Source, SpeechRules, WAV_HEADER, encode_audio, pcm16,
    wav_header,
};
pub use qhx_plugins::{PluginOptions, Plugins};
pub use qhx_qnn::{MemoryMode, PerfMode};
pub use qhx_text::{Beginning, CallFormat, Infill, ReasoningMarks, Tool, ToolCall};
pub use qhx_types::Media;
