//! The host's tables of the vision tower, distinguished by their numbers of elements.

use serde::Deserialize;

use super::settings::Settings;
use crate::kernels::f16_to_f32;
use qhx_op::{BufferId, DType, Error, Host, Result};

/// Values of a table: in a mapped file, or made of one.
#[derive(Debug)]
pub(super) enum Table {
    Mapped(BufferId),
    Computed(Vec<f32>),
}

impl Table {
    pub fn values<'a>(&'a self, host: &'a Host) -> &'a [f32] {
        match self {
            Self::Mapped(buffer) => host.f32s(*buffer),
            Self::Computed(values) => values,
        }
    }

    /// The table called `name` under one of the keys that manifests have for it.
    fn open(host: &mut Host, name: &str) -> Result<(Self, String)> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Entry {
            Path(String),
            Typed { path: String, dtype: DType },
        }
        let pointers = [
            format!("/artifacts/vision/{name}"),
            format!("/artifacts/vis_{name}"),
            format!("/artifacts/vis_{name}_f32"),
        ];
        for pointer in &pointers {
            let Some(entry) = host.value::<Entry>(pointer)? else { continue };
            let (path, dtype) = match entry {
                Entry::Path(path) => (path, DType::F32),
                Entry::Typed { path, dtype } => (path, dtype),
            };
            let buffer = host.artifact(pointer, &path)?;
            let table = match dtype {
                DType::F32 if host.len(buffer).is_multiple_of(4) => Self::Mapped(buffer),
                DType::F16 if host.len(buffer).is_multiple_of(2) => {
                    let half = host.f16s(buffer);
                    let mut values = vec![0.0; half.len()];
                    f16_to_f32(half, &mut values);
                    Self::Computed(values)
                }
                other => {
                    return Err(Error::artifact(format!(
                        "{path}: {} bytes of {other}, expected whole f32 or f16 values",
                        host.len(buffer)
                    )));
                }
            };
            return Ok((table, path));
        }
        let keys: Vec<_> =
            pointers.iter().map(|p| p.trim_start_matches('/').replace('/', ".")).collect();
        Err(Error::manifest(format!(
            "the bundle has a vision graph, but its manifest names no table {name}; looked for {}",
            keys.join(", ")
        )))
    }
}

/// The tables of patch embedding and learned positions.
#[derive(Debug)]
pub(super) struct Tables {
    /// `[hidden, 3 · frames · patch²]`; none where the file holds the sum over frames alone.
    pub moving: Option<Table>,
    /// `[hidden, 3 · patch²]`, the sum over frames: an image is the same frame several times.
    pub still: Table,
    pub bias: Table,
    pub positions: Positions,
}

/// Learned positions.
#[derive(Debug)]
pub(super) enum Positions {
    /// Positions of a square with this number a side, resampled for each grid.
    Square(Table, usize),
    /// Positions of the one grid that the graph takes, in the order of its patches.
    Grid(Table),
}

impl Tables {
    /// Opens the tables for rows of `hidden` values. `fixed` is the number of patches of a graph that takes one grid.
    ///
    /// # Errors
    /// When a table is missing, or has another size.
    pub fn open(
        host: &mut Host,
        settings: &Settings,
        hidden: usize,
        fixed: Option<usize>,
    ) -> Result<Self> {
        let Settings { patch_size: patch, temporal_patch_size: frames, .. } = *settings;
        let (weight, path) = Table::open(host, "patch_embed")?;
        let plane = patch * patch;
        let found = weight.values(host).len();
        let (moving, still) = if found == hidden.saturating_mul(3 * frames * plane) {
            let still = Table::Computed(sum_frames(weight.values(host), frames, plane));
            (Some(weight), still)
        } else if found == hidden.saturating_mul(3 * plane) {
            (None, weight)
        } else {
            return Err(Error::artifact(format!(
                "{path}: {found} values, expected {hidden} rows (the width of the vision graph's x) of 3 x {frames} x \
                 {patch} x {patch}, or of 3 x {patch} x {patch} summed over the frames"
            )));
        };
        let (bias, path) = Table::open(host, "patch_embed_bias")?;
        let found = bias.values(host).len();
        if found != hidden {
            return Err(Error::artifact(format!("{path}: {found} values, expected {hidden}")));
        }
        let (positions, path) = Table::open(host, "pos_embed")?;
        let found = positions.values(host).len();
        let rows = found.checked_div(hidden).filter(|rows| rows * hidden == found && *rows > 0);
        let side = rows.map(usize::isqrt).filter(|side| Some(side * side) == rows);
        let positions = match side {
            Some(_) if settings.pos_side.is_none() && rows == fixed => Positions::Grid(positions),
            Some(side) if settings.pos_side.is_none_or(|declared| declared == side) => {
                Positions::Square(positions, side)
            }
            _ => {
                let square = settings
                    .pos_side
                    .map_or_else(|| "a square of".to_owned(), |n| format!("{n} x {n}"));
                let grid = fixed.map_or_else(String::new, |n| {
                    format!(", or {n}, the patches of the vision graph,")
                });
                return Err(Error::artifact(format!(
                    "{path}: {found} values, expected {square} rows{grid} of {hidden}"
                )));
            }
        };
        Ok(Self { moving, still, bias, positions })
    }
}

/// The filters for an image that stands in every frame.
fn sum_frames(weight: &[f32], frames: usize, plane: usize) -> Vec<f32> {
    let mut still = vec![0.0; weight.len() / frames.max(1)];
    let channels = weight.chunks_exact(frames * plane).zip(still.chunks_exact_mut(plane));
    for (moving, still) in channels {
        for frame in moving.chunks_exact(plane) {
            still.iter_mut().zip(frame).for_each(|(sum, weight)| *sum += weight);
        }
    }
    still
}

#[cfg(test)]
mod tests {
    use super::sum_frames;

    #[test]
    fn the_filters_of_a_still_image_are_sums_over_its_frames() {
        // One output, two channels, two frames of two pixels.
        let weight = [1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0];
        assert_eq!(sum_frames(&weight, 2, 2), [11.0, 22.0, 33.0, 44.0]);
        assert_eq!(sum_frames(&weight, 1, 2), weight);
    }
}
