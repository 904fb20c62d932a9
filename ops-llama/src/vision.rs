//! `vision_generate`: a decoder that takes images, with all that is said about them declared in the manifest, so that a
//! new family is a recipe alone.

use qhx_kit::decoder::{DeclaredDecoder, Decoder};
use qhx_kit::vision::{DeclaredImages, SquareEncoder};
use qhx_op::{
    Generator, Host, Modality, Op, OpDescription, OpenInfo, Placement, Result, Segment, View,
};

const NAME: &str = "vision_generate";

/// Text generation over images and text.
#[derive(Debug)]
pub struct VisionGenerate {
    decoder: Decoder,
    images: DeclaredImages,
    softcap: Option<f32>,
}

impl Op for VisionGenerate {
    fn describe() -> OpDescription {
        let mut params_schema = DeclaredDecoder::schema(["pixels", "embeds", "positions"]);
        params_schema["properties"]["vision"] = SquareEncoder::schema();
        OpDescription {
            name: NAME.to_owned(),
            summary:
                "Text generation over images and text, for any decoder that its manifest declares"
                    .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            modalities: vec![Modality::Text, Modality::Image],
            params_schema,
            ..DeclaredDecoder::describe()
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let decoder = DeclaredDecoder::open_as(host, NAME)?;
        let softcap = decoder.info().softcap;
        let decoder = decoder.into_decoder();
        let images = DeclaredImages::open(host, decoder.hidden())?;
        Ok(Self { decoder, images, softcap })
    }

    fn info(&self) -> OpenInfo {
        let (placeholders, softcap) = (self.images.placeholders(), self.softcap);
        let mut info = OpenInfo { placeholders, softcap, ..self.decoder.info() };
        if self.images.prefix() {
            // What a prompt's tokens become depends on those behind them: no part of it is of use to another.
            (info.can_truncate, info.can_snapshot) = (false, false);
            info.prompt_rules.special_tokens = false;
        }
        info
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for VisionGenerate {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.images.place(Self::describe, segment)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let whole = self.images.prefix() && self.decoder.state().position() == 0;
        let prompt = self.images.prompt(host, segments)?.seen_whole(whole);
        prompt.prefill(host, &mut self.decoder)
    }
}
