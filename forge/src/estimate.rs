//! Cost of a graph on the device, estimated by the cost model in the QNN library's own compiler.
//!
//! On request the compiler writes the schedule that it has made, event by event, as a Chrome trace: which
//! op runs on which unit from which cycle to which, and how many bytes it moves. This module asks for
//! it and sums it up. Nothing is executed. Bytes are facts of the compiled graph; times are a model.
//!
//! Not modelled: see [`NOT_MODELLED`]. A forge that is to estimate asks for the schedules of the binaries that it makes
//! ([`QnnCompiler::with_schedules`]); without a bundle each graph is compiled for its estimate alone.

mod breakdown;
mod memory;
mod schedule;
mod timeline;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::read_json;
use qhx_graph::graph::Graph;
use qhx_graph::progress::Progress;
use qhx_qnn::{SOCS, Target};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use schedule::{Trace, Unit, op_name};

use crate::bundle::replace_json;
use crate::chain::{DECODERS, names_graph, within};
use crate::compile::Compiler as _;
use crate::qnn::{QnnCompiler, Schedule};
use crate::recipe::{CONTEXTS, ContextPlan, Recipe};

pub use breakdown::{Class, ClassTime, UnitTime};

/// Voltage corner that estimates are for by default, about turbo.
pub const DEFAULT_CORNER: u32 = 7;
/// Costs that an estimate leaves out.
pub const NOT_MODELLED: &str = "calls from the host to the NPU, the host's own work, clock changes, heat \
     and other users of the memory are not modelled; ops without a cost model count with an assumption";
/// Max time of a graph that dequantizes weights, as a multiple of its estimate.
///
/// The library has no cost model for the op that dequantizes weights, `packed_quant_offset_to_fp16` for those of 4
/// bits, and assumes that it is quick. For int8 it then expects decoding to become 1.9 times as fast as with f16 on
/// v81, where published bundles became 1.07 times as fast.
pub const DEQUANTIZE_FACTOR: f64 = 1.9 / 1.07;
/// Log message of the library when it has no cost model of a chip.
const NO_COST_MODEL: &str = "cost model could not be initialized";
/// Chips of which QAIRT 2.51 has none.
const WITHOUT_COST_MODEL: [&str; 7] =
    ["SM7325", "QCM6490", "SC8280X", "SM8475", "SSG2115P", "SSG2125P", "SXR1230P"];
/// Number of the most expensive ops that are listed.
const TOP_OPS: usize = 10;

/// Options of an estimate.
#[derive(Debug, Clone, Default)]
pub struct EstimateOptions {
    /// Voltage corner of the core, 1 to 12; the higher, the faster the clock.
    pub corner: u32,
    /// Folder for the traces, `<graph>.json`; Perfetto and chrome://tracing show them.
    pub traces: Option<PathBuf>,
    /// Folder for pictures of them, `<graph>.svg`.
    pub pictures: Option<PathBuf>,
}

/// One kind of op in a graph, summed over all of its events.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct OpCost {
    /// The library's name.
    pub op: String,
    /// Unit that runs it: `HVX`, `HMX` or `DMA`.
    pub unit: String,
    /// Events.
    pub count: usize,
    /// Their durations together; units and threads run side by side.
    pub us: f64,
}

impl OpCost {
    fn new(op: &str, unit: &str, (count, us): (usize, f64)) -> Self {
        Self { op: op.to_owned(), unit: unit.to_owned(), count, us }
    }
}

