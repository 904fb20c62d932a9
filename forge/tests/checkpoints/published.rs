//! The table of published checkpoints in `docs/checkpoints.md`: made again from the fields of their configurations.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use qhx_checkpoint::Checkpoint;
use qhx_forge::plan::{Plan, plan};
use qhx_forge::recipe::{Precision, Recipe, Task};
use qhx_forge::registry::recipe;
use qhx_forge::{AUTO_SHARDS, ForgeOptions};
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::weight::Weight;
use qhx_types::DType;
use serde_json::{Value, json};

use super::{configured, read_json};

/// The table stands between these lines.
const MARKS: [&str; 2] = ["<!-- table of plans -->\n", "<!-- end of the table -->\n"];
const CONTEXT: usize = 4096;

/// Sizes of a planned bundle.
pub(crate) struct Sizes {
    /// Bytes of the bundle without reference graphs.
    pub bytes: u64,
    /// Bytes that its contexts, their inputs and outputs and the tables take when it is open.
    pub open_bytes: u64,
    /// Number of contexts.
    pub contexts: usize,
    /// Bytes of weights that a token of text reads; none of a model that writes no text, or has experts on the host.
    pub step_bytes: Option<u64>,
    /// It takes images.
    pub sees: bool,
}

/// A checkpoint of the list, planned in each precision of [`Precision::ALL`]: its sizes, or what is in the way.
pub(crate) struct Planned {
    pub name: String,
    pub class: String,
    pub plans: Vec<Result<Sizes, String>>,
}

impl Planned {
    /// Sizes in a precision.
    pub fn sizes(&self, precision: Precision) -> Result<&Sizes, &str> {
        let index = Precision::ALL.iter().position(|known| *known == precision).unwrap();
        self.plans[index].as_ref().map_err(String::as_str)
    }
}

/// All checkpoints of the list.
pub(crate) static PLANNED: LazyLock<Vec<Planned>> = LazyLock::new(|| {
    let list = include_str!("published.json");
    let list: Vec<Value> = serde_json::from_str(list).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let planned = |checkpoint: &Value| {
        let (path, task) = written(checkpoint, folder.path());
        let class = read_json(&path)["architectures"][0].as_str().unwrap().to_owned();
        let plans = Precision::ALL.map(|precision| {
            planned(&path, task, precision).map_err(|what| {
                match what.rsplit_once("config.json: ") {
                    _ if what.contains("no recipe") => "no recipe".to_owned(),
                    _ if what.contains("one process of the NPU") => "over 8 contexts".to_owned(),
                    Some((_, what)) => what.to_owned(),
                    None => what,
                }
            })
        });
        let name = checkpoint["name"].as_str().unwrap().to_owned();
        Planned { name, class, plans: plans.into() }
    };
    list.iter().map(planned).collect()
});

fn planned(config: &Path, task: Option<Task>, precision: Precision) -> Result<Sizes, String> {
    let checkpoint = Checkpoint::synthetic(config, 1).map_err(|e| e.message().to_owned())?;
    let options = ForgeOptions {
        task,
        max_ctx: task.is_none().then_some(CONTEXT),
        shards: AUTO_SHARDS,
        share_weights: true,
        precision,
        ..ForgeOptions::new("out")
    };
    let (plan, recipe) =
        plan(&checkpoint, recipe, &options, true).map_err(|e| e.message().to_owned())?;
    let tables = plan.tables.iter().map(|(_, bytes)| bytes).sum::<u64>();
    let contexts = plan.contexts.iter().map(|context| context.device_bytes()).sum::<u64>();
    Ok(Sizes {
        bytes: plan.bytes(),
        open_bytes: contexts + plan.embed_bytes + tables,
        contexts: plan.contexts.len(),
        step_bytes: step_bytes(&recipe),
        sees: recipe.plan_params.contains_key("vision"),
    })
}

/// Weights of the graphs that a token of text runs, each once.
fn step_bytes(recipe: &Recipe) -> Option<u64> {
    let speaks = recipe.params.contains_key("transcription");
    let experts = ["router", "n_experts"].iter().any(|key| recipe.params.contains_key(*key));
    if speaks || experts {
        return None;
    }
    let named = |key: &str| {
        let value = recipe.plan_params.get(key).cloned().unwrap_or_default();
        let list = value.as_array().cloned().unwrap_or_else(|| vec![value]);
        list.iter().filter_map(|name| Some(name.as_str()?.to_owned())).collect::<Vec<_>>()
    };
    let decode = named("decode");
    let names = [&decode[..], &named("lmhead")].concat();
    let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
    let graphs = graphs.filter(|graph| names.iter().any(|name| name == graph.name()));
    let weights = graphs.flat_map(Graph::weights);
    let rows = |weight: &Weight| (weight.source().name().to_owned(), weight.source().first_row());
    let once: BTreeMap<_, _> = weights.map(|weight| (rows(weight), weight.qnn_bytes())).collect();
    (!decode.is_empty()).then(|| once.values().sum())
}

