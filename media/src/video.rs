//! Decoding videos: frames sampled from folders of images and from animations.

use std::io::Cursor;
use std::path::{Path, PathBuf};

use image::codecs::gif::GifDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::{AnimationDecoder as _, ColorType, ImageDecoder as _};
use qhx_base::{Error, ErrorKind, Result};
use qhx_types::Media;

use crate::format::{Format, Kind};
use crate::raw::{allowance, check_size, png_pixels, zeroed};
use crate::source::HEAD;
use crate::{ImageRules, Limits, Source, VideoRules, decode_image, pixels};

/// Bound on the pixels of all frames of an animation, as a multiple of `Limits::video_pixels`.
const DECODED: u64 = 64;

/// Sampled frames of a video.
#[derive(Clone, PartialEq)]
pub struct Frames {
    /// The frames one behind the other: `times.len() · width · height · 3` values.
    pub rgb: Vec<u8>,
    /// Pixels in a row.
    pub width: u32,
    /// Rows of a frame.
    pub height: u32,
    /// Seconds from the beginning at which each frame begins.
    pub times: Vec<f32>,
}

impl Frames {
    /// The video as a part of a prompt.
    ///
    /// # Errors
    /// When there are no frames, or not as many values as the sizes ask for.
    pub fn into_media(self) -> Result<Media> {
        let media = Media::video(self.rgb, self.width, self.height, self.times);
        media.map_err(|e| Error::of(ErrorKind::Prompt, e))
    }
}

impl std::fmt::Debug for Frames {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Frames({} × {}, at {:?} s)", self.width, self.height, self.times)
    }
}

/// Decodes a video and samples its frames.
///
/// - A folder: each file in it, sorted by name with numbers as numbers (`2.png` before `10.png`), is a frame, and there
///   are `fps` of them in a second. Files whose names begin with a dot do not count. Where there are more than
///   `max_frames`, evenly spaced ones are taken.
/// - An animated GIF, PNG or WebP: `fps` frames a second, but at least `min_frames` and at most `max_frames`, evenly
///   spaced over all frames: the arithmetic of `Qwen3VLVideoProcessor.sample_frames` of `transformers`. Each has the
///   time at which it is shown. As in browsers, a delay below 20 ms counts as 100 ms.
///
/// # Errors
///
/// Errors of [`decode_image`](crate::decode_image); and where frames of a folder differ in size, or an image is not
/// animated.
pub fn decode_video(
    source: &Source,
    rules: &VideoRules,
    images: &ImageRules,
    limits: &Limits,
) -> Result<Frames> {
    if !(rules.fps.is_finite() && rules.fps > 0.0) {
        let what = format!("{} frames per second, expected a number above 0", rules.fps);
        return Err(Error::new(ErrorKind::Usage, what));
    }
    match source {
        Source::File(path) if path.is_dir() => folder(source, path, rules, images, limits),
        _ => animation(source, rules, images, limits),
    }
}

/// Which of `total` frames are taken where `wanted` would be right: `numpy.linspace(0, total - 1, n).round()`.
fn sampled(total: usize, wanted: usize, rules: &VideoRules) -> Vec<usize> {
    let count = wanted.max(rules.min_frames).min(rules.max_frames).min(total).max(1);
    let last = total.saturating_sub(1);
    let step = last as f64 / (count.max(2) - 1) as f64;
    let index = |i: usize| {
        if i + 1 == count && count > 1 {
            last
        } else {
            (i as f64 * step).round_ties_even() as usize
        }
    };
    (0..count).map(index).collect()
}

fn folder(
    source: &Source,
    path: &Path,
    rules: &VideoRules,
    images: &ImageRules,
    limits: &Limits,
) -> Result<Frames> {
    let failed = |e| Error::io(ErrorKind::Io, path, e);
    let mut files: Vec<PathBuf> = Vec::new();
    for entry in std::fs::read_dir(path).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if entry.file_name().as_encoded_bytes().starts_with(b".") {
            continue;
        }
        files.push(entry.path());
        if files.len() as u64 > limits.frames {
            return Err(too_many(source, limits));
        }
    }
    if files.is_empty() {
        return Err(source.refused("no images in this folder").hint("each frame is an image file"));
    }
    alphanumeric_sort::sort_path_slice(&mut files);
    let indices = sampled(files.len(), files.len(), rules);
    let mut frames: Option<Frames> = None;
    for (count, &index) in indices.iter().enumerate() {
        let Some(file) = files.get(index) else { continue };
        let this = Source::File(file.clone());
        let image = decode_image(&this, images, limits)?;
        let frames = match &mut frames {
            Some(frames) => frames,
            empty => {
                let (width, height) = (image.width, image.height);
                check_sampled(source, indices.len(), width, height, limits)?;
                let rgb = Vec::new();
                empty.insert(Frames { rgb, width, height, times: Vec::new() })
            }
        };
        if (image.width, image.height) != (frames.width, frames.height) {
            let (width, height) = (frames.width, frames.height);
            return Err(this
                .refused(format!(
                    "{} × {} pixels, but the first frame of the video has {width} × {height}",
                    image.width, image.height
                ))
                .hint("give all frames one size"));
        }
        if count == 0 {
            let bytes = image.rgb.len().saturating_mul(indices.len());
            frames.rgb = zeroed(source, bytes)?;
            frames.rgb.clear();
        }
        frames.rgb.extend_from_slice(&image.rgb);
        frames.times.push((index as f64 / f64::from(rules.fps)) as f32);
    }
    frames.ok_or_else(|| source.refused("no images in this folder"))
}