/// The estimate for one execution of a graph.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct GraphEstimate {
    /// Key of its context.
    pub context: String,
    /// Name.
    pub graph: String,
    /// True for a graph that a step does not run: of several tokens of a prompt, of an image or audio, or of an
    /// encoder for shorter texts.
    pub prompt: bool,
    /// Positions of the context of which the graph takes a token, where there are graphs for several contexts: a step
    /// runs those of one of them.
    #[serde(rename = "positions")]
    pub context_positions: Option<usize>,
    /// Seconds of audio that one execution is for, of a graph that takes log-mel frames: its window without what only
    /// gives context.
    pub audio_seconds: Option<f64>,
    /// From the first event to the end of the last.
    pub us: f64,
    /// Clock of the core, in MHz.
    pub core_mhz: f64,
    /// Bytes of weights as they are stored.
    pub weight_bytes: u64,
    /// Bytes read from memory.
    pub dma_read_bytes: u64,
    /// Bytes written to memory.
    pub dma_write_bytes: u64,
    /// Memory that activations move to when they do not fit the NPU's own.
    pub spill_fill_bytes: u64,
    /// Rate of the slowest bus between memory and NPU that the library assumes, in bytes per second.
    #[serde(rename = "memory_bytes_per_second")]
    pub memory_rate: f64,
    /// The time at the rate at which devices of this chip read weights, by times that were published: see
    /// [`GraphEstimate::us`] for the library's own.
    #[serde(default)]
    pub measured_memory_us: Option<f64>,
    /// Time that reading the weights takes at the library's rate, of tables the rows that are gathered: no schedule is
    /// faster.
    #[serde(rename = "weight_floor_us")]
    pub floor_us: f64,
    /// Ops whose time is assumed, as the library has no cost model for them.
    #[serde(rename = "without_cost_model")]
    pub unmodelled: Vec<OpCost>,
    /// The ten kinds of ops that take the longest.
    pub most_expensive: Vec<OpCost>,
    /// Parts of its time by class; they add up to it.
    #[serde(rename = "classes", default)]
    pub breakdown: Vec<ClassTime>,
    /// Times of the kinds of units.
    #[serde(default)]
    pub units: Vec<UnitTime>,
}

impl GraphEstimate {
    /// The op that dequantizes weights and whose time is assumed, if there is one.
    pub fn dequantizing(&self) -> Option<&OpCost> {
        self.unmodelled.iter().find(|cost| cost.op.contains("quant"))
    }

    /// The upper end of the estimate: [`GraphEstimate::us`], or [`DEQUANTIZE_FACTOR`] times as much where weights are
    /// dequantized.
    pub fn max_us(&self) -> f64 {
        if self.dequantizing().is_some() { self.us * DEQUANTIZE_FACTOR } else { self.us }
    }
}

/// Estimates every graph of a recipe, but for those that `known` has.
///
/// # Errors
/// When a graph cannot be compiled, or its schedule not be read.
pub fn estimate(
    recipe: &Recipe,
    compiler: &QnnCompiler,
    options: &EstimateOptions,
    known: &[GraphEstimate],
    progress: &mut dyn Progress,
) -> Result<Vec<GraphEstimate>> {
    for folder in [&options.traces, &options.pictures].into_iter().flatten() {
        std::fs::create_dir_all(folder).map_err(|e| Error::io(ErrorKind::Io, folder, e))?;
    }
    let mut found = Vec::new();
    for context in &recipe.contexts {
        for graph in context.compiled() {
            let of_graph =
                |one: &&GraphEstimate| one.context == context.key && one.graph == graph.name();
            if let Some(known) = known.iter().find(of_graph) {
                found.push(known.clone());
                continue;
            }
            let (graphs, batches) = (vec![graph.clone()], Vec::new());
            let only = ContextPlan { graphs, batches, ..context.clone() };
            let folder = temporary()?;
            let compiler = compiler.clone().with_schedules(folder.path(), options.corner);
            let binary = folder.path().join("graph.bin");
            compiler
                .compile(&context.key, &only.graphs, false, &binary, progress)
                .and_then(|_| read(recipe, &only, &compiler, &binary, folder.path()))
                .map(|estimates| found.extend(estimates))
                .map_err(|e| {
                    let e = match has_no_cost_model(&e) {
                        true => no_cost_model(compiler.target()),
                        false => e,
                    };
                    e.context(format_args!("estimate of {:?}", graph.name()))
                })?;
            let file = folder.path().join(Schedule::Trace.file(graph.name()));
            if let Some(traces) = &options.traces {
                let kept = traces.join(Schedule::Trace.file(graph.name()));
                std::fs::copy(&file, &kept).map_err(|e| Error::io(ErrorKind::Io, &kept, e))?;
            }
            if let (Some(pictures), Some(estimate)) = (&options.pictures, found.last()) {
                let picture = pictures.join(format!("{}.svg", graph.name()));
                let (name, target) = (graph.name(), compiler.target());
                let target = target.name().unwrap_or_else(|| target.to_string());
                let title = format!(
                    "{name} on {target}, corner {}: {:.0} µs by the compiler's estimate",
                    options.corner, estimate.us
                );
                let schedule = schedule::open(&file)?;
                let trace = schedule::parse(schedule.bytes())?;
                let svg = timeline::svg(&trace, &title, &estimate.breakdown);
                std::fs::write(&picture, svg).map_err(|e| Error::io(ErrorKind::Io, &picture, e))?;
            }
        }
    }
    Ok(found)
}