/// The configuration of a line of the list as a file, and its task.
fn written(checkpoint: &Value, folder: &Path) -> (PathBuf, Option<Task>) {
    let mut config = match checkpoint["file"].as_str() {
        Some(file) => read_json(&qhx_paths::workspace().join("tests/configs").join(file)),
        None => checkpoint["config"].clone(),
    };
    for key in ["long_factor", "short_factor"] {
        if let Some(count) = config["rope_scaling"][key].as_u64() {
            config["rope_scaling"][key] = json!(vec![1.0; count as usize]);
        }
    }
    let path = folder.join("config.json");
    std::fs::write(&path, serde_json::to_vec(&config).unwrap()).unwrap();
    (path, serde_json::from_value(checkpoint["task"].clone()).unwrap())
}

fn row(checkpoint: &Planned) -> String {
    let cells = checkpoint.plans.iter().map(|plan| match plan {
        Ok(Sizes { bytes, contexts, .. }) => format!("{}, {contexts}", gigabytes(*bytes)),
        Err(what) => what.clone(),
    });
    let (name, class) = (&checkpoint.name, &checkpoint.class);
    format!("| {name} | `{class}` | {} |\n", cells.collect::<Vec<_>>().join(" | "))
}

pub(crate) fn gigabytes(bytes: u64) -> String {
    format!("{:.1} GB", bytes as f64 / 1e9)
}

/// Compares what a page has between two lines with `text`, or writes it there with `INSTA_UPDATE=always`.
pub(crate) fn compare(page: &str, [begin, end]: [&str; 2], text: &str) {
    let path = qhx_paths::workspace().join("docs").join(page);
    let page = std::fs::read_to_string(&path).unwrap();
    let (before, rest) = page.split_once(begin).unwrap();
    let (found, after) = rest.split_once(end).unwrap();
    if std::env::var("INSTA_UPDATE").is_ok_and(|v| v == "always") {
        std::fs::write(&path, format!("{before}{begin}{text}{end}{after}")).unwrap();
        return;
    }
    assert_eq!(found, text, "INSTA_UPDATE=always writes this into {}", path.display());
}

#[test]
fn the_page_of_checkpoints_has_the_plans_of_the_forge() {
    let rows: String = PLANNED.iter().map(row).collect();
    let table =
        format!("| checkpoint | class | fp16 | w8a16 | w4a16 |\n|---|---|---|---|---|\n{rows}");
    compare("checkpoints.md", MARKS, &table);
}

#[test]
fn masks_of_default_bundles_fit_a_mebibyte() {
    let list = include_str!("published.json");
    let list: Vec<Value> = serde_json::from_str(list).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let (mut planned, mut wide) = (0, Vec::new());
    for checkpoint in &list {
        let (path, task) = written(checkpoint, folder.path());
        let Ok(checkpoint) = Checkpoint::synthetic(&path, 1) else { continue };
        let precision = Precision::W4A16;
        let options = ForgeOptions { task, precision, ..ForgeOptions::new("out") };
        let Ok((_, recipe)) = plan(&checkpoint, recipe, &options, true) else { continue };
        planned += 1;
        for graph in recipe.contexts.iter().flat_map(|context| &context.graphs) {
            for input in graph.info(Elem::qnn).inputs {
                let bytes = input.try_byte_len().unwrap();
                if input.name.starts_with("cmask") && bytes > 1 << 20 {
                    wide.push(format!("{}: {} {input} {bytes}", path.display(), graph.name()));
                }
            }
        }
    }
    assert!(planned > 20 && wide.is_empty(), "{planned} planned; {wide:?}");
}

#[test]
fn prompts_take_fewer_rows_in_longer_contexts() {
    let checkpoint = configured("qwen3-0.6b.json");
    let widest = |max_ctx: Option<usize>, npu: bool| {
        let options = ForgeOptions { max_ctx, ..ForgeOptions::new("out") };
        let (plan, _) = plan(&checkpoint, recipe, &options, npu).unwrap();
        let graphs = plan.contexts.into_iter().flat_map(|context| context.graphs);
        // Shards have names such as `prefill128_p0`.
        let rows = graphs.filter_map(|name| {
            let rows = name.strip_prefix("prefill")?;
            rows.split_once('_').map_or(rows, |(rows, _)| rows).parse::<usize>().ok()
        });
        (plan.max_ctx, rows.max().unwrap())
    };
    assert_eq!(widest(None, true), (4096, 120));
    assert_eq!(widest(Some(3968), true), (3968, 128));
    assert_eq!(widest(Some(8192), true), (8192, 56));
    // Too few rows would be left.
    assert_eq!(widest(Some(32_768), true), (32_768, 128));
    assert_eq!(widest(None, false), (4096, 128));
}

