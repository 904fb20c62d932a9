//! Decoders of text: Qwen3.5-0.8B linked in and as a plugin, with sampling; Llama-3.2-1B with its layers in one graph
//! and in four, and without prefill graphs.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use half::f16;
use qhx_benches::allocations;
use qhx_benches::null::{NullModel, linked, sparse};
use qhx_benches::shapes::{Decoder, EMBED, QWEN35_08B, open_qwen35};
use qhx_core::op::Logits;
use qhx_core::sampling::{AllowedTokens, Sampler, SamplingParams};
use qhx_ops_llama as _;
use qhx_ops_qwen35 as _;
use qhx_plugins::{PluginOptions, Plugins};
use qhx_types::GraphInfo;
use serde_json::json;

use crate::Anything;
use crate::measure::{Decoding, TURNS};

const LLAMA_1B: Decoder = Decoder {
    hidden: 2048,
    layers: 16,
    max_ctx: 2048,
    kv_heads: 8,
    head_dim: 64,
    rotary: 64,
    vocab: 128_256,
};
/// Tokens of Llama's prefill graphs.
const WIDTH: usize = 128;

pub(crate) fn qwen35(folder: &Path) -> Anything {
    let mut runs = vec![("linked in", linked()?)];
    let file = std::env::current_exe()?.with_file_name(format!(
        "{}qhx_ops_qwen35_plugin{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    ));
    if file.is_file() {
        let options = PluginOptions::default().files(vec![file]).only_named(true);
        runs.push(("plugin", Plugins::discover(&options)?));
    } else {
        eprintln!("no plugin beside this program: build qhx-ops-qwen35-plugin to measure it too");
    }
    let decoding =
        Decoding { tokens: 1000, vocab: QWEN35_08B.vocab, prompt: (512, TURNS), allocations: 0 };
    let mut times = Vec::new();
    for (name, plugins) in &runs {
        let mut op = open_qwen35(folder, plugins, QWEN35_08B)?;
        times.push(decoding.run(name, &mut *op)?[0]);
    }
    if let [linked, plugin] = times[..] {
        println!("plugin / linked in: {:.3}", plugin.as_secs_f64() / linked.as_secs_f64());
    }
    sampling()
}

fn sampling() -> Anything {
    let vocab = QWEN35_08B.vocab;
    let mut logits: Vec<f16> =
        (0..vocab).map(|i| f16::from_f32(((i * 7919) % 100_003) as f32 / 5000.0 - 10.0)).collect();
    logits[200_000] = f16::from_f32(30.0);
    // A padded vocabulary, and an id that the tokenizer does not know.
    let known = |id| id < 248_077 && id != 100_000;
    let allowed = Arc::new(AllowedTokens::select(vocab, known));
    let drawn = SamplingParams::default().temperature(0.8).top_k(40).top_p(0.95).seed(1);
    for (label, params) in
        [("greedy", SamplingParams::default()), ("temperature 0.8, top-k 40, top-p 0.95", drawn)]
    {
        let mut sampler = Sampler::restricted(params, vocab, Arc::clone(&allowed))?;
        let mut best = Duration::MAX;
        for turn in 0..=TURNS {
            let allocated = allocations::count();
            let start = Instant::now();
            for _ in 0..100 {
                sampler.sample(Logits::F16(&logits))?;
            }
            best = best.min(start.elapsed() / 100);
            assert!(turn == 0 || allocations::count() == allocated, "sampling allocated");
        }
        println!("sampling, {label}: {:.2} µs", best.as_secs_f64() * 1e6);
    }
    Ok(())
}

pub(crate) fn llama(folder: &Path) -> Anything {
    sparse(folder, &[(EMBED, LLAMA_1B.embed_bytes())])?;
    let decoding =
        Decoding { tokens: 1000, vocab: LLAMA_1B.vocab, prompt: (512, TURNS), allocations: 0 };
    let mut prompts = Vec::new();
    for (prefill, shards) in [(true, 1), (true, 4), (false, 1)] {
        let graphs = |name: &str, rows: usize| -> Vec<GraphInfo> {
            let each = LLAMA_1B.layers / shards;
            let graph = |i| LLAMA_1B.graph(format!("{name}{i}"), rows, i * each..(i + 1) * each);
            (0..shards).map(graph).collect()
        };
        let names =
            |graphs: &[GraphInfo]| graphs.iter().map(|g| g.name.clone()).collect::<Vec<_>>();
        let decode = graphs("decode", 1);
        let mut plan = json!({"decode": names(&decode), "lmhead": "lmhead"});
        let mut contexts = vec![
            ("decode".to_owned(), decode),
            ("lmhead".to_owned(), vec![LLAMA_1B.head("lmhead")]),
        ];
        if prefill {
            let graphs = graphs("prefill", WIDTH);
            plan["prefill"] = names(&graphs).into();
            contexts.push(("prefill".to_owned(), graphs));
        }
        let model = NullModel {
            op: "llama_generate",
            params: LLAMA_1B.params(5e5),
            plan,
            artifacts: json!({"embed": EMBED}),
            contexts,
            threads: 1,
        };
        let how = if prefill { "prefill graph of 128" } else { "decode graph only" };
        let mut op = model.open(folder, &linked()?)?;
        prompts.push(decoding.run(&format!("{how}, {shards} shards"), &mut *op)?[1]);
    }
    if let [wide, .., narrow] = prompts[..] {
        println!(
            "host time of the prompt, decode graph only / prefill graph: {:.2}",
            narrow.as_secs_f64() / wide.as_secs_f64()
        );
    }
    Ok(())
}
