//! Images, audio and videos in prompts: how files become what an op is given, and where a part
//! stands among the tokens.

use serde::{Deserialize, Serialize};

/// Rules by which the host turns files into the pixels and samples of a family.
///
/// Fields are added as families need them: take the default and change what differs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct MediaRules {
    /// For images, and for the frames of a video.
    pub image: ImageRules,
    /// For audio.
    pub audio: AudioRules,
    /// For videos.
    pub video: VideoRules,
}

/// Rules by which an image becomes RGB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct ImageRules {
    /// Turn and mirror the image as its EXIF orientation declares.
    pub upright: bool,
    /// Handling of transparency.
    pub alpha: Alpha,
}

impl Default for ImageRules {
    fn default() -> Self {
        Self { upright: true, alpha: Alpha::White }
    }
}

/// Handling of transparency.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Alpha {
    /// The image is laid over white.
    #[default]
    White,
    /// The colours are taken as they stand in the file.
    Drop,
}

/// Rules by which audio becomes samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct AudioRules {
    /// Samples per second that the op wants.
    pub rate: u32,
}

impl Default for AudioRules {
    fn default() -> Self {
        Self { rate: 16_000 }
    }
}

/// Which frames of a video are taken.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct VideoRules {
    /// Frames per second, as far as the next two allow.
    pub fps: f32,
    /// Minimum number of frames, if the video has them.
    pub min_frames: usize,
    /// Maximum number of frames.
    pub max_frames: usize,
}

impl Default for VideoRules {
    fn default() -> Self {
        Self { fps: 2.0, min_frames: 4, max_frames: 768 }
    }
}

/// Place of an image, audio clip or video among the tokens of a prompt.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Placement {
    /// The token that a rendered conversation has for the part. `pieces` take its place.
    pub marker: u32,
    /// Tokens before the part in a text that no template wrote.
    #[serde(default)]
    pub opening: Vec<u32>,
    /// Tokens after the part in a text that no template wrote.
    #[serde(default)]
    pub closing: Vec<u32>,
    /// Pieces of the prompt for the part, in order.
    pub pieces: Vec<Piece>,
}

/// A piece of a [`Placement`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Piece {
    /// A text, which the host turns into tokens.
    Text(String),
    /// Tokens.
    Tokens(Vec<u32>),
    /// The part itself, or some frames of it.
    Part {
        /// The token that stands at each of the positions, where something counts or lists tokens.
        token: u32,
        /// Positions that it takes in the context.
        positions: usize,
        /// For a video that is consumed in several parts: the first frame of this one, and the one after its last.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        frames: Option<(usize, usize)>,
        /// For an image that is consumed in several parts, such as tiles: which of how many this one is, counted from
        /// 0. The op then gets it as [`crate::Segment::Tile`]. The parts of one image have the same number of them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        part: Option<(u16, u16)>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_version_declares_is_read() {
        let rules: MediaRules =
            serde_json::from_str(r#"{"audio":{"rate":24000,"dither":1}}"#).unwrap();
        let mut expected = MediaRules::default();
        expected.audio.rate = 24_000;
        assert_eq!(rules, expected);
        let text = r#"{"marker":7,"pieces":[{"text":"<0.2 seconds>"},{"part":{"token":7,"positions":4}}]}"#;
        let placement: Placement = serde_json::from_str(text).unwrap();
        let part = Piece::Part { token: 7, positions: 4, frames: None, part: None };
        let pieces = vec![Piece::Text("<0.2 seconds>".into()), part];
        assert_eq!(placement, Placement { marker: 7, pieces, ..Placement::default() });
    }
}
