//! Limits on the cost of a file.

use qhx_types::{Media, Segment};

/// Bounds on the cost of one file. A larger file is refused before memory is taken for it.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct Limits {
    /// Bytes of a file: 512 MiB.
    pub bytes: u64,
    /// Pixels of an image: 120 million, so that a phone's image of 108 megapixels is accepted. Decoding takes at most
    /// about ten bytes a pixel (a progressive JPEG in full colour), 1.1 GiB at the limit, and three bytes stay. No
    /// model sees more than a few megapixels of it.
    pub pixels: u64,
    /// Pixels of all frames of a video that are kept: 256 million, 768 MB. These are 768 frames of 640 × 480, or two
    /// minutes of 1920 × 1080 at one frame a second.
    pub video_pixels: u64,
    /// Frames that an animation or a folder may hold: 100,000. All of an animation's are decoded, and those that are
    /// not kept are dropped at once. An animation's frames together may also not have more than 64 times the pixels of
    /// `video_pixels`, which bounds the time.
    pub frames: u64,
    /// Seconds of audio: two hours, 439 MiB of samples at 16 kHz.
    pub seconds: u32,
}

impl Limits {
    /// Leaves less for the files of the same request: takes off what one has cost.
    pub fn spend(&mut self, media: &Media) {
        match media.segment() {
            Segment::Image { width, height, .. } => {
                let pixels = u64::from(width) * u64::from(height);
                self.pixels = self.pixels.saturating_sub(pixels);
            }
            Segment::Audio { samples, rate } => {
                let seconds = samples.len().div_ceil(rate.max(1) as usize);
                let seconds = u32::try_from(seconds).unwrap_or(u32::MAX);
                self.seconds = self.seconds.saturating_sub(seconds);
            }
            Segment::Video { width, height, times, .. } => {
                let pixels = u64::from(width) * u64::from(height) * times.len() as u64;
                self.video_pixels = self.video_pixels.saturating_sub(pixels);
            }
            _ => {}
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bytes: 512 << 20,
            pixels: 120_000_000,
            video_pixels: 256_000_000,
            frames: 100_000,
            seconds: 2 * 3600,
        }
    }
}
