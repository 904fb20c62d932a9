//! Bundles with context binaries, their plans and estimates.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_checkpoint::Checkpoint;
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_forge::compile::Compiler as _;
use qhx_forge::estimate::{
    Class, DEFAULT_CORNER, EstimateOptions, GraphEstimate, OpCost, estimate, read,
};
use qhx_forge::plan::plan;
use qhx_forge::qnn::QnnCompiler;
use qhx_forge::recipe::{Activations, Precision, Recipe, RecipeOptions};
use qhx_forge::registry::recipe;
use qhx_forge::{CheckBackends, ForgeOptions, Silent, forge, forge_checkpoint};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv2d, Elem};
use qhx_graph::weight::Storage;
use qhx_paths::fixture;
use qhx_qnn::{QnnBackend, QnnOptions, Target};
use qhx_tiers::tier;

use crate::common::{Log, read_json};
use crate::support::weight;
use crate::tier::opened;

#[tier(qnn)]
fn a_bundle_has_context_binaries_for_its_architecture() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("v79");
    let mut options = ForgeOptions::new(&out);
    options.max_ctx = Some(64);
    options.prefill = Some(Vec::new());
    options.compiler = Some(Arc::new(QnnCompiler::new(library.clone(), Target::V79)));
    let report = forge(&fixture("qwen35-tied"), &options, &mut Silent).unwrap();
    assert_eq!(report.dsp_arch.as_deref(), Some("v79"));
    let manifest = read_json(&report.manifest);
    let compiled_by = manifest["model"]["compiled_by"].as_str().unwrap();
    assert!(compiled_by.contains(library.build_id()), "{compiled_by}");
    let backend = QnnBackend::with_library(&library, QnnOptions::default()).unwrap();
    for context in &report.contexts {
        let entry = &manifest["artifacts"]["contexts"][&context.key];
        let path = out.join(entry["bin"].as_str().unwrap());
        assert_eq!(Some(std::fs::metadata(&path).unwrap().len()), context.binary_bytes);
        let source = ContextSource {
            key: context.key.clone(),
            binary: Some(path),
            ..ContextSource::default()
        };
        let opened = backend.open_context(&source).unwrap();
        let names: Vec<_> = opened.graphs().iter().map(|g| g.name.clone()).collect();
        assert_eq!(names, context.graphs);
    }
}

/// The configuration of a small Qwen3.5 with round sizes.
fn small_config(folder: &Path) -> PathBuf {
    let path = folder.join("small.json");
    let config = serde_json::json!({
        "architectures": ["Qwen3_5ForCausalLM"],
        "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128,
        "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "max_position_embeddings": 1024, "vocab_size": 6000, "tie_word_embeddings": true,
    });
    std::fs::write(&path, config.to_string()).unwrap();
    path
}

/// One shard of 64 positions, without prefill graphs.
fn small_recipe(checkpoint: &Checkpoint, precision: Precision) -> Recipe {
    let prefill = Some(Vec::new());
    let options =
        RecipeOptions { precision, prefill, shards: 1, max_ctx: 64, ..Default::default() };
    recipe(checkpoint, &options).unwrap()
}

/// A step, one for four sequences, and prompts of few and many rows: the library once computed 16 of them wrongly.
#[tier(qnn)]
fn integers_of_16_bits_agree_with_the_reference_graphs() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("llama.json");
    let config = serde_json::json!({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama",
        "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "max_position_embeddings": 256, "vocab_size": 320,
    });
    fs::write(&path, config.to_string()).unwrap();
    let checkpoint = Checkpoint::synthetic(&path, 3).unwrap();
    let made = |activations| {
        let mut options = ForgeOptions::new(folder.path().join(format!("{activations:?}")));
        (options.precision, options.activations) = (Precision::W4A16, activations);
        (options.max_ctx, options.prefill, options.batch) = (Some(64), Some(vec![16, 32]), vec![4]);
        options.compiler = Some(Arc::new(QnnCompiler::new(library.clone(), Target::V73)));
        let qnn = library.clone();
        options.check = Some(CheckBackends {
            qnn: Box::new(move || {
                Ok(Arc::new(QnnBackend::with_library(&qnn, QnnOptions::default())?))
            }),
            cpu: Box::new(|| Ok(Arc::new(CpuBackend::new(CpuOptions::exact())?))),
            seed: 1,
        });
        let mut log = Log::default();
        let report = forge_checkpoint(&checkpoint, recipe, &options, &mut log).unwrap();
        for row in &report.check {
            assert!(row.agrees() && row.error < 4e-3, "{activations:?}: {row:?}");
        }
        let graphs = report.check.iter().map(|row| row.graph.clone());
        assert!(graphs.collect::<Vec<_>>().contains(&"prefill16".to_owned()));
        (report.contexts[0].binary_bytes.unwrap(), log)
    };
    let ((floats, _), (integers, log)) = (made(Activations::F16), made(Activations::Int16));
    assert_ne!(integers, floats);
    assert!(
        log.notes.iter().any(|note| note.contains("5 of 5 4-bit weights are multiplied")),
        "{log:?}"
    );
}

