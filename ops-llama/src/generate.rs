//! `llama_generate`: decoding with a KV cache, prompts in chunks.

use qhx_op::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_op::fill::{CausalMask, Rope};
use qhx_op::state::StateCarrier;
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task, schema};

const NAME: &str = "llama_generate";

/// Text generation for Llama-like decoders.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for Llama-like decoders (Llama, Mistral, Qwen2, Qwen3)"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: schema::decoder([]),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let rope = Rope::from_params(host, "/params")?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        Ok(Self { decoder })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { verification: self.decoder.verification(), ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.decoder)
    }
}
