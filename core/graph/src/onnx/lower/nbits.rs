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
use qhx_types::quantized::{Quantized, QuantizedForm, pack_nibbles, repeated};
use rten_onnx::onnx::DataType;

use super::{Lowering, dims, int, ints, to};
use crate::graph::{Node, Origin, TensorId};
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
        let Quantized { values, scales, offsets, .. } = weights;
        let (rows, columns) = (weight.rows(), weight.cols());
        match NBits::packed(form, [rows, columns]) {
            Some((packed, pieces)) => self.packed(
                name,
                packed,
                &values,
                [scales, offsets].map(|list| repeated(&list, pieces)),
            ),
            None => {
                let blocks = DequantizedBlocks { rows, columns, block: form.block };
                self.dequantized_blocks(name, blocks, &values, [&scales, &offsets])
            }
        }
    }

    fn packed(
        &mut self,
        name: &str,
        weight: NBits,
        values: &[i8],
        [scales, offsets]: [Vec<f32>; 2],
    ) -> Result<()> {
        let integers = format!("{name}{}", suffix::NBITS);
        self.external(&integers, DataType::UINT8, &weight.integer_dims(), |file| {
            file.write(&pack_nibbles(values))
        })?;
        let scale = format!("{name}{}", suffix::SCALE);
        self.scales(&scale, &weight.scale_dims(), &scales)?;
        if offsets.is_empty() {
            return Ok(());
        }
        let (offset, by_row) = (format!("{name}{}", suffix::OFFSET), format!("{name}.by_row"));
        self.scales(&offset, &weight.scale_dims(), &offsets)?;
        self.push(Operator::Mul, vec![offset, scale], &by_row, vec![]);
        let perm = vec![ints(attribute::PERM, swapped(2))];
        self.push(Operator::Transpose, vec![by_row], &format!("{name}{}", suffix::SHIFT), perm);
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
