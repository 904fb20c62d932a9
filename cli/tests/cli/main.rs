//! Runs the real programs in folders of their own.

mod chat;
mod classic;
mod embed;
#[cfg(feature = "parquet")]
mod embed_parquet;
mod failures;
mod generate;
#[cfg(unix)]
mod interrupt;
mod phimoe;
mod qnn;
mod reports;
mod run;
mod size;
#[cfg(target_os = "linux")]
mod streams;
mod verify;
