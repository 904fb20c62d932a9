//! MXFP4 (OCP Microscaling Formats 1.0), as gpt-oss stores it: `X_blocks` has two values a byte, the first in its lower
//! half, and `X_scales` a power of two for each 32 inputs.

use safetensors::Dtype;

use super::fields::Fields;
use super::integers::{Groups, Integers, Points, Values};
use super::part::{Numbers, Part};
use super::{Files, Found, Read, Tensor, same_shape};

/// Inputs of a block.
const BLOCK: usize = 32;
/// The values, e2m1, doubled.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

pub(super) fn gather(files: &Files<'_>) -> Read<Vec<Found>> {
    files.before("_blocks").map(|name| layer(files, name)).collect()
}

fn layer(files: &Files<'_>, name: &str) -> Read<Found> {
    let (blocks, scales) = (format!("{name}_blocks"), format!("{name}_scales"));
    let part = files.need(&blocks, &blocks, &[Dtype::U8])?;
    let [outer @ .., count, 16] = &*part.shape else {
        return Err(format!(
            "tensor {blocks} has the shape {:?}, expected blocks of 16 bytes",
            part.shape
        ));
    };
    let outer = outer.to_vec();
    let of = files.need(&scales, &blocks, &[Dtype::U8, Dtype::F8_E8M0])?;
    let expected: Vec<usize> = outer.iter().chain([count]).copied().collect();
    same_shape(&scales, &of, &expected, "one for each block")?;
    let sizes = outer
        .iter()
        .try_fold(1usize, |all, size| all.checked_mul(*size))
        .zip(count.checked_mul(BLOCK));
    let (outputs, inputs) = sizes
        .filter(|(outputs, inputs)| outputs * inputs > 0 && !outer.is_empty())
        .ok_or_else(|| {
            format!("tensor {blocks} has the shape {:?}, expected outputs and blocks", part.shape)
        })?;
    let tensor = Tensor::new(integers("MXFP4", part.clone(), of, [outputs, inputs]));
    let shape = outer.iter().copied().chain([inputs]).collect();
    Ok(Found {
        name: name.to_owned(),
        tensor: Tensor { shape, ..tensor },
        parts: vec![blocks, scales],
    })
}

/// Values of 4 bits in lines of `inputs`, each 32 with a power of two.
pub(super) fn integers(
    name: &'static str,
    values: Part,
    scales: Part,
    shape: [usize; 2],
) -> Integers {
    let [_, inputs] = shape;
    Integers {
        name,
        shape,
        values: Values::Table(Fields::new(values, 4, [inputs / 8, 1]), E2M1),
        bits: 8,
        points: Points::Middle,
        // The values are doubled.
        scales: Numbers { factor: 0.5, ..Numbers::new(scales, [inputs / BLOCK, 1]) },
        group: BLOCK,
        groups: Groups::Plain,
        offsets: false,
    }
}
