//! Runs the real programs in folders of their own.

mod chat;
mod classic;
mod embed;
mod failures;
mod generate;
#[cfg(unix)]
mod interrupt;
mod qnn;
mod reports;
mod run;
mod verify;
