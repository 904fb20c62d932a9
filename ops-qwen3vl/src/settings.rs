//! What a manifest says of pictures, and what published bundles leave out.

use qhx_op::fill::{RopeParams, Sections};
use qhx_op::{Error, Host, Result};
use serde::Deserialize;

/// `params.vision`. The defaults are those of published checkpoints.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub(crate) struct Settings {
    /// Pixels of a patch's side.
    pub patch_size: usize,
    /// Frames of a patch.
    pub temporal_patch_size: usize,
    /// Patches of a side of the square that becomes one token.
    pub merge_size: usize,
    /// Base of the rotary tables of patches.
    pub rope_theta: f64,
    /// Side of the square table of learned positions.
    pub pos_side: Option<usize>,
    /// Least and greatest area of a picture that keeps its shape.
    pub min_pixels: u64,
    pub max_pixels: u64,
    pub image_mean: [f64; 3],
    pub image_std: [f64; 3],
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            patch_size: 16,
            temporal_patch_size: 2,
            merge_size: 2,
            rope_theta: 1e4,
            pos_side: None,
            min_pixels: 65_536,
            max_pixels: 16_777_216,
            image_mean: [0.5; 3],
            image_std: [0.5; 3],
        }
    }
}

/// A size that the host reckons with is never larger.
const MAX_SIDE: usize = 1 << 10;

impl Settings {
    pub fn read(host: &Host) -> Result<Self> {
        let settings: Self = host.value("/params/vision")?.unwrap_or_default();
        for (key, found) in [
            ("patch_size", settings.patch_size),
            ("temporal_patch_size", settings.temporal_patch_size),
            ("merge_size", settings.merge_size),
        ] {
            if !(1..=MAX_SIDE).contains(&found) {
                return Err(Error::manifest(format!(
                    "manifest params.vision.{key} is {found}, expected 1 to {MAX_SIDE}"
                )));
            }
        }
        Ok(settings)
    }

    /// Patches that become one token.
    pub fn unit(&self) -> usize {
        self.merge_size * self.merge_size
    }
}

/// The tokens around pictures and videos; the defaults are those of the published tokenizer.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Tokens {
    pub image: u32,
    pub video: u32,
    pub start: u32,
    pub end: u32,
}

impl Tokens {
    pub fn read(host: &Host) -> Result<Self> {
        let id = |key: &str, default| {
            let found = host.value(&format!("/params/{key}"))?;
            Ok::<u32, Error>(found.unwrap_or(default))
        };
        Ok(Self {
            image: id("image_token_id", 151_655)?,
            video: id("video_token_id", 151_656)?,
            start: id("vision_start_token_id", 151_652)?,
            end: id("vision_end_token_id", 151_653)?,
        })
    }
}

/// Base of the decoder's rotary tables, and pairs by axis, of published checkpoints.
const THETA: f64 = 5e6;
const SECTION: [usize; 3] = [24, 20, 20];

/// The decoder's rotary tables, as far as the manifest says; the axes always take turns.
pub(crate) fn rope(host: &Host) -> Result<RopeParams> {
    let mut rope = RopeParams::read(host, "/params")?;
    rope.theta = rope.theta.or(Some(THETA));
    let pairs: usize = SECTION.iter().sum();
    rope.sections = match rope.sections {
        Some(Sections::Chunked(section) | Sections::Interleaved(section)) => {
            Some(Sections::Interleaved(section))
        }
        None if rope.rotary_dim == Some(2 * pairs) => Some(Sections::Interleaved(SECTION)),
        other => other,
    };
    Ok(rope)
}
