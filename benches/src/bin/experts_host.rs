//! Host time, page faults and memory of `phimoe_generate` at the published Phi-tiny-MoE shapes, over a
//! table of experts of the published size; and a prompt of 529 tokens, batched and token by token.
//!
//! With `cold` behind the folder it compares times with experts that are asked for ahead, and without.
//!
//! The graphs execute nothing, so that what remains is qhx. The first argument is a folder for the
//! table, which is made once (2.8 GB); without one it is made in a temporary folder.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use qhx_benches::allocations::{self, Counting};
use qhx_benches::experts::{
    EXPERT_BYTES, EXPERTS, LAYERS, TABLE, TABLE_BYTES, Way, make_tables, open,
};
use qhx_benches::memory::{mapped_resident, page_faults, peak_and_anonymous};
use qhx_benches::null::linked;
use qhx_core::op::{HostOp, Segment};
use qhx_ops_phimoe as _;
use qhx_plugins::Plugins;
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};

#[global_allocator]
static ALLOCATOR: Counting = Counting;

type AnyError = Box<dyn std::error::Error>;

const MB: f64 = 1e6;

/// Tokens of the prompt that is published with a time to the first token.
const PROMPT: usize = 529;

struct Run {
    time: Duration,
    allocations: u64,
    faults: (u64, u64),
}

fn steps(op: &mut dyn HostOp, tokens: u32) -> Result<Run, AnyError> {
    let (faults, allocated) = (page_faults(), allocations::count());
    let start = Instant::now();
    for token in 0..tokens {
        op.decode(token * 97 % 32_000)?;
    }
    let time = start.elapsed() / tokens;
    // Before the faults are asked for, which allocates.
    let allocations = allocations::count() - allocated;
    let after = page_faults();
    Ok(Run { time, allocations, faults: (after.0 - faults.0, after.1 - faults.1) })
}

fn spans(op: &mut dyn HostOp, since: &[(String, Duration)], per: u32) -> String {
    let part = |(name, busy): (String, Duration)| {
        let earlier = since.iter().find(|s| s.0 == name).map_or(Duration::ZERO, |s| s.1);
        format!("{name} {:.3}", (busy - earlier).as_secs_f64() * 1e3 / f64::from(per))
    };
    let parts: Vec<_> = busy(op).into_iter().filter(|s| !s.1.is_zero()).map(part).collect();
    parts.join(", ")
}

fn busy(op: &mut dyn HostOp) -> Vec<(String, Duration)> {
    op.span_stats().into_iter().map(|s| (s.name, s.busy)).collect()
}

/// Host time a token of a form of weight inputs.
fn decode(folder: &Path, plugins: &Plugins, way: Way) -> Result<Duration, AnyError> {
    let form = if way.int8 { "int8" } else { "f16" };
    let resident = || mapped_resident(TABLE) as f64 / MB;
    let start = Instant::now();
    let mut op = open(folder, plugins, way)?;
    println!(
        "{form} weight inputs, {} threads: opened in {:.1} ms, {:.1} MB of the table mapped in",
        way.threads,
        start.elapsed().as_secs_f64() * 1e3,
        resident()
    );
    op.prefill(&[Segment::Tokens(&[1])])?;
    let first = resident();
    let expected = if way.int8 { 0 } else { LAYERS * 2 * EXPERT_BYTES };
    println!(
        "  after 1 token {first:.1} MB of the table are mapped in; the chosen experts have {:.1} MB",
        expected as f64 / MB
    );
    // The kernel maps whole blocks of its page cache, so that some pages around an expert come with it.
    let around = if way.int8 { 0 } else { LAYERS * 2 * (1 << 20) };
    assert!(
        first * MB <= (expected + around) as f64,
        "pages of experts that were not chosen were touched"
    );
    let tokens = if way.int8 { 200 } else { 8 };
    steps(&mut *op, tokens)?;
    let mut best: Option<Run> = None;
    for _ in 0..5 {
        let before = busy(&mut *op);
        let run = steps(&mut *op, tokens)?;
        assert!(way.random || run.allocations == 0, "a decode step allocated");
        if best.as_ref().is_none_or(|b| run.time < b.time) {
            let parts = spans(&mut *op, &before, tokens);
            println!("  {:.3} ms a token ({parts})", run.time.as_secs_f64() * 1e3);
            best = Some(run);
        }
    }
    let best = best.ok_or("no run")?;
    let (peak, anonymous) = peak_and_anonymous();
    println!(
        "  page faults in {tokens} tokens: {} minor, {} major; {:.1} MB of the table mapped in; peak \
         RSS {:.0} MB, not from files {:.0} MB",
        best.faults.0,
        best.faults.1,
        resident(),
        peak as f64 / MB,
        anonymous as f64 / MB
    );
    Ok(best.time)
}

