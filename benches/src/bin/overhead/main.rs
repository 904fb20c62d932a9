//! Host time of host-ops at published shapes, by part: `overhead [CASE…]`, all cases without one.
//!
//! The graphs execute nothing, so that what remains is qhx: the host-op, the plugin boundary, the binding of states,
//! sampling. Asserts that a token costs no heap allocation, but for those of the thread pool's queue where Gemma 4's
//! per-layer inputs are projected on the host.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the report is the result")]

mod decoders;
mod embedder;
mod gemma4;
mod measure;
mod plugins;
mod qwen3vl;
mod trivial;

use std::path::Path;
use std::process::ExitCode;

use qhx_benches::allocations::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type Anything<T = ()> = Result<T, Box<dyn std::error::Error>>;

/// Measures a case, with files in a folder.
type Case = fn(&Path) -> Anything;

const CASES: [(&str, Case); 6] = [
    ("qwen3.5", decoders::qwen35),
    ("llama", decoders::llama),
    ("gemma4", gemma4::run),
    ("qwen3-vl", qwen3vl::run),
    ("embedder", embedder::run),
    ("plugins", plugins::run),
];

fn main() -> Anything<ExitCode> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    if let [flag, task @ ..] = &arguments[..]
        && flag == plugins::PROBE
    {
        return Ok(qhx_base::child::serve(task, &[qhx_plugins::probe::TASK]));
    }
    if let Some(other) = arguments.iter().find(|asked| CASES.iter().all(|(name, _)| asked != name))
    {
        let names = CASES.map(|(name, _)| name).join(", ");
        return Err(format!("no case {}; there are: {names}", other.display()).into());
    }
    for (name, run) in CASES {
        if arguments.is_empty() || arguments.iter().any(|asked| asked == name) {
            println!("# {name}");
            run(tempfile::tempdir()?.path())?;
        }
    }
    Ok(ExitCode::SUCCESS)
}
