//! Prompts with images and videos for a decoder with M-RoPE: where they stand, and how they are consumed.

use super::{Features, Grid, VisionEncoder};
use crate::decoder::{Decoder, SoftRows};
use qhx_op::text::{check_room, not_taken};
use qhx_op::{Error, Host, OpDescription, Piece, Placement, Result, Segment, View};

/// The tokens around images and videos.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct VisionTokens {
    /// Stands for each row of an image; `params.image_token_id`.
    pub image: u32,
    /// Stands for each row of a video; `params.video_token_id`.
    pub video: u32,
    /// Before an image; `params.vision_start_token_id`.
    pub start: u32,
    /// After an image; `params.vision_end_token_id`.
    pub end: u32,
}

impl VisionTokens {
    /// Tokens that the manifest declares; those of `self` by default.
    fn or_manifest(self, host: &Host) -> Result<Self> {
        let id = |key: &str, default| {
            let found = host.value(&format!("/params/{key}_token_id"))?;
            Ok::<u32, Error>(found.unwrap_or(default))
        };
        Ok(Self {
            image: id("image", self.image)?,
            video: id("video", self.video)?,
            start: id("vision_start", self.start)?,
            end: id("vision_end", self.end)?,
        })
    }
}

/// Turns prompts with images and videos into tokens and rows.
///
/// An image is `start`, a run of `image`, `end`. A video is for each patch in time its seconds as text, `start`, a run
/// of `video`, `end` (`Qwen3VLProcessor` of `transformers`); where the manifest declares `tokens_per_second` or
/// `time_step`, one run as an image's (`Qwen2_5_VLProcessor`).
#[derive(Debug)]
pub struct VisionPrompts {
    op: OpDescription,
    tokens: VisionTokens,
    encoder: Option<VisionEncoder>,
}

impl VisionPrompts {
    /// Opens what a bundle has for images: see [`VisionEncoder`]. `op` is the op's description, for messages; `width`
    /// are the values of a row of the decoder; `published` are the tokens where the manifest does not say them.
    ///
    /// # Errors
    /// Errors of [`VisionEncoder::open`], or if a token of the manifest is invalid.
    pub fn open(
        host: &mut Host,
        op: OpDescription,
        width: usize,
        published: VisionTokens,
    ) -> Result<Self> {
        let tokens = published.or_manifest(host)?;
        Ok(Self { op, tokens, encoder: VisionEncoder::open(host, width)? })
    }

    /// Vision encoder; `None` in a bundle of text alone.
    pub fn encoder(&self) -> Option<&VisionEncoder> {
        self.encoder.as_ref()
    }

    /// Checks the tokens of a bundle with a vision graph.
    ///
    /// # Errors
    /// When a bundle with a vision graph has a token beyond the `vocab` rows of the embedding table.
    pub fn check_tokens(&self, vocab: usize) -> Result<()> {
        let VisionTokens { image, video, start, end } = self.tokens;
        let outside = [image, video, start, end].into_iter().find(|id| *id as usize >= vocab);
        match outside.filter(|_| self.encoder.is_some()) {
            Some(id) => Err(Error::manifest(format!(
                "manifest params: the token {id} around images is outside the vocabulary of {vocab}; expected \
                 image_token_id, video_token_id, vision_start_token_id and vision_end_token_id below it"
            ))),
            None => Ok(()),
        }
    }

    /// The tokens that stand for images and videos, for `placeholders` of [`qhx_op::OpenInfo`].
    pub fn placeholders(&self) -> Vec<u32> {
        vec![self.tokens.image, self.tokens.video]
    }

