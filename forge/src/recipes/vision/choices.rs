//! Options of recipes with a vision tower, and what they choose: sizes of images, the tower's precision.

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;

use super::config::{Patches, Vision};
use super::tower::Tower;
use crate::kit::{Layers, VISION_WEIGHTS};
use crate::recipe::RecipeOptions;
use crate::recipes::choices::numbers;
use crate::registry::RecipeOption;

/// Side of the square that images are stretched to by default, rounded down to whole tokens.
pub(in crate::recipes) const DEFAULT_SIZE: usize = 512;

pub(in crate::recipes) const IMAGE_SIZE: RecipeOption = RecipeOption {
    name: "image-size",
    values: &[],
    help: "side of the square that images are stretched to, in pixels; 512 by default, or the multiple of a token's \
           side below",
};
pub(in crate::recipes) const IMAGE_PATCHES: RecipeOption = RecipeOption {
    name: "image-patches",
    values: &[],
    help: "patches of the vision graphs, such as 256,512,1024: images keep their shape, and the smallest graph \
           that holds one takes it",
};
/// The vision tower, in the precision of the options.
pub(super) fn tower<'a>(
    checkpoint: &'a Checkpoint,
    vision: &'a Vision,
    options: &RecipeOptions,
) -> Tower<'a> {
    let precision = VISION_WEIGHTS.precision(options);
    Tower { layers: Layers::new(checkpoint, precision, vision.form.eps), vision }
}

/// Patches that the vision graphs take, the smallest first; a square of `default` pixels a side by default.
pub(super) fn patches(
    vision: &Vision,
    options: &RecipeOptions,
    default: usize,
) -> Result<Vec<Patches>> {
    let usage = |what: String| Error::new(ErrorKind::Usage, what);
    let side = vision.patch * vision.merge;
    let room = |patches: usize| {
        let tokens = patches / vision.unit();
        if tokens < options.max_ctx {
            return Ok(());
        }
        Err(usage(format!(
            "an image of {patches} patches takes {tokens} tokens, and the context has {}",
            options.max_ctx
        ))
        .hint("make the images smaller, or the context longer"))
    };
    let size = options.choice(IMAGE_SIZE.name);
    let mut counts = numbers(options, IMAGE_PATCHES.name, 1..=1 << 16)?;
    if counts.is_none() && size.is_none() {
        let shapes = vision.form.shapes.iter().map(|count| count / vision.unit() * vision.unit());
        let half = options.max_ctx.saturating_mul(vision.unit()) / 2;
        let fitting: Vec<_> = shapes.filter(|count| *count <= half).collect();
        counts = Some(fitting).filter(|fitting| !fitting.is_empty());
    }
    let Some(counts) = counts else {
        let pixels = size.map_or(Ok(default), str::parse);
        let pixels = pixels.ok().filter(|n| (side..=1 << 14).contains(n) && n.is_multiple_of(side));
        let pixels = pixels.ok_or_else(|| {
            let found = size.map_or_else(|| default.to_string(), str::to_owned);
            usage(format!("image-size {found:?}, expected a multiple of {side} up to 16384"))
                .hint(format!("a token of an image is a square of {side} × {side} pixels"))
        })?;
        let patches = Patches::Square(pixels / vision.patch);
        return room(patches.count()).map(|()| vec![patches]);
    };
    if size.is_some() {
        return Err(usage(
            "image-size and image-patches are both set, expected one of them".to_owned(),
        )
        .hint("image-size stretches images to a square, image-patches keeps their shape"));
    }
    if counts.iter().any(|count| !count.is_multiple_of(vision.unit())) {
        let unit = vision.unit();
        return Err(usage(format!("image-patches {counts:?}, expected multiples of {unit}")));
    }
    counts.iter().try_for_each(|count| room(*count))?;
    Ok(counts.into_iter().map(Patches::UpTo).collect())
}
