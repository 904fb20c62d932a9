//! `qwen3_5_generate`: any number of decode shards, a separate or fused head.

use qhx_op::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_op::fill::{CausalMask, Rope, RopeParams};
use qhx_op::state::StateCarrier;
use qhx_op::{Host, Modality, Op, OpDescription, Result, Task, schema};

const NAME: &str = "qwen3_5_generate";
/// Fraction of a head that is rotated when the manifest does not say: the family's own.
const ROTARY_FRACTION: f64 = 0.25;
/// Base of the rotary frequencies when the manifest does not say: the family's own.
const ROPE_THETA: f64 = 1e7;

/// Text generation for the Qwen3.5 hybrid family.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
}

fn rope(host: &Host) -> Result<Rope> {
    let mut params = RopeParams::read(host, "/params")?;
    params.theta.get_or_insert(ROPE_THETA);
    let said = |key: &str| host.value::<f64>(&format!("/params/{key}"));
    if said("rotary_dim")?.is_none() && said("partial_rotary_factor")?.is_none() {
        // The whole head, so far.
        params.rotary_dim =
            params.rotary_dim.map(|head| (head as f64 * ROTARY_FRACTION).round() as usize);
    }
    params.rope()
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for the Qwen3.5 hybrid family (gated delta rule and softmax \
                      attention)"
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
        let layers = [LayerState::Caches(&["k", "v"]), LayerState::States(&["conv", "ssm"])];
        graphs.check_layers(host, &state, &layers)?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let rope = rope(host)?;
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        Ok(Self { decoder })
    }

    fn decoder(&self) -> Option<&Decoder> {
        Some(&self.decoder)
    }

    fn decoder_mut(&mut self) -> Option<&mut Decoder> {
        Some(&mut self.decoder)
    }
}
