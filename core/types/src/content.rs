//! The content of images, audio and videos in prompts.

use std::fmt;
use std::sync::Arc;

use sha2::{Digest as _, Sha256};

use crate::{Modality, Segment};

/// Reason why pixels or samples cannot be part of a prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaError(String);

impl fmt::Display for MediaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MediaError {}

type Result<T, E = MediaError> = std::result::Result<T, E>;

/// An image, an audio clip or a video, as a host-op gets it. Clones share the content.
///
/// Two are equal when their contents are: the state that one has left behind serves the other.
#[derive(Clone)]
pub struct Media {
    content: Arc<Content>,
    /// SHA-256 of kind, sizes and content.
    id: [u8; 32],
}

enum Content {
    Image { rgb: Vec<u8>, width: u32, height: u32 },
    Audio { samples: Vec<f32>, rate: u32 },
    Video { rgb: Vec<u8>, width: u32, height: u32, times: Vec<f32> },
}

impl Media {
    /// An image: interleaved RGB, 8 bits a channel, rows from the top; `width · height · 3` bytes.
    ///
    /// # Errors
    /// When there are not as many bytes, or none.
    pub fn image(rgb: Vec<u8>, width: u32, height: u32) -> Result<Self> {
        check_pixels("image", rgb.len(), width, height, 1)?;
        Ok(Self::new(Content::Image { rgb, width, height }))
    }

    /// Audio: mono samples in −1…1, `rate` of them a second.
    ///
    /// # Errors
    /// When there are none, when `rate` is 0, or for a sample that is not finite.
    pub fn audio(samples: Vec<f32>, rate: u32) -> Result<Self> {
        if samples.is_empty() || rate == 0 {
            let message = format!(
                "the audio has {} samples at {rate} a second, expected at least one of each",
                samples.len()
            );
            return Err(MediaError(message));
        }
        check_finite("the audio: sample", &samples)?;
        Ok(Self::new(Content::Audio { samples, rate }))
    }

    /// A video: frames as of [`Media::image`], one behind the other, and the second at which each is shown.
    ///
    /// # Errors
    /// Errors of [`Media::image`], or if times are not finite or go back.
    pub fn video(rgb: Vec<u8>, width: u32, height: u32, times: Vec<f32>) -> Result<Self> {
        check_pixels("video", rgb.len(), width, height, times.len())?;
        check_finite("the video: time", &times)?;
        if let Some(at) = times.windows(2).position(|pair| pair[1] < pair[0]) {
            let message = format!(
                "the video: frame {} is shown at {} s, expected no earlier than the one before, at {} s",
                at + 1,
                times[at + 1],
                times[at]
            );
            return Err(MediaError(message));
        }
        Ok(Self::new(Content::Video { rgb, width, height, times }))
    }

    fn new(content: Content) -> Self {
        let mut hash = Sha256::new();
        let mut sizes = |kind: u8, numbers: [u32; 2]| {
            hash.update([kind]);
            numbers.iter().for_each(|number| hash.update(number.to_le_bytes()));
        };
        match &content {
            Content::Image { rgb, width, height } => {
                sizes(0, [*width, *height]);
                hash.update(rgb);
            }
            Content::Audio { samples, rate } => {
                sizes(1, [*rate, 0]);
                hash.update(bytemuck::cast_slice::<f32, u8>(samples));
            }
            Content::Video { rgb, width, height, times } => {
                sizes(2, [*width, *height]);
                hash.update(bytemuck::cast_slice::<f32, u8>(times));
                hash.update(rgb);
            }
        }
        let id = hash.finalize().into();
        Self { content: Arc::new(content), id }
    }

    /// Modality of the content.
    pub fn modality(&self) -> Modality {
        match *self.content {
            Content::Image { .. } => Modality::Image,
            Content::Audio { .. } => Modality::Audio,
            Content::Video { .. } => Modality::Video,
        }
    }

    /// The name of one of its kind in messages.
    pub fn noun(&self) -> &'static str {
        match *self.content {
            Content::Image { .. } => "image",
            Content::Audio { .. } => "audio",
            Content::Video { .. } => "video",
        }
    }

    /// SHA-256 of kind, sizes and content.
    pub fn id(&self) -> [u8; 32] {
        self.id
    }

    /// All of it, for a host-op.
    pub fn segment(&self) -> Segment<'_> {
        match &*self.content {
            Content::Image { rgb, width, height } => {
                Segment::Image { rgb, width: *width, height: *height }
            }
            Content::Audio { samples, rate } => Segment::Audio { samples, rate: *rate },
            Content::Video { rgb, width, height, times } => {
                let (width, height, frames) = (*width, *height, times.len());
                Segment::Video { rgb, width, height, times, frames }
            }
        }
    }

    /// Piece `index` of the `of` pieces of an image. `None` for anything else, and unless `index` is below `of`.
    pub fn tile(&self, index: u16, of: u16) -> Option<Segment<'_>> {
        match &*self.content {
            &Content::Image { ref rgb, width, height } if index < of => {
                Some(Segment::Tile { rgb, width, height, index, of })
            }
            _ => None,
        }
    }

    /// The frames from `first` up to `end` of a video. `None` for anything else, for frames that are
    /// not there, and for none.
    pub fn frames(&self, first: usize, end: usize) -> Option<Segment<'_>> {
        let Content::Video { rgb, width, height, times } = &*self.content else { return None };
        let (width, height, frames) = (*width, *height, times.len());
        let frame = rgb.len() / frames;
        let times = times.get(first..end).filter(|times| !times.is_empty())?;
        let rgb = &rgb[first * frame..end * frame];
        Some(Segment::Video { rgb, width, height, times, frames })
    }
}

