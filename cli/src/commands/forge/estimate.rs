//! `qhx forge estimate`: what the graphs will cost on the device, as the QNN compiler sees it.

use std::path::PathBuf;

use clap::Args;
use qhx_core::Result;
use qhx_core::qnn::Target;
use qhx_forge::checkpoint::Checkpoint;
use qhx_forge::estimate::{
    DEFAULT_CORNER, EstimateOptions, GraphEstimate, NOT_MODELLED, OpCost, estimate,
};
use qhx_forge::plan::plan;
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::{ForgeOptions, recipes};
use serde_json::{Value, json};

use super::{ShapeArgs, source};
use crate::app::{App, Status};
use crate::args::LibraryArgs;
use crate::backends::Libraries;
use crate::progress::ForgeProgress;

const EXAMPLES: &str = "\
Examples:
  qhx forge estimate Qwen3.5-0.8B
  qhx forge estimate config.json --target v79 --precision w8a16 --corner 5
  qhx forge estimate Qwen3.5-0.8B --trace traces    # then open traces/decode.json in Perfetto";

/// Estimate what the graphs cost on the device, without one
///
/// Compiles every graph and sums up the schedule that the QNN compiler makes for the target: time,
/// bytes read and written, and the ops that take most time. Weights do not matter, so that a
/// config.json alone is enough. Bytes are facts of the compiled graphs; times come from the
/// compiler's cost model and are no measurement.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct EstimateArgs {
    /// Folder of the checkpoint, or a config.json
    pub checkpoint: PathBuf,
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Voltage corner of the core, 1 to 12; 7 is about turbo
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CORNER)]
    pub corner: u32,
    /// Keep the schedules in this folder, for Perfetto
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Runs the command.
pub(super) fn run(args: &EstimateArgs, app: &mut App) -> Result<Status> {
    let checkpoint = source(&args.checkpoint)?;
    let libraries = args.libraries.require("an estimate")?;
    let options = args.shape.options(&args.checkpoint);
    let wanted = EstimateOptions { corner: args.corner, traces: args.trace.clone() };
    let compiler = (&libraries, args.shape.target());
    show(&checkpoint, &options, &wanted, compiler, args.json, app)?;
    Ok(Status::Done)
}

/// Estimates and prints.
pub(super) fn show(
    checkpoint: &Checkpoint,
    options: &ForgeOptions,
    wanted: &EstimateOptions,
    (libraries, target): (&Libraries, Target),
    as_json: bool,
    app: &mut App,
) -> Result<()> {
    let (_, recipe) = plan(checkpoint, recipes::recipe, options, true)?;
    let compiler = QnnCompiler::new(libraries.open()?, target);
    let graphs = {
        let _working = app.interrupts.working();
        let mut progress = ForgeProgress::new(app.interrupts.token().clone());
        estimate(&recipe, &compiler, wanted, &mut progress)?
    };
    if as_json {
        return app.output.json(&estimate_json(&graphs, target, wanted.corner));
    }
    for line in lines(&graphs, target, wanted.corner) {
        app.output.line(&line)?;
    }
    Ok(())
}

/// Sums of what one step, a token or a text, runs: each graph once, but for those of prompts.
struct Total {
    us: f64,
    floor_us: f64,
    weights: u64,
    read: u64,
    written: u64,
}

impl Total {
    fn of(graphs: &[GraphEstimate]) -> Self {
        let step = || graphs.iter().filter(|g| !g.prompt);
        Self {
            us: step().map(|g| g.us).sum(),
            floor_us: step().map(|g| g.floor_us).sum(),
            weights: step().map(|g| g.weight_bytes).sum(),
            read: step().map(|g| g.dma_read_bytes).sum(),
            written: step().map(|g| g.dma_write_bytes).sum(),
        }
    }
}

fn lines(graphs: &[GraphEstimate], target: Target, corner: u32) -> Vec<String> {
    let mut lines =
        vec![format!("compiler estimate for {target}, corner {corner}: no measurement")];
    for graph in graphs {
        lines.push(format!(
            "{}: {:.0} us at {:.0} MHz, {:.2} times the {:.0} us that its weights take to read",
            graph.graph,
            graph.us,
            graph.core_mhz,
            ratio(graph.us, graph.floor_us),
            graph.floor_us
        ));
        lines.push(format!(
            "  weights {}, read {}, written {}, spill and fill {}",
            mega(graph.weight_bytes),
            mega(graph.dma_read_bytes),
            mega(graph.dma_write_bytes),
            mega(graph.spill_fill_bytes)
        ));
        for op in &graph.most_expensive {
            lines.push(cost("  ", op));
        }
        for op in &graph.unmodelled {
            lines.push(cost("  without cost model: ", op));
        }
    }
    let total = Total::of(graphs);
    lines.push(format!(
        "one step: {:.0} us, {:.2} times the {:.0} us that its weights take to read; read {}, \
         written {}, {:.3} times the weights",
        total.us,
        ratio(total.us, total.floor_us),
        total.floor_us,
        mega(total.read),
        mega(total.written),
        ratio((total.read + total.written) as f64, total.weights as f64)
    ));
    lines.push(NOT_MODELLED.to_owned());
    lines
}

fn cost(before: &str, op: &OpCost) -> String {
    format!("{before}{:<4} {:<44} {:>6} times {:>9.1} us", op.unit, op.op, op.count, op.us)
}

fn ratio(a: f64, b: f64) -> f64 {
    if b > 0.0 { a / b } else { 0.0 }
}

fn mega(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

fn estimate_json(graphs: &[GraphEstimate], target: Target, corner: u32) -> Value {
    let ops = |list: &[OpCost]| -> Vec<Value> {
        list.iter()
            .map(|op| json!({"op": op.op, "unit": op.unit, "count": op.count, "us": op.us}))
            .collect()
    };
    let list: Vec<_> = graphs
        .iter()
        .map(|graph| {
            json!({
                "context": graph.context,
                "graph": graph.graph,
                "prompt": graph.prompt,
                "us": graph.us,
                "core_mhz": graph.core_mhz,
                "weight_bytes": graph.weight_bytes,
                "dma_read_bytes": graph.dma_read_bytes,
                "dma_write_bytes": graph.dma_write_bytes,
                "spill_fill_bytes": graph.spill_fill_bytes,
                "memory_bytes_per_second": graph.memory_rate,
                "weight_floor_us": graph.floor_us,
                "without_cost_model": ops(&graph.unmodelled),
                "most_expensive": ops(&graph.most_expensive),
            })
        })
        .collect();
    let total = Total::of(graphs);
    json!({
        "kind": "compiler estimate",
        "target": target.to_string(),
        "corner": corner,
        "not_modelled": NOT_MODELLED,
        "graphs": list,
        "step": {
            "us": total.us,
            "weight_floor_us": total.floor_us,
            "weight_bytes": total.weights,
            "dma_read_bytes": total.read,
            "dma_write_bytes": total.written,
        },
    })
}
