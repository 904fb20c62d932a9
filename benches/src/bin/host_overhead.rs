//! Host time per token at the published Qwen3.5-0.8B shapes, by part.
//!
//! The graphs execute nothing, so that what remains is qhx: the host-op, the plugin boundary, the
//! binding of states, sampling. Asserts that a token costs no heap allocation.

#![expect(clippy::print_stdout, clippy::print_stderr, reason = "the report is the result")]

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::f16;
use qhx_benches::allocations::{self, Counting};
use qhx_benches::hybrid::open;
use qhx_benches::shapes::QWEN35_08B;
use qhx_core::op::{HostOp, OpProvider, OpSource, Segment};
use qhx_core::sampling::{AllowedTokens, Sampler, SamplingParams};
use qhx_ops_qwen35 as _;
use qhx_plugins::{PluginOptions, Plugins};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const TOKENS: u32 = 1000;

type AnyError = Box<dyn std::error::Error>;

struct Report {
    decode: Duration,
    spans: Vec<(String, Duration)>,
    allocations: u64,
}

fn measure(op: &mut dyn HostOp) -> Result<Report, AnyError> {
    op.reset()?;
    op.prefill(&[Segment::Tokens(&[1, 2, 3, 4, 5, 6, 7, 8])])?;
    for token in 0..8 {
        op.decode(token)?;
    }
    let before: Vec<_> = op.span_stats();
    let allocated = allocations::count();
    let start = Instant::now();
    for token in 0..TOKENS {
        op.decode(token * 97 % 248_000)?;
    }
    let decode = start.elapsed();
    let allocations = allocations::count() - allocated;
    let spans = op
        .span_stats()
        .into_iter()
        .map(|s| {
            let earlier =
                before.iter().find(|b| b.name == s.name).map_or(Duration::ZERO, |b| b.busy);
            (s.name, s.busy - earlier)
        })
        .collect();
    Ok(Report { decode, spans, allocations })
}

fn per_token(total: Duration) -> f64 {
    total.as_secs_f64() * 1e6 / f64::from(TOKENS)
}

fn main() -> Result<(), AnyError> {
    let folder = tempfile::tempdir()?;
    let mut runs =
        vec![("linked in", Plugins::discover(&PluginOptions::default().only_named(true))?)];
    let so = std::env::current_exe()?.with_file_name(format!(
        "{}qhx_ops_qwen35_plugin{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    ));
    if so.is_file() {
        let files: Vec<PathBuf> = vec![so];
        let options = PluginOptions::default().files(files).only_named(true);
        runs.push(("plugin", Plugins::discover(&options)?));
    } else {
        eprintln!("no plugin beside this program: build qhx-ops-qwen35-plugin to measure it too");
    }

    println!("Qwen3.5-0.8B shapes, null backend, {TOKENS} tokens; µs per token");
    println!(
        "recurrent state: {:.1} MB, copied per token: 0 (buffers change places)",
        QWEN35_08B.state_bytes() as f64 / 1e6
    );
    let mut first = None;
    for (name, plugins) in &runs {
        let source = plugins.find("qwen3_5_generate")?.source;
        debug_assert_eq!(*name == "linked in", source == OpSource::Builtin);
        let mut op = open(folder.path(), plugins, &QWEN35_08B)?;
        // Best of five: what the machine can do, not what else it was doing.
        let mut best = measure(&mut *op)?;
        for _ in 0..4 {
            let again = measure(&mut *op)?;
            assert_eq!(again.allocations, 0, "a decode step allocated");
            if again.decode < best.decode {
                best = again;
            }
        }
        println!(
            "host-op step, {name}: {:8.2}   allocations per token: {}",
            per_token(best.decode),
            best.allocations
        );
        for (span, time) in &best.spans {
            println!("  {span:<12} {:8.2}", per_token(*time));
        }
        match first {
            None => first = Some(best.decode),
            Some(base) => {
                println!(
                    "  ratio to linked in: {:.3}",
                    best.decode.as_secs_f64() / base.as_secs_f64()
                );
            }
        }
    }

    let mut logits: Vec<f16> = (0..QWEN35_08B.vocab)
        .map(|i| f16::from_f32(((i * 7919) % 100_003) as f32 / 5000.0 - 10.0))
        .collect();
    logits[200_000] = f16::from_f32(30.0);
    // A padded vocabulary, and an id that the tokenizer does not know.
    let known = |id| id < 248_077 && id != 100_000;
    let allowed = Arc::new(AllowedTokens::select(QWEN35_08B.vocab, known));
    let report = |label: &str, params: SamplingParams| -> Result<(), AnyError> {
        let allowed = Arc::clone(&allowed);
        let mut sampler = Sampler::restricted(params, QWEN35_08B.vocab, allowed)?;
        let logits = qhx_core::op::Logits::F16(&logits);
        for _ in 0..10 {
            sampler.sample(logits)?;
        }
        let mut best = Duration::MAX;
        let allocated = allocations::count();
        for _ in 0..5 {
            let start = Instant::now();
            for _ in 0..100 {
                sampler.sample(logits)?;
            }
            best = best.min(start.elapsed() / 100);
        }
        assert_eq!(allocations::count(), allocated, "sampling allocated");
        println!("sampling, {label}: {:8.2}", best.as_secs_f64() * 1e6);
        Ok(())
    };
    report("greedy", SamplingParams::default())?;
    report(
        "temperature 0.8, top-k 40, top-p 0.95",
        SamplingParams::default().temperature(0.8).top_k(40).top_p(0.95).seed(1),
    )?;
    Ok(())
}
