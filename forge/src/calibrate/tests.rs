use std::sync::Arc;

use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_paths::fixture;

use super::*;
use crate::registry::recipe;
use qhx_core::Manifest;
use qhx_exec::Workspace;
use qhx_exec::backend::Backend;
use qhx_exec::graph_runner::{self, Named};
use qhx_types::GraphInfo;

#[test]
fn divergence_is_that_of_the_distributions() {
    let (mut even, mut skewed) = ([5f32, 5.0], [1f32, 1.0 + 3f32.ln()]);
    log_softmax(&mut even);
    log_softmax(&mut skewed);
    // Probabilities 1/2, 1/2 and 1/4, 3/4.
    let expected = 0.5 * (0.5f64 / 0.25).ln() + 0.5 * (0.5f64 / 0.75).ln();
    assert!((divergence_of(&even, &skewed) - expected).abs() < 1e-6);
    assert_eq!(divergence_of(&even, &even), 0.0);
    assert_eq!((likeliest(&even), likeliest(&skewed)), (Some(0), Some(1)));
}

#[test]
fn weights_belong_to_layers_and_kinds() {
    let names = ["model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj", "lm_head"]
        .map(|name| format!("{name}.weight"));
    let (layers, groups) = units(&names);
    assert_eq!(layers, ["layers.0", "layers.10", "lm_head"]);
    assert_eq!(groups, ["up_proj"]);
}

#[test]
fn the_folder_above_the_bundle_is_created() {
    let dir = tempfile::tempdir().unwrap();
    let checkpoint = Checkpoint::open(&fixture("qwen35-tied")).unwrap();
    let options = ForgeOptions::new(dir.path().join("new/qwen35/w4"));
    let wanted = CalibrateOptions { texts: vec!["hello you".to_owned()], tokens: 2, target: None };
    let open: OpenBundle<'_> = &|manifest| {
        assert!(manifest.starts_with(dir.path().join("new/qwen35")));
        Err(Error::new(ErrorKind::Internal, "opened"))
    };
    let error = calibrate(&checkpoint, recipe, &options, &wanted, open, &mut crate::Silent);
    assert_eq!(error.unwrap_err().message(), "opened");
}

/// A graph in a workspace of its own.
struct Opened(Workspace, Arc<GraphInfo>);

impl Opened {
    fn new(manifest: &Manifest, key: &str) -> Result<Self> {
        let cpu: Arc<dyn Backend> = Arc::new(CpuBackend::new(CpuOptions::exact())?);
        let source = manifest.context_source(&manifest.open_artifacts(), key)?;
        let (workspace, graphs) = graph_runner::open(&cpu, &source)?;
        Ok(Self(workspace, Arc::clone(&graphs[0])))
    }

    fn run(&mut self, x: &[f32]) -> Result<Vec<f32>> {
        let value = |name: &str, len| match name {
            "x" => x.to_vec(),
            "cos" => vec![1.0; len],
            _ => vec![0.0; len],
        };
        let inputs = self.1.inputs.iter();
        let inputs: Vec<Named> =
            inputs.map(|t| (t.name.clone(), value(&t.name, t.shape.iter().product()))).collect();
        let mut outputs = graph_runner::run(&mut self.0, &self.1, &inputs)?.into_iter();
        let wanted = outputs.find(|(name, _)| name == "y" || name == "logits");
        Ok(wanted.map(|(_, values)| values).unwrap_or_default())
    }
}

/// Runs each token through the graphs alone, as if it were the first: no host-op is at hand here.
struct Graphs {
    decode: Opened,
    head: Opened,
}

impl Reader for Graphs {
    fn reset(&mut self) -> Result<()> {
        Ok(())
    }

    fn read(&mut self, tokens: &[u32], take: &mut dyn FnMut(Vec<f32>) -> Result<()>) -> Result<()> {
        for token in tokens {
            let x = (0..80).map(|i| ((i * 7 + 1) as f32 * *token as f32).sin()).collect::<Vec<_>>();
            let y = self.decode.run(&x)?;
            take(self.head.run(&y)?)?;
        }
        Ok(())
    }
}

#[test]
fn sensitive_layers_keep_precision_until_a_target_holds() {
    let checkpoint = Checkpoint::open(&fixture("mistral-tiny")).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let options = ForgeOptions {
        precision: Precision::W4A16,
        max_ctx: Some(64),
        ..ForgeOptions::new(folder.path().join("out"))
    };
    let open = |manifest: &Path| -> Result<Box<dyn Reader>> {
        let manifest = Manifest::load(manifest)?;
        let [decode, head] = ["decode", "lmhead"].map(|key| Opened::new(&manifest, key));
        Ok(Box::new(Graphs { decode: decode?, head: head? }))
    };
    let run = |target: f64| {
        let texts = vec!["The capital of France is Paris.".to_owned(), String::new()];
        let wanted = CalibrateOptions { texts, tokens: 6, target: Some(target) };
        calibrate(&checkpoint, recipe, &options, &wanted, &open, &mut crate::Silent).unwrap()
    };
    // Out of reach, so that all layers are kept.
    let found = run(1e-12);
    assert_eq!((found.tokens, found.reached, found.kept.len()), (6, false, 4), "{found:?}");
    let whole = found.precisions.iter().find(|(one, _)| *one == Precision::W4A16);
    let whole = whole.map(|(_, quality)| quality.divergence).unwrap();
    // int8 is much closer to f16.
    assert!(found.chosen.unwrap().divergence < whole / 10.0, "{found:?}");
    let layers: Vec<_> = found.layers.iter().map(|(part, _)| part.as_str()).collect();
    assert_eq!(layers, ["layers.0", "layers.1", "layers.2", "layers.3", "lm_head"]);
    let groups: Vec<_> = found.groups.iter().map(|(part, _)| part.as_str()).collect();
    assert!(groups.contains(&"down_proj") && groups.contains(&"q_proj"), "{groups:?}");
    // Each layer alone costs something, and no part more than twice of all together.
    for (part, quality) in &found.layers[..4] {
        assert!(quality.divergence > 0.0, "{part}: {found:?}");
    }
    for (part, quality) in found.layers.iter().chain(&found.groups) {
        assert!(quality.divergence < 2.0 * whole, "{part}: {found:?}");
    }
    // Half of it: some layers are kept, the most sensitive first.
    let target = whole / 2.0;
    let kept = run(target);
    assert!(kept.reached && kept.chosen.unwrap().divergence <= target, "{kept:?}");
    let worst = found.layers[..4].iter().max_by(|a, b| a.1.divergence.total_cmp(&b.1.divergence));
    assert_eq!(kept.kept[0].part, worst.unwrap().0, "{kept:?}");
    assert!((1..=4).contains(&kept.kept.len()), "{kept:?}");
    assert!(kept.kept.iter().all(|one| one.precision == Precision::W8A16));
    // Nothing stays behind.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
