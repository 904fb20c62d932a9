//! `qhx forge plan`: what a bundle will consist of and what making it takes.

use qhx_base::Result;
use qhx_terminal::{Status, Terminal};
use serde_json::{Value, json};

use super::args::{PlanArgs, source};
use crate::plan::{Plan, plan};
use crate::registry;

/// Runs the command.
pub(super) fn run(args: &PlanArgs, terminal: Terminal<'_>) -> Result<Status> {
    let checkpoint = source(&args.checkpoint, &args.shape)?;
    let oldest = args.shape.targets().iter().filter_map(|choice| choice.known());
    let mut options =
        args.shape.options(&args.checkpoint, oldest.min_by_key(|target| target.arch))?;
    options.onnx = args.onnx;
    let (plan, _) = plan(&checkpoint, registry::recipe, &options, !args.cpu_only)?;
    let memory = memory();
    let targets = args.shape.targets().iter().map(|choice| choice.name());
    let targets: Vec<_> = targets.filter(|_| plan.compiled).collect();
    if args.json {
        terminal.output.json(&plan_json(&plan, &targets, memory))?;
    } else {
        for line in lines(&plan, &targets, memory) {
            terminal.output.line(&line)?;
        }
    }
    Ok(Status::Done)
}

fn lines(plan: &Plan, targets: &[String], memory: Option<u64>) -> Vec<String> {
    let mut lines = vec![format!(
        "{}: layers in {} {}, context of {} tokens",
        plan.family,
        plan.shards,
        if plan.shards == 1 { "shard" } else { "shards" },
        plan.max_ctx
    )];
    for context in &plan.contexts {
        let mut line = format!("  {:<16} {:<6}", context.key, context.precision.name());
        if plan.compiled {
            line += &format!(
                " binary {:>9}, with inputs and outputs {:>9}",
                mega(context.binary_bytes),
                mega(context.device_bytes())
            );
        }
        if context.onnx_bytes > 0 {
            line += &format!(", onnx {:>9}", mega(context.onnx_bytes));
        }
        lines.push(line);
    }
    if plan.compiled && !plan.shared {
        lines.push("  each graph of a context holds its own copy of the weights".to_owned());
    }
    let dtype = plan.embed_dtype.to_string();
    lines.push(format!("  {:<16} {dtype:<6} table  {:>9}", "embedding", mega(plan.embed_bytes)));
    for (key, bytes) in &plan.tables {
        lines.push(format!("  {key:<16}        table  {:>9}", mega(*bytes)));
    }
    lines.push(format!("bundle {}, without the tokenizer", mega(plan.bytes())));
    lines.push(format!("time on two cores about {}", minutes(plan.seconds())));
    if let [_, _, ..] = targets {
        let count = targets.len() as u32;
        lines.push(format!(
            "{count} targets ({}): {count} bundles, {} in all, about {}",
            targets.join(", "),
            mega(plan.bytes().saturating_mul(count.into())),
            minutes(plan.seconds() * f64::from(count))
        ));
    }
    let needed = plan.peak_bytes();
    lines.push(match memory {
        Some(free) if free < needed => format!(
            "memory about {}, but only {} is free here: close programs{}",
            mega(needed),
            mega(free),
            plan.lower_peak().map_or(String::new(), |way| format!(", or {way}"))
        ),
        Some(free) => {
            format!("memory about {} of the {} that is free here", mega(needed), mega(free))
        }
        None => format!("memory about {}", mega(needed)),
    });
    lines.extend(plan.notes());
    lines.extend(plan.warning());
    lines
}

fn minutes(seconds: f64) -> String {
    let minutes = seconds / 60.0;
    if minutes < 1.0 { "under a minute".to_owned() } else { format!("{minutes:.0} min") }
}

fn mega(bytes: u64) -> String {
    format!("{:.0} MB", bytes as f64 / 1e6)
}

fn plan_json(plan: &Plan, targets: &[String], memory: Option<u64>) -> Value {
    let contexts: Vec<_> = plan
        .contexts
        .iter()
        .map(|context| {
            json!({
                "key": context.key,
                "graphs": context.graphs,
                "precision": context.precision.name(),
                "weight_bytes": context.weight_bytes,
                "binary_bytes": plan.compiled.then_some(context.binary_bytes),
                "device_bytes": plan.compiled.then(|| context.device_bytes()),
                "onnx_bytes": context.onnx_bytes,
            })
        })
        .collect();
    let table = |(key, bytes): &(String, u64)| json!({"key": key, "bytes": bytes});
    let tables: Vec<_> = plan.tables.iter().map(table).collect();
    json!({
        "family": plan.family,
        "task": plan.task.name(),
        "shards": plan.shards,
        "max_ctx": plan.max_ctx,
        "targets": targets,
        "context_budget": plan.budget,
        "share_weights": plan.compiled.then_some(plan.shared),
        "contexts": contexts,
        "embed_bytes": plan.embed_bytes,
        "embed_dtype": plan.embed_dtype,
        "tables": tables,
        "bytes": plan.bytes(),
        "peak_memory_bytes": plan.peak_bytes(),
        "free_memory_bytes": memory,
        "seconds": plan.seconds().round(),
        "left_out": plan.left_out,
        "notes": plan.recipe_notes,
        "warning": plan.warning(),
    })
}

/// Bytes of memory that programs can still get, where the system says it.
fn memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024)
}
