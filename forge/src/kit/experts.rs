//! The weights of the experts: where they lie in a checkpoint, and the tables that a bundle has of them.

use std::io::Write;
use std::sync::Arc;

use qhx_core::{Error, ErrorKind, Result};

use super::config::Config;
use crate::checkpoint::Checkpoint;
use crate::progress::Progress;
use crate::recipe::{TableFile, TableSource, Tables};
use crate::weight::{RowSource, Storage, Weight, row_range};

/// Gate, up and down of one expert.
type Matrices = [Arc<dyn RowSource>; 3];

/// All experts, layer by layer, read when they are written.
#[derive(Debug)]
struct Experts {
    /// `[layers · experts]`
    matrices: Vec<Matrices>,
}

/// Files `experts_i8.bin` and `experts_scale.f32`: for each layer and expert gate `[width, hidden]`, up
/// `[width, hidden]`, down `[hidden, width]`, row-major int8 without gaps; one f32 scale for each of
/// these rows in the same order.
pub(super) fn tables(checkpoint: &Checkpoint, config: &Config) -> Result<Tables> {
    let mut matrices = Vec::with_capacity(config.layers * config.experts);
    for layer in 0..config.layers {
        matrices.extend(layer_experts(checkpoint, config, layer)?);
    }
    let file = |field: &str, name: &str| TableFile {
        field: field.to_owned(),
        name: name.to_owned(),
        dtype: None,
    };
    Ok(Tables {
        key: "experts".to_owned(),
        files: vec![file("weights", "experts_i8.bin"), file("scales", "experts_scale.f32")],
        source: Arc::new(Experts { matrices }),
    })
}

/// The experts of a layer, in the names of published checkpoints (`block_sparse_moe.experts.E.w1`) or
/// as stacks (`mlp.experts.gate_up_proj`).
fn layer_experts(checkpoint: &Checkpoint, config: &Config, layer: usize) -> Result<Vec<Matrices>> {
    let (hidden, width, experts) = (config.hidden, config.width, config.experts);
    let stacked = format!("layers.{layer}.mlp.experts");
    if checkpoint.has(&format!("{stacked}.gate_up_proj")) {
        let gate_up = format!("{stacked}.gate_up_proj");
        let gate_up = checkpoint.stack(&gate_up, [experts, 2 * width, hidden])?;
        let down = checkpoint.stack(&format!("{stacked}.down_proj"), [experts, hidden, width])?;
        return Ok((0..experts)
            .map(|expert| {
                let first = 2 * expert * width;
                [
                    row_range(&gate_up, first..first + width),
                    row_range(&gate_up, first + width..first + 2 * width),
                    row_range(&down, expert * hidden..(expert + 1) * hidden),
                ]
            })
            .collect());
    }
    (0..experts)
        .map(|expert| {
            let matrix = |name: &str, shape| {
                let prefix = format!("layers.{layer}.block_sparse_moe.experts.{expert}");
                checkpoint.matrix(&format!("{prefix}.{name}.weight"), shape)
            };
            Ok([
                matrix("w1", [width, hidden])?,
                matrix("w3", [width, hidden])?,
                matrix("w2", [hidden, width])?,
            ])
        })
        .collect()
}

/// Where a layer's router is.
pub(super) fn router(checkpoint: &Checkpoint, layer: usize) -> String {
    let new = format!("layers.{layer}.mlp.router");
    let found = checkpoint.has(&format!("{new}.weight"));
    if found { new } else { format!("layers.{layer}.block_sparse_moe.gate") }
}

impl TableSource for Experts {
    fn bytes(&self) -> u64 {
        let sizes = self.matrices.iter().flatten().map(|m| m.shape());
        let bytes = sizes.map(|[rows, cols]| (rows as u64).saturating_mul(cols as u64 + 4));
        bytes.fold(0, u64::saturating_add)
    }

    fn write(&self, files: &mut [&mut dyn Write], progress: &mut dyn Progress) -> Result<()> {
        let [weights, scales] = files else {
            return Err(Error::new(ErrorKind::Internal, "the experts are two files"));
        };
        let fail = |e: std::io::Error| Error::caused(ErrorKind::Io, "table of experts", e);
        let mut done = 0;
        for matrix in self.matrices.iter().flatten() {
            if progress.cancelled() {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            let rows = Weight::new(Arc::clone(matrix), Storage::Int8).to_int8()?;
            weights.write_all(bytemuck::cast_slice(&rows.values)).map_err(fail)?;
            let bytes: Vec<u8> = rows.scales.iter().flat_map(|s| s.to_le_bytes()).collect();
            scales.write_all(&bytes).map_err(fail)?;
            done += (rows.values.len() + bytes.len()) as u64;
            progress.advance(done);
        }
        Ok(())
    }
}