impl PartialEq for Media {
    fn eq(&self, other: &Self) -> bool {
        self.id == other.id
    }
}

impl Eq for Media {}

impl fmt::Debug for Media {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &*self.content {
            Content::Image { width, height, .. } => write!(f, "Image({width}×{height})"),
            Content::Audio { samples, rate } => {
                write!(f, "Audio({} samples at {rate} Hz)", samples.len())
            }
            Content::Video { width, height, times, .. } => {
                write!(f, "Video({} frames of {width}×{height})", times.len())
            }
        }
    }
}

fn check_pixels(what: &str, found: usize, width: u32, height: u32, frames: usize) -> Result<()> {
    let pixels = (width as usize).checked_mul(height as usize);
    let bytes = pixels.and_then(|n| n.checked_mul(3)).and_then(|n| n.checked_mul(frames));
    if bytes == Some(found) && found > 0 {
        return Ok(());
    }
    let message = format!(
        "the {what} has {found} bytes for {frames} × {width} × {height} pixels, expected three for each, \
         and at least one pixel"
    );
    Err(MediaError(message))
}

fn check_finite(what: &str, values: &[f32]) -> Result<()> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => {
            let message = format!("{what} {at} is {}, expected a finite number", values[at]);
            Err(MediaError(message))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_contents_are_equal_and_others_are_not() {
        let image = |rgb: &[u8], w, h| Media::image(rgb.to_vec(), w, h).unwrap();
        assert_eq!(image(&[1; 12], 2, 2), image(&[1; 12], 2, 2));
        let all = [
            image(&[1; 12], 2, 2),
            image(&[1; 12], 4, 1),
            image(&[2; 12], 2, 2),
            Media::video(vec![1; 12], 2, 2, vec![0.0]).unwrap(),
            Media::video(vec![1; 12], 2, 2, vec![1.0]).unwrap(),
            Media::audio(vec![1.0; 3], 8000).unwrap(),
            Media::audio(vec![1.0; 3], 16000).unwrap(),
        ];
        for (i, a) in all.iter().enumerate() {
            assert!(all[i + 1..].iter().all(|b| a != b), "{a:?}");
        }
    }

    #[test]
    fn sizes_that_do_not_fit_are_named() {
        let says = |media: Result<Media>, words: &str| {
            let error = media.unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        };
        says(Media::image(vec![0; 11], 2, 2), "11 bytes for 1 × 2 × 2 pixels");
        says(Media::image(Vec::new(), 0, 2), "at least one pixel");
        says(Media::image(vec![0; 3], u32::MAX, u32::MAX), "3 bytes for");
        says(Media::video(Vec::new(), 2, 2, Vec::new()), "0 bytes for 0 × 2 × 2 pixels");
        says(Media::video(vec![0; 6], 1, 1, vec![1.0, 0.5]), "frame 1 is shown at 0.5 s");
        says(Media::video(vec![0; 6], 1, 1, vec![0.0, f32::NAN]), "time 1 is NaN");
        says(Media::audio(Vec::new(), 16000), "0 samples");
        says(Media::audio(vec![0.0], 0), "at 0 a second");
        says(Media::audio(vec![0.0, f32::INFINITY], 16000), "sample 1 is inf");
    }

    #[test]
    fn a_video_is_taken_in_parts() {
        let video = Media::video((0..12).collect(), 2, 1, vec![0.0, 0.5]).unwrap();
        let second = Segment::Video {
            rgb: &[6, 7, 8, 9, 10, 11],
            width: 2,
            height: 1,
            times: &[0.5],
            frames: 2,
        };
        assert_eq!(video.frames(1, 2), Some(second));
        assert_eq!(video.frames(0, 2), Some(video.segment()));
        for (first, end) in [(1, 3), (2, 2), (2, 1), (usize::MAX, usize::MAX)] {
            assert_eq!(video.frames(first, end), None, "{first}..{end}");
        }
        assert_eq!(Media::image(vec![0; 3], 1, 1).unwrap().frames(0, 1), None);
    }
}
