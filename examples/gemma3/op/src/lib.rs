//! `gemma3_generate`: the host side of Gemma 3.
//!
//! Full layers see all positions, sliding ones the last of a window. Each kind has rotary tables and a
//! mask of its own, and the caches of sliding layers are rings. The tokens of an image see each other.

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState, SoftPart, SoftPrompt};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::{SlidingLayers, StateCarrier};
use qhx_kit::vision::{Image, SquareEncoder, text_only};
use qhx_op::text::not_taken;
use qhx_op::{
    Generator, Host, Modality, Op, OpDescription, OpenInfo, Piece, Placement, Result, Segment,
    Task, View,
};
use serde::Deserialize;

const NAME: &str = "gemma3_generate";
/// Tables and mask of sliding layers.
const COS: &str = "cos_local";
const SIN: &str = "sin_local";
const MASK: &str = "cmask_local";

/// `params.image_tokens` of the manifest: the tokens around an image, and the one at its positions.
#[derive(Debug, Clone, Copy, Deserialize)]
struct ImageTokens {
    begin: u32,
    soft: u32,
    end: u32,
}

/// Text generation for Gemma 3.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    /// None in a bundle of text alone.
    vision: Option<(SquareEncoder, ImageTokens)>,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder([COS, SIN, MASK, "pixels", "embeds"]);
        params_schema["properties"]["vision"] = SquareEncoder::schema();
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation over images and text (Gemma 3)".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text, Modality::Image],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let local: SlidingLayers = host.require("/params/local")?;
        let state = StateCarrier::with_rings(host, &graphs.groups(), |role| local.window_of(role))?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let slots = local.slots(&state);
        let full = CausalMask::new(state.capacity().unwrap_or(0));
        let sliding = CausalMask::new(slots.unwrap_or(0)).named(MASK).window(local.window).ring();
        let embedding = graphs.embedding(host)?.scaled(host.require("/params/embed_scale")?)?;
        let vision = match SquareEncoder::open(host, graphs.hidden())? {
            Some(encoder) => Some((encoder, host.require("/params/image_tokens")?)),
            None => None,
        };
        let decoder = Decoder::builder(NAME, graphs, state)
            .embedding(embedding)
            .rope(Rope::from_params(host, "/params")?)
            .rope(Rope::from_params(host, "/params/local")?.named(COS, SIN))
            .mask(full)
            .mask(sliding)
            .open(host)?;
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

impl Generator for Generate {
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

qhx_op::register_ops!(Generate);
qhx_op::export_plugin!();
