//! Quantized weights in blocks, and the matmuls that read them.
//!
//! 4-bit blocks of 32 become the weights of `MatMulNBits`, an operator of ONNX Runtime
//! (<https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md>), which reads them without
//! dequantizing them first. Longer blocks are split into such, with equal scales. Offsets are a term of their own:
//! `Σ_b (Σ_{k in b} x_k) · offset_b · scale_b`. Any other form is dequantized by `DequantizeLinear`, as int8 is.
//! Values, scales and offsets are those of the QNN graph.

use qhx_core::quantized::pack_nibbles;
use qhx_core::{Error, ErrorKind, Result};

use super::{Lowering, dims, int};
use crate::graph::{Node, Origin, TensorId};
use crate::onnx::proto::{FLOAT, INT8, UINT8};
use crate::quantize::{BLOCK, Bits, Quantized, QuantizedForm};
use crate::weight::{Storage, Weight};

/// Where `MatMulNBits` is from.
pub(super) const DOMAIN: &str = "com.microsoft";

/// True for what becomes a weight of `MatMulNBits`.
const fn packed(form: QuantizedForm) -> bool {
    matches!(form.bits, Bits::Four) && form.block.is_multiple_of(BLOCK)
}

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
        let mut shifts = weights.as_ref().shifts();
        let Quantized { values, mut scales, .. } = weights;
        let (rows, mut count) = (weight.rows(), weight.cols() / form.block);
        if packed(form) {
            self.packs = true;
            let parts = form.block / BLOCK;
            if parts > 1 {
                for list in [&mut scales, &mut shifts] {
                    *list = list.iter().flat_map(|&v| std::iter::repeat_n(v, parts)).collect();
                }
                count *= parts;
            }
            let shape = [rows, count, BLOCK / 2];
            self.external(&format!("{name}.nbits"), UINT8, &shape, |file| {
                file.write(&pack_nibbles(&values))
            })?;
            self.external(&format!("{name}.scale"), FLOAT, &[rows, count], |file| {
                file.write(bytemuck::cast_slice(&scales))
            })?;
            if !shifts.is_empty() {
                let mut columns: Vec<f32> = Vec::with_capacity(shifts.len());
                for block in 0..count {
                    columns.extend(shifts.iter().skip(block).step_by(count));
                }
                self.external(&format!("{name}.offset"), FLOAT, &[count, rows], |file| {
                    file.write(bytemuck::cast_slice(&columns))
                })?;
            }
            return Ok(());
        }
        let (int8, scale) = (format!("{name}.int8"), format!("{name}.scale"));
        let blocks = rows * count;
        self.external(&int8, INT8, &[blocks, form.block], |file| {
            file.write(bytemuck::cast_slice(&values))
        })?;
        self.external(&scale, FLOAT, &[blocks], |file| file.write(bytemuck::cast_slice(&scales)))?;
        if count == 1 && shifts.is_empty() {
            let inputs = vec![int8, scale];
            self.push("DequantizeLinear", inputs, name, vec![int("axis", 0)]);
            return Ok(());
        }
        let (scaled, shifted) = (format!("{name}.scaled"), format!("{name}.shifted"));
        self.push("DequantizeLinear", vec![int8, scale], &scaled, vec![int("axis", 0)]);
        let mut wide = scaled;
        if !shifts.is_empty() {
            let offset = format!("{name}.offset");
            self.external(&offset, FLOAT, &[blocks, 1], |file| {
                file.write(bytemuck::cast_slice(&shifts))
            })?;
            self.push("Add", vec![wide, offset], &shifted, vec![]);
            wide = shifted;
        }
        let shape = self.int64s(dims(&[rows, weight.cols()]));
        self.push("Reshape", vec![wide, shape], name, vec![]);
        Ok(())
    }

    /// Adds the matmul of a `Linear` whose weight [`Lowering::blocks`] has packed; false for any other.
    pub(super) fn blocks_matmul(&mut self, node: &Node, output: &str) -> Result<bool> {
        let &[x, weight, ref bias @ ..] = node.inputs.as_slice() else { return Ok(false) };
        let graph = self.graph;
        let Origin::Weight(stored) = &graph.tensor(weight)?.origin else { return Ok(false) };
        let Storage::Blocks(form) = stored.storage() else { return Ok(false) };
        if !packed(form) {
            return Ok(false);
        }
        let [rows, cols] = [stored.rows(), stored.cols()];
        let inner = |suffix: &str| format!("{}.{suffix}", node.name);
        let of = |id: TensorId| self.name(id);
        let (x_name, weight) = (of(x)?, of(weight)?);
        let mut terms = vec![inner("matmul")];
        let attributes = vec![
            int("K", cols as i64),
            int("N", rows as i64),
            int("bits", i64::from(form.bits.count())),
            int("block_size", BLOCK as i64),
        ];
        let inputs = vec![x_name.clone(), format!("{weight}.nbits"), format!("{weight}.scale")];
        self.push("MatMulNBits", inputs, &inner("matmul"), attributes);
        if let Some(last) = self.out.node.last_mut() {
            DOMAIN.clone_into(&mut last.domain);
        }
        if form.offsets {
            let Some(&m) = graph.tensor(x)?.shape.first() else {
                return Err(Error::new(ErrorKind::Internal, format!("{}: no rows", node.name)));
            };
            let shape = self.int64s(dims(&[m, cols / BLOCK, BLOCK]));
            let axis = self.int64s(vec![2]);
            let (parts, sums) = (inner("blocks"), inner("sums"));
            self.push("Reshape", vec![x_name, shape], &parts, vec![]);
            self.push("ReduceSum", vec![parts, axis], &sums, vec![int("keepdims", 0)]);
            let inputs = vec![sums, format!("{weight}.offset")];
            self.push("MatMul", inputs, &inner("shift"), vec![]);
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
            self.push("Add", vec![sum, term], &next, vec![]);
            sum = next;
        }
    }
}
