//! Looks at bundles and machines, and measures them: for programs that manage bundles, not for apps that run them.
//!
//! | module | holds |
//! |---|---|
//! | [`bench`](mod@bench) | rates of prefill, decode, audio and draft tokens, with charts and energy |
//! | [`corpus`] | files of texts to files of vectors, in shards |
//! | [`verify`] | suites of prompts with their answers, hashes of a bundle's files, and figures beside a baseline |
//! | [`inspect`](mod@inspect) | contents of a bundle or of a context binary |
//! | [`doctor`] | libraries, device, plugins and folders of this machine |
//! | [`install`](mod@install) | the QNN libraries, fetched from a package index |
//! | [`models`] | models by their names: fetched, or made of a checkpoint |
//! | [`publish`] | a bundle for a repository of a hub, with its model card |
//! | [`running`] | the models that a server has in memory |
//! | [`package`] | checkpoints, fetched from there, too |
//! | [`push`](mod@push) | a phone: copies what runs a bundle there, tries it, and reports |

pub mod bench;
pub mod corpus;
pub mod doctor;
pub mod inspect;
pub mod install;
pub mod models;
pub mod package;
pub mod publish;
pub mod push;
pub mod running;
pub mod verify;
mod wheel;