#[test]
fn a_plan_counts_shared_weights_once() {
    let checkpoint = configured("qwen3-0.6b.json");
    let planned = |share_weights| {
        let options = ForgeOptions { share_weights, shards: 1, ..ForgeOptions::new("out") };
        plan(&checkpoint, recipe, &options, true).unwrap().0
    };
    let [apart, shared] = [false, true].map(planned);
    let keys = |plan: &Plan| plan.contexts.iter().map(|c| c.key.clone()).collect::<Vec<_>>();
    assert_eq!((keys(&apart), keys(&shared)), (keys(&shared), keys(&apart)));
    // The compiler has a copy for each graph all the same.
    assert_eq!(apart.peak_bytes(), shared.peak_bytes());
    let [apart, shared] = [apart, shared].map(|plan| plan.contexts[0].clone());
    assert_eq!(shared.graphs, ["decode", "prefill16", "prefill120"]);
    assert_eq!(apart.weight_bytes, 3 * shared.weight_bytes);
}

/// Size of a bundle for devices beside its quantized weights, tables of experts and per-layer inputs among them. A
/// tied table stands once more beside its head, which counts for much in a small model.
#[test]
fn device_bundles_are_hardly_larger_than_their_weights() {
    let list = include_str!("published.json");
    let list: Vec<Value> = serde_json::from_str(list).unwrap();
    let folder = tempfile::tempdir().unwrap();
    for (name, percent) in [
        ("meta-llama/Llama-3.2-1B-Instruct", 133),
        ("Qwen/Qwen3-4B", 117),
        ("meta-llama/Llama-3.1-8B-Instruct", 115),
        ("google/gemma-4-E4B-it", 115),
    ] {
        let checkpoint = list.iter().find(|checkpoint| checkpoint["name"] == name).unwrap();
        let checkpoint = written(checkpoint, folder.path()).0;
        let checkpoint = Checkpoint::synthetic(&checkpoint, 1).unwrap();
        let (precision, share_weights) = (Precision::W4A16, true);
        let options = ForgeOptions { precision, share_weights, ..ForgeOptions::new("out") };
        let (plan, recipe) = plan(&checkpoint, recipe, &options, true).unwrap();
        let graphs = recipe.contexts.iter().flat_map(|context| &context.graphs);
        let weights = graphs.flat_map(Graph::weights);
        let once: BTreeMap<&str, u64> =
            weights.map(|weight| (weight.source().name(), weight.qnn_bytes())).collect();
        let weights = once.values().chain(plan.tables.iter().map(|(_, bytes)| bytes)).sum::<u64>();
        eprintln!("{name}: {} of {weights} bytes, {} shards", plan.bytes(), plan.shards);
        assert!(plan.bytes() * 100 <= weights * percent, "{name}: {} of {weights}", plan.bytes());
        assert_eq!(plan.embed_dtype, DType::I8, "{name}");
        assert!(plan.peak_bytes() <= 16_000_000_000, "{name}: {}", plan.peak_bytes());
    }
}

#[test]
fn hints_of_plans_never_suggest_what_was_given() {
    let checkpoint = configured("qwen3-0.6b.json");
    let planned = |shards, prefill: &[usize], share_weights| {
        let prefill = Some(prefill.to_vec());
        let options = ForgeOptions { shards, prefill, share_weights, ..ForgeOptions::new("out") };
        plan(&checkpoint, recipe, &options, true).unwrap().0
    };
    assert_eq!(planned(AUTO_SHARDS, &[], false).lower_peak(), Some("give more --shards"));
    assert_eq!(planned(2, &[], false).lower_peak(), None);
    let warning = planned(28, &[8], true).warning().unwrap();
    assert!(warning.contains("at once: fewer shards make fewer"), "{warning}");

    let large = configured("mistral-7b-v0.3.json");
    let refused = |prefill: Option<Vec<usize>>, share_weights| {
        let options =
            ForgeOptions { shards: 2, prefill, share_weights, ..ForgeOptions::new("out") };
        let error = plan(&large, recipe, &options, true).unwrap_err();
        error.hint_text().unwrap().contains("--prefill 0")
    };
    assert!(refused(None, false));
    assert!(!refused(None, true) && !refused(Some(Vec::new()), false));
}
