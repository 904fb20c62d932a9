//! Output of image decoders, and the memory that they may take.

use image::ColorType;
use image::metadata::Orientation;
use qhx_base::Result;

use crate::{Limits, Source};

/// Output of an image decoder.
pub(crate) struct Raw {
    pub pixels: Vec<u8>,
    pub color: ColorType,
    pub width: u32,
    pub height: u32,
    pub orientation: Orientation,
}

/// Bytes of text and profiles that a decoder may take beside the image.
const BESIDE: u64 = 16 << 20;

/// Memory that decoders of the crate `image` may take beside the pixels that they are given, for an image of `pixels`
/// pixels in a file of `bytes` bytes.
pub(crate) fn allowance(pixels: u64, bytes: usize) -> image::Limits {
    let mut allowance = image::Limits::no_limits();
    // Buffers of the image, with 16-bit values; and chunks as they stand in the file.
    let buffers = pixels.saturating_mul(8).saturating_add(bytes as u64);
    allowance.max_alloc = Some(buffers.saturating_add(BESIDE));
    allowance
}

/// Pixels of a PNG image by its first chunk, within the limits. Its decoder takes memory for profiles before it can be
/// asked; 0 for what is no PNG image.
pub(crate) fn png_pixels(source: &Source, bytes: &[u8], limits: &Limits) -> Result<u64> {
    let [width, height] = [16, 20].map(|at| {
        let size = bytes.get(at..).and_then(|rest| rest.first_chunk::<4>());
        size.map_or(0, |size| u32::from_be_bytes(*size))
    });
    if width > 0 && height > 0 {
        check_size(source, width, height, limits)?;
    }
    Ok(u64::from(width) * u64::from(height))
}

/// Refuses an image without pixels, and one with too many.
pub(crate) fn check_size(source: &Source, width: u32, height: u32, limits: &Limits) -> Result<()> {
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 {
        return Err(source
            .refused(format!("an image of {width} × {height} pixels"))
            .hint("save it again with another program"));
    }
    if pixels > limits.pixels {
        let max = limits.pixels as f64 / 1e6;
        return Err(source
            .refused(format!(
                "{width} × {height} pixels are {:.1} megapixels, at most {max:.1} are read",
                pixels as f64 / 1e6
            ))
            .hint("scale it down first: a model sees a few megapixels of it at most"));
    }
    Ok(())
}

/// A buffer of zeros, if there is memory for it.
pub(crate) fn zeroed(source: &Source, len: usize) -> Result<Vec<u8>> {
    let mut buffer = Vec::new();
    buffer.try_reserve_exact(len).map_err(|e| {
        source
            .refused(format!("no memory for {len} bytes of pixels: {e}"))
            .hint("scale it down first")
    })?;
    buffer.resize(len, 0);
    Ok(buffer)
}
