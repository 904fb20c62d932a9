//! Host work before the vision graph: the tables of patch embedding and learned positions, and the choice of an image's
//! size.

use std::sync::Arc;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::weight::{RowSource, held};
use qhx_kit::vision::AxialOrder;
use serde_json::{Map, Value, json};

use super::config::{InTime, Patches, Vision, Windows};
use crate::kit::{self, MatrixFile, matrices, object};
use crate::recipe::Tables;

/// Min and max area that published processors declare, for synthetic models.
const IMAGE_PIXELS: [u64; 2] = [65_536, 16_777_216];
/// Longest side that published processors of Mistral 3 declare, for synthetic models.
const LONGEST: u64 = 1540;
/// The same as [`IMAGE_PIXELS`] for all frames of a video together.
const VIDEO_PIXELS: [u64; 2] = [4096, 25_165_824];

/// Weight `[hidden, 3 · frames · patch · patch]` and bias `[hidden]` of the patch embedding.
pub(super) fn patch_embed(
    checkpoint: &Checkpoint,
    vision: &Vision,
) -> Result<[Arc<dyn RowSource>; 2]> {
    let Vision { hidden, temporal, patch, .. } = *vision;
    let (projection, bias) = vision.form.patch;
    let shape = [hidden, 3, temporal, patch, patch];
    // Of a class without videos it is a convolution over one frame, which has no axis of time.
    let flat = [hidden, 3, patch, patch];
    let shape = if vision.form.videos { &shape[..] } else { &flat };
    let weight = checkpoint.rows(&format!("{projection}.weight"), shape)?;
    let bias = match bias {
        false => zeros([hidden, 1]),
        true => checkpoint.rows(&format!("{projection}.bias"), &[hidden])?,
    };
    Ok([weight, bias])
}

/// The table of learned positions, `[side², hidden]`; a row of zeros of a tower without.
pub(super) fn positions(checkpoint: &Checkpoint, vision: &Vision) -> Result<Arc<dyn RowSource>> {
    let shape = [vision.side * vision.side, vision.hidden];
    match vision.form.positions {
        None => Ok(zeros(shape)),
        Some(name) => checkpoint.matrix(&format!("{name}.weight"), shape),
    }
}

/// Zeros that a host adds in place of a tensor that the checkpoint does not have.
fn zeros(shape: [usize; 2]) -> Arc<dyn RowSource> {
    held("zeros", shape, vec![0.0; shape[0] * shape[1]])
}

/// Files `vis_patch_embed_f32`, `vis_patch_embed_bias_f32` and `vis_pos_embed_f32`.
pub(super) fn tables(checkpoint: &Checkpoint, vision: &Vision) -> Result<Tables> {
    let [weight, bias] = patch_embed(checkpoint, vision)?;
    Ok(matrices(
        "vision",
        vec![
            MatrixFile::in_f32("patch_embed", "vis_patch_embed", weight),
            MatrixFile::in_f32("patch_embed_bias", "vis_patch_embed_bias", bias),
            MatrixFile::in_f32("pos_embed", "vis_pos_embed", positions(checkpoint, vision)?),
        ],
    ))
}

