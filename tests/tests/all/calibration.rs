//! `qhx forge --calibrate`: what low-bit weights cost, against figures of whole bundles that read token by token.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_core::engine::Model;
use qhx_forge::calibrate::{CalibrateOptions, Quality, Reader, calibrate};
use qhx_forge::registry::recipe;
use qhx_forge::{ForgeOptions, Precision, Silent};
use qhx_tests::{backends, files, tiny};
use serde::Deserialize;

const TINY: &str = "llama3-blocks";

/// `calibration.json` of the fixture, of a bundle for each line.
#[derive(Debug, Deserialize)]
struct Recorded {
    texts: Vec<String>,
    target: f64,
    tokens: usize,
    perplexity: f64,
    precisions: BTreeMap<String, Figures>,
    layers: BTreeMap<String, Figures>,
    groups: BTreeMap<String, Figures>,
    kept: BTreeMap<String, String>,
}

#[derive(Debug, Deserialize)]
struct Figures {
    kl: f64,
    perplexity: f64,
}

/// Cost of reading a bundle.
#[derive(Debug, Clone, Copy)]
struct Taken {
    /// Bytes of the files below the folder of all bundles.
    bytes: u64,
    /// Executions of graphs.
    executions: u64,
}

/// A model that notes what it took when it is closed.
struct Noted {
    model: Model,
    bytes: u64,
    taken: Rc<RefCell<Vec<Taken>>>,
}

impl Reader for Noted {
    fn reset(&mut self) -> Result<()> {
        self.model.reset()
    }

    fn read(&mut self, tokens: &[u32], take: &mut dyn FnMut(Vec<f32>) -> Result<()>) -> Result<()> {
        self.model.read(tokens, take)
    }
}

impl Drop for Noted {
    fn drop(&mut self) {
        let executions = self.model.graph_stats().iter().map(|graph| graph.executions).sum();
        self.taken.borrow_mut().push(Taken { bytes: self.bytes, executions });
    }
}

fn bytes(folder: &Path) -> u64 {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap());
    let sizes = entries.map(|entry| match entry.file_type().unwrap().is_dir() {
        true => bytes(&entry.path()),
        false => entry.metadata().unwrap().len(),
    });
    sizes.sum()
}

fn same(found: &[(String, Quality)], recorded: &BTreeMap<String, Figures>) {
    assert_eq!(found.len(), recorded.len());
    for (part, quality) in found {
        let Figures { kl, perplexity } = recorded[part];
        let near = (quality.divergence - kl).abs() <= 1e-2 * kl + 1e-7;
        assert!(near, "{part}: KL {}, recorded {kl}", quality.divergence);
        assert!((quality.perplexity / perplexity - 1.0).abs() < 1e-4, "{part}: {quality:?}");
    }
}

#[test]
fn wide_graphs_beside_one_bundle_choose_as_whole_bundles() {
    let recorded: Recorded = files::json(&tiny::fixture(TINY).join("calibration.json"));
    let folder = tempfile::tempdir().unwrap();
    let taken = Rc::new(RefCell::new(Vec::new()));
    let open = |manifest: &Path| -> Result<Box<dyn Reader>> {
        let bytes = bytes(folder.path());
        let model = tiny::open(manifest, backends::cpu())?;
        Ok(Box::new(Noted { model, bytes, taken: Rc::clone(&taken) }))
    };
    let options = ForgeOptions {
        precision: Precision::W4A16,
        ..ForgeOptions::new(folder.path().join("out"))
    };
    let texts = recorded.texts.clone();
    let wanted = CalibrateOptions { texts, tokens: 256, target: Some(recorded.target) };
    let checkpoint = Checkpoint::open(&tiny::fixture(TINY)).unwrap();
    let found = calibrate(&checkpoint, recipe, &options, &wanted, &open, &mut Silent).unwrap();

    assert_eq!(found.tokens, recorded.tokens);
    assert!((found.perplexity / recorded.perplexity - 1.0).abs() < 1e-5, "{}", found.perplexity);
    let precisions: Vec<_> =
        found.precisions.iter().map(|(p, quality)| (p.name().to_owned(), *quality)).collect();
    same(&precisions, &recorded.precisions);
    same(&found.layers, &recorded.layers);
    same(&found.groups, &recorded.groups);
    let kept = found.kept.iter().map(|one| (one.part.clone(), one.precision.name().to_owned()));
    assert_eq!(kept.collect::<BTreeMap<_, _>>(), recorded.kept);

    // The bundle with f16 weights is read first; what has few other weights takes little more room.
    let taken = taken.borrow();
    let (first, parts) = (taken[0], &taken[1..=found.layers.len() + found.groups.len()]);
    for part in parts {
        assert!(part.bytes > first.bytes && 10 * part.bytes < 13 * first.bytes, "{taken:?}");
        assert_eq!(part.executions, first.executions, "{taken:?}");
    }
    // Many tokens a step, with the logits of each.
    assert!(4 * first.executions < recorded.tokens as u64, "{taken:?}");
    // Nothing stays behind.
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}
