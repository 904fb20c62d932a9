//! `qwen3vl_generate`: prompts of text, pictures and videos over a decoder with deepstack inputs.

use qhx_op::decoder::{Decoder, DecoderGraphs, LayerState, SoftRows};
use qhx_op::fill::CausalMask;
use qhx_op::state::StateCarrier;
use qhx_op::text::{check_room, not_taken};
use qhx_op::vision::Grid;
use qhx_op::{
    Error, ErrorCode, Host, Modality, Op, OpDescription, Piece, Placement, Result, Segment, Task,
    View, schema,
};

use crate::deepstack::Deepstack;
use crate::picture::Eye;
use crate::positions::Positions;
use crate::settings::{Tokens, rope};

const NAME: &str = "qwen3vl_generate";

/// Text generation for Qwen3-VL.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    tokens: Tokens,
    eye: Option<Eye>,
}

/// What a prompt is made of.
#[derive(Debug, Default)]
struct Prompt {
    tokens: Vec<u32>,
    /// Pictures, and parts of videos, by the index of their first token.
    pictures: Vec<(usize, Grid)>,
    /// Rows of each of them.
    embeds: Vec<Vec<f32>>,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder(["deepstack", "deepstack_*", "embeds"]);
        params_schema["properties"]["vision"] = schema::graphs(
            "Graphs that make rows of a picture's patches. One without the input cmask takes one square picture; of \
             those with it, the smallest that a picture fits into takes it. Without any the bundle takes text only.",
        );
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation over pictures, videos and text (Qwen3-VL)".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text, Modality::Image, Modality::Video],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let hidden = graphs.hidden();
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let rope = rope(host)?;
        let eye = Eye::open(host, hidden)?;
        if eye.is_some() && rope.sections.is_none() {
            return Err(Error::manifest(
                "manifest params.rope_scaling.mrope_section is missing: it says which pairs of a head turn by time, \
                 row and column of a picture",
            ));
        }
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let mut decoder = Decoder::builder(NAME, graphs, state)
            .filler(Positions::new(rope.rope()?))
            .filler(Deepstack::new(hidden))
            .mask(mask)
            .open(host)?;
        let tokens = Tokens::read(host)?;
        if let Some(eye) = &eye {
            deepstack(&mut decoder)?.check(eye.layers())?;
            let Tokens { image, video, start, end } = tokens;
            if let Some(id) = [image, video, start, end]
                .into_iter()
                .find(|id| *id as usize >= decoder.input_vocab())
            {
                return Err(Error::manifest(format!(
                    "manifest params: the token {id} around pictures is outside the vocabulary of {}; expected \
                     image_token_id, video_token_id, vision_start_token_id and vision_end_token_id below it",
                    decoder.input_vocab()
                )));
            }
        }
        Ok(Self { decoder, tokens, eye })
    }

    fn decoder(&self) -> Option<&Decoder> {
        Some(&self.decoder)
    }

    fn decoder_mut(&mut self) -> Option<&mut Decoder> {
        Some(&mut self.decoder)
    }

    fn placeholders(&self) -> Vec<u32> {
        // Those that stand for nothing in a bundle of text alone are refused there, too.
        vec![self.tokens.image, self.tokens.video]
    }

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let eye = self.eye(segment)?;
        let Tokens { image, video, start, end } = self.tokens;
        let positions = eye.tokens(segment)?.patches();
        let (marker, pieces) = match segment {
            Segment::Video { times, .. } => {
                let mut pieces = Vec::new();
                for (index, times) in times.chunks(eye.frames()).enumerate() {
                    let first = index * eye.frames();
                    pieces.push(Piece::Text(format!("<{:.1} seconds>", mean(times))));
                    pieces.push(Piece::Tokens(vec![start]));
                    let frames = Some((first, first + times.len()));
                    pieces.push(Piece::Part { token: video, positions, frames });
                    pieces.push(Piece::Tokens(vec![end]));
                }
                if pieces.is_empty() {
                    return Err(Error::prompt("a video without frames"));
                }
                (video, pieces)
            }
            _ => (image, vec![Piece::Part { token: image, positions, frames: None }]),
        };
        Ok(Placement { marker, opening: vec![start], closing: vec![end], pieces })
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let mut prompt = self.lay_out(segments)?;
        let before = self.decoder.state().position();
        check_room(before, prompt.tokens.len(), self.decoder.info().max_ctx)?;
        let parts = segments.iter().filter(|segment| !matches!(segment, Segment::Tokens(_)));
        let firsts: Vec<_> = prompt.pictures.iter().map(|(first, _)| *first).collect();
        let mut layers = Vec::new();
        for (segment, first) in parts.zip(firsts) {
            let Some(eye) = &mut self.eye else { return Err(text_only()) };
            let features = eye.look(host, segment)?;
            prompt.embeds.push(features.embeds);
            layers.push((first, features.deepstack));
        }
        deepstack(&mut self.decoder)?.put(layers);
        let result = self.consume(host, before, &prompt);
        deepstack(&mut self.decoder)?.clear();
        if result.is_err() {
            // Pictures that were not consumed stand nowhere.
            let position = self.decoder.state().position();
            self.decoder.state_mut().truncate(position)?;
        }
        result
    }
}

