//! What decoders of pictures give and may take.

use image::ColorType;
use image::metadata::Orientation;
use qhx_core::Result;

use crate::{Limits, Source};

/// What a decoder gives.
pub(crate) struct Raw {
    pub pixels: Vec<u8>,
    pub color: ColorType,
    pub width: u32,
    pub height: u32,
    pub orientation: Orientation,
}

/// What decoders of the crate `image` may take beside the pixels that they are given.
pub(crate) fn allowance(limits: &Limits) -> image::Limits {
    let mut allowance = image::Limits::no_limits();
    // Buffers of a picture as large as may be, with 16-bit values; and text and profiles beside it.
    allowance.max_alloc = Some(limits.pixels.saturating_mul(8).saturating_add(64 << 20));
    allowance
}

/// Refuses a picture without pixels, and one with too many.
pub(crate) fn check_size(source: &Source, width: u32, height: u32, limits: &Limits) -> Result<()> {
    let pixels = u64::from(width) * u64::from(height);
    if pixels == 0 {
        return Err(source
            .refused(format!("a picture of {width} × {height} pixels"))
            .hint("save it anew with another program"));
    }
    if pixels > limits.pixels {
        let most = limits.pixels as f64 / 1e6;
        return Err(source
            .refused(format!(
                "{width} × {height} pixels are {:.1} megapixels, at most {most:.1} are read",
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
