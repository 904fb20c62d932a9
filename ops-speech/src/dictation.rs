//! Speech to text by an encoder of clips of several lengths and a decoder that attends to what it made.

use std::fmt::Debug;

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{
    Generator, Host, MediaRules, Modality, Op, OpDescription, OpenInfo, Placement, PromptRules,
    Result, Segment, Task, View,
};
use serde_json::json;

use crate::listener::{Ear, Listener, Positions, attends};

/// Name of the table of positions in the manifest.
const POSITIONS: &str = "/artifacts/positions";

/// How a family makes rows of samples.
pub(crate) trait Family: Ear + Sized {
    const NAME: &'static str;
    const SUMMARY: &'static str;
    /// Inputs of the encoder.
    const INPUTS: &'static [&'static str];

    fn open(host: &mut Host) -> Result<Self>;
}

/// The host-op of a family. What the decoder's positions are is what the manifest declares: a table, or a rope.
#[derive(Debug)]
pub struct Dictation<F> {
    decoder: Decoder,
    listener: Listener<F>,
}

impl<F: Family + 'static> Op for Dictation<F> {
    fn describe() -> OpDescription {
        let roles = ["pos", "cross_*"].into_iter().chain(F::INPUTS.iter().copied());
        let mut params_schema = schema::decoder(roles);
        params_schema["properties"]["encoder"] = schema::graphs(
            "Graphs from a clip to the keys and values of the cross-attention; each for clips of another length.",
        );
        params_schema["required"] = json!(["decode", "encoder"]);
        OpDescription {
            name: F::NAME.to_owned(),
            summary: F::SUMMARY.to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Transcribe],
            modalities: vec![Modality::Text, Modality::Audio],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let family = F::open(host)?;
        let listener = Listener::open(host, family)?;
        let positions = match host.manifest().pointer(POSITIONS) {
            Some(_) => Some(Positions::open(host, graphs.hidden())?),
            None => None,
        };
        let mut decoder =
            Decoder::builder(F::NAME, graphs, state).mask(mask).filler(listener.cross());
        decoder = match positions {
            Some(positions) => decoder.filler(positions),
            None => decoder.rope(Rope::from_params(host, "/params")?),
        };
        let decoder = decoder.open(host)?;
        listener.check_token(&decoder)?;
        Ok(Self { decoder, listener })
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.listener.ear.rate();
        OpenInfo {
            placeholders: vec![self.listener.token],
            // What a saved state attends to is the clip's, and not saved with it.
            can_snapshot: false,
            media,
            prompt_rules: PromptRules { special_tokens: false },
            ..self.decoder.info()
        }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl<F: Family + 'static> Generator for Dictation<F> {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.listener.place(segment)
    }

    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.listener.reset(host, &mut self.decoder)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        self.listener.prefill(host, &mut self.decoder, segments)
    }

    fn export_state(&mut self, _: &mut Host) -> Result<Vec<u8>> {
        Err(attends())
    }
}
