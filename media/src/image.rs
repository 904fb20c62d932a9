//! Decoding images: PNG, JPEG, WebP and GIF files to RGB of 8 bits a channel.

use std::io::Cursor;

use image::codecs::gif::GifDecoder;
use image::codecs::png::PngDecoder;
use image::codecs::webp::WebPDecoder;
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, RgbImage};
use qhx_base::{Error, ErrorKind, Result};
use qhx_types::Media;

use crate::format::{Format, Kind};
use crate::raw::{Raw, allowance, check_size, png_pixels, zeroed};
use crate::source::HEAD;
use crate::{ImageRules, Limits, Source, jpeg, pixels};

/// A decoded image.
#[derive(Clone, PartialEq, Eq)]
pub struct Image {
    /// Red, green and blue of each pixel, row by row from the top: `width · height · 3` values.
    pub rgb: Vec<u8>,
    /// Pixels in a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl Image {
    /// The image as a part of a prompt.
    ///
    /// # Errors
    /// When there are not `width · height · 3` values, or none.
    pub fn into_media(self) -> Result<Media> {
        let media = Media::image(self.rgb, self.width, self.height);
        media.map_err(|e| Error::of(ErrorKind::Prompt, e))
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({} × {})", self.width, self.height)
    }
}

/// Decodes an image: PNG, JPEG, WebP, GIF; of an animation the first frame.
///
/// Greys, palettes, CMYK and 16-bit values become RGB of 8 bits each. Colour profiles are not applied, which is what
/// `transformers` does. The EXIF orientation is applied where the rules say so.
///
/// # Errors
///
/// [`ErrorKind::Io`] where the file cannot be read; [`ErrorKind::Prompt`]
/// where it is no image, is broken or cut off, or larger than the limits.
pub fn decode_image(source: &Source, rules: &ImageRules, limits: &Limits) -> Result<Image> {
    let bytes = source.read(limits)?;
    let format = Format::expect(source, bytes.get(..HEAD).unwrap_or(&bytes), Kind::Image)?;
    let raw = decode(source, format, &bytes, limits)?;
    drop(bytes);
    finish(source, raw, rules)
}

fn decode(source: &Source, format: Format, bytes: &[u8], limits: &Limits) -> Result<Raw> {
    let broken = |e| source.broken(format.name(), e);
    let reader = Cursor::new(bytes);
    match format {
        Format::Png => {
            let allowance = allowance(png_pixels(source, bytes, limits)?, bytes.len());
            let decoder = PngDecoder::with_limits(reader, allowance).map_err(broken)?;
            read(source, format, decoder, limits)
        }
        Format::Gif => {
            let mut decoder = GifDecoder::new(reader).map_err(broken)?;
            decoder.set_limits(allowance(limits.pixels, bytes.len())).map_err(broken)?;
            read(source, format, decoder, limits)
        }
        Format::Webp => {
            let decoder = WebPDecoder::new(reader).map_err(broken)?;
            read(source, format, decoder, limits)
        }
        _ => jpeg::decode(source, bytes, limits),
    }
}

fn read(
    source: &Source,
    format: Format,
    mut decoder: impl ImageDecoder,
    limits: &Limits,
) -> Result<Raw> {
    let (width, height) = decoder.dimensions();
    check_size(source, width, height, limits)?;
    // A damaged EXIF block is no reason to refuse the image.
    let orientation = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let color = decoder.color_type();
    let len = usize::try_from(decoder.total_bytes()).unwrap_or(usize::MAX);
    let mut pixels = zeroed(source, len)?;
    decoder.read_image(&mut pixels).map_err(|e| source.broken(format.name(), e))?;
    Ok(Raw { pixels, color, width, height, orientation })
}

fn finish(source: &Source, raw: Raw, rules: &ImageRules) -> Result<Image> {
    let Raw { pixels, color, width, height, orientation } = raw;
    let malformed =
        || source.broken("image", format_args!("{width} × {height} pixels of {color:?}"));
    let rgb = pixels::to_rgb(pixels, color, rules.alpha).ok_or_else(malformed)?;
    let image = RgbImage::from_raw(width, height, rgb).ok_or_else(malformed)?;
    let mut image = DynamicImage::ImageRgb8(image);
    if rules.upright {
        image.apply_orientation(orientation);
    }
    let (width, height) = (image.width(), image.height());
    Ok(Image { rgb: image.into_rgb8().into_raw(), width, height })
}
