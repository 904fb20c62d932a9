//! Prompts of text, images and audio: tokens, and the rows that stand instead of some of them.

use std::time::Instant;

use qhx_kit::audio::Clip;
use qhx_kit::decoder::{SoftPart, SoftPrompt};
use qhx_kit::vision::Image;
use qhx_op::text::not_taken;
use qhx_op::{Error, Host, OpDescription, Piece, Placement, Result, Segment, SpanId};

use crate::audio::Audio;
use crate::tower::MediaTokens;
use crate::vision::Vision;

/// The towers that a bundle has.
#[derive(Debug)]
pub(crate) struct Media {
    vision: Option<Vision>,
    audio: Option<Audio>,
    op: OpDescription,
    /// Time of each, from pixels and samples to rows.
    seeing: SpanId,
    hearing: SpanId,
}

impl Media {
    /// `hidden` is the width of the decoder's rows; `op` says what is taken.
    pub fn open(host: &mut Host, hidden: usize, op: OpDescription) -> Result<Self> {
        Ok(Self {
            vision: Vision::open(host, hidden)?,
            audio: Audio::open(host, hidden)?,
            op,
            seeing: host.span("vision"),
            hearing: host.span("audio"),
        })
    }

    /// Tokens that stand for images and audio.
    pub fn placeholders(&self) -> Vec<u32> {
        let vision = self.vision.as_ref().map(Vision::tokens);
        let audio = self.audio.as_ref().map(Audio::tokens);
        vision.into_iter().chain(audio).map(|tokens| tokens.token_id).collect()
    }

    /// The begin token, soft tokens, the end token.
    pub fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let (MediaTokens { token_id, begin_token_id, end_token_id }, positions) = match segment {
            Segment::Image { .. } => {
                let vision = self.vision.as_ref().ok_or_else(|| without("images", "vision"))?;
                (vision.tokens(), vision.count(Image::of_segment(segment)?)?)
            }
            Segment::Audio { .. } => {
                let audio = self.audio.as_ref().ok_or_else(|| without("audio", "audio"))?;
                let clip = Clip::of_segment(segment, audio.rate())?;
                (audio.tokens(), audio.count(clip.samples().len())?)
            }
            other => return Err(not_taken(&self.op, other)),
        };
        let part = Piece::Part { token: token_id, positions, frames: None, part: None };
        let pieces =
            vec![Piece::Tokens(vec![begin_token_id]), part, Piece::Tokens(vec![end_token_id])];
        Ok(Placement { marker: token_id, pieces, ..Placement::default() })
    }

    /// Runs the towers. The tokens around images and audio are in the prompt already.
    pub fn prompt(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<SoftPrompt> {
        SoftPrompt::of(segments, |segment| {
            let start = Instant::now();
            let (token, rows, count) = match segment {
                Segment::Image { .. } => {
                    let vision = self.vision.as_mut().ok_or_else(|| without("images", "vision"))?;
                    let image = Image::of_segment(segment)?;
                    let (count, rows) = vision.soft_tokens(host, image)?;
                    host.end(self.seeing, start);
                    dump(host, "image_soft", &rows, count)?;
                    (vision.tokens().token_id, rows, count)
                }
                Segment::Audio { .. } => {
                    let audio = self.audio.as_mut().ok_or_else(|| without("audio", "audio"))?;
                    let clip = Clip::of_segment(segment, audio.rate())?;
                    let (count, rows) = audio.soft_tokens(host, clip)?;
                    host.end(self.hearing, start);
                    dump(host, "audio_soft", &rows, count)?;
                    (audio.tokens().token_id, rows, count)
                }
                other => return Err(not_taken(&self.op, other)),
            };
            Ok(SoftPart { token, count, rows, together: false })
        })
    }
}

fn dump(host: &Host, name: &str, rows: &[f32], count: usize) -> Result<()> {
    host.dump_values(name, rows, &[count, rows.len() / count.max(1)])
}

fn without(what: &str, tower: &str) -> Error {
    Error::prompt(format!(
        "the bundle takes no {what}: it has no graphs {tower:?}; forge a checkpoint with that tower, and without \
         towers=none"
    ))
}