fn animation(
    source: &Source,
    rules: &VideoRules,
    images: &ImageRules,
    limits: &Limits,
) -> Result<Frames> {
    let bytes = source.read(limits)?;
    let format = Format::expect(source, bytes.get(..HEAD).unwrap_or(&bytes), Kind::Video)?;
    let broken = |e| source.broken(format.name(), e);
    let still = || {
        source
            .refused(format!("a {} image that is not animated, expected a video", format.name()))
            .hint("give it as an image, or a folder of images as a video")
    };
    // Twice, so that no more frames than those that are kept are in memory: the number and times of all are known at
    // the end only.
    let Some(Decoded { width, height, frames }) = decode(source, format, &bytes, limits)? else {
        return Err(still());
    };
    let max = limits.video_pixels.saturating_mul(DECODED) / (u64::from(width) * u64::from(height));
    let (mut starts, mut now) = (Vec::new(), 0.0f64);
    for frame in frames {
        let (numerator, denominator) = frame.map_err(broken)?.delay().numer_denom_ms();
        let delay = f64::from(numerator) / f64::from(denominator.max(1));
        starts.push(now);
        now += if delay < 20.0 { 100.0 } else { delay };
        if starts.len() as u64 > limits.frames.min(max) {
            return Err(too_many(source, limits));
        }
    }
    if starts.len() < 2 {
        return Err(still());
    }
    let wanted = (now * f64::from(rules.fps) / 1000.0) as usize;
    let indices = sampled(starts.len(), wanted, rules);
    check_sampled(source, indices.len(), width, height, limits)?;
    let size = width as usize * height as usize * 3;
    let mut rgb = zeroed(source, size.saturating_mul(indices.len()))?;
    rgb.clear();
    let mut times = Vec::with_capacity(indices.len());
    let again = decode(source, format, &bytes, limits)?.ok_or_else(still)?;
    let mut wanted = indices.iter().copied().peekable();
    for (index, frame) in again.frames.enumerate() {
        let frame = frame.map_err(broken)?;
        if wanted.peek() != Some(&index) {
            continue;
        }
        let pixels = frame.into_buffer().into_raw();
        let pixels = pixels::to_rgb(pixels, ColorType::Rgba8, images.alpha).unwrap_or_default();
        if pixels.len() != size {
            return Err(
                source.broken(format.name(), format_args!("frame {index} has another size"))
            );
        }
        rgb.extend_from_slice(&pixels);
        times.push((starts.get(index).copied().unwrap_or_default() / 1000.0) as f32);
        wanted.next();
        if wanted.peek().is_none() {
            break;
        }
    }
    Ok(Frames { rgb, width, height, times })
}

struct Decoded<'a> {
    width: u32,
    height: u32,
    frames: image::Frames<'a>,
}

/// The frames of an animation, each on the whole canvas; `None` for a still image.
fn decode<'a>(
    source: &Source,
    format: Format,
    bytes: &'a [u8],
    limits: &Limits,
) -> Result<Option<Decoded<'a>>> {
    let broken = |e| source.broken(format.name(), e);
    let reader = Cursor::new(bytes);
    // The animations' decoders hold several canvases of four bytes a pixel.
    let pixels = match format {
        Format::Png => png_pixels(source, bytes, limits)?,
        _ => limits.pixels,
    };
    let mut allowance = allowance(pixels, bytes.len());
    allowance.max_alloc = allowance.max_alloc.map(|max| max.saturating_mul(2));
    let (width, height, frames) = match format {
        Format::Gif => {
            let mut decoder = GifDecoder::new(reader).map_err(broken)?;
            let (width, height) = decoder.dimensions();
            check_size(source, width, height, limits)?;
            decoder.set_limits(allowance).map_err(broken)?;
            (width, height, decoder.into_frames())
        }
        Format::Png => {
            let decoder = PngDecoder::with_limits(reader, allowance).map_err(broken)?;
            let (width, height) = decoder.dimensions();
            check_size(source, width, height, limits)?;
            if !decoder.is_apng().map_err(broken)? {
                return Ok(None);
            }
            (width, height, decoder.apng().map_err(broken)?.into_frames())
        }
        Format::Webp => {
            let decoder = WebPDecoder::new(reader).map_err(broken)?;
            let (width, height) = decoder.dimensions();
            check_size(source, width, height, limits)?;
            if !decoder.has_animation() {
                return Ok(None);
            }
            (width, height, decoder.into_frames())
        }
        _ => return Ok(None),
    };
    Ok(Some(Decoded { width, height, frames }))
}

fn check_sampled(
    source: &Source,
    frames: usize,
    width: u32,
    height: u32,
    limits: &Limits,
) -> Result<()> {
    let pixels = (frames as u64).saturating_mul(u64::from(width) * u64::from(height));
    if pixels > limits.video_pixels {
        let what = format!(
            "{frames} frames of {width} × {height} are {:.0} megapixels, at most {:.0} are read",
            pixels as f64 / 1e6,
            limits.video_pixels as f64 / 1e6
        );
        return Err(source
            .refused(what)
            .hint("take fewer frames a second, or scale the frames down"));
    }
    Ok(())
}

fn too_many(source: &Source, limits: &Limits) -> Error {
    let max = limits.frames;
    source
        .refused(format!("more frames than are read ({max}, fewer of large ones)"))
        .hint("cut out the part that matters")
}
