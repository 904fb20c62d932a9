//! Settings for images: those that a manifest declares, and defaults for those that published bundles leave out.

use serde::Deserialize;

use qhx_op::{Error, Host, Result};

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
    /// The corners of that table are those of an image; else its entries are areas of it.
    pub pos_aligned: bool,
    /// Images one of whose sides is less than a token's grow until none is, before their size is chosen.
    pub grow: bool,
    /// Videos are taken.
    pub videos: bool,
    /// Frequencies of columns in the rotary tables lie between those of rows.
    pub rope_between: bool,
    /// Maximum of a side, where images keep their shape and grow to whole tokens alone, instead of areas.
    pub longest_edge: Option<u32>,
    /// Minimum and maximum area of an image that keeps its shape.
    pub min_pixels: u64,
    pub max_pixels: u64,
    /// The same for all frames of a video together; of one that is consumed as a whole for each of them.
    pub video_min_pixels: u64,
    pub video_max_pixels: u64,
    /// Positions that a second of a video takes in time. Its patches in time then follow each other without their
    /// seconds as text between them (Qwen2.5-VL).
    pub tokens_per_second: Option<f32>,
    /// The same with this number of positions for each patch in time, whatever the frames' times (Qwen2-VL).
    pub time_step: Option<f32>,
    /// Patches of a side of the windows that blocks of the tower attend within, for graphs with the input `windows`.
    pub window: Option<usize>,
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
            pos_aligned: true,
            grow: false,
            videos: true,
            rope_between: false,
            longest_edge: None,
            min_pixels: 65_536,
            max_pixels: 16_777_216,
            video_min_pixels: 4096,
            video_max_pixels: 25_165_824,
            tokens_per_second: None,
            time_step: None,
            window: None,
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
        if settings.window.is_some_and(|side| side == 0 || side % settings.merge_size != 0) {
            return Err(Error::manifest(format!(
                "manifest params.vision.window is {:?}, expected a multiple of {}, its merge_size",
                settings.window, settings.merge_size
            )));
        }
        for (key, found) in
            [("tokens_per_second", settings.tokens_per_second), ("time_step", settings.time_step)]
        {
            if found.is_some_and(|n| !(n.is_finite() && n > 0.0)) {
                return Err(Error::manifest(format!(
                    "manifest params.vision.{key} is {found:?}, expected a positive number"
                )));
            }
        }
        Ok(settings)
    }

    /// A video is consumed as a whole, its patches in time one behind the other.
    pub fn whole_videos(&self) -> bool {
        self.tokens_per_second.is_some() || self.time_step.is_some()
    }

    /// Patches that become one token.
    pub fn unit(&self) -> usize {
        self.merge_size * self.merge_size
    }
}
