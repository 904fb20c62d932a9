//! Groups of options that several programs share.

use std::path::PathBuf;

use clap::{ArgAction, Args};
use qhx::libraries::LibraryFiles;
use qhx::vars;

/// Options of every command of every program.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub struct ProcessArgs {
    /// Threads for the host's part and for the CPU backend [default: one per core]
    #[arg(long, value_name = "N", global = true, value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub threads: Option<u16>,
    /// Log more: -v what happens, -vv details, -vvv everything
    #[arg(short, long, action = ArgAction::Count, global = true)]
    pub verbose: u8,
    /// What to log, by target and level, such as `warn,qnn=debug`; overrides -v
    #[arg(long, value_name = "FILTER", global = true, env = vars::LOG, hide_env_values = true)]
    pub log: Option<String>,
}

impl ProcessArgs {
    /// The number of threads.
    pub fn threads(&self) -> Option<usize> {
        self.threads.map(usize::from)
    }
}

/// Where the QNN libraries are.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "QNN libraries")]
pub struct LibraryArgs {
    /// libQnnHtp.so [default: the installed libraries, see `qhx libraries`]
    #[arg(long, value_name = "FILE", env = vars::HTP, hide_env_values = true)]
    pub htp: Option<PathBuf>,
    /// libQnnSystem.so [default: the one beside libQnnHtp.so]
    #[arg(long = "qnn-system", value_name = "FILE", env = vars::SYSTEM, hide_env_values = true)]
    pub system: Option<PathBuf>,
}

impl LibraryArgs {
    /// Files that the options name.
    pub fn files(&self) -> LibraryFiles {
        LibraryFiles::default().with_htp(self.htp.clone()).with_system(self.system.clone())
    }
}
