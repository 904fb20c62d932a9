//! Cosmos3-Edge as a decoder of text, drawn: logits are those of `transformers`.

use std::sync::Arc;

use qhx_base::compare::Distance;
use qhx_core::op::Segment;
use qhx_exec::backend::Backend;
use qhx_forge::ForgeOptions;
use qhx_tests::forged::Forged;
use qhx_tests::tiny::fixture;
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
    backend: Arc<dyn Backend>,
    compared: usize,
    change: impl Fn(&mut ForgeOptions),
) -> Distance {
    let runs: Vec<Run> = files::json(&fixture("cosmos3/logits.json"));
    let run = &runs[0];
    let folder = tempfile::tempdir().unwrap();
    for file in ["cosmos3/config.json", "cosmos3/model.safetensors", "quantised/tokenizer.json"] {
        let from = fixture(file);
        std::fs::copy(&from, folder.path().join(from.file_name().unwrap())).unwrap();
    }
    let bundle = Forged::of(folder.path(), |options| {
        options.max_ctx = Some(run.ids.len());
        options.prefill = Some(vec![4, 6]);
        change(options);
    });
    let mut model = bundle.open(backend);
    let op = model.op_mut();
    let (prompt, rest) = run.ids.split_at(run.at[1] + 1);
    op.prefill(&[Segment::Tokens(prompt)]).unwrap();
    let mut found = Vec::new();
    for (at, token) in (run.at[1]..).zip(std::iter::once(None).chain(rest.iter().map(Some))) {
        if let Some(token) = token {
            op.decode(*token).unwrap();
        }
        let Some(index) = run.at[..compared].iter().position(|known| *known == at) else {
            continue;
        };
        let logits = op.logits().unwrap().capped(None);
        found.push(Distance::of(&logits, &run.logits[index]).unwrap());
    }
    assert_eq!(found.len(), compared - 1);
    found.into_iter().reduce(Distance::worse).unwrap()
}

#[test]
fn logits_are_those_of_transformers() {
    for shards in [1, 3] {
        let found = worst(backends::cpu(), 8, |options| options.shards = shards);
        assert!(found.largest <= 1e-4, "{shards} shards: {}", found.largest);
    }
}

#[tier(qnn)]
fn logits_on_the_npu_are_those_of_transformers() {
    let found = worst(backends::qnn(), 4, |options| {
        options.prefill = Some(vec![6]);
        options.compiler = Some(backends::compiler("v81"));
    });
    assert!(found.cosine >= 0.9999 && found.largest <= 0.05, "{found:?}");
}
