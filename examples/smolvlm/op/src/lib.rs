//! `smolvlm_generate`: the host side of SmolVLM and Idefics 3.
//!
//! A decoder, and images in tiles. How an image is cut and which texts stand before its tiles the recipe declares in the
//! manifest's `params`.

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_kit::vision::{DeclaredImages, SquareEncoder};
use qhx_op::{
    Generator, Host, Modality, Op, OpDescription, OpenInfo, Placement, Result, Segment, Task, View,
};

const NAME: &str = "smolvlm_generate";

/// Text generation for SmolVLM and Idefics 3.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    images: DeclaredImages,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder(["pixels", "embeds"]);
        params_schema["properties"]["vision"] = SquareEncoder::schema();
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation over images and text (SmolVLM, Idefics 3)".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text, Modality::Image],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let images = DeclaredImages::open(host, graphs.hidden())?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let rope = Rope::from_params(host, "/params")?;
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        Ok(Self { decoder, images })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { placeholders: self.images.placeholders(), ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Generate {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.images.place(Self::describe, segment)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        self.images.prompt(host, segments)?.prefill(host, &mut self.decoder)
    }
}
