//! `qhx forge estimate`: what the graphs will cost on the device, as the QNN compiler sees it.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use qhx::libraries::Libraries;
use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_qnn::Target;
use qhx_terminal::{Status, Terminal};
use serde::Serialize;
use serde_json::{Value, json};

use super::args::{EstimateArgs, source};
use super::progress::ForgeProgress;
use super::targets::places;
use crate::estimate::{EstimateOptions, GraphEstimate, NOT_MODELLED, OpCost, UnitTime, estimate};
use crate::plan::plan;
use crate::qnn::QnnCompiler;
use crate::{ForgeOptions, registry};

/// Runs the command.
pub(super) fn run(args: &EstimateArgs, terminal: Terminal<'_>) -> Result<Status> {
    let checkpoint = source(&args.checkpoint, &args.shape)?;
    let libraries = args.libraries.files().require("an estimate")?;
    let mut terminal = terminal;
    for place in places(args.shape.targets(), Path::new(""), &libraries)? {
        // With a folder each where there are several targets.
        let within = |folder: &Option<PathBuf>| folder.as_ref().map(|dir| dir.join(&place.out));
        let (traces, pictures) = (within(&args.trace), within(&args.svg));
        let wanted = EstimateOptions { corner: args.corner, traces, pictures };
        let compiler = (&libraries, place.target);
        let options = args.shape.options(&args.checkpoint, Some(place.target))?;
        let form = match (args.json, args.explain) {
            (true, _) => Form::Json,
            (false, true) => Form::Explained,
            (false, false) => Form::Text,
        };
        show(&checkpoint, &options, &wanted, compiler, &[], form, &mut terminal)?;
    }
    Ok(Status::Done)
}

/// Printing of estimates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// For people.
    Text,
    /// The same, with what the time goes to.
    Explained,
    /// One JSON object, which has that, too.
    Json,
}

/// Estimates what is not `known`, and prints all; returns the estimates.
pub(super) fn show(
    checkpoint: &Checkpoint,
    options: &ForgeOptions,
    wanted: &EstimateOptions,
    (libraries, target): (&Libraries, Target),
    known: &[GraphEstimate],
    form: Form,
    terminal: &mut Terminal<'_>,
) -> Result<Vec<GraphEstimate>> {
    let (_, recipe) = plan(checkpoint, registry::recipe, options, true)?;
    let compiler = QnnCompiler::new(libraries.open()?, target);
    let graphs = {
        let _working = terminal.interrupts.working();
        let mut progress = ForgeProgress::new(terminal.interrupts.token().clone());
        estimate(&recipe, &compiler, wanted, known, &mut progress)?
    };
    if form == Form::Json {
        terminal.output.json(&estimate_json(&graphs, target, wanted.corner))?;
        return Ok(graphs);
    }
    for line in lines(&graphs, target, wanted.corner, form == Form::Explained) {
        terminal.output.line(&line)?;
    }
    Ok(graphs)
}

/// Name of a target: an architecture stands for one chip, and others of it have other clocks.
fn chip(target: Target) -> String {
    target.name().unwrap_or_else(|| target.to_string())
}

/// Beyond this multiple of the time of the weights, something else decides.
const MEANINGFUL: f64 = 20.0;

/// Sums of what one step, a token or a text, runs: each graph once, but for those of prompts, encoders and towers, and
/// of other contexts.
#[derive(Serialize)]
struct Total {
    /// Positions of the context, where there are several.
    positions: Option<usize>,
    us: f64,
    max_us: f64,
    #[serde(rename = "weight_floor_us")]
    floor_us: f64,
    #[serde(rename = "weight_bytes")]
    weights: u64,
    #[serde(rename = "dma_read_bytes")]
    read: u64,
    #[serde(rename = "dma_write_bytes")]
    written: u64,
}

impl Total {
    /// For each context, the largest first.
    fn all(graphs: &[GraphEstimate]) -> Vec<Self> {
        let step = graphs.iter().filter(|graph| !graph.prompt);
        let contexts: BTreeSet<_> = step.filter_map(|graph| graph.context_positions).collect();
        if contexts.is_empty() {
            return vec![Self::of(graphs, None)];
        }
        contexts.into_iter().rev().map(|positions| Self::of(graphs, Some(positions))).collect()
    }

    fn of(graphs: &[GraphEstimate], positions: Option<usize>) -> Self {
        let runs = |graph: &&GraphEstimate| {
            !graph.prompt && graph.context_positions.is_none_or(|its| Some(its) == positions)
        };
        let step = || graphs.iter().filter(runs);
        Self {
            positions,
            us: step().map(|g| g.us).sum(),
            max_us: step().map(GraphEstimate::max_us).sum(),
            floor_us: step().map(|g| g.floor_us).sum(),
            weights: step().map(|g| g.weight_bytes).sum(),
            read: step().map(|g| g.dma_read_bytes).sum(),
            written: step().map(|g| g.dma_write_bytes).sum(),
        }
    }