/// The prompt on one way: graph executions and host time.
fn prompt(folder: &Path, plugins: &Plugins, way: Way) -> Result<(u64, Duration), AnyError> {
    let mut op = open(folder, plugins, way)?;
    let mut random = SplitMix64::seed_from_u64(11);
    let tokens: Vec<u32> = (0..PROMPT).map(|_| (random.next_u64() % 32_000) as u32).collect();
    let mut best = Duration::MAX;
    let mut executions = 0;
    for _ in 0..2 {
        op.reset()?;
        let count =
            |op: &mut dyn HostOp| -> u64 { op.graph_stats().iter().map(|s| s.executions).sum() };
        let before = count(&mut *op);
        let start = Instant::now();
        op.prefill(&[Segment::Tokens(&tokens)])?;
        best = best.min(start.elapsed());
        executions = count(&mut *op) - before;
    }
    Ok((executions, best))
}

/// Times with experts that are asked for as a whole, and without, in turns: the first token and the first prompt from a
/// table that is not in memory and from one that is, and tokens after that.
fn ahead(folder: &Path, plugins: &Plugins, way: Way) -> Result<(), AnyError> {
    let mut random = SplitMix64::seed_from_u64(11);
    let tokens: Vec<u32> = (0..PROMPT).map(|_| (random.next_u64() % 32_000) as u32).collect();
    for (name, cold, prompt) in [
        ("first token, cold table", true, false),
        ("first token, table in memory", false, false),
        ("prompt of 529, cold table", true, true),
        ("prompt of 529, table in memory", false, true),
    ] {
        let mut times = [const { Vec::new() }; 2];
        let mut later = [const { Vec::new() }; 2];
        for turn in 0..2 * TURNS {
            if cold {
                forget(&folder.join(TABLE))?;
            }
            let read_ahead = turn % 2 == 1;
            let way = Way { int8: false, prompts: prompt, read_ahead, ..way };
            let mut op = open(folder, plugins, way)?;
            let start = Instant::now();
            op.prefill(&[Segment::Tokens(if prompt { &tokens } else { &[1] })])?;
            times[turn % 2].push(start.elapsed());
            if !cold && !prompt {
                steps(&mut *op, 8)?;
                later[turn % 2].push(steps(&mut *op, 8)?.time);
            }
        }
        report(name, &mut times);
        if !cold && !prompt {
            report("a token after 9 others, table in memory", &mut later);
        }
    }
    Ok(())
}

/// Turns of each way.
const TURNS: usize = 7;

fn report(name: &str, times: &mut [Vec<Duration>; 2]) {
    let [without, with] = times.each_mut().map(|times| {
        times.sort_unstable();
        times.get(times.len() / 2).map_or(0.0, |time| time.as_secs_f64() * 1e3)
    });
    let ranges = times.each_ref().map(|times| {
        let ms = |time: Option<&Duration>| time.map_or(0.0, |time| time.as_secs_f64() * 1e3);
        format!("{:.1} to {:.1}", ms(times.first()), ms(times.last()))
    });
    println!(
        "{name}: {without:.1} ms ({}), asked for {with:.1} ms ({}), ratio {:.2}",
        ranges[0],
        ranges[1],
        with / without
    );
}

/// Has the kernel forget what it keeps of a file.
#[cfg(target_os = "linux")]
fn forget(path: &Path) -> Result<(), AnyError> {
    let file = std::fs::File::open(path)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    Ok(())
}

#[cfg(not(target_os = "linux"))]
fn forget(_: &Path) -> Result<(), AnyError> {
    Err("a file leaves memory on Linux only".into())
}

fn main() -> Result<(), AnyError> {
    let temporary = tempfile::tempdir()?;
    let folder = std::env::args_os().nth(1).map_or(temporary.path().to_owned(), PathBuf::from);
    make_tables(&folder)?;
    let plugins = linked()?;
    println!(
        "Phi-tiny-MoE shapes, null backend, table of {:.2} GB ({} experts)",
        TABLE_BYTES as f64 / 1e9,
        LAYERS * EXPERTS
    );
    let way = Way { int8: true, prompts: false, random: true, read_ahead: true, threads: 2 };
    if std::env::args_os().nth(2).is_some_and(|way| way == "cold") {
        return ahead(&folder, &plugins, way);
    }
    let int8 = decode(&folder, &plugins, Way { random: false, ..way })?;
    let two = decode(&folder, &plugins, Way { int8: false, ..way })?;
    let one = decode(&folder, &plugins, Way { int8: false, threads: 1, ..way })?;
    println!(
        "host time a token, f16 over int8 inputs: {:.0} with 1 thread, {:.0} with 2",
        one.as_secs_f64() / int8.as_secs_f64(),
        two.as_secs_f64() / int8.as_secs_f64()
    );
    for int8 in [true, false] {
        let form = if int8 { "int8" } else { "f16" };
        let (many, stepped) = prompt(&folder, &plugins, Way { int8, ..way })?;
        let (few, batched) = prompt(&folder, &plugins, Way { int8, prompts: true, ..way })?;
        println!(
            "{PROMPT} tokens of prompt, {form} inputs: batched {few} executions, {:.1} ms of host \
             time; token by token {many} and {:.1} ms; ratios {:.0} and {:.1}",
            batched.as_secs_f64() * 1e3,
            stepped.as_secs_f64() * 1e3,
            many as f64 / few as f64,
            stepped.as_secs_f64() / batched.as_secs_f64()
        );
    }
    Ok(())
}
