//! NV-EmbedCode-7B: an encoder in four chained contexts, hidden width 4096, 512 tokens.
//!
//! The hidden states between parts are one buffer bound at both ends, which is checked: each part finds what the one
//! before has written, and the time of the parts is that of no copy.

use std::path::Path;
use std::sync::atomic::{AtomicU8, Ordering};

use qhx_benches::null::{NullModel, linked, sparse};
use qhx_benches::shapes::{EMBED, tensor};
use qhx_core::op::{HostOp, Segment};
use qhx_exec::null::NullBackend;
use qhx_ops_llama as _;
use qhx_types::GraphInfo;
use serde_json::json;

use crate::Anything;
use crate::measure::{TURNS, best};

const PARTS: usize = 4;
const HIDDEN: usize = 4096;
const LENGTH: usize = 512;
const HEAD_DIM: usize = 128;
const VOCAB: usize = 32_000;
const TEXTS: u32 = 50;

fn open(
    folder: &Path,
    script: impl FnOnce(NullBackend) -> NullBackend,
) -> Anything<Box<dyn HostOp>> {
    sparse(folder, &[(EMBED, VOCAB * HIDDEN * 2)])?;
    let parts = (0..PARTS).map(|index| {
        let inputs = [
            tensor("x", [LENGTH, HIDDEN]),
            tensor("cos", [LENGTH, HEAD_DIM / 2]),
            tensor("sin", [LENGTH, HEAD_DIM / 2]),
            tensor("cmask", [1, LENGTH]),
        ];
        let name = format!("enc_p{index}");
        (name.clone(), vec![GraphInfo::new(name, inputs, [tensor("y", [LENGTH, HIDDEN])])])
    });
    let contexts: Vec<_> = parts.collect();
    let names: Vec<_> = contexts.iter().map(|(name, _)| name.clone()).collect();
    let model = NullModel {
        op: "llama_embed_sharded",
        params: json!({
            "hidden": HIDDEN, "vocab": VOCAB, "n_layers": 32, "max_ctx": LENGTH,
            "head_dim": HEAD_DIM, "rope_theta": 1e4
        }),
        plan: json!({"parts": names, "pooling": "mean", "normalize": true}),
        artifacts: json!({"embed": EMBED}),
        contexts,
        threads: 1,
    };
    Ok(model.open_with(folder, &linked()?, script)?)
}

/// Each part must find the counter of the one before in its input.
fn check_hand_over(folder: &Path) -> Anything {
    static COUNTER: AtomicU8 = AtomicU8::new(0);
    let mut op = open(folder, |backend| {
        backend.with_script(|info, inputs, outputs| {
            let before = COUNTER.load(Ordering::Relaxed);
            assert_eq!(inputs[0][0], before, "{}: not what the part before wrote", info.name);
            COUNTER.store(before + 1, Ordering::Relaxed);
            outputs[0].fill(before + 1);
            Ok(())
        })
    })?;
    op.embed(&[Segment::Tokens(&[1])])?;
    assert_eq!(usize::from(COUNTER.load(Ordering::Relaxed)), PARTS);
    Ok(())
}

pub(crate) fn run(folder: &Path) -> Anything {
    check_hand_over(folder)?;
    let mut op = open(folder, |backend| backend)?;
    let tokens: Vec<u32> = (0..LENGTH as u32).map(|i| i * 61 % VOCAB as u32).collect();
    println!("{PARTS} parts, hidden {HIDDEN}; µs per text");
    for real in [LENGTH, LENGTH / 8] {
        let text = [Segment::Tokens(&tokens[..real])];
        let found = best(
            &mut *op,
            TURNS,
            |_| Ok(()),
            |op| {
                (0..TEXTS).try_for_each(|_| op.embed(&text).map(drop))?;
                Ok(())
            },
        )?;
        let each = |ms: f64| ms * 1e3 / f64::from(TEXTS);
        println!(
            "{real} tokens: {:8.1}   allocations per text: {} (the list of segments at the plugin boundary), bytes \
             copied between parts: 0",
            each(found.ms()),
            found.allocations / u64::from(TEXTS)
        );
        for (name, time) in &found.spans {
            println!("  {name:<8} {:8.1}", each(time.as_secs_f64() * 1e3));
        }
    }
    Ok(())
}