/// True where a graph is not compiled because the library has no cost model of the chip, which only schedules need.
pub(crate) fn has_no_cost_model(error: &Error) -> bool {
    error.message().contains(NO_COST_MODEL)
}

/// Says for which chips there are estimates.
fn no_cost_model(target: Target) -> Error {
    let all = || SOCS.iter().filter(|soc| !WITHOUT_COST_MODEL.contains(&soc.name));
    let names = all().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let soc = SOCS.iter().find(|soc| soc.target == target);
    let chip = soc.map_or_else(|| format!("chip {}", target.soc), ToString::to_string);
    Error::new(
        ErrorKind::Context,
        format!("the QNN library has no clocks and no cost model of {chip}, {target}"),
    )
    .hint(format!("estimate for another --target; QAIRT 2.51 has those of {names}"))
}

/// A folder for schedules, which goes with the value.
///
/// # Errors
/// When it cannot be made.
pub fn temporary() -> Result<tempfile::TempDir> {
    tempfile::tempdir().map_err(|e| Error::io(ErrorKind::Io, &std::env::temp_dir(), e))
}

/// Writes the times into the manifest of a bundle that was made, as `artifacts.contexts.<key>.us`. Host-ops choose by
/// them which graphs a prompt goes through. Of a context or a graph that the manifest does not have, nothing is
/// written.
///
/// # Errors
/// When the file is no manifest, or cannot be replaced.
pub fn record(manifest: &Path, graphs: &[GraphEstimate]) -> Result<()> {
    let mut document = read_json(manifest)?;
    for GraphEstimate { context, graph, us, .. } in graphs.iter().filter(|graph| graph.us > 0.0) {
        let contexts = document.pointer_mut("/artifacts/contexts");
        let entry = contexts.and_then(|all| all.get_mut(context)).and_then(Value::as_object_mut);
        let times = entry.map(|entry| entry.entry("us").or_insert_with(|| json!({})));
        if let Some(times) = times.and_then(Value::as_object_mut) {
            // Tenths of a microsecond are finer than the model.
            times.insert(graph.clone(), json!((us * 10.0).round().max(1.0) / 10.0));
        }
    }
    replace_json(manifest, &document)
}

/// Rows that a step runs: one token, or an encoder's longest text.
fn step_rows(contexts: &[ContextPlan]) -> Option<usize> {
    let needed = contexts.iter().filter(|context| context.optional.is_none() && !context.once);
    let all: Vec<usize> = needed.flat_map(|context| &context.graphs).filter_map(rows).collect();
    if all.contains(&1) { Some(1) } else { all.into_iter().max() }
}

/// True for what each step runs. Graphs without such rows are encoders and towers, which run once for what a prompt
/// holds.
fn of_step(context: &ContextPlan, graph: &Graph, step: Option<usize>) -> bool {
    context.optional.is_none() && !context.once && step.is_some() && rows(graph) == step
}

