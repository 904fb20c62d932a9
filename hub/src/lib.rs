//! A hub of bundles and checkpoints (Hugging Face's, or one that speaks like it), and the cache of what was fetched.
//!
//! | type | what it is |
//! |---|---|
//! | [`HubOptions`] | endpoint, token, cache folder; [`HubOptions::from_environment`] reads them |
//! | [`Name`] | `OWNER/NAME[@REVISION][/FOLDER]` |
//! | [`Hub`] | resolves a name to a commit and its files ([`Listing`]), and downloads a [`Selection`] of them |
//! | [`Publication`] | files that [`Hub::publish`] puts into a repository |
//! | [`Lock`] | keeps other processes out while something is fetched |
//! | [`index::Index`] | short names of models, and the repositories behind them |
//! | [`Cache`] | what was fetched: finds a name's folder without a network, lists, checks, removes |
//!
//! The cache has the layout of the hub's own tools (`blobs`, `snapshots`, `refs`), so that what these fetched is found
//! and they find what this crate fetched. A file gets its name once its hash is right; what is there of it before lies
//! beside as `.incomplete`, and the next attempt goes on from there.

mod blob;
mod cache;
mod choose;
mod download;
mod environment;
mod fetch;
mod head;
mod http;
mod hub;
pub mod index;
mod kind;
mod links;
mod listing;
mod local;
mod lock;
mod name;
mod options;
mod progress;
mod record;
mod remove;
mod upload;
mod wait;

pub use blob::BlobId;
pub use cache::Cache;
pub use choose::{BundleFolder, CheckpointFiles, Selection, Want, bundles};
pub use download::Pulled;
pub use environment::VARIABLES;
pub use hub::Hub;
pub use kind::Kind;
pub use listing::{Listing, RemoteFile};
pub use local::{Found, Local, Unfinished};
pub use lock::Lock;
pub use name::Name;
pub use options::HubOptions;
pub use progress::DownloadProgress;
pub use record::FileCheck;
pub use remove::Removed;
pub use upload::{LocalFile, Publication, Published, UploadProgress};
