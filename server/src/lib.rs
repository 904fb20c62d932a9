//! Serves bundles over HTTP, to clients of OpenAI's, Anthropic's and Ollama's interfaces: what `qhx serve` runs.
//!
//! ```no_run
//! let options = qhx_server::ServerOptions::default().bundle(qhx::Bundle::open("qwen35/v81")?);
//! let server = qhx_server::Server::bind(options)?;
//! println!("http://{}", server.address());
//! server.run(&qhx::CancelToken::new())?;
//! # Ok::<(), qhx::Error>(())
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | `server` | the listening socket, the end |
//! | `connections` | how many there may be, and when one that does not read is given up |
//! | `app`, `tally` | what requests share, and what is known of each |
//! | `memory`, `activity` | memory for requests, and what is tidied up once there are none |
//! | `hosts` | names that the server goes by |
//! | `routes` | which address is answered by what, and what every request goes through |
//! | `registry` | the models: loaded when they are asked for, within a memory budget |
//! | `catalog`, `pulls`, `manage` | models that can be added, what adds and removes them, and their routes |
//! | `page` | the page at `/` |
//! | `queue`, `worker` | jobs that wait, and the threads that do them |
//! | `pending`, `sse` | what comes of a job, awaited as a whole or streamed |
//! | `turns`, `ask` | conversations, and how they are answered, whatever interface they came by |
//! | `answer` | reasoning, text and calls of tools in an answer |
//! | `realtime` | `/v1/realtime`: speech that is transcribed while it goes on, over a WebSocket |
//! | `wyoming` | the same and speech in the protocol of Home Assistant |
//! | `recording` | audio that comes piece by piece |
//! | `chat`, `completions`, `embeddings`, `rerank`, `messages`, `responses`, `audio`, `infill`, `ollama` | the interfaces |
//!
//! Whatever a client sends is untrusted input. It names models by their names, never by paths, and images and audio by
//! `data:` URLs, never by files or addresses.

mod access_log;
mod activity;
mod answer;
mod app;
mod audio;
mod catalog;
mod chat;
mod completions;
mod connections;
mod conversation;
mod custom_tools;
mod embeddings;
mod error;
mod fields;
mod generation_request;
mod hosts;
mod ids;
mod infill;
mod manage;
mod memory;
mod messages;
mod metrics;
mod ollama;
mod options;
mod page;
mod pending;
mod pulls;
mod queue;
mod realtime;
mod recording;
mod registry;
mod request;
mod request_metrics;
mod rerank;
mod responses;
mod routes;
mod server;
mod speech;
mod sse;
mod stored_responses;
mod tokens;
mod worker;
mod wyoming;

pub use access_log::Record;
pub use catalog::{Catalog, CatalogEntry, CatalogProgress};
pub use options::ServerOptions;
pub use server::Server;