/// Positions of the context that a decoder's graph is for, where there are several (`params.contexts`).
fn context_positions(recipe: &Recipe, graph: &Graph) -> Option<usize> {
    let sizes = recipe.params.get(CONTEXTS)?.as_array()?;
    let whole = recipe.plan_params.get(DECODERS[0]).zip(recipe.params.get("max_ctx"));
    let mut lists = within(&recipe.plan_params).zip(sizes).chain(whole);
    let (_, positions) = lists.find(|(list, _)| names_graph(list, graph.name()))?;
    usize::try_from(positions.as_u64()?).ok()
}

/// Seconds of audio that a graph of log-mel frames `mel` `[frames, mels]` covers, by the manifest's
/// `params.audio.front_end` and `params.transcription.context`.
fn audio_seconds(params: &Map<String, Value>, graph: &Graph) -> Option<f64> {
    let front_end = params.get("audio")?.get("front_end")?;
    let number = |key: &str| front_end.get(key).and_then(Value::as_f64);
    let mel = graph.tensors().iter().find(|tensor| tensor.name == "mel")?;
    let window = *mel.shape.first()? as f64 * number("hop")? / number("rate")?;
    let context = params.get("transcription").and_then(|rules| rules.get("context"));
    let context = context.and_then(Value::as_array).into_iter().flatten();
    let seconds = window - context.filter_map(Value::as_f64).sum::<f64>();
    Some(seconds).filter(|seconds| *seconds > 0.0)
}

/// Rows of hidden states that a graph takes.
fn rows(graph: &Graph) -> Option<usize> {
    let x = graph.tensors().iter().find(|tensor| tensor.name == "x")?;
    x.shape.first().copied()
}

/// Estimates of a context's graphs, by the schedules in `folder` that the library wrote when it compiled `binary`.
///
/// # Errors
/// When a schedule cannot be read.
pub fn read(
    recipe: &Recipe,
    context: &ContextPlan,
    compiler: &QnnCompiler,
    binary: &Path,
    folder: &Path,
) -> Result<Vec<GraphEstimate>> {
    let info = compiler.read(binary)?;
    let step = step_rows(&recipe.contexts);
    let mut found = Vec::new();
    for graph in context.compiled() {
        let file = schedule::open(&folder.join(Schedule::Trace.file(graph.name())))?;
        let trace = schedule::parse(file.bytes())?;
        // Absent where the library does not know the key.
        let costs = folder.join(Schedule::Costs.file(graph.name()));
        let costs = std::fs::read_to_string(costs).unwrap_or_default();
        let mut estimate = summarise(&trace, &costs);
        estimate.context.clone_from(&context.key);
        graph.name().clone_into(&mut estimate.graph);
        estimate.weight_bytes = graph.weight_bytes();
        let compiled = info.graphs.iter().find(|compiled| compiled.name == graph.name());
        let figures = compiled.and_then(|compiled| compiled.figures);
        estimate.spill_fill_bytes = figures.and_then(|f| f.spill_fill_bytes).unwrap_or(0);
        if estimate.memory_rate > 0.0 {
            let read = graph.weight_bytes_read();
            estimate.floor_us = read as f64 / estimate.memory_rate * 1e6;
        }
        let measured = memory::measured_rate(compiler.target());
        estimate.measured_memory_us = measured.map(|rate| memory::at_rate(&estimate, rate));
        estimate.prompt = !of_step(context, graph, step);
        estimate.context_positions = context_positions(recipe, graph);
        estimate.audio_seconds = audio_seconds(&recipe.params, graph);
        found.push(estimate);
    }
    Ok(found)
}

