//! What a manifest declares about images, and what published bundles leave out.

use serde::Deserialize;

use crate::{Error, Host, Result};

/// `params.vision`. The defaults are those of published checkpoints.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub(super) struct Settings {
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
    /// Minimum and maximum area of an image that keeps its shape.
    pub min_pixels: u64,
    pub max_pixels: u64,
    /// The same for all frames of a video together.
    pub video_min_pixels: u64,
    pub video_max_pixels: u64,
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
            video_min_pixels: 4096,
            video_max_pixels: 25_165_824,
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
