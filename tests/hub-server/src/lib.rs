//! A hub on loopback for tests: it serves repositories, and takes uploads, by the API of the Hugging Face hub, and
//! fails as it is asked to.
//!
//! [`Server::start`] serves [`Repo`]s until it is dropped. [`Server::fault`] makes the next requests for a path fail,
//! and [`Server::requests`] lists what arrived, headers included.

mod answer;
mod repo;
mod server;
mod tls;
mod upload;

pub use repo::{File, Repo};
pub use server::{Fault, Request, Server};
pub use tls::CERTIFICATE;