#[tier(qnn)]
fn a_plan_says_how_large_the_binaries_become() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    for precision in Precision::ALL {
        let mut options = ForgeOptions::new(folder.path().join(precision.name()));
        (options.precision, options.max_ctx, options.prefill) = (precision, Some(64), Some(vec![]));
        options.shards = 2;
        options.compiler = Some(Arc::new(QnnCompiler::new(library.clone(), Target::V81)));
        let (plan, _) = plan(&checkpoint, recipe, &options, true).unwrap();
        let report = forge_checkpoint(&checkpoint, recipe, &options, &mut Silent).unwrap();
        for (context, planned) in report.contexts.iter().zip(&plan.contexts) {
            assert_eq!(context.key, planned.key);
            let ratio = context.binary_bytes.unwrap() as f64 / planned.binary_bytes as f64;
            // Of a model as small as this, what is not weights is more than a hundredth.
            assert!((0.8..1.1).contains(&ratio), "{} {precision:?}: {ratio}", planned.key);
        }
    }
}

#[tier(qnn)]
fn an_estimate_is_no_faster_than_reading_the_weights() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    let recipe = |precision| small_recipe(&checkpoint, precision);
    let traces = folder.path().join("traces");
    let pictures = folder.path().join("pictures");
    let (kept, drawn) = (Some(traces.clone()), Some(pictures.clone()));
    let wanted = |corner| EstimateOptions { corner, traces: kept.clone(), pictures: drawn.clone() };
    let compiler = QnnCompiler::new(library, Target::V81);
    let found = |precision, corner| {
        estimate(&recipe(precision), &compiler, &wanted(corner), &[], &mut Silent).unwrap()
    };
    let fp16 = found(Precision::Fp16, DEFAULT_CORNER);
    assert_eq!(fp16.iter().map(|g| g.graph.as_str()).collect::<Vec<_>>(), ["decode", "lmhead"]);
    for graph in &fp16 {
        let weights = graph.weight_bytes as f64;
        assert!((1.0..1.25).contains(&(graph.dma_read_bytes as f64 / weights)), "{graph:?}");
        assert!(graph.us >= graph.floor_us && graph.floor_us > 0.0, "{graph:?}");
        // Devices read faster than the library assumes; what is bound by that takes less time, and nothing more.
        let devices = graph.measured_memory_us.unwrap();
        assert!((0.8..=1.0).contains(&(devices / graph.us)), "{graph:?}");
        assert!((1..=10).contains(&graph.most_expensive.len()), "{graph:?}");
        assert!(traces.join(format!("{}.json", graph.graph)).exists());
        assert_explained(graph);
        let picture = fs::read_to_string(pictures.join(format!("{}.svg", graph.graph))).unwrap();
        assert_eq!(
            roxmltree::Document::parse(&picture).unwrap().root_element().tag_name().name(),
            "svg"
        );
        for words in ["HMX", "HVX 1", "DMA", "reading weights", "time, µs", "on v81, corner 7: "] {
            assert!(picture.contains(words), "{words}: {picture}");
        }
    }
    // A slower clock takes longer; int8 weights are half to read, and dequantized without a model.
    let slow = found(Precision::Fp16, 2);
    assert!(slow[0].us > fp16[0].us && slow[0].core_mhz < fp16[0].core_mhz);
    let int8 = found(Precision::W8A16, DEFAULT_CORNER);
    assert!(int8[0].dma_read_bytes * 10 < fp16[0].dma_read_bytes * 7);
    assert!(int8[0].dequantizing().is_some(), "{:?}", int8[0].unmodelled);
    // 4 bits are half of that, and so is their estimated time.
    let four = found(Precision::W4A16, DEFAULT_CORNER);
    assert!(four[0].dma_read_bytes * 10 < int8[0].dma_read_bytes * 7, "{four:?}");
    assert!(
        four[0].dequantizing().is_some_and(|op| op.op == "packed_quant_offset_to_fp16"),
        "{four:?}"
    );
    assert!(four[0].max_us() > 1.7 * four[0].us && fp16[0].max_us() == fp16[0].us);
    let dequantizing = |graph: &GraphEstimate| of_class(graph, Class::Dequantize);
    assert!(dequantizing(&four[0]) > 0.0 && dequantizing(&fp16[0]) == 0.0, "{four:?}");
    four.iter().chain(&int8).chain(&slow).for_each(assert_explained);
}

