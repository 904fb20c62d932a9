//! A decoder with experts on the host, on the backend that executes nothing.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::op::HostOp;
use qhx_plugins::Plugins;
use qhx_types::{DType, GraphInfo, TensorInfo};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use serde_json::json;

use crate::null::NullModel;
use crate::shapes::{Decoder, EMBED, tensor};

/// Phi-tiny-MoE: 32 layers of 16 experts, 2.8 GB of int8 weights.
const SHAPES: Decoder = Decoder {
    hidden: 4096,
    layers: LAYERS,
    max_ctx: 2048,
    kv_heads: 4,
    head_dim: 128,
    rotary: 128,
    vocab: 32_064,
};
/// Number of layers.
pub const LAYERS: usize = 32;
/// Experts of a layer.
pub const EXPERTS: usize = 16;
/// Width of an expert.
const WIDTH: usize = 448;
/// Tokens of the prefill graphs.
const WINDOW: usize = 576;
/// Bytes of one expert's int8 weights.
pub const EXPERT_BYTES: usize = 3 * SHAPES.hidden * WIDTH;
/// Bytes of all experts' int8 weights.
pub const TABLE_BYTES: usize = LAYERS * EXPERTS * EXPERT_BYTES;
/// Bytes of all experts' scales.
const SCALE_BYTES: usize = 4 * LAYERS * EXPERTS * (2 * WIDTH + SHAPES.hidden);

/// Options for opening the op.
#[derive(Debug, Clone, Copy)]
pub struct Way {
    /// Weight inputs are int8 instead of f16.
    pub int8: bool,
    /// The prefill graphs are there.
    pub prompts: bool,
    /// Tokens go to experts at random instead of all to the first two.
    pub random: bool,
    /// Experts are asked for as a whole.
    pub read_ahead: bool,
    /// Threads of the host.
    pub threads: usize,
}

/// The name of the table of weights in the folder.
pub const TABLE: &str = "experts_i8.bin";

/// Makes the tables in `folder`, filled with numbers, unless they are there already.
///
/// # Errors
/// When a file cannot be written.
pub fn make_tables(folder: &Path) -> Result<()> {
    let fail = |path: &Path, e: std::io::Error| Error::io(ErrorKind::Io, path, e);
    let mut random = SplitMix64::seed_from_u64(1);
    for (name, bytes) in
        [(TABLE, TABLE_BYTES), ("experts_scale.f32", SCALE_BYTES), (EMBED, SHAPES.embed_bytes())]
    {
        let path = folder.join(name);
        if path.metadata().is_ok_and(|m| m.len() == bytes as u64) {
            continue;
        }
        let mut file =
            BufWriter::with_capacity(1 << 20, File::create(&path).map_err(|e| fail(&path, e))?);
        let mut left = bytes;
        while left > 0 {
            let block: Vec<u8> = match name {
                TABLE => (0..1 << 17).flat_map(|_| random.next_u64().to_le_bytes()).collect(),
                "experts_scale.f32" => [7e-4f32.to_le_bytes(); 1 << 14].concat(),
                _ => [f16::from_f32(0.01).to_le_bytes(); 1 << 14].concat(),
            };
            let block = &block[..block.len().min(left)];
            file.write_all(block).map_err(|e| fail(&path, e))?;
            left -= block.len();
        }
        let file = file.into_inner().map_err(|e| fail(&path, e.into_error()))?;
        file.sync_all().map_err(|e| fail(&path, e))?;
    }
    Ok(())
}

/// Attention and router of a layer over `rows` tokens: over a cache for one, else over a prompt.
fn layer(name: &str, layer: usize, rows: usize) -> GraphInfo {
    let mut graph = SHAPES.graph(format!("{name}{layer}"), rows, [layer]);
    if rows > 1 {
        graph.inputs.truncate(3);
        graph.inputs.push(tensor("cmask", [rows, rows]));
    }
    graph.outputs.extend([tensor("z", [rows, SHAPES.hidden]), tensor("router", [rows, EXPERTS])]);
    graph
}

/// One or two experts over `rows` tokens, with int8 or f16 weights as inputs.
fn ffn(name: &str, prefixes: &[&str], rows: usize, int8: bool) -> GraphInfo {
    let hidden = SHAPES.hidden;
    let mut inputs = vec![tensor("x", [rows, hidden])];
    if prefixes.len() == 2 {
        inputs.push(tensor("residual", [rows, hidden]));
        inputs.extend(["m1", "m2"].map(|m| tensor(m, [1, 1])));
    }
    let dtype = if int8 { DType::SFixed8 } else { DType::F16 };
    for prefix in prefixes {
        for (matrix, shape) in
            [("gate", [WIDTH, hidden]), ("up", [WIDTH, hidden]), ("down", [hidden, WIDTH])]
        {
            inputs.push(TensorInfo::new(format!("{prefix}{matrix}"), dtype, shape));
            if int8 {
                inputs.push(tensor(format!("{prefix}{matrix}_scale"), [1, shape[0]]));
            }
        }
    }
    GraphInfo::new(name, inputs, [tensor("y", [rows, hidden])])
}

/// Opens `phimoe_generate` over the tables in `folder`.
///
/// # Errors
/// When the files, the plugin or the graphs do not fit.
pub fn open(folder: &Path, plugins: &Plugins, way: Way) -> Result<Box<dyn HostOp>> {
    let layers = |name: &str, rows| (0..LAYERS).map(|i| layer(name, i, rows)).collect();
    let mut contexts = vec![
        ("a".to_owned(), layers("a", 1)),
        ("ffn2".to_owned(), vec![ffn("ffn2", &["a_", "b_"], 1, way.int8)]),
        ("lmhead_ar1".to_owned(), vec![SHAPES.head("lmhead_ar1")]),
    ];
    if way.prompts {
        contexts.push(("pf".to_owned(), layers("pf", WINDOW)));
        contexts.push(("ffn_pf".to_owned(), vec![ffn("ffn_pf", &[""], WINDOW, way.int8)]));
    }
    let mut params = SHAPES.params(1e4);
    params["n_experts"] = json!(EXPERTS);
    let model = NullModel {
        op: "phimoe_generate",
        params,
        plan: json!({"int8_step": 0.0078125, "read_ahead": way.read_ahead}),
        artifacts: json!({
            "embed": EMBED, "experts": {"weights": TABLE, "scales": "experts_scale.f32"}
        }),
        contexts,
        threads: way.threads,
    };
    if !way.random {
        return model.open(folder, plugins);
    }
    let mut random = SplitMix64::seed_from_u64(7);
    model.open_with(folder, plugins, |backend| {
        backend.with_outputs(move |info, outputs| {
            for (tensor, bytes) in info.outputs.iter().zip(outputs) {
                if tensor.name == "router" {
                    for score in bytes.as_chunks_mut::<2>().0 {
                        let value = (random.next_u64() >> 40) as f32 / 1e6;
                        *score = f16::from_f32(value).to_le_bytes();
                    }
                }
            }
            Ok(())
        })
    })
}
