//! `gemma3_generate`: the host side of Gemma 3 text.
//!
//! Full layers see all positions, sliding ones the last of a window. Each kind has rotary tables and a
//! mask of its own, and the caches of sliding layers are rings.

use qhx_op::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_op::fill::{CausalMask, Rope};
use qhx_op::state::StateCarrier;
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task, schema};
use serde::Deserialize;

const NAME: &str = "gemma3_generate";
/// Tables and mask of sliding layers.
const COS: &str = "cos_local";
const SIN: &str = "sin_local";
const MASK: &str = "cmask_local";

/// `params.local` of the manifest: options of sliding layers besides their rope.
#[derive(Debug, Deserialize)]
struct Local {
    /// Indices of these layers.
    layers: Vec<usize>,
    /// Positions that they see, the current one included.
    window: usize,
}

impl Local {
    /// The window of the cache `k_i` or `v_i`, where layer i slides.
    fn window_of(&self, role: &str) -> Option<usize> {
        let (_, layer) = role.rsplit_once('_')?;
        let layer: usize = layer.parse().ok()?;
        self.layers.contains(&layer).then_some(self.window)
    }
}

/// Text generation for Gemma 3.
#[derive(Debug)]
pub struct Generate(Decoder);

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for Gemma 3".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: schema::decoder([COS, SIN, MASK]),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let local: Local = host.require("/params/local")?;
        let state = StateCarrier::with_rings(host, &graphs.groups(), |role| local.window_of(role))?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let slots = local.layers.first().and_then(|i| state.capacity_of(&format!("k_{i}")));
        let full = CausalMask::new(state.capacity().unwrap_or(0));
        let sliding = CausalMask::new(slots.unwrap_or(0)).named(MASK).window(local.window).ring();
        let embedding = graphs.embedding(host)?.scaled(host.require("/params/embed_scale")?)?;
        Decoder::builder(NAME, graphs, state)
            .embedding(embedding)
            .rope(Rope::from_params(host, "/params")?)
            .rope(Rope::from_params(host, "/params/local")?.named(COS, SIN))
            .mask(full)
            .mask(sliding)
            .open(host)
            .map(Self)
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { verification: self.0.verification(), ..self.0.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.0)
    }
}

qhx_op::register_ops!(Generate);
qhx_op::export_plugin!();
