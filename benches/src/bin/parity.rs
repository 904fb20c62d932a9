//! Compares a bundle's context binaries with its ONNX graphs, token by token at full size.
//!
//! `parity BUNDLE libQnnHtp.so libQnnSystem.so ID,ID,… COUNT`
//!
//! Both backends take the prompt and then COUNT tokens: the CPU's greedy choice, also where the HTP's
//! would be another. Prints for each the two choices, the cosine of the logits, and how far the CPU's
//! first choice leads its second, as a multiple of the logits' standard deviation.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_core::CancelToken;
use qhx_core::backend::Backend;
use qhx_core::compare::Distance;
use qhx_core::engine::{Model, ModelOptions};
use qhx_core::manifest::{self, Manifest};
use qhx_core::op::{Logits, Segment};
use qhx_core::qnn::{QnnBackend, QnnOptions};
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_ops_llama as _;
use qhx_ops_phimoe as _;
use qhx_ops_qwen35 as _;
use qhx_plugins::{PluginOptions, Plugins};

type AnyError = Box<dyn std::error::Error>;

fn open(manifest: &Path, backend: Arc<dyn Backend>) -> Result<Model, AnyError> {
    let options = PluginOptions { only_named: true, ..PluginOptions::default() };
    Ok(Model::open(ModelOptions {
        manifest: Arc::new(Manifest::load(manifest)?),
        backend,
        ops: &Plugins::discover(&options)?,
        threads: None,
        cancel: CancelToken::new(),
        progress: None,
        dump: None,
        trace: None,
    })?)
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

/// How far the largest leads the second, in standard deviations.
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

fn main() -> Result<(), AnyError> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [bundle, htp, system, prompt, count] = &arguments[..] else {
        return Err("usage: parity BUNDLE libQnnHtp.so libQnnSystem.so ID,ID,... COUNT".into());
    };
    let prompt: Vec<u32> = prompt.split(',').map(str::parse).collect::<Result<_, _>>()?;
    let count: usize = count.parse()?;
    let manifest = manifest::select(Path::new(bundle))?;
    let cpu = Arc::new(CpuBackend::new(CpuOptions::default())?);
    let qnn = Arc::new(QnnBackend::new(QnnOptions {
        htp: PathBuf::from(htp),
        system: Some(PathBuf::from(system)),
        ..QnnOptions::default()
    })?);
    let (mut cpu, mut qnn) = (open(&manifest, cpu)?, open(&manifest, qnn)?);
    for model in [&mut cpu, &mut qnn] {
        model.op_mut().reset()?;
        model.op_mut().prefill(&[Segment::Tokens(&prompt)])?;
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
