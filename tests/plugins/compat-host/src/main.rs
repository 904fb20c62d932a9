//! Generates with `test_frozen` of the plugin it is given and prints the interface version of
//! either side and the tokens, or the error.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::process::ExitCode;

use qhx_core::engine::{Prompt, Request};
use qhx_core::{CancelToken, Result};
use qhx_plugins::{PluginOptions, PluginStatus, Plugins, interface_version};

#[path = "../../../src/null_model.rs"]
mod null_model;

fn run() -> Result<String> {
    let options = PluginOptions {
        files: std::env::args_os().skip(1).map(PathBuf::from).collect(),
        only_named: true,
        ..PluginOptions::default()
    };
    let plugins = Plugins::discover(&options)?;
    let theirs = plugins.files().iter().find_map(|status| match status {
        PluginStatus::Loaded { plugin, .. } => Some(plugin.interface.clone()),
        _ => None,
    });
    let mut model = null_model::open("test_frozen", &plugins, &CancelToken::new())?;
    let request = Request::greedy(Prompt::Tokens(vec![1, 2]), 4);
    let generation = model.generate(&request, &mut |_| ControlFlow::Continue(()))?;
    Ok(format!(
        "host {} plugin {} tokens {:?}",
        interface_version(),
        theirs.unwrap_or_default(),
        generation.tokens
    ))
}

#[expect(clippy::print_stdout, reason = "the result is what it prints")]
fn main() -> ExitCode {
    match run() {
        Ok(text) => {
            println!("{text}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            println!("{}", error.message());
            ExitCode::from(error.kind().exit_code())
        }
    }
}
