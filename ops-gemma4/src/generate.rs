//! `gemma4_split_generate`: decoding with a KV cache, prompts in chunks.

use qhx_kit::decoder::{Decoder, DecoderGraphs};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{
    Alpha, Generator, Host, MediaRules, Modality, Op, OpDescription, OpenInfo, Placement, Result,
    Segment, Task, Verification, View,
};
use serde_json::Value;

use crate::layout::Layout;
use crate::media::Media;
use crate::per_layer::{CONTEXT, PLE, PerLayerInputs};

const NAME: &str = "gemma4_split_generate";
/// Tables and mask of full layers, and of sliding ones.
const FULL: [&str; 3] = ["cos_f", "sin_f", "cmask_f"];
const SLIDING: [&str; 3] = ["cos_s", "sin_s", "cmask_s"];

/// `plan.params`: that of a decoder, and the graphs of the towers.
fn params_schema() -> Value {
    let roles = FULL.into_iter().chain(SLIDING).chain([PLE, CONTEXT, "mel", "keep"]);
    let mut params = schema::decoder(roles);
    for (key, what) in [
        ("vision", "Graph of the vision tower, or several for different numbers of patches."),
        ("audio_enc", "Graph of the audio tower, or several for different lengths."),
        (
            PLE,
            "Graphs that project rows for per-layer inputs, one for each number of rows; the host does without.",
        ),
    ] {
        params["properties"][key] = schema::graphs(what);
    }
    params
}

/// Text generation for Gemma 4.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    media: Media,
    softcap: Option<f32>,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for Gemma 4".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text, Modality::Image, Modality::Audio],
            params_schema: params_schema(),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let layout = Layout::read(host)?;
        let state = StateCarrier::with_rings(host, &graphs.groups(), |role| {
            layout.sliding.window_of(role)
        })?;
        layout.check(host, &graphs, &state)?;
        let [full_cos, full_sin, full_mask] = FULL;
        let [cos, sin, mask] = SLIDING;
        let full = CausalMask::new(state.capacity().unwrap_or(0)).named(full_mask);
        let ring = layout.ring(&state).unwrap_or(0);
        let sliding = CausalMask::new(ring).named(mask).window(layout.sliding.window).ring();
        let scale = host.require("/params/embed_scale")?;
        let embedding = graphs.embedding(host)?.scaled(scale)?;
        let rows = graphs.embedding(host)?.scaled(scale)?;
        let per_layer = PerLayerInputs::open(host, rows, layout.layers)?;
        let media = Media::open(host, graphs.hidden(), Self::describe())?;
        let softcap = host.value("/params/final_logit_softcapping")?;
        let decoder = Decoder::builder(NAME, graphs, state)
            .embedding(embedding)
            .rope(Rope::from_params(host, "/params/full")?.named(full_cos, full_sin))
            .rope(Rope::from_params(host, "/params/sliding")?.named(cos, sin))
            .mask(full)
            .mask(sliding)
            .filler(per_layer)
            .open(host)?;
        Ok(Self { decoder, media, softcap })
    }

    fn info(&self) -> OpenInfo {
        // `transformers` leaves images as they lie in the file, and drops transparency.
        let mut media = MediaRules::default();
        media.image.upright = false;
        media.image.alpha = Alpha::Drop;
        OpenInfo {
            placeholders: self.media.placeholders(),
            media,
            softcap: self.softcap,
            verification: self.verification(),
            ..self.decoder.info()
        }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Generate {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.media.place(segment)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        if segments.iter().all(|segment| matches!(segment, Segment::Tokens(_))) {
            return self.decoder.prefill(host, segments);
        }
        self.media.prompt(host, segments)?.prefill(host, &mut self.decoder)
    }
}

impl Generate {
    /// Only graphs of all layers verify draft tokens, and a bundle has them where it was asked for.
    fn verification(&self) -> Verification {
        let found = self.decoder.verification();
        match found.refusal {
            Some(why) => Verification::refused(format!(
                "{why}; `qhx forge --recipe-option verify=8` makes graphs of all layers that take 8 tokens"
            )),
            None => found,
        }
    }
}
