//! Quantized weights in blocks, and the matmuls that read them.
//!
//! 4-bit blocks of 32 become the weights of `MatMulNBits` ([`NBits`]). Longer blocks are split into such, with equal
//! scales. Any other form is dequantized by `DequantizeLinear`, as int8 is ([`DequantizedBlocks`]). Values, scales and
//! offsets are those of the QNN graph.

use crate::onnx::format::{
    DequantizedBlocks, NBits, Operator, ROW_AXIS, STORED_FLOATS, attribute, suffix, swapped,
};
use half::f16;
use half::slice::HalfFloatSliceExt;
use qhx_base::{Error, ErrorKind, Result};
use qhx_types::quantized::{NIBBLE_ZERO, Quantized, QuantizedForm, pack_nibbles, repeated};
use rten_onnx::onnx::DataType;

use super::{Lowering, dims, int, ints, to};
use crate::graph::{Node, Origin, TensorId};
use crate::super_blocks::SuperBlocks;
use crate::weight::{Storage, Weight};

impl Lowering<'_> {
    /// Adds the weight called `name`: the initialisers that [`Lowering::blocks_matmul`] reads, or a node that
    /// dequantizes it.
    pub(super) fn blocks(
        &mut self,
        name: &str,
        weight: &Weight,
        form: QuantizedForm,
    ) -> Result<()> {
        let weights = weight.to_blocks(form)?;
        let (rows, columns) = (weight.rows(), weight.cols());
        let super_blocks = SuperBlocks::of(&weights, columns);
        let Quantized { values, scales, offsets, .. } = weights;
        match NBits::packed(form, [rows, columns]) {
            Some((packed, pieces)) => {
                let integers = format!("{name}{}", suffix::NBITS);
                self.external(&integers, DataType::UINT8, &packed.integer_dims(), |file| {
                    file.write(&pack_nibbles(&values))
                })?;
                match super_blocks {
                    Some(found) => self.super_blocks(name, packed, &found),
                    None => {
                        let each = [scales, offsets].map(|list| repeated(&list, pieces));
                        self.scales_and_offsets(name, packed, each)
                    }
                }
            }
            None => {
                let blocks = DequantizedBlocks { rows, columns, block: form.block };
                self.dequantized_blocks(name, blocks, &values, [&scales, &offsets])
            }
        }
    }

    /// Adds the scales of packed integers, and what [`suffix::SHIFT`] is.
    fn scales_and_offsets(
        &mut self,
        name: &str,
        weight: NBits,
        [scales, offsets]: [Vec<f32>; 2],
    ) -> Result<()> {
        let scale = format!("{name}{}", suffix::SCALE);
        self.scales(&scale, &weight.scale_dims(), &scales)?;
        if offsets.is_empty() {
            return Ok(());
        }
        let (offset, by_row) = (format!("{name}{}", suffix::OFFSET), format!("{name}.by_row"));
        self.scales(&offset, &weight.scale_dims(), &offsets)?;
        self.push(Operator::Mul, vec![offset, scale], &by_row, vec![]);
        self.shift(name, by_row);
        Ok(())
    }

    fn shift(&mut self, name: &str, by_row: String) {
        let perm = vec![ints(attribute::PERM, swapped(2))];
        self.push(Operator::Transpose, vec![by_row], &format!("{name}{}", suffix::SHIFT), perm);
    }

    /// Same as [`Lowering::scales_and_offsets`] of super-blocks. Minima belong to integers from 0 on, and the operator
    /// has them from −8 on: shifts are minima and eight scales.
    fn super_blocks(&mut self, name: &str, weight: NBits, found: &SuperBlocks) -> Result<()> {
        // By the weight's name, as its nodes are copied to other graphs.
        let part = |suffix: &str| format!("{name}{suffix}");
        let [units, multiples] = [suffix::UNITS, suffix::MULTIPLES].map(part);
        let [of_units, of_multiples] = weight.super_dims();
        self.external(&units, DataType::FLOAT16, &of_units, |file| {
            file.write(bytemuck::cast_slice(&found.units))
        })?;
        self.external(&multiples, DataType::UINT8, &of_multiples, |file| {
            file.write(found.multiples.as_flattened().as_flattened().as_flattened())
        })?;
        let [wide, counts, all] = [".wide", ".counts", ".all"].map(part);
        self.push(STORED_FLOATS, vec![units], &wide, vec![to(DataType::FLOAT)]);
        self.push(Operator::Cast, vec![multiples], &counts, vec![to(DataType::FLOAT)]);
        self.push(Operator::Mul, vec![wide, counts], &all, vec![]);
        let [scale, minimum] = [suffix::SCALE, suffix::MINIMUM].map(part);
        for (kind, name) in [&scale, &minimum].into_iter().enumerate() {
            let from = kind as i64;
            let [from, end, axis] = [from, from + 1, 3].map(|number| self.int64s(vec![number]));
            let half = format!("{name}.half");
            self.push(Operator::Slice, vec![all.clone(), from, end, axis], &half, vec![]);
            let shape = self.int64s(dims(&weight.scale_dims()));
            self.push(Operator::Reshape, vec![half, shape], name, vec![]);
        }
        let [zero, moved, by_row] = [".zero", ".moved", ".by_row"].map(part);
        let eight = f32::from(NIBBLE_ZERO).to_le_bytes();
        self.initializer(&zero, DataType::FLOAT, &[], &eight);
        self.push(Operator::Mul, vec![scale, zero], &moved, vec![]);
        self.push(Operator::Add, vec![moved, minimum], &by_row, vec![]);
        self.shift(name, by_row);
        Ok(())
    }

    fn dequantized_blocks(
        &mut self,
        name: &str,
        weight: DequantizedBlocks,
        values: &[i8],
        [scales, offsets]: [&[f32]; 2],
    ) -> Result<()> {
        let count = scales.len();
        let (int8, scale) = (format!("{name}{}", suffix::INT8), format!("{name}{}", suffix::SCALE));
        self.external(&int8, DataType::INT8, &weight.integer_dims(count), |file| {
            file.write(bytemuck::cast_slice(values))
        })?;
        let axis = || vec![int(attribute::AXIS, ROW_AXIS)];
        let scaled = format!("{name}.scaled");
        if offsets.is_empty() {
            self.scales(&scale, &DequantizedBlocks::scale_dims(count), scales)?;
            let inputs = vec![int8, scale];
            if count == weight.rows {
                self.push(Operator::DequantizeLinear, inputs, name, axis());
                return Ok(());
            }
            self.push(Operator::DequantizeLinear, inputs, &scaled, axis());
        } else {
            let (wide, shifted) = (format!("{name}.wide"), format!("{name}.shifted"));
            let offset = format!("{name}{}", suffix::OFFSET);
            self.scales(&scale, &DequantizedBlocks::offset_dims(count), scales)?;
            self.scales(&offset, &DequantizedBlocks::offset_dims(count), offsets)?;
            self.push(Operator::Cast, vec![int8], &wide, vec![to(DataType::FLOAT)]);
            self.push(Operator::Add, vec![wide, offset], &shifted, vec![]);
            self.push(Operator::Mul, vec![shifted, scale], &scaled, vec![]);
        }
        let shape = self.int64s(dims(&weight.dims()));
        self.push(Operator::Reshape, vec![scaled, shape], name, vec![]);
        Ok(())
    }

    /// Adds scales or offsets to the external-data file: as f16 and a node that makes them f32 if all are such values,
    /// else as f32.
    fn scales(&mut self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        let mut halves = vec![f16::ZERO; values.len()];
        halves.convert_from_f32_slice(values);
        let mut back = vec![0f32; values.len()];
        halves.convert_to_f32_slice(&mut back);
        if back.iter().zip(values).any(|(half, scale)| half.to_bits() != scale.to_bits()) {
            let bytes = bytemuck::cast_slice(values);
            return self.external(name, DataType::FLOAT, shape, |file| file.write(bytes));
        }
        let stored = format!("{name}{}", suffix::FLOAT16);
        self.external(&stored, DataType::FLOAT16, shape, |file| {
            file.write(bytemuck::cast_slice(&halves))
        })?;
        self.push(STORED_FLOATS, vec![stored], name, vec![to(DataType::FLOAT)]);
        Ok(())
    }

    /// Adds the matmul of a `Linear` whose weight [`Lowering::blocks`] has packed; false for any other.
    pub(super) fn blocks_matmul(&mut self, node: &Node, output: &str) -> Result<bool> {
        let &[x, weight, ref bias @ ..] = node.inputs.as_slice() else { return Ok(false) };
        let graph = self.graph;
        let Origin::Weight(stored) = &graph.tensor(weight)?.origin else { return Ok(false) };
        let Storage::Blocks(form) = stored.storage() else { return Ok(false) };
        let Some((packed, _)) = NBits::packed(form, [stored.rows(), stored.cols()]) else {
            return Ok(false);
        };
        let inner = |suffix: &str| format!("{}.{suffix}", node.name);
        let of = |id: TensorId| self.name(id);
        let (x_name, weight) = (of(x)?, of(weight)?);
        let part = |suffix: &str| format!("{weight}{suffix}");
        let mut terms = vec![inner("matmul")];
        let attributes = packed.attributes().map(|(name, value)| int(name, value)).to_vec();
        let inputs = vec![x_name.clone(), part(suffix::NBITS), part(suffix::SCALE)];
        self.push(Operator::MatMulNBits, inputs, &inner("matmul"), attributes);
        if form.offsets {
            let Some(&m) = graph.tensor(x)?.shape.first() else {
                return Err(Error::new(ErrorKind::Internal, format!("{}: no rows", node.name)));
            };
            let shape = self.int64s(dims(&packed.parts(m)));
            let axis = self.int64s(vec![NBits::SUM_AXIS]);
            let (parts, sums) = (inner("blocks"), inner("sums"));
            self.push(Operator::Reshape, vec![x_name, shape], &parts, vec![]);
            let keep = vec![int(attribute::KEEP_DIMS, NBits::SUM_KEEP_DIMS)];
            self.push(Operator::ReduceSum, vec![parts, axis], &sums, keep);
            let inputs = vec![sums, part(suffix::SHIFT)];
            self.push(Operator::MatMul, inputs, &inner("shift"), vec![]);
            terms.push(inner("shift"));
        }
        for &bias in bias {
            terms.push(self.name(bias)?);
        }
        self.sum(terms, &node.name, output);
        Ok(true)
    }

    /// Makes `output` the sum of `terms`, of which the last node wrote one.
    fn sum(&mut self, terms: Vec<String>, name: &str, output: &str) {
        let last = terms.len().saturating_sub(1);
        let mut terms = terms.into_iter().enumerate();
        let Some((_, mut sum)) = terms.next() else { return };
        if last == 0 {
            if let Some(node) = self.out.node.last_mut() {
                node.output = vec![output.to_owned()];
            }
            return;
        }
        for (index, term) in terms {
            let next = if index == last { output.to_owned() } else { format!("{name}.sum{index}") };
            self.push(Operator::Add, vec![sum, term], &next, vec![]);
            sum = next;
        }
    }
}
