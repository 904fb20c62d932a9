//! `decoder_generate`: a decoder of text that its manifest declares whole, so that a new family is a recipe alone.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use super::inputs::QueryGrowth;
use super::{Decoder, DecoderGraphs, LayerState};
use crate::fill::{CausalMask, Rope};
use crate::schema;
use crate::state::{SlidingLayers, StateCarrier};
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task};

/// Rotary tables and mask of sliding layers.
const LOCAL: [&str; 3] = ["cos_local", "sin_local", "cmask_local"];

/// Text generation over any decoder of the kit's form.
///
/// `params` of the manifest declare what the op fills and binds besides the graphs:
///
/// | key | holds |
/// |---|---|
/// | `head_dim`, `rope_theta`, `rope_scaling`, … | rotary tables `cos` and `sin`: [`crate::fill::RopeParams`] |
/// | `local` | sliding layers: `layers`, `window`, and where their rope is another one its keys, for `cos_local` and `sin_local`; their mask is `cmask_local`, their caches are rings |
/// | `states` | replaced states of layers without caches, such as `["conv"]` for `past_conv_i` → `present_conv_i`; those that the graphs have, unless it is there |
/// | `query_growth` | `beta` and `original`: queries are multiplied by `1 + beta · ln(1 + ⌊p / original⌋)` of their position p, the input `q_scale` |
/// | `states_beside_caches` | true where every layer has both caches and states |
/// | `stateless` | layers that have neither |
/// | `embed_scale` | factor of the embedding's rows |
/// | `final_logit_softcapping` | softcap of the logits |
#[derive(Debug)]
pub struct DeclaredDecoder {
    decoder: Decoder,
    softcap: Option<f32>,
}

impl DeclaredDecoder {
    /// Name of the host-op.
    pub const NAME: &'static str = "decoder_generate";

    /// Opens the decoder of a host-op with the name `op`.
    ///
    /// # Errors
    /// When the graphs, their states and `params` do not fit each other.
    pub fn open_as(host: &mut Host, op: &'static str) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let local = host.value::<SlidingLayers>("/params/local")?.unwrap_or_default();
        let state = StateCarrier::with_rings(host, &graphs.groups(), |role| local.window_of(role))?;
        let declared = host.value::<Vec<String>>("/params/states")?;
        let states = declared.unwrap_or_else(|| replaced(&state));
        let states: Vec<_> = states.iter().map(String::as_str).collect();
        let without = host.value::<Vec<usize>>("/params/stateless")?.unwrap_or_default();
        let (caches, states) = (LayerState::Caches(&["k", "v"]), LayerState::States(&states));
        let check = |kinds: &[_]| graphs.check_layers_but(host, &state, kinds, &without);
        if matches!(states, LayerState::States([])) {
            check(&[caches])?;
        } else if host.value::<bool>("/params/states_beside_caches")?.unwrap_or(false) {
            check(&[caches])?;
            check(&[states])?;
        } else {
            check(&[caches, states])?;
        }
        let embedding = match host.value::<f32>("/params/embed_scale")? {
            Some(scale) => graphs.embedding(host)?.scaled(scale)?,
            None => graphs.embedding(host)?,
        };
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let slots = local.slots(&state);
        let rope = Rope::from_params(host, "/params")?;
        let mut decoder =
            Decoder::builder(op, graphs, state).embedding(embedding).rope(rope).mask(mask);
        if let Some(slots) = slots {
            let [cos, sin, mask] = LOCAL;
            // Without a base of their own, their rotary frequencies are those of the other layers.
            if host.value::<f64>("/params/local/rope_theta")?.is_some() {
                decoder = decoder.rope(Rope::from_params(host, "/params/local")?.named(cos, sin));
            }
            let mask = CausalMask::new(slots).named(mask).window(local.window).ring();
            decoder = decoder.mask(mask);
        }
        if let Some(growth) = host.value::<QueryGrowth>("/params/query_growth")? {
            decoder = decoder.filler(growth);
        }
        let decoder = decoder.open(host)?;
        Ok(Self { decoder, softcap: host.value("/params/final_logit_softcapping")? })
    }

    /// The decoder alone, for an op that adds to it; the softcap of [`Op::info`] is that op's affair.
    pub fn into_decoder(self) -> Decoder {
        self.decoder
    }

    /// JSON schema of `plan.params`, with the roles of further tensors.
    pub fn schema<'a>(roles: impl IntoIterator<Item = &'a str>) -> Value {
        let mut schema = schema::decoder(LOCAL.into_iter().chain([QueryGrowth::ROLE]).chain(roles));
        schema["description"] = json!("A decoder of the kit's form; params declare the rest.");
        schema
    }
}

/// Names of the replaced states that graphs have, without the numbers of layers.
fn replaced(state: &StateCarrier) -> Vec<String> {
    let numbered = state.roles().filter(|role| state.has_state(role));
    let names: BTreeSet<_> = numbered
        .filter_map(|role| role.rsplit_once('_'))
        .filter(|(_, layer)| layer.parse::<usize>().is_ok())
        .map(|(name, _)| name.to_owned())
        .collect();
    names.into_iter().collect()
}

impl Op for DeclaredDecoder {
    fn describe() -> OpDescription {
        OpDescription {
            name: Self::NAME.to_owned(),
            summary: "Text generation over any decoder that its manifest declares".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema: Self::schema([]),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        Self::open_as(host, Self::NAME)
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { softcap: self.softcap, ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.decoder)
    }
}
