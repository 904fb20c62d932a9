//! `gemma3_generate`: Gemma 3 with images, whose tokens see each other. Text alone needs no more than
//! [`DeclaredDecoder`].

use qhx_kit::decoder::{DeclaredDecoder, Decoder, SoftPart, SoftPrompt};
use qhx_kit::vision::{Image, SquareEncoder, text_only};
use qhx_op::text::not_taken;
use qhx_op::{
    Generator, Host, Modality, Op, OpDescription, OpenInfo, Piece, Placement, Result, Segment, View,
};
use serde::Deserialize;

const NAME: &str = "gemma3_generate";

/// `params.image_tokens` of the manifest: the tokens around an image, and the one at its positions.
#[derive(Debug, Clone, Copy, Deserialize)]
struct ImageTokens {
    begin: u32,
    soft: u32,
    end: u32,
}

/// Text generation for Gemma 3 with images.
#[derive(Debug)]
pub struct Gemma3 {
    decoder: Decoder,
    /// None where the bundle lacks the optional graph.
    vision: Option<(SquareEncoder, ImageTokens)>,
}

impl Op for Gemma3 {
    fn describe() -> OpDescription {
        let mut params_schema = DeclaredDecoder::schema(["pixels", "embeds"]);
        params_schema["properties"]["vision"] = SquareEncoder::schema();
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation over images and text (Gemma 3)".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            modalities: vec![Modality::Text, Modality::Image],
            params_schema,
            ..DeclaredDecoder::describe()
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let decoder = DeclaredDecoder::open_as(host, NAME)?.into_decoder();
        let vision = match SquareEncoder::open(host, decoder.hidden())? {
            Some(encoder) => Some((encoder, host.require("/params/image_tokens")?)),
            None => None,
        };
        Ok(Self { decoder, vision })
    }

    fn info(&self) -> OpenInfo {
        let tokens = self.vision.iter().map(|(_, tokens)| tokens.soft);
        OpenInfo { placeholders: tokens.collect(), ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Gemma3 {
    qhx_op::inner_generator!(decoder);

    /// `Gemma3Processor` of `transformers`: empty lines around the tokens of an image.
    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let Segment::Image { .. } = segment else {
            return Err(not_taken(&Self::describe(), segment));
        };
        let (encoder, ImageTokens { begin, soft, end }) =
            self.vision.as_ref().ok_or_else(text_only)?;
        let positions = encoder.tokens();
        let line = || Piece::Text("\n\n".to_owned());
        let pieces = vec![
            line(),
            Piece::Tokens(vec![*begin]),
            Piece::Part { token: *soft, positions, frames: None, part: None },
            Piece::Tokens(vec![*end]),
            line(),
        ];
        Ok(Placement { marker: *begin, pieces, ..Placement::default() })
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let Self { decoder, vision } = self;
        let prompt = SoftPrompt::of(segments, |segment| {
            let (encoder, tokens) = vision.as_mut().ok_or_else(text_only)?;
            let rows = encoder.encode(host, Image::of_segment(segment)?)?;
            Ok(SoftPart { token: tokens.soft, count: encoder.tokens(), rows, together: true })
        })?;
        prompt.prefill(host, decoder)
    }
}