    /// Place of an image or a video in a prompt, for [`qhx_op::Generator::place`].
    ///
    /// # Errors
    /// When the segment is not visual, or its size is not accepted.
    pub fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let encoder = self.seeing(segment)?;
        let VisionTokens { image, video, start, end } = self.tokens;
        let positions = encoder.tokens(segment)?.patches();
        let whole = |token, positions| Piece::Part { token, positions, frames: None, part: None };
        let (marker, pieces) = match (segment, encoder.in_time(segment)) {
            (_, Some((patches, _))) => {
                (video, vec![whole(video, positions.saturating_mul(patches))])
            }
            (Segment::Video { times, .. }, None) => {
                let mut pieces = Vec::new();
                for (index, times) in times.chunks(encoder.frames()).enumerate() {
                    let first = index * encoder.frames();
                    pieces.push(Piece::Text(format!("<{:.1} seconds>", mean(times))));
                    pieces.push(Piece::Tokens(vec![start]));
                    let frames = Some((first, first + times.len()));
                    pieces.push(Piece::Part { token: video, positions, frames, part: None });
                    pieces.push(Piece::Tokens(vec![end]));
                }
                if pieces.is_empty() {
                    return Err(Error::prompt("a video without frames"));
                }
                (video, pieces)
            }
            _ => (image, vec![whole(image, positions)]),
        };
        Ok(Placement { marker, opening: vec![start], closing: vec![end], pieces })
    }

    /// The tokens of a prompt, with its images encoded.
    ///
    /// # Errors
    /// When the prompt does not fit behind what `decoder` has consumed, before any image is looked at.
    pub fn encode(
        &mut self,
        host: &mut Host,
        decoder: &Decoder,
        segments: &[Segment<'_>],
    ) -> Result<VisionPrompt> {
        let (tokens, places) = self.lay_out(segments)?;
        check_room(decoder.state().position(), tokens.len(), decoder.info().max_ctx)?;
        let parts = segments.iter().filter(|segment| !matches!(segment, Segment::Tokens(_)));
        let mut images = Vec::with_capacity(places.len());
        for (segment, (first, grid)) in parts.zip(places) {
            let encoder = self.encoder.as_mut().ok_or_else(text_only)?;
            let (patches, step) = encoder.in_time(segment).unwrap_or((1, 0.0));
            let features = encoder.encode(host, segment, grid)?;
            images.push(EncodedImage { first, grid, patches, step, features });
        }
        Ok(VisionPrompt { tokens, images })
    }

    /// Vision encoder for an image or a video.
    fn seeing(&self, segment: &Segment<'_>) -> Result<&VisionEncoder> {
        match segment {
            Segment::Image { .. } | Segment::Video { .. } => {
                self.encoder.as_ref().ok_or_else(text_only)
            }
            _ => Err(not_taken(&self.op, segment)),
        }
    }

    /// The tokens of a prompt, and the first one and the grid of each image.
    fn lay_out(&self, segments: &[Segment<'_>]) -> Result<(Vec<u32>, Vec<Place>)> {
        let VisionTokens { image, video, .. } = self.tokens;
        let (mut prompt, mut images) = (Vec::new(), Vec::new());
        for segment in segments {
            let token = match segment {
                Segment::Tokens(tokens) => {
                    if let Some(id) = tokens.iter().find(|id| [image, video].contains(id)) {
                        return Err(Error::prompt(format!(
                            "the prompt has the token {id}, which stands for an image, without the image"
                        )));
                    }
                    prompt.extend_from_slice(tokens);
                    continue;
                }
                Segment::Video { .. } => video,
                _ => image,
            };
            let encoder = self.seeing(segment)?;
            let grid = encoder.tokens(segment)?;
            let patches = encoder.in_time(segment).map_or(1, |(patches, _)| patches);
            images.push((prompt.len(), grid));
            prompt.resize(prompt.len() + grid.patches() * patches, token);
        }
        Ok((prompt, images))
    }
}

/// Index of an image's first token in the prompt, and the image's grid.
type Place = (usize, Grid);

/// A prompt that [`VisionPrompts::encode`] made.
#[derive(Debug)]
pub struct VisionPrompt {
    /// All tokens; those that stand for images included.
    pub tokens: Vec<u32>,
    /// Images and patches in time of videos, in order.
    pub images: Vec<EncodedImage>,
}

/// An image, a patch in time of a video, or all patches of it, in a prompt.
#[derive(Debug)]
pub struct EncodedImage {
    /// Index of its first token in the prompt.
    pub first: usize,
    /// Rows and columns of its tokens; of a video, in each patch.
    pub grid: Grid,
    /// Patches in time.
    pub patches: usize,
    /// Positions that these are apart in time.
    pub step: f32,
    /// Output of the encoder.
    pub features: Features,
}

impl VisionPrompt {
    /// Has `decoder` consume the prompt, its images at their places of [`crate::state::StateCarrier::track`]; returns
    /// the logits of the last token. What was consumed before a failure stays.
    ///
    /// # Errors
    /// Errors of [`Decoder::prefill_soft`].
    pub fn prefill(&self, host: &mut Host, decoder: &mut Decoder) -> Result<View> {
        let result = self.consume(host, decoder);
        if result.is_err() {
            // Images that were not consumed stand nowhere.
            let position = decoder.state().position();
            decoder.state_mut().truncate(position)?;
        }
        result
    }

    fn consume(&self, host: &mut Host, decoder: &mut Decoder) -> Result<View> {
        let before = decoder.state().position();
        let track = decoder.state_mut().track_mut();
        for EncodedImage { first, grid, patches, step, .. } in &self.images {
            let sizes = [*patches, grid.rows, grid.columns];
            track.place_video(before + first, sizes, *step)?;
        }
        if host.dumping() {
            let slots = before..before + self.tokens.len();
            let places = slots.flat_map(|slot| track.at(slot)).map(|axis| axis as f32);
            host.dump_values("positions", &places.collect::<Vec<_>>(), &[self.tokens.len(), 3])?;
        }
        let images = self.images.iter();
        let soft: Vec<_> = images
            .map(|EncodedImage { first, features, .. }| SoftRows {
                first: *first,
                values: &features.embeds,
                together: 0,
                prefix: false,
            })
            .collect();
        decoder.prefill_soft(host, &self.tokens, &soft)
    }
}

/// Error for an image in a prompt for a bundle without a vision graph.
pub fn text_only() -> Error {
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