/// Part of a class in a graph's time.
fn of_class(graph: &GraphEstimate, class: Class) -> f64 {
    let of = graph.breakdown.iter().filter(|time| time.class == class);
    of.map(|time| time.wall_us).sum()
}

/// The parts of all classes are the whole time, none is less than what it has alone, and weights and products are seen.
fn assert_explained(graph: &GraphEstimate) {
    let all: f64 = graph.breakdown.iter().map(|time| time.wall_us).sum();
    assert!((all / graph.us - 1.0).abs() < 1e-6, "{all} of {}: {graph:?}", graph.us);
    for time in &graph.breakdown {
        assert!(time.alone_us <= time.wall_us + 1e-6, "{time:?}");
    }
    for class in [Class::Matmul, Class::Weights] {
        assert!(of_class(graph, class) > 0.0, "{class}: {graph:?}");
    }
    let units: Vec<_> = graph.units.iter().map(|unit| unit.unit.as_str()).collect();
    assert_eq!(units, ["HMX", "HVX", "DMA"]);
    assert!(graph.units.iter().all(|unit| unit.alone_us <= unit.us && unit.us <= graph.us + 1e-6));
}

/// Machines differ in the bus that decides: X Elite's is wider than that of the phone with the same NPU.
#[tier(qnn)]
fn chips_of_an_architecture_have_their_own_memory() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    let recipe = small_recipe(&checkpoint, Precision::Fp16);
    let wanted = EstimateOptions { corner: DEFAULT_CORNER, ..EstimateOptions::default() };
    let found = |name: &str| {
        let compiler = QnnCompiler::new(library.clone(), Target::named(name).unwrap());
        estimate(&recipe, &compiler, &wanted, &[], &mut Silent)
    };
    let rate = |name: &str| found(name).unwrap()[0].memory_rate / 1e9;
    let rates = ["8-gen-2", "x-elite", "x2-elite"].map(rate);
    assert!(rates.is_sorted() && rates[0] > 40.0 && rates[2] > 2.0 * rates[0], "{rates:?}");
    // One that the library has no clocks for.
    let error = found("SC8280X").unwrap_err().report().to_string();
    for words in [
        "decode",
        "no cost model of SC8280X (sc8280xp, 8cx-gen-3), v68",
        "8-elite-gen-5",
        "x-elite",
    ] {
        assert!(error.contains(words), "{words}: {error}");
    }
}