    fn line(&self) -> String {
        let moved = (self.read + self.written) as f64;
        format!(
            "one step{}: {:.0} us{}; read {}, written {}{}",
            self.positions.map_or_else(String::new, |count| format!(" at up to {count} positions")),
            self.us,
            floor(self.us, self.floor_us, self.weights),
            mega(self.read),
            mega(self.written),
            times(moved, self.weights as f64)
                .map_or_else(String::new, |ratio| format!(", {ratio:.3} times the weights"))
        )
    }
}

/// Seconds of audio that costs of encoders are summed for.
const AUDIO: f64 = 30.0;

/// Cost of a recogniser's encoder for [`AUDIO`] seconds, with its longest window.
struct Audio<'a> {
    graph: &'a str,
    /// Seconds of audio that one execution covers.
    seconds: f64,
    us: f64,
    max_us: f64,
}

impl<'a> Audio<'a> {
    fn of(graphs: &'a [GraphEstimate]) -> Option<Self> {
        let windows = graphs.iter().filter_map(|one| Some((one, one.audio_seconds?)));
        let (longest, seconds) = windows.max_by(|a, b| a.1.total_cmp(&b.1))?;
        let count = AUDIO / seconds;
        let (us, max_us) = (longest.us * count, longest.max_us() * count);
        Some(Self { graph: &longest.graph, seconds, us, max_us })
    }
}

fn lines(graphs: &[GraphEstimate], target: Target, corner: u32, explain: bool) -> Vec<String> {
    let mut lines =
        vec![format!("compiler estimate for {}, corner {corner}: no measurement", chip(target))];
    for graph in graphs {
        lines.push(format!(
            "{}: {:.0} us at {:.0} MHz{}",
            graph.graph,
            graph.us,
            graph.core_mhz,
            floor(graph.us, graph.floor_us, graph.weight_bytes)
        ));
        lines.push(format!(
            "  weights {}, read {}, written {}, spill and fill {}",
            mega(graph.weight_bytes),
            mega(graph.dma_read_bytes),
            mega(graph.dma_write_bytes),
            mega(graph.spill_fill_bytes)
        ));
        if let Some(us) = graph.measured_memory_us {
            lines.push(format!(
                "  {us:.0} us at the rate at which devices of this chip read weights"
            ));
        }
        match explain {
            true => lines.extend(explained(graph)),
            false => lines.extend(graph.most_expensive.iter().map(|op| cost("  ", op))),
        }
        for op in &graph.unmodelled {
            lines.push(cost("  without cost model: ", op));
        }
    }
    if let Some(audio) = Audio::of(graphs) {
        lines.push(format!(
            "30 s of audio: {:.0} us of {} in executions for {:.1} s each{}",
            audio.us,
            audio.graph,
            audio.seconds,
            if audio.max_us > audio.us {
                format!(", up to {:.0} us", audio.max_us)
            } else {
                String::new()
            }
        ));
    }
    // An encoder that answers by itself has no steps.
    if !graphs.iter().any(|graph| !graph.prompt) {
        lines.push(NOT_MODELLED.to_owned());
        return lines;
    }
    let totals = Total::all(graphs);
    lines.extend(totals.iter().map(Total::line));
    if let Some(op) = graphs.iter().find_map(GraphEstimate::dequantizing) {
        let total = &totals[0];
        lines.push(format!(
            "{} dequantizes weights and has no cost model: one step is {:.0} to {:.0} us, the latter if devices take \
             as much longer than the estimate as published int8 bundles do",
            op.op, total.us, total.max_us
        ));
    }
    lines.push(NOT_MODELLED.to_owned());
    lines
}

/// Time of a graph by classes, as a table.
fn explained(graph: &GraphEstimate) -> Vec<String> {
    let mut lines = vec![format!(
        "  {:<22} {:>11} {:>7} {:>11} {:>12}  most of it",
        "class", "wall, us", "%", "alone, us", "busy, us"
    )];
    for time in &graph.breakdown {
        let ops = time.ops.iter().map(|op| format!("{} {:.0}", op.op, op.us)).collect::<Vec<_>>();
        let (class, share) = (time.class, time.wall_us / graph.us.max(1e-9) * 100.0);
        let line = format!(
            "  {class:<22} {:>11.1} {share:>7.1} {:>11.1} {:>12.1}  {}",
            time.wall_us,
            time.alone_us,
            time.busy_us,
            ops.join(", ")
        );
        lines.push(line.trim_end().to_owned());
    }
    let unit = |unit: &UnitTime| {
        let share = |us: f64| us / graph.us.max(1e-9) * 100.0;
        let (runs, alone) = (share(unit.us), share(unit.alone_us));
        format!("{} runs {runs:.1} % of the time, {alone:.1} % alone", unit.unit)
    };
    lines.push(format!("  {}", graph.units.iter().map(unit).collect::<Vec<_>>().join("; ")));
    lines
}

