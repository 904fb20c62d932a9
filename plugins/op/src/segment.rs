//! Segments of a prompt, as they cross the boundary.

use crate::abi::RSlice;

use crate::Segment;
use crate::abi::{
    RawSegment, SEGMENT_AUDIO, SEGMENT_IMAGE, SEGMENT_TILE, SEGMENT_TOKENS, SEGMENT_VIDEO,
};

impl<'a> From<Segment<'a>> for RawSegment<'a> {
    fn from(segment: Segment<'a>) -> Self {
        let empty = Self {
            kind: SEGMENT_TOKENS,
            width: 0,
            height: 0,
            rate: 0,
            tokens: RSlice::EMPTY,
            bytes: RSlice::EMPTY,
            samples: RSlice::EMPTY,
        };
        match segment {
            Segment::Tokens(tokens) => Self { tokens: tokens.into(), ..empty },
            Segment::Image { rgb, width, height } => {
                Self { kind: SEGMENT_IMAGE, width, height, bytes: rgb.into(), ..empty }
            }
            Segment::Audio { samples, rate } => {
                Self { kind: SEGMENT_AUDIO, rate, samples: samples.into(), ..empty }
            }
            Segment::Tile { rgb, width, height, index, of } => {
                let rate = (u32::from(of) << 16) | u32::from(index);
                Self { kind: SEGMENT_TILE, width, height, rate, bytes: rgb.into(), ..empty }
            }
            Segment::Video { rgb, width, height, times, frames } => {
                let (bytes, samples) = (rgb.into(), times.into());
                let rate = u32::try_from(frames).unwrap_or(u32::MAX);
                Self { kind: SEGMENT_VIDEO, width, height, rate, bytes, samples, ..empty }
            }
            Segment::Unknown(kind) => Self { kind, ..empty },
            // A kind that has no number here yet: the op refuses it as one that it does not know.
            _ => Self { kind: u32::MAX, ..empty },
        }
    }
}

impl<'a> From<&'a RawSegment<'a>> for Segment<'a> {
    fn from(raw: &'a RawSegment<'a>) -> Self {
        match raw.kind {
            SEGMENT_TOKENS => Self::Tokens(raw.tokens.as_slice()),
            SEGMENT_IMAGE => {
                Self::Image { rgb: raw.bytes.as_slice(), width: raw.width, height: raw.height }
            }
            SEGMENT_AUDIO => Self::Audio { samples: raw.samples.as_slice(), rate: raw.rate },
            SEGMENT_VIDEO => Self::Video {
                rgb: raw.bytes.as_slice(),
                width: raw.width,
                height: raw.height,
                times: raw.samples.as_slice(),
                frames: (raw.rate as usize).max(raw.samples.len()),
            },
            SEGMENT_TILE => Self::Tile {
                rgb: raw.bytes.as_slice(),
                width: raw.width,
                height: raw.height,
                index: raw.rate as u16,
                of: (raw.rate >> 16) as u16,
            },
            kind => Self::Unknown(kind),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tile_crosses_with_its_index() {
        for (index, of) in [(0, 1), (3, 17), (65_534, 65_535)] {
            let tile = Segment::Tile { rgb: &[1, 2, 3], width: 1, height: 1, index, of };
            assert_eq!(Segment::from(&RawSegment::from(tile)), tile);
        }
    }
}