impl Generate {
    /// What sees, for a picture or a video.
    fn eye(&self, segment: &Segment<'_>) -> Result<&Eye> {
        match segment {
            Segment::Image { .. } | Segment::Video { .. } => {
                self.eye.as_ref().ok_or_else(text_only)
            }
            _ => Err(not_taken(&Self::describe(), segment)),
        }
    }

    /// The tokens of a prompt, and where its pictures stand.
    fn lay_out(&self, segments: &[Segment<'_>]) -> Result<Prompt> {
        let mut prompt = Prompt::default();
        let Tokens { image, video, .. } = self.tokens;
        for segment in segments {
            let token = match segment {
                Segment::Tokens(tokens) => {
                    if let Some(id) = tokens.iter().find(|id| [image, video].contains(id)) {
                        return Err(Error::prompt(format!(
                            "the prompt has the token {id}, which stands for a picture, without the picture"
                        )));
                    }
                    prompt.tokens.extend_from_slice(tokens);
                    continue;
                }
                Segment::Video { .. } => video,
                _ => image,
            };
            let grid = self.eye(segment)?.tokens(segment)?;
            let first = prompt.tokens.len();
            prompt.pictures.push((first, grid));
            prompt.tokens.resize(first + grid.patches(), token);
        }
        Ok(prompt)
    }

    fn consume(&mut self, host: &mut Host, before: usize, prompt: &Prompt) -> Result<View> {
        let track = self.decoder.state_mut().track_mut();
        for (first, grid) in &prompt.pictures {
            track.place(before + first, grid.rows, grid.columns)?;
        }
        if host.dumping() {
            let slots = before..before + prompt.tokens.len();
            let places = slots.flat_map(|slot| track.at(slot)).map(|axis| axis as f32);
            host.dump_values("positions", &places.collect::<Vec<_>>(), &[prompt.tokens.len(), 3])?;
        }
        let rows = prompt.pictures.iter().zip(&prompt.embeds);
        let soft: Vec<_> =
            rows.map(|((first, _), values)| SoftRows { first: *first, values }).collect();
        self.decoder.prefill_soft(host, &prompt.tokens, &soft)
    }
}

fn deepstack(decoder: &mut Decoder) -> Result<&mut Deepstack> {
    decoder.filler_mut().ok_or_else(lost)
}

/// The decoder was made with these fillers.
fn lost() -> Error {
    Error::new(ErrorCode::INTERNAL, "a filler of the decoder is not there")
}

fn text_only() -> Error {
    Error::prompt(
        "this bundle takes text only: it has none of the vision graphs that plan.params.vision of the manifest names",
    )
}

/// The mean time of the frames of a patch, where the last stands for those that are missing.
fn mean(times: &[f32]) -> f64 {
    // What was a short decimal number before it became an f32 is that number again.
    let exact = |time: &f32| (f64::from(*time) * 1e4).round() / 1e4;
    match (times.first(), times.last()) {
        (Some(first), Some(last)) => f64::midpoint(exact(first), exact(last)),
        _ => 0.0,
    }
}
