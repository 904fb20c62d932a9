//! Sizes that images are resized to.

use std::fmt;

use qhx_op::{Error, Result};

/// Width and height in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Size {
    /// Pixels of a row.
    pub width: u32,
    /// Rows.
    pub height: u32,
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}×{}", self.width, self.height)
    }
}

impl Size {
    /// Number of pixels.
    pub fn area(self) -> u64 {
        u64::from(self.width) * u64::from(self.height)
    }

    /// Bytes of RGB8 pixels; `None` when no memory has as many.
    pub(super) fn rgb_len(self) -> Option<usize> {
        usize::try_from(self.area()).ok()?.checked_mul(3)
    }

    fn of(width: f64, height: f64) -> Option<Self> {
        // A cast of a float saturates, and NaN becomes 0.
        let (w, h) = (width as u32, height as u32);
        let exact = w > 0 && h > 0 && f64::from(w) == width && f64::from(h) == height;
        exact.then_some(Self { width: w, height: h })
    }
}

/// Sides may differ by this factor.
const MAX_RATIO: f64 = 200.0;

/// The size nearest to `size` whose sides are multiples of `factor`, with `min_pixels` to
/// `max_pixels` pixels, about as wide for its height as `size` (`smart_resize` of
/// `Qwen2VLImageProcessor`, which Qwen3-VL uses).
///
/// # Errors
/// When one side of `size` is more than 200 times the other, or is 0.
pub fn smart_resize(size: Size, factor: u32, min_pixels: u64, max_pixels: u64) -> Result<Size> {
    fitting(size, [1, 1], factor, min_pixels, max_pixels)
}

