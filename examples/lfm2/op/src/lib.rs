//! `lfm2_generate`: the host side of LFM2 and LFM2.5.
//!
//! Most layers are gated short convolutions, whose state is a FIFO of the last columns
//! (`past_conv_i` → `present_conv_i`); the others are attention with a KV cache (`past_k_i`,
//! `past_v_i` → `new_k_i`, `new_v_i`). Graphs take one token, or several of a prompt, through the
//! layers; another gives logits.

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task};

const NAME: &str = "lfm2_generate";

/// The state of a layer, from token to token.
const LAYERS: [LayerState<'_>; 2] =
    [LayerState::States(&["conv"]), LayerState::Caches(&["k", "v"])];

/// Text generation for LFM2 and LFM2.5.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for LFM2 and LFM2.5".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: schema::decoder([]),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        // The graphs that plan.params names, and their caches and FIFOs: paired by name, allocated
        // and bound.
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        host.require::<usize>("/params/n_layers")?;
        graphs.check_layers(host, &state, &LAYERS)?;
        // What the host fills besides the embedding's row.
        let (head_dim, theta) =
            (host.require("/params/head_dim")?, host.require("/params/rope_theta")?);
        let rope = Rope::new(head_dim, theta)?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        Ok(Self { decoder })
    }

    fn info(&self) -> OpenInfo {
        self.decoder.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.decoder)
    }
}

qhx_op::register_ops!(Generate);
qhx_op::export_plugin!();