fn cost(before: &str, op: &OpCost) -> String {
    format!("{before}{:<4} {:<44} {:>6} times {:>9.1} us", op.unit, op.op, op.count, op.us)
}

/// Compares a time with that of reading the weights: a ratio where the time mostly goes to them.
fn floor(us: f64, floor_us: f64, weights: u64) -> String {
    match times(us, floor_us) {
        Some(ratio) => {
            format!(", {ratio:.2} times the {floor_us:.0} us that its weights take to read")
        }
        None if weights == 0 => ", without weights of its own".to_owned(),
        None => ", little of it for reading weights".to_owned(),
    }
}

/// A ratio that says something: none where there is nothing to compare with, or next to nothing.
fn times(a: f64, b: f64) -> Option<f64> {
    (b > 0.0 && a <= b * MEANINGFUL).then(|| a / b)
}

fn mega(bytes: u64) -> String {
    format!("{:.2} MB", bytes as f64 / 1e6)
}

fn estimate_json(graphs: &[GraphEstimate], target: Target, corner: u32) -> Value {
    let list = graphs.iter().map(|graph| {
        let mut json = json!(graph);
        json["max_us"] = json!(graph.max_us());
        json
    });
    let totals = Total::all(graphs);
    let audio = Audio::of(graphs).map(|audio| {
        json!({"graph": audio.graph, "seconds": AUDIO, "us": audio.us, "max_us": audio.max_us})
    });
    json!({
        "kind": "compiler estimate",
        "target": chip(target),
        "corner": corner,
        "not_modelled": NOT_MODELLED,
        "graphs": list.collect::<Vec<_>>(),
        "audio": audio,
        "step": totals[0],
        "steps": totals,
    })
}

#[cfg(test)]
mod tests {
    use super::{Total, explained, floor};
    use crate::estimate::{Class, ClassTime, GraphEstimate, OpCost, UnitTime};

    #[test]
    fn what_the_time_goes_to_is_a_table() {
        let op = |op: &str| OpCost { op: op.into(), unit: "HVX".into(), count: 2, us: 30.0 };
        let layout = ClassTime {
            class: Class::Layout,
            wall_us: 25.0,
            alone_us: 10.0,
            busy_us: 60.0,
            ops: vec![op("Transpose"), op("Concat")],
        };
        let idle = ClassTime { class: Class::Idle, ops: Vec::new(), ..layout.clone() };
        let hvx = UnitTime { unit: "HVX".into(), us: 50.0, alone_us: 20.0 };
        let graph = GraphEstimate {
            us: 50.0,
            breakdown: vec![layout, idle],
            units: vec![hvx],
            ..GraphEstimate::default()
        };
        assert_eq!(
            explained(&graph),
            [
                "  class                     wall, us       %   alone, us     busy, us  most of it",
                "  layout changes                25.0    50.0        10.0         60.0  Transpose 30, Concat 30",
                "  idle                          25.0    50.0        10.0         60.0",
                "  HVX runs 100.0 % of the time, 40.0 % alone",
            ]
        );
    }

    #[test]
    fn a_step_runs_the_graphs_of_one_context() {
        let graph = |graph: &str, context_positions, us| GraphEstimate {
            context: graph.to_owned(),
            graph: graph.to_owned(),
            prompt: graph.starts_with("prefill"),
            context_positions,
            us,
            ..GraphEstimate::default()
        };
        let head = graph("lmhead", None, 5.0);
        let several = [
            graph("decode", Some(4096), 100.0),
            graph("decode512", Some(512), 60.0),
            graph("prefill16", None, 200.0),
            head.clone(),
        ];
        let steps = |graphs: &[GraphEstimate]| {
            let all = Total::all(graphs);
            all.iter().map(|total| (total.positions, total.us)).collect::<Vec<_>>()
        };
        assert_eq!(steps(&several), [(Some(4096), 105.0), (Some(512), 65.0)]);
        assert_eq!(steps(&[graph("decode", None, 100.0), head]), [(None, 105.0)]);
    }

    #[test]
    fn ratios_to_next_to_no_weights_are_not_shown() {
        assert_eq!(floor(12.0, 8.0, 9), ", 1.50 times the 8 us that its weights take to read");
        assert_eq!(floor(4066.3, 4.0, 9), ", little of it for reading weights");
        assert_eq!(floor(12.0, 0.0, 9), ", little of it for reading weights");
        assert_eq!(floor(12.0, 0.0, 0), ", without weights of its own");
    }
}
