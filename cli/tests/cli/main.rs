//! Runs the real programs in folders of their own.

#[macro_use]
mod run;

#[cfg(target_os = "linux")]
mod action;
mod bench;
mod bench_table;
#[cfg(unix)]
mod board;
mod calibrate;
mod chat;
mod classic;
mod demo;
mod embed;
mod embed_files;
#[cfg(feature = "parquet")]
mod embed_parquet;
mod failures;
mod generate;
mod golden;
mod grammar;
#[cfg(unix)]
mod interrupt;
#[cfg(all(unix, not(feature = "builtin-ops")))]
mod library;
mod media;
mod names;
mod newcomer;
mod phimoe;
#[cfg(not(feature = "builtin-ops"))]
mod plugins;
mod prepare;
mod pull;
#[cfg(unix)]
mod push;
mod qnn;
mod reports;
mod rerank;
#[cfg(unix)]
mod serve;
mod size;
mod speak;
#[cfg(target_os = "linux")]
mod streams;
mod targets;
mod templates;
mod trace;
mod transcribe;
mod verify;
#[cfg(unix)]
mod vision;