fn summarise(trace: &Trace<'_>, stats: &str) -> GraphEstimate {
    let mhz = trace.mhz();
    let assumed = without_model(stats);
    let mut costs: BTreeMap<(&str, &str), (usize, f64)> = BTreeMap::new();
    let mut unmodelled: BTreeMap<(&str, &str), (usize, f64)> = BTreeMap::new();
    // What the scalar thread does is starting and awaiting the others.
    for (unit, event) in trace.work().filter(|(unit, _)| *unit != Unit::Scalar) {
        let mut tables = vec![&mut costs];
        if assumed.contains(&*event.args.opcode) {
            tables.push(&mut unmodelled);
        }
        for table in tables {
            let entry = table.entry((op_name(&event.name), unit.name())).or_default();
            entry.0 += 1;
            entry.1 += event.dur / mhz;
        }
    }
    let list = |table: BTreeMap<(&str, &str), (usize, f64)>| {
        let costs = table.into_iter().map(|((op, unit), sum)| OpCost::new(op, unit, sum));
        let mut list: Vec<_> = costs.collect();
        list.sort_by(|a, b| b.us.total_cmp(&a.us));
        list
    };
    let mut most_expensive = list(costs);
    most_expensive.truncate(TOP_OPS);
    let (breakdown, units) = breakdown::breakdown(trace);
    GraphEstimate {
        us: trace.end() / mhz,
        core_mhz: mhz,
        dma_read_bytes: trace.traffic.total_num_dma_read_bytes,
        dma_write_bytes: trace.traffic.total_num_dma_write_bytes,
        memory_rate: trace.machine.memory_rate(),
        unmodelled: list(unmodelled),
        most_expensive,
        breakdown,
        units,
        ..GraphEstimate::default()
    }
}

