//! Compares a bundle's context binaries with its ONNX graphs, token by token at full size.
//!
//! `parity BUNDLE libQnnHtp.so libQnnSystem.so ID,ID,… COUNT [--steps]`
//!
//! Both backends take the prompt and then COUNT tokens: the CPU's greedy choice, also where the HTP's
//! would be another. Prints for each the two choices, the cosine of the logits, and how far the CPU's
//! first choice leads its second, as a multiple of the logits' standard deviation.
//!
//! With `--steps` the CPU takes the prompt token by token, and the HTP through the bundle's prefill graphs: what chunks
//! compute against what steps do. Then the rows behind the last layer, the rows of caches and the states are compared,
//! too. For that the decoder must have one shard.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use qhx_base::compare::Distance;
use qhx_benches::null::linked;
use qhx_benches::observed::{Observed, Written};
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::manifest::{self, Manifest};
use qhx_core::op::{Logits, Segment};
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::Backend;
use qhx_ops_llama as _;
use qhx_ops_phimoe as _;
use qhx_ops_qwen35 as _;
use qhx_qnn::{QnnBackend, QnnOptions};
use serde_json::Value;

type AnyError = Box<dyn std::error::Error>;

fn open(
    manifest: Manifest,
    backend: Arc<dyn Backend>,
    observed: &Observed,
) -> Result<Model, AnyError> {
    let plugins = linked()?;
    let options = ModelOptions::new(manifest, backend, &plugins);
    Ok(Model::open(options.executed(observed.tap()))?)
}

/// The bundle with graphs for one token only.
fn without_prefill_graphs(manifest: &Path) -> Result<Manifest, AnyError> {
    let mut document = Manifest::load(manifest)?.raw;
    let Some(params) = document.pointer_mut("/plan/params").and_then(Value::as_object_mut) else {
        return Err("the manifest has no plan.params".into());
    };
    let named = match params.remove("prefill") {
        Some(Value::String(name)) => vec![name],
        Some(Value::Array(names)) => {
            names.iter().filter_map(Value::as_str).map(str::to_owned).collect()
        }
        _ => return Err("the bundle has no prefill graphs".into()),
    };
    // The forge names a context after its graph.
    if let Some(contexts) =
        document.pointer_mut("/artifacts/contexts").and_then(Value::as_object_mut)
    {
        contexts.retain(|key, _| !named.contains(key));
    }
    Ok(Manifest::from_value(manifest, document, None)?)
}

fn logits(model: &mut Model) -> Result<Vec<f32>, AnyError> {
    Ok(match model.op_mut().logits()? {
        Logits::F32(values) => values.to_vec(),
        Logits::F16(values) => values.iter().map(|v| v.to_f32()).collect(),
    })
}

fn best(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b]))
}

/// Margin of the largest logit over the second, in standard deviations.
fn margin(logits: &[f32]) -> f64 {
    let (mut first, mut second) = (f32::MIN, f32::MIN);
    for &v in logits {
        if v > first {
            (first, second) = (v, first);
        } else if v > second {
            second = v;
        }
    }
    let n = logits.len() as f64;
    let mean = logits.iter().map(|v| f64::from(*v)).sum::<f64>() / n;
    let variance = logits.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n;
    f64::from(first - second) / variance.sqrt()
}

/// The min cosine of each kind of tensor, and where.
fn compare(found: &Written, expected: &Written) -> Result<(), AnyError> {
    for (kind, prefix) in
        [("rows", "y"), ("rows of caches", "new_"), ("states", "present_"), ("logits", "logits")]
    {
        let mut min = (f64::INFINITY, String::new());
        for (name, expected) in expected.iter().filter(|(name, _)| name.starts_with(prefix)) {
            let found = found.get(name).ok_or_else(|| format!("no prefill graph has {name}"))?;
            // A chunk that the prompt does not fill is the last, and has rows behind its tokens.
            let rows = found.values.len().min(expected.values.len());
            let (cosine, row) =
                Distance::least_row(&found.values[..rows], &expected.values, expected.width)?;
            if cosine < min.0 {
                min = (cosine, format!("{name}, {row}"));
            }
        }
        println!("{kind}: min cosine {:.6} ({})", min.0, min.1);
    }
    Ok(())
}

fn main() -> Result<(), AnyError> {
    let mut arguments: Vec<String> = std::env::args().skip(1).collect();
    let steps = arguments.pop_if(|last| *last == "--steps").is_some();
    let [bundle, htp, system, prompt, count] = &arguments[..] else {
        return Err(
            "usage: parity BUNDLE libQnnHtp.so libQnnSystem.so ID,ID,... COUNT [--steps]".into()
        );
    };
    let prompt: Vec<u32> = prompt.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let count: usize = count.parse()?;
    let manifest = manifest::select(Path::new(bundle))?;
    let cpu = Arc::new(CpuBackend::new(CpuOptions::exact())?);
    let qnn = Arc::new(QnnBackend::new(QnnOptions {
        htp: PathBuf::from(htp),
        system: Some(PathBuf::from(system)),
        ..QnnOptions::default()
    })?);
    let written = [Observed::default(), Observed::default()];
    let of_cpu =
        if steps { without_prefill_graphs(&manifest)? } else { Manifest::load(&manifest)? };
    let mut cpu = open(of_cpu, cpu, &written[0])?;
    let mut qnn = open(Manifest::load(&manifest)?, qnn, &written[1])?;
    for model in [&mut cpu, &mut qnn] {
        model.op_mut().reset()?;
        let start = Instant::now();
        model.op_mut().prefill(&[Segment::Tokens(&prompt)])?;
        let stats = model.graph_stats();
        let executions: Vec<_> = stats
            .iter()
            .filter(|graph| graph.executions > 0)
            .map(|graph| format!("{} × {}", graph.graph, graph.executions))
            .collect();
        println!("prompt in {:.1} s: {}", start.elapsed().as_secs_f64(), executions.join(", "));
    }
    let [expected, found] = written.map(|written| written.take());
    if steps {
        compare(&found, &expected)?;
    }
    let mut equal = 0;
    for step in 0..count {
        let (expected, found) = (logits(&mut cpu)?, logits(&mut qnn)?);
        let (Some(first), Some(other)) = (best(&expected), best(&found)) else {
            return Err("no logits".into());
        };
        equal += usize::from(first == other);
        println!(
            "step {step}: cpu {first}, htp {other}, cosine {:.6}, margin {:.4}",
            Distance::of(&found, &expected)?.cosine,
            margin(&expected)
        );
        for model in [&mut cpu, &mut qnn] {
            model.op_mut().decode(u32::try_from(first)?)?;
        }
    }
    println!("{equal} of {count} tokens are equal");
    Ok(())
}
