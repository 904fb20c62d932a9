//! `llama_generate`: decoding with a KV cache, prompts in chunks.
//!
//! Where some layers see only the last positions of a window, their caches are rings, and they have a mask of their own.

use qhx_op::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_op::fill::{CausalMask, Rope};
use qhx_op::state::StateCarrier;
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task, schema};
use serde::Deserialize;

const NAME: &str = "llama_generate";
/// Mask of sliding layers.
const LOCAL_MASK: &str = "cmask_local";

/// `params.local` of the manifest: layers that slide.
#[derive(Debug, Default, Deserialize)]
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

/// Text generation for Llama-like decoders.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    softcap: Option<f32>,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for Llama-like decoders (Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite, \
                      OLMo 2, Gemma 2)"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: schema::decoder([LOCAL_MASK]),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let local = host.value::<Local>("/params/local")?.unwrap_or_default();
        let state = StateCarrier::with_rings(host, &graphs.groups(), |role| local.window_of(role))?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let rope = Rope::from_params(host, "/params")?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let slots = local.layers.first().and_then(|layer| state.capacity_of(&format!("k_{layer}")));
        let mut decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask);
        if let Some(slots) = slots {
            let mask = CausalMask::new(slots).named(LOCAL_MASK).window(local.window).ring();
            decoder = decoder.mask(mask);
        }
        let decoder = decoder.open(host)?;
        let softcap = host.value("/params/final_logit_softcapping")?;
        Ok(Self { decoder, softcap })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { softcap: self.softcap, ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.decoder)
    }
}