/// Codes of the ops that the table of cost models says it does not know: lines of
/// `id,code,unit,status,…`, with the status `exists`, `fallback` or another.
fn without_model(stats: &str) -> std::collections::BTreeSet<&str> {
    stats
        .lines()
        .skip(1)
        .filter_map(|line| {
            let mut fields = line.split(',');
            let (code, status) = (fields.nth(1)?, fields.nth(1)?);
            (!matches!(status, "exists" | "fallback")).then_some(code)
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use qhx_core::manifest::Manifest;

    use super::*;
    use qhx_graph::builder::GraphBuilder;
    use qhx_graph::graph::{Elem, UnaryOp};

    const TRACE: &str = r#"{"traceEvents": [
            {"name": "thread_name", "ph": "M", "tid": 0, "pid": 0, "args": {"name": "FG:"}},
            {"name": "thread_name", "ph": "M", "tid": 2, "pid": 0, "args": {"name": "HVX 2:"}},
            {"name": "thread_name", "ph": "M", "tid": 10, "pid": 0, "args": {"name": "DMA:"}},
            {"name": "TCM usage", "ph": "C", "pid": 0, "ts": 5, "args": {"TCM usage": 4096}},
            {"name": "default_dma_start (q::weights)", "ph": "X", "tid": 0, "ts": 0, "dur": 150, "args": {"opcode": "W@a"}},
            {"name": "default_dma (q::weights)", "ph": "X", "tid": 10, "ts": 0, "dur": 2000, "args": {"opcode": "W@a"}},
            {"name": "q::Conv", "ph": "X", "tid": 0, "ts": 1500, "dur": 500, "args": {"opcode": "Conv@c", "flags": ["uses_hmx"]}},
            {"name": "q::Mul", "ph": "X", "tid": 2, "ts": 2000, "dur": 500, "args": {"opcode": "Mul@b"}},
            {"name": "q::Mul", "ph": "X", "tid": 2, "ts": 2500, "dur": 500, "args": {"opcode": "Mul@b"}},
            {"name": "default_dma_sync (q::weights)", "ph": "X", "tid": 0, "ts": 3100, "dur": 150, "args": {"opcode": ""}}],
            "DMA/L2 Access Statistics": {"total_num_dma_read_bytes": 131072, "total_num_dma_write_bytes": 7},
            "Hextimate Configuration": {"sim_core_freq": 1000.0, "soc_type": "X", "sim_nspnoc_freq": 806,
                "sim_mp_width": 32, "sim_mp_channels": 2, "sim_gemnoc_freq": 900, "sim_gemnoc_width": 32,
                "sim_gemnoc_channels": 2, "sim_gemnoc_efficiency": 1, "sim_ddr_freq": 4224, "sim_ddr_width": 2,
                "sim_ddr_channels": 4, "sim_ddr_efficiency": 0.9}}"#;

    #[test]
    fn a_graph_of_frames_is_for_the_audio_of_its_window() {
        let mut b = GraphBuilder::new("encoder");
        let mel = b.input("mel", Elem::Activation, &[3000, 80]).unwrap();
        let y = b.unary(UnaryOp::Neg, mel).unwrap();
        b.output("y", y).unwrap();
        let graph = b.finish().unwrap();
        let seconds = |params: Value| audio_seconds(params.as_object().unwrap(), &graph);
        let front_end = json!({"rate": 16_000, "hop": 160});
        assert_eq!(seconds(json!({"audio": {"front_end": front_end}})), Some(30.0));
        let transcription = json!({"context": [2.5, 1.5]});
        let params = json!({"audio": {"front_end": front_end}, "transcription": transcription});
        assert_eq!(seconds(params), Some(26.0));
        assert_eq!(seconds(json!({})), None);
    }

    /// Also where layers are named by a pattern, and where masks are of rings.
    #[test]
    fn a_graph_is_for_the_positions_of_its_context() {
        for (tiny, whole, smaller) in [
            ("gemma4-tiny", "decode_p0", "decode32_p0"),
            ("phimoe-6", "a1", "a32_1"),
            ("qwen3-moe", "decode1", "decode32_1"),
        ] {
            let checkpoint = qhx_checkpoint::Checkpoint::open(&qhx_paths::fixture(tiny)).unwrap();
            let options = crate::ForgeOptions {
                contexts: vec![32, 64],
                max_ctx: Some(200),
                ..crate::ForgeOptions::new("out")
            };
            let (_, recipe) =
                crate::plan::plan(&checkpoint, crate::registry::recipe, &options, false).unwrap();
            let positions = |name: &str| {
                let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
                let found = graphs.filter(|graph| graph.name().starts_with(name));
                let mut found = found.map(|graph| context_positions(&recipe, graph));
                found.next().unwrap_or_else(|| panic!("{tiny}: no graph {name}"))
            };
            assert_eq!(positions(whole), Some(200), "{tiny}");
            assert_eq!(positions(smaller), Some(32), "{tiny}");
            assert_eq!(positions(&smaller.replace("32", "64")), Some(64), "{tiny}");
            assert_eq!(positions("lmhead"), None, "{tiny}");
        }
    }

    #[test]
    fn times_get_into_the_manifest_of_their_contexts() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("m.json");
        let context = |name: &str| json!({"bin": format!("{name}.bin")});
        let contexts = json!({"decode": context("decode"), "prefill16": context("prefill16")});
        let document =
            json!({"schema_version": 1, "artifacts": {"contexts": contexts}, "plan": {}});
        std::fs::write(&file, document.to_string()).unwrap();
        let blank = summarise(&serde_json::from_str(TRACE).unwrap(), "");
        let graph = |name: &str, us| GraphEstimate {
            context: name.into(),
            graph: name.into(),
            us,
            ..blank.clone()
        };
        let graphs = [graph("decode", 2021.04), graph("prefill16", 0.0), graph("elsewhere", 1.0)];
        record(&file, &graphs).unwrap();
        let manifest = Manifest::load(&file).unwrap();
        let [decode, prefill] = &manifest.artifacts.contexts[..] else { panic!("two contexts") };
        assert_eq!(decode.us, [("decode".to_owned(), 2021.0)]);
        assert!(prefill.us.is_empty());
    }

    #[test]
    fn encoders_and_towers_are_no_part_of_a_step() {
        let graph = |name: &str, input: &str, rows| {
            let mut b = GraphBuilder::new(name);
            let x = b.input(input, Elem::Activation, &[rows, 4]).unwrap();
            let y = b.unary(UnaryOp::Neg, x).unwrap();
            b.output("y", y).unwrap();
            ContextPlan::alone(b.finish().unwrap())
        };
        let tower = ContextPlan { optional: Some("vision".into()), ..graph("vision", "x", 9) };
        let step = |contexts: Vec<ContextPlan>| {
            let rows = step_rows(&contexts);
            let of_step = contexts.iter().filter(|c| of_step(c, &c.graphs[0], rows));
            of_step.map(|c| c.key.clone()).collect::<Vec<_>>()
        };
        let decoder = [("encoder", "mel", 8), ("decode", "x", 1), ("prefill16", "x", 16)];
        let decoder = decoder.map(|(name, input, rows)| graph(name, input, rows));
        assert_eq!(step([std::slice::from_ref(&tower), &decoder[..]].concat()), ["decode"]);
        assert_eq!(step(vec![tower, graph("enc4", "x", 4), graph("enc", "x", 8)]), ["enc"]);
    }

    #[test]
    fn a_schedule_is_summed_up() {
        let trace: Trace<'_> = serde_json::from_str(TRACE).unwrap();
        let stats = "opid,name,resource,model status,prediction\n1,W@a,dma,exists,1\n2,Mul@b,hvx,bad_name,1\n";
        let found = summarise(&trace, stats);
        assert_eq!((found.us, found.dma_read_bytes, found.dma_write_bytes), (3.25, 131_072, 7));
        // The bus to the NPU is the slowest.
        assert_eq!(found.memory_rate, 806e6 * 64.0);
        let mul = OpCost::new("Mul", "HVX", (2, 1.0));
        let load = OpCost::new("weights", "DMA", (1, 2.0));
        let product = OpCost::new("Conv", "HMX", (1, 0.5));
        assert_eq!(found.most_expensive, [load, mul.clone(), product]);
        assert_eq!(found.unmodelled, [mul]);
        // Half of the moment in which weights come and the product runs belongs to each.
        let parts = found.breakdown.iter().map(|time| (time.class, time.wall_us, time.alone_us));
        let expected = [
            (Class::Matmul, 0.25, 0.0),
            (Class::Weights, 1.75, 1.5),
            (Class::Elementwise, 1.0, 1.0),
            (Class::Scheduling, 0.15, 0.15),
            (Class::Idle, 0.1, 0.1),
        ];
        for ((class, wall, alone), found) in expected.into_iter().zip(parts) {
            assert_eq!(class, found.0);
            assert!((wall - found.1).abs() < 1e-9 && (alone - found.2).abs() < 1e-9, "{found:?}");
        }
        assert_eq!(found.breakdown.len(), expected.len());
        let units: Vec<_> =
            found.units.iter().map(|one| (&*one.unit, one.us, one.alone_us)).collect();
        assert_eq!(units, [("HMX", 0.5, 0.0), ("HVX", 1.0, 1.0), ("DMA", 2.0, 1.5)]);
    }

    /// However long the schedule is, a row has no more rectangles than moments.
    #[test]
    fn a_picture_is_bounded() {
        let events: Vec<_> = (0..50_000)
            .map(|at| {
                // Longer than a moment, so that neighbours differ.
                let name = if at / 60 % 2 == 0 { "q::Mul" } else { "q::Softmax" };
                json!({"name": name, "ph": "X", "tid": 2, "ts": at * 10, "dur": 1 + at % 10})
            })
            .chain([
                json!({"name": "thread_name", "ph": "M", "tid": 2, "args": {"name": "HVX 2:"}}),
            ])
            .collect();
        let text = json!({
            "traceEvents": events, "Hextimate Configuration": {"sim_core_freq": 1000},
            "DMA/L2 Access Statistics": {"total_num_dma_read_bytes": 0, "total_num_dma_write_bytes": 0},
        });
        let text = text.to_string();
        let trace = schedule::parse(text.as_bytes()).unwrap();
        let picture = timeline::svg(&trace, "<a> & b", &summarise(&trace, "").breakdown);
        let document = roxmltree::Document::parse(&picture).unwrap();
        let count = document.descendants().filter(|node| node.has_tag_name("rect")).count();
        assert!((100..1300).contains(&count), "{count}");
        let title = document.descendants().find(|node| node.has_tag_name("title")).unwrap();
        assert_eq!(title.text(), Some("<a> & b"));
        let words = document.descendants().filter_map(|node| node.text()).collect::<String>();
        assert!(
            words.contains("HVX 2") && words.contains("softmax, ") && words.contains("500"),
            "{words}"
        );
    }
}