/// A graph of several tokens, or of an image, is no part of the step that gives a token.
#[tier(qnn)]
fn an_estimate_of_a_step_leaves_prompts_out() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    let mut recipe = small_recipe(&checkpoint, Precision::Fp16);
    let graph = |name: &str, rows: usize| {
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, 32]).unwrap();
        let y = b.linear("up", x, weight(1, [32, 32], Storage::Float), None).unwrap();
        b.output("y", y).unwrap();
        b.finish().unwrap()
    };
    recipe.contexts.truncate(1);
    recipe.contexts[0].graphs = vec![graph("decode", 1), graph("several", 8)];
    let mut tower = recipe.contexts[0].clone();
    (tower.key, tower.optional) = ("tower".to_owned(), Some("tower".to_owned()));
    tower.graphs = vec![graph("tower", 1)];
    recipe.contexts.push(tower);
    let compiler = QnnCompiler::new(library, Target::V81);
    let wanted = EstimateOptions { corner: DEFAULT_CORNER, ..EstimateOptions::default() };
    let found = estimate(&recipe, &compiler, &wanted, &[], &mut Silent).unwrap();
    let prompts: Vec<_> = found.iter().map(|g| (g.graph.as_str(), g.prompt)).collect();
    assert_eq!(prompts, [("decode", false), ("several", true), ("tower", true)]);
    // A bundle's binary comes with the same schedules, and its graphs are not compiled again.
    let scheduled = compiler.clone().with_schedules(folder.path(), DEFAULT_CORNER);
    let (context, binary) = (&recipe.contexts[0], folder.path().join("both.bin"));
    scheduled.compile(&context.key, &context.graphs, false, &binary, &mut Silent).unwrap();
    let schedules = read(&recipe, context, &compiler, &binary, folder.path()).unwrap();
    assert_eq!(schedules, found[..2]);
    let mut compiled = Log::default();
    assert_eq!(estimate(&recipe, &compiler, &wanted, &schedules, &mut compiled).unwrap(), found);
    assert_eq!(compiled.stages, ["compile tower for v81"]);
}

/// A stage of a vision tower: what it reads counts, and every op that takes time is named.
#[tier(qnn)]
fn an_estimate_counts_convolutions_and_tables() {
    let library = opened();
    let folder = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::synthetic(&small_config(folder.path()), 3).unwrap();
    let mut recipe = small_recipe(&checkpoint, Precision::Fp16);
    let mut b = GraphBuilder::new("stage");
    let x = b.input("x", Elem::Activation, &[1, 64, 16, 16]).unwrap();
    let indices = b.input("indices", Elem::I32, &[64]).unwrap();
    let conv = Conv2d { stride: [2, 2], padding: [[1, 1], [1, 1]], ..Conv2d::new([3, 3]) };
    let filters = weight(1, [256, 64 * 9], Storage::Float);
    let y = b.conv2d("down", x, filters, None, conv).unwrap();
    let y = b.reshape(y, &[256, 64]).unwrap();
    let y = b.transpose(y, &[1, 0]).unwrap();
    let table = b.table("positions", weight(2, [512, 256], Storage::Float)).unwrap();
    let rows = b.gather(table, indices, 0).unwrap();
    let y = b.add(y, rows).unwrap();
    let weight = b.row("weight", vec![1.0; 256]).unwrap();
    let bias = b.row("bias", vec![0.0; 256]).unwrap();
    let y = b.layer_norm(y, 1e-6, weight, bias).unwrap();
    let y = b.gelu(y).unwrap();
    b.output("y", y).unwrap();
    recipe.contexts.truncate(1);
    recipe.contexts[0].graphs = vec![b.finish().unwrap()];
    let compiler = QnnCompiler::new(library, Target::V81);
    let wanted = EstimateOptions { corner: DEFAULT_CORNER, ..EstimateOptions::default() };
    let found = &estimate(&recipe, &compiler, &wanted, &[], &mut Silent).unwrap()[0];
    assert_eq!(found.weight_bytes, 2 * (256 * 64 * 9 + 512 * 256));
    // Of the table, 64 rows are read.
    let read = 2 * (256 * 64 * 9 + 64 * 256);
    assert!((read..found.weight_bytes).contains(&found.dma_read_bytes), "{found:?}");
    let floor = read as f64 / found.memory_rate * 1e6;
    assert!((found.floor_us / floor - 1.0).abs() < 1e-9, "{found:?}");
    assert!(found.us >= found.floor_us && found.floor_us > 0.0, "{found:?}");
    for op in ["ConvLayer", "layernorm", "Tanh"] {
        let named = |cost: &OpCost| cost.op.contains(op);
        assert!(found.most_expensive.iter().any(named), "{op}: {found:?}");
    }
    assert_eq!(found.unmodelled, []);
}