/// The size of the frames of a video, `frames` in all, of which patches span `temporal` each: as [`smart_resize`], but
/// `min_pixels` and `max_pixels` count the pixels of all frames, and a frame one of whose sides is less than `factor`
/// grows first (`smart_resize` of `Qwen3VLVideoProcessor`).
///
/// A video has at least one patch in time, for which its last frame is repeated.
///
/// # Errors
/// Errors of [`smart_resize`].
pub fn smart_resize_video(
    size: Size,
    [frames, temporal]: [usize; 2],
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Result<Size> {
    if temporal == 0 {
        return Err(Error::manifest("patches of 0 frames, expected at least 1"));
    }
    not_empty(size)?;
    let frames = frames.max(temporal);
    let whole = (frames as f64 / temporal as f64).round_ties_even() * temporal as f64;
    fitting(grown(size, factor), [frames, whole as usize], factor, min_pixels, max_pixels)
}

/// The size of an image whose sides have `longest` pixels at most, and are rounded up to multiples of `factor`
/// (`get_resize_output_image_size` of `PixtralImageProcessor`).
///
/// # Errors
/// When a side of `size` is 0, or would be.
pub(super) fn within_longest(size: Size, longest: u32, factor: u32) -> Result<Size> {
    not_empty(size)?;
    if longest == 0 || factor == 0 {
        return Err(Error::manifest(format!(
            "images of at most {longest} pixels a side, a multiple of {factor}: expected positive numbers"
        )));
    }
    let (w, h) = (f64::from(size.width), f64::from(size.height));
    let ratio = (h / f64::from(longest)).max(w / f64::from(longest)).max(1.0);
    let factor = f64::from(factor);
    let side = |side: f64| ((side / ratio).floor() / factor).ceil() * factor;
    let (to_w, to_h) = (side(w), side(h));
    let fits = to_w > 0.0 && to_h > 0.0;
    Size::of(to_w, to_h).filter(|_| fits).ok_or_else(|| unfit(size, to_w, to_h))
}

/// An image one of whose sides is less than `factor`, enlarged until none is: its height first, and each side rounded
/// (`smart_resize` of `PaddleOCRVLImageProcessor`).
pub(super) fn grown_in_turn(size: Size, factor: u32) -> Size {
    let Size { mut width, mut height } = size;
    let scaled = |side: u32, by: u32| {
        let side = u64::from(side) * u64::from(factor);
        (side as f64 / f64::from(by)).round_ties_even() as u32
    };
    if height < factor {
        (width, height) = (scaled(width, height), factor);
    }
    if width < factor {
        (width, height) = (factor, scaled(height, width));
    }
    Size { width, height }
}

/// A frame one of whose sides is less than `factor`, enlarged until none is.
fn grown(size: Size, factor: u32) -> Size {
    if size.width.min(size.height) >= factor {
        return size;
    }
    let factor = f64::from(factor);
    let scale = (factor / f64::from(size.height)).max(factor / f64::from(size.width));
    let side = |side: u32| (f64::from(side) * scale) as u32;
    Size { width: side(size.width), height: side(size.height) }
}

/// [`smart_resize`] with limits for all of `frames` frames: their number, and what it is rounded to.
fn fitting(
    size: Size,
    [frames, whole]: [usize; 2],
    factor: u32,
    min_pixels: u64,
    max_pixels: u64,
) -> Result<Size> {
    if factor == 0 || min_pixels == 0 || min_pixels > max_pixels {
        return Err(Error::manifest(format!(
            "images of {min_pixels} to {max_pixels} pixels with sides that are multiples of \
             {factor}: expected a positive factor, and limits with the lower one first"
        )));
    }
    not_empty(size)?;
    let (w, h) = (f64::from(size.width), f64::from(size.height));
    if w.max(h) / w.min(h) > MAX_RATIO {
        return Err(Error::prompt(format!(
            "an image of {size} pixels: expected sides that differ by a factor of {MAX_RATIO} at \
             most; cut it into pieces"
        )));
    }
    let (f, min, max) = (f64::from(factor), min_pixels as f64, max_pixels as f64);
    let near = |side: f64| (side / f).round_ties_even() * f;
    let (mut to_w, mut to_h) = (near(w), near(h));
    let (frames, whole) = (frames as f64, whole as f64);
    if whole * to_w * to_h > max {
        let beta = (frames * w * h / max).sqrt();
        let below = |side: f64| f.max((side / beta / f).floor() * f);
        (to_w, to_h) = (below(w), below(h));
    } else if whole * to_w * to_h < min {
        let beta = (min / (frames * w * h)).sqrt();
        let above = |side: f64| (side * beta / f).ceil() * f;
        (to_w, to_h) = (above(w), above(h));
    }
    Size::of(to_w, to_h).ok_or_else(|| unfit(size, to_w, to_h))
}

/// The largest size about as wide for its height as `size` that gives at most `max_patches` patches
/// of `patch` by `patch` pixels, with sides that are multiples of `patch · pool`
/// (`get_aspect_ratio_preserving_size` of `Gemma4ImageProcessor`). A side that would be 0 is one
/// such unit.
///
/// # Errors
/// When not even one unit fits the patches, or when a side of `size` is 0.
pub fn aspect_ratio_preserving_size(
    size: Size,
    patch: u32,
    pool: u32,
    max_patches: u32,
) -> Result<Size> {
    let parameters = [patch, pool, max_patches];
    if parameters.contains(&0) {
        return Err(Error::manifest(format!(
            "images of {max_patches} patches of {patch}×{patch} pixels, pooled {pool} by {pool}: \
             expected positive numbers"
        )));
    }
    not_empty(size)?;
    let (w, h) = (f64::from(size.width), f64::from(size.height));
    let [patch, pool, patches] = parameters.map(f64::from);
    let (unit, max_area) = (patch * pool, patches * (patch * patch));
    let scale = (max_area / (w * h)).sqrt();
    let below = |side: f64| (scale * side / unit).floor() * unit;
    let (mut to_w, mut to_h) = (below(w), below(h));
    let longest = (patches / (pool * pool)).floor() * unit;
    if to_h == 0.0 && to_w > 0.0 {
        (to_w, to_h) = (((w / h).floor() * unit).min(longest), unit);
    } else if to_w == 0.0 && to_h > 0.0 {
        (to_w, to_h) = (unit, ((h / w).floor() * unit).min(longest));
    }
    let fits = to_w * to_h <= max_area;
    Size::of(to_w, to_h).filter(|_| fits).ok_or_else(|| unfit(size, to_w, to_h))
}

fn not_empty(size: Size) -> Result<()> {
    match size.area() {
        0 => {
            Err(Error::prompt(format!("an image of {size} pixels has none; expected at least 1×1")))
        }
        _ => Ok(()),
    }
}

fn unfit(size: Size, width: f64, height: f64) -> Error {
    Error::prompt(format!(
        "an image of {size} pixels would become {width}×{height}, which the model cannot take; \
         expected sides that differ less, or a model that takes more patches"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_without_a_result_are_refused() {
        let size = |width, height| Size { width, height };
        for (from, part) in [
            (size(0, 7), "at least 1×1"),
            (size(201, 1), "factor of 200"),
            (size(1, u32::MAX), "factor of 200"),
        ] {
            let error = smart_resize(from, 32, 65536, 1 << 24).unwrap_err();
            assert!(error.message().contains(part), "{error}");
            assert!(error.message().contains(&from.to_string()), "{error}");
        }
        assert!(smart_resize(size(4, 4), 0, 1, 2).is_err());
        assert!(smart_resize(size(4, 4), 2, 3, 2).is_err());
        // The sides would have more pixels than fit 32 bits.
        assert!(smart_resize(size(4, 4), u32::MAX, u64::MAX, u64::MAX).is_err());
        assert!(smart_resize(size(u32::MAX, u32::MAX), 2, 1, u64::MAX).is_err());
        for parameters in [(0, 1, 1), (1, 0, 1), (1, 1, 0), (16, 3, 1)] {
            let (patch, pool, patches) = parameters;
            let error = aspect_ratio_preserving_size(size(9, 9), patch, pool, patches).unwrap_err();
            assert!(error.message().contains("expected"), "{error}");
        }
        assert!(aspect_ratio_preserving_size(size(9, 0), 16, 3, 2520).is_err());
        let max = u32::MAX;
        let _ = aspect_ratio_preserving_size(size(max, 1), max, max, max);
    }
}
