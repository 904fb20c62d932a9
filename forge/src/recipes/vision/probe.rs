//! Magnitudes of the vision tower's hidden states on an image, which is shaped as the host-op shapes it.

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_core::op::Segment;
use qhx_graph::weight::{Storage, Weight};
use qhx_kit::vision::{
    Image, Normalisation, PatchLayout, Patchify, Resizer, Size, resample_positions, smart_resize,
};

use super::choices::{VISION_SHIFT, patches, tower, vision_shift};
use super::config::{Patches, Vision};
use super::tables::{Processor, positions};
use crate::recipe::{Probe, RecipeOptions, Scaling, from_kit};

/// The blocks of the tower on the patches of one image; `default` as in [`super::add`].
pub(in crate::recipes) fn probe(
    checkpoint: &Checkpoint,
    vision: &Vision,
    options: &RecipeOptions,
    default: usize,
    shown: Segment<'_>,
) -> Result<Probe> {
    let Vision { hidden, patch, temporal, merge, side, .. } = *vision;
    let graphs = patches(vision, options, default)?;
    let processor = Processor::read(checkpoint)?;
    let image = Image::of_segment(&shown).map_err(from_kit)?;
    let size = match graphs.as_slice() {
        [Patches::Square(side)] => {
            let side = (side * patch) as u32;
            Size { width: side, height: side }
        }
        _ => {
            let [min, max] = processor.areas(vision, &graphs);
            smart_resize(image.size(), (patch * merge) as u32, min, max).map_err(from_kit)?
        }
    };
    let mut resizer = Resizer::default();
    let image = resizer.resize(image, size).map_err(from_kit)?;
    let patchify = Patchify::new(patch, merge, PatchLayout::ChannelsFirst).map_err(from_kit)?;
    let grid = patchify.grid(size).map_err(from_kit)?;
    let normalisation = Normalisation::mean_std(processor.mean, processor.std, 1.0 / 255.0);
    let mut pixels = vec![0.0; grid.patches() * patchify.patch_len(temporal)];
    patchify
        .write(&vec![image; temporal], &normalisation.map_err(from_kit)?, &mut pixels)
        .map_err(from_kit)?;
    let table = Weight::new(positions(checkpoint, vision)?, Storage::Float).to_f32()?;
    let mut interpolated = vec![0.0; grid.patches() * hidden];
    resample_positions(&table, side, hidden, grid, merge, &mut interpolated).map_err(from_kit)?;
    Ok(Probe {
        graph: tower(checkpoint, vision, options).probe(grid, interpolated)?,
        inputs: vec![("pixels".to_owned(), pixels)],
        scaling: Some(Scaling {
            option: VISION_SHIFT.name,
            now: u32::from(vision_shift(options)),
            max: VISION_SHIFT.values.len() as u32 - 1,
        }),
    })
}