/// `params.vision` of the manifest: what the host needs to know to make patches of an image.
pub(super) fn params(
    checkpoint: &Checkpoint,
    vision: &Vision,
    patches: &[Patches],
) -> Result<Map<String, Value>> {
    let image = Processor::read(checkpoint, vision)?;
    let mut params = object(json!({
        "hidden": vision.hidden,
        "head_dim": vision.dim(),
        "rope_theta": vision.rope_theta,
        "patch_size": vision.patch,
        "temporal_patch_size": vision.temporal,
        "merge_size": vision.merge,
        "pos_side": vision.side,
        "n_deepstack": vision.deepstack.len(),
        "image_mean": image.mean,
        "image_std": image.std,
    }));
    let sizes = match patches {
        [Patches::Square(side)] => json!({"image_size": side * vision.patch}),
        _ => match image.longest {
            Some(longest) => json!({"longest_edge": longest}),
            None => {
                let [min, max] = image.areas(vision, patches);
                json!({"min_pixels": min, "max_pixels": max})
            }
        },
    };
    params.append(&mut object(sizes));
    let shaped = !matches!(patches, [Patches::Square(_)]);
    if shaped && vision.form.videos {
        let [min, max] = areas(&kit::Processor::video(checkpoint)?, VIDEO_PIXELS)?;
        params.append(&mut object(json!({"video_min_pixels": min, "video_max_pixels": max})));
    }
    // What is usual is left out.
    for (key, value, unusual) in [
        ("videos", false, !vision.form.videos),
        ("pos_aligned", false, !vision.form.aligned),
        ("grow", true, vision.form.grows),
        ("rope_between", true, vision.form.rope == AxialOrder::RowsColumnsBetween),
    ] {
        if unusual {
            params.insert(key.to_owned(), json!(value));
        }
    }
    if let Some(Windows { side, .. }) = vision.windows {
        params.insert("window".to_owned(), json!(side));
    }
    if let Some(in_time) = vision.in_time {
        let (key, positions) = match in_time {
            InTime::PerSecond(positions) => ("tokens_per_second", positions),
            InTime::Step(positions) => ("time_step", positions),
        };
        params.insert(key.to_owned(), json!(positions));
    }
    Ok(params)
}

/// Options of a processor's file for images.
pub(super) struct Processor {
    /// Min and max area.
    pixels: [u64; 2],
    /// Maximum of a side, where that is what the processor limits (`PixtralImageProcessor`).
    longest: Option<u64>,
    pub mean: [f64; 3],
    pub std: [f64; 3],
}

impl Processor {
    /// Min and max area of images that keep their shape: the processor's, or that of the largest graph.
    pub fn areas(&self, vision: &Vision, patches: &[Patches]) -> [u64; 2] {
        let count = patches.iter().map(|patches| patches.count()).max().unwrap_or(0);
        let max = (count as u64).saturating_mul((vision.patch * vision.patch) as u64);
        self.pixels.map(|pixels| pixels.min(max))
    }

    pub fn read(checkpoint: &Checkpoint, vision: &Vision) -> Result<Self> {
        let file = kit::Processor::image(checkpoint)?;
        let [mean, std] = file.mean_std()?;
        file.usual_steps()?;
        file.only("/resample", &json!(3))?;
        // Pixtral's processor has the sizes of patches in another file.
        if vision.form.rope != AxialOrder::RowsColumnsBetween {
            file.only("/patch_size", &json!(vision.patch))?;
            file.only("/merge_size", &json!(vision.merge))?;
        }
        if vision.form.videos {
            file.only("/temporal_patch_size", &json!(vision.temporal))?;
        }
        // The key of a side is that of an area in other processors.
        let longest = (vision.form.rope == AxialOrder::RowsColumnsBetween)
            .then(|| number(&file, ["/size/longest_edge", "/size/height"], LONGEST));
        let longest = longest.transpose()?;
        let pixels = match longest {
            Some(_) => IMAGE_PIXELS,
            None => areas(&file, IMAGE_PIXELS)?,
        };
        Ok(Self { pixels, longest, mean, std })
    }
}

/// Min and max area, whatever the keys are called; where both spellings are there, the older counts.
fn areas(file: &kit::Processor, [min, max]: [u64; 2]) -> Result<[u64; 2]> {
    let min = number(file, ["/min_pixels", "/size/shortest_edge"], min)?;
    let max = number(file, ["/max_pixels", "/size/longest_edge"], max)?;
    if min > max {
        return Err(file.fault(&format!(
            "areas from {min} to {max}, expected the first to be at most the second"
        )));
    }
    Ok([min, max])
}

fn number(file: &kit::Processor, keys: [&str; 2], default: u64) -> Result<u64> {
    let Some((key, value)) = keys.iter().find_map(|key| Some((key, file.get(key)?))) else {
        return Ok(default);
    };
    let number = value.as_u64().filter(|n| (1..=1 << 40).contains(n));
    number.ok_or_else(|| file.bad(key, "numbers"))
}
