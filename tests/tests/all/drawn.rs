//! Decoders with drawn weights in the layout of published checkpoints: Cosmos3-Edge and Gemma 3n, text alone. Logits
//! are those of `transformers`.

use std::path::Path;
use std::sync::Arc;

use qhx_base::compare::Distance;
use qhx_core::op::Segment;
use qhx_exec::backend::Backend;
use qhx_forge::ForgeOptions;
use qhx_tests::forged::Forged;
use qhx_tests::tiny::{self, fixture};
use qhx_tests::{backends, files};
use qhx_tiers::tier;
use serde::Deserialize;

/// A text of as many tokens as the context has, and the logits behind some of them.
#[derive(Deserialize)]
struct Run {
    ids: Vec<u32>,
    at: Vec<usize>,
    logits: Vec<Vec<f32>>,
}

/// Largest distance of the first `compared` logits: a part of the text is a prompt, the rest follows token by token.
fn worst(
    name: &str,
    backend: Arc<dyn Backend>,
    compared: usize,
    change: impl Fn(&mut ForgeOptions),
) -> Distance {
    let runs: Vec<Run> = files::json(&fixture(&format!("drawn/{name}/logits.json")));
    let folder = tempfile::tempdir().unwrap();
    let [config, weights] =
        ["config.json", "model.safetensors"].map(|f| format!("drawn/{name}/{f}"));
    for file in [&*config, &*weights, "quantised/tokenizer.json"] {
        let from = fixture(file);
        std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
    }
    worst_of(folder.path(), &runs[0], backend, compared, change)
}

fn worst_of(
    checkpoint: &Path,
    run: &Run,
    backend: Arc<dyn Backend>,
    compared: usize,
    change: impl Fn(&mut ForgeOptions),
) -> Distance {
    let bundle = Forged::of(checkpoint, |options| {
        options.max_ctx = Some(run.ids.len());
        options.prefill = Some(vec![4, 6]);
        change(options);
    });
    let mut model = bundle.open(backend);
    let op = model.op_mut();
    let cap = op.info().softcap;
    // A context may end before its second logits.
    let first = compared.min(run.at.len()).min(2) - 1;
    let (prompt, rest) = run.ids.split_at(run.at[first] + 1);
    op.prefill(&[Segment::Tokens(prompt)]).unwrap();
    let mut found = Vec::new();
    for (at, token) in (run.at[first]..).zip(std::iter::once(None).chain(rest.iter().map(Some))) {
        if let Some(token) = token {
            op.decode(*token).unwrap();
        }
        let Some(index) = run.at[..compared].iter().position(|known| *known == at) else {
            continue;
        };
        let logits = op.logits().unwrap().capped(cap);
        found.push(Distance::of(&logits, &run.logits[index]).unwrap());
    }
    assert_eq!(found.len(), compared - first);
    found.into_iter().reduce(Distance::worse).unwrap()
}

/// Contexts over which the layers are spread: of Gemma 3n, streams pass from one to the next.
const SHARDS: [(&str, [usize; 2]); 2] = [("cosmos3", [1, 3]), ("gemma3n", [1, 4])];

#[test]
fn logits_are_those_of_transformers() {
    for (name, shards) in SHARDS {
        for shards in shards {
            let found = worst(name, backends::cpu(), 8, |options| options.shards = shards);
            eprintln!("{name}, {shards} shards: {:.1e}", found.largest);
            assert!(found.largest <= 1e-4, "{name}, {shards} shards: {}", found.largest);
        }
    }
}

/// Decoders in other shapes, drawn by `tests/oracle/drawn_unseen.py`: `QHX_TEST_DRAWN` has their folders. All that do
/// not match are named.
#[tier(by_hand = "QHX_TEST_DRAWN")]
fn decoders_of_the_environment_equal_the_reference() {
    let folders = std::env::var_os("QHX_TEST_DRAWN").unwrap();
    let mut wrong = Vec::new();
    for folder in std::env::split_paths(&folders) {
        let runs: Vec<Run> = files::json(&folder.join("logits.json"));
        for run in &runs {
            let label = format!("{}, context of {}", folder.display(), run.ids.len());
            let compare = || worst_of(&folder, run, backends::cpu(), run.at.len(), |_| ());
            match std::panic::catch_unwind(std::panic::AssertUnwindSafe(compare)) {
                Ok(found) => {
                    eprintln!("{label}: {:.1e}", found.largest);
                    wrong.extend((found.largest > 1e-4).then_some(label));
                }
                Err(_) => wrong.push(label),
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[tier(qnn)]
fn logits_on_the_npu_are_those_of_transformers() {
    let targets = tiny::targets();
    for (name, _) in SHARDS {
        for target in targets {
            let found = worst(name, backends::qnn(), 4, |options| {
                (options.shards, options.prefill) = (1, Some(vec![6]));
                options.compiler = Some(backends::compiler(target));
            });
            eprintln!("{name}, {target}: {found:?}");
            assert!(found.cosine >= 0.9995 && found.largest <= 0.1, "{name}, {target}: {found:?}");
        }
    }
}
