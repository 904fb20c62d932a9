//! `smolvlm_generate`: the host side of SmolVLM and Idefics 3.
//!
//! An image is resized to multiples of the square that the vision graph takes, and cut into tiles of that size. The
//! prompt has the rows of each tile after a text that says where it lies, and of the whole image, stretched to such a
//! square, behind them.

mod tiles;

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState, SoftPart, SoftPrompt};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_kit::vision::{Image, SquareEncoder, text_only};
use qhx_op::text::not_taken;
use qhx_op::{
    Generator, Host, Modality, Op, OpDescription, OpenInfo, Piece, Placement, Result, Segment,
    Task, View,
};

use tiles::{Cutter, Tiling};

const NAME: &str = "smolvlm_generate";

/// Text generation for SmolVLM and Idefics 3.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    /// None in a bundle of text alone.
    vision: Option<Vision>,
    /// The token that stands at each position of a tile, and in the place of an image.
    token: u32,
}

#[derive(Debug)]
struct Vision {
    encoder: SquareEncoder,
    tiling: Tiling,
    cutter: Cutter,
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
        let vision = match SquareEncoder::open(host, graphs.hidden())? {
            None => None,
            Some(encoder) => {
                let tiling = Tiling::read(host, encoder.size())?;
                let cutter = Cutter::new(encoder.filter());
                Some(Vision { encoder, tiling, cutter })
            }
        };
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let rope = Rope::from_params(host, "/params")?;
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        Ok(Self { decoder, vision, token: host.require("/params/image_token_id")? })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo { placeholders: vec![self.token], ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Generate {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let Segment::Image { .. } = segment else {
            return Err(not_taken(&Self::describe(), segment));
        };
        let vision = self.vision.as_ref().ok_or_else(text_only)?;
        let grid = vision.tiling.grid(Image::of_segment(segment)?.size())?;
        let (token, positions) = (self.token, vision.encoder.tokens());
        let mut pieces = Vec::new();
        for (index, text) in grid.texts().enumerate() {
            let part = grid.part(index);
            pieces.push(Piece::Text(text));
            pieces.push(Piece::Part { token, positions, frames: None, part });
        }
        pieces.push(Piece::Text(tiles::AROUND.to_owned()));
        Ok(Placement { marker: token, pieces, ..Placement::default() })
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let Self { decoder, vision, token } = self;
        let mut last = None;
        let prompt = SoftPrompt::of(segments, |segment| {
            let Some(Vision { encoder, tiling, cutter }) = vision else { return Err(text_only()) };
            let image = Image::of_segment(segment)?;
            let shown = match *segment {
                Segment::Tile { rgb, index, of, .. } => {
                    let grid = tiling.grid(image.size())?;
                    // The tiles of an image have it in common: it is resized once.
                    if !last.is_some_and(|last| std::ptr::eq(last, rgb)) {
                        cutter.resize(image, &grid)?;
                    }
                    last = Some(rgb);
                    cutter.tile(&grid, encoder.size(), [index, of])?
                }
                _ => cutter.whole(image, tiling)?,
            };
            let rows = encoder.encode(host, shown)?;
            Ok(SoftPart { token: *token, count: encoder.tokens(), rows, together: false })
        })?;
        prompt.prefill(host, decoder)
    }
}
