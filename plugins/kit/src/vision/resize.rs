//! Resizing as torchvision does it for u8 pixels.

use fast_image_resize::images::{TypedImage, TypedImageRef};
use fast_image_resize::pixels::U8x3;
use fast_image_resize::{FilterType, ResizeAlg, ResizeOptions};
use serde::Deserialize;

use super::{Image, Size};
use qhx_op::{Error, ErrorCode, Result};

/// Pixels that an image may have, also between the passes: 800 MB.
const MAX_PIXELS: u64 = 1 << 28;

/// The kernel of a resampling; in a manifest its name, `bicubic`. All widen by the scale where an image shrinks
/// (antialias).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Filter {
    /// Keys' cubic with a = −0.5 (Catmull-Rom): `BICUBIC` of torchvision with antialias, and of PIL.
    #[default]
    Bicubic,
    /// The triangle: `BILINEAR` of both.
    Bilinear,
    /// The sinc windowed by its own middle lobe, a = 3: `LANCZOS` of PIL, as the processors of Idefics 3 and SmolVLM
    /// resize. torchvision has none for tensors.
    Lanczos,
}

/// Resizes images, and keeps its memory from one to the next.
///
/// Gives the bits of `torchvision.transforms.v2.functional.resize` for u8 tensors on a CPU with
/// `antialias=True`, with [`Filter::Lanczos`] those of Pillow's `Image.resize` up to version 12 (later ones begin with
/// the vertical pass where the height shrinks much more than the width): the horizontal pass comes first, and its
/// result is rounded and cut to u8 before the vertical one. (`fast_image_resize` called once takes another order: up to
/// 23 levels off.)
#[derive(Debug, Default)]
pub struct Resizer {
    filter: Filter,
    resizer: fast_image_resize::Resizer,
    /// The image after the horizontal pass.
    narrowed: Vec<u8>,
    done: Vec<u8>,
}

impl Resizer {
    /// A resizer that uses `filter`.
    pub fn new(filter: Filter) -> Self {
        Self { filter, ..Self::default() }
    }

    /// The image, as large as `to`; the same pixels where it is so already. The answer lies in the resizer until the
    /// next call.
    ///
    /// # Errors
    /// When `to` has no pixels, or a result, that of the horizontal pass included, more than 2²⁸.
    pub fn resize<'a>(&'a mut self, image: Image<'a>, to: Size) -> Result<Image<'a>> {
        let from = image.size();
        let middle = Size { width: to.width, height: from.height };
        if to.area() == 0 || to.area().max(middle.area()) > MAX_PIXELS {
            return Err(Error::prompt(format!(
                "an image of {from} pixels cannot become {to}: expected at least one pixel, and at \
                 most {MAX_PIXELS} for each of {to} and {middle}"
            )));
        }
        let mut rgb = image.rgb();
        if middle != from {
            scale(&mut self.resizer, self.filter, rgb, from, &mut self.narrowed, middle)?;
            rgb = &self.narrowed;
        }
        if to != middle {
            scale(&mut self.resizer, self.filter, rgb, middle, &mut self.done, to)?;
            rgb = &self.done;
        }
        Image::new(rgb, to.width, to.height)
    }
}

/// One pass, from pixels of size `from` to pixels of size `to`.
fn scale(
    resizer: &mut fast_image_resize::Resizer,
    filter: Filter,
    source: &[u8],
    from: Size,
    target: &mut Vec<u8>,
    to: Size,
) -> Result<()> {
    let failed = |why: &dyn std::fmt::Display| {
        Error::new(
            ErrorCode::INTERNAL,
            format!("resizing an image from {from} to {to} pixels: {why}"),
        )
    };
    let len = to.rgb_len().ok_or_else(|| failed(&"too many bytes"))?;
    let missing = len.saturating_sub(target.len());
    target.try_reserve_exact(missing).map_err(|e| failed(&e))?;
    target.resize(len, 0);
    let filter = match filter {
        Filter::Bicubic => FilterType::CatmullRom,
        Filter::Bilinear => FilterType::Bilinear,
        Filter::Lanczos => {
            lanczos(source, from, target, to);
            return Ok(());
        }
    };
    // Views of one type of pixel: the others would be compiled into this crate, for minutes.
    let source = TypedImageRef::<U8x3>::from_buffer(from.width, from.height, source)
        .map_err(|e| failed(&e))?;
    let mut image =
        TypedImage::<U8x3>::from_buffer(to.width, to.height, target).map_err(|e| failed(&e))?;
    let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(filter)).use_alpha(false);
    resizer.resize_typed(&source, &mut image, &options).map_err(|e| failed(&e))
}

/// One pass as Pillow does it: coefficients of 22 bits.
fn lanczos(source: &[u8], from: Size, target: &mut [u8], to: Size) {
    let (across, below) = (from.width != to.width, from.width as usize * 3);
    let (count, out, inner) =
        if across { (from.width, to.width, 3) } else { (from.height, to.height, below) };
    let kernels: Vec<_> = (0..out).map(|at| lanczos_kernel(count, out, at)).collect();
    let lines = source.chunks_exact(count as usize * inner);
    for (line, done) in lines.zip(target.chunks_exact_mut(out as usize * inner)) {
        for ((first, weights), values) in kernels.iter().zip(done.chunks_exact_mut(inner)) {
            for (at, value) in values.iter_mut().enumerate() {
                let taps = line[first * inner + at..].iter().step_by(inner);
                let sum: i64 = taps.zip(weights).map(|(&v, w)| i64::from(v) * w).sum();
                *value = ((sum + (1 << 21)) >> 22).clamp(0, 255) as u8;
            }
        }
    }
}

/// The first of the values that make value `at` of `out`, and their weights, in units of 2⁻²².
fn lanczos_kernel(count: u32, out: u32, at: u32) -> (usize, Vec<i64>) {
    let scale = f64::from(count) / f64::from(out);
    let wide = scale.max(1.0);
    let (centre, support) = ((f64::from(at) + 0.5) * scale, 3.0 * wide);
    let first = (centre - support + 0.5).max(0.0) as u32;
    let end = ((centre + support + 0.5) as u32).min(count);
    let sinc = |x: f64| {
        let x = x * std::f64::consts::PI;
        if x == 0.0 { 1.0 } else { x.sin() / x }
    };
    let weight = |i: u32| {
        let x = (f64::from(i) - centre + 0.5) * (1.0 / wide);
        if (-3.0..3.0).contains(&x) { sinc(x) * sinc(x / 3.0) } else { 0.0 }
    };
    let weights: Vec<f64> = (first..end).map(weight).collect();
    let sum: f64 = weights.iter().sum();
    let fixed = |w: &f64| (w / sum * f64::from(1 << 22)).round() as i64;
    (first as usize, weights.iter().map(fixed).collect())
}
