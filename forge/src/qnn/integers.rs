//! Linear layers over 16-bit integers.
//!
//! Weights of 4 bits times f16 are dequantized by the vector units, and decoding waits for them. Times 16-bit integers
//! the matrix unit takes the weights as integers of 8 bits, which are the 4 bits times a multiple of their block: a
//! third of the vector units' work. Activations become integers and floats again on the way. The ops for that compute
//! whole tiles: a row of 2,048 takes 80,000 cycles of the vector threads, as 32 rows of 64 it takes 6,000
//! (`docs/graphs.md`).

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::graph::{Node, Tensor};
use qhx_graph::quantize::{BLOCK, Bits, Quantized, QuantizedForm};
use qhx_graph::weight::{Storage, Weight};
use qhx_qnn::compose::{Param, TensorHandle, TensorSpec};
use qhx_types::quantized::Multiples;
use qhx_types::{DType, Quantization};

use super::lower::{Integers, Lowering, f16_values};

/// Factor by which inputs may exceed what was measured before they are clamped.
const INPUTS: f32 = 2.0;
/// The same for results, whose part without offsets and bias may be larger than all.
const OUTPUTS: f32 = 4.0;
/// Elements of a row when a few rows become integers or floats.
const DENSE: usize = 64;
/// Rows that are laid out so.
const FEW: usize = 31;

/// True of the form that 16-bit integers are multiplied with.
pub(crate) fn multiplies(weight: &Weight) -> bool {
    let fits = |n: usize| n > 0 && n.is_multiple_of(DENSE);
    let form = |form: QuantizedForm| form.bits == Bits::Four && form.block == BLOCK && form.offsets;
    let own = weight.source().block_form().is_none();
    matches!(weight.storage(), Storage::Blocks(of) if form(of))
        && own
        && fits(weight.rows())
        && fits(weight.cols())
}

impl Lowering<'_, '_> {
    /// Declares the filter of a weight that is multiplied with integers; none where its scales are no multiples.
    pub(super) fn integers(
        &mut self,
        tensor: &Tensor,
        weight: &Weight,
        blocks: &Quantized,
    ) -> Result<Option<(TensorHandle, Integers)>> {
        let [rows, cols] = [weight.rows(), weight.cols()];
        let range = weight.range().filter(|_| multiplies(weight));
        let (Some(range), Some(multiples)) = (range, blocks.multiples(cols)) else {
            return Ok(None);
        };
        let Multiples { rows: scales, blocks: multiples_of } = &multiples;
        debug_assert_eq!([scales.len(), multiples_of.len()], [rows, rows * cols / BLOCK]);
        let mut turned = vec![0i8; blocks.values.len()];
        for (row, values) in blocks.values.chunks_exact(cols).enumerate() {
            for (to, value) in turned.iter_mut().skip(row).step_by(rows).zip(values) {
                *to = *value;
            }
        }
        let shape = [1, 1, cols, rows];
        let filter =
            self.composer.tensor(TensorSpec::filter(&tensor.name, &shape, &turned, &multiples))?;
        let products = blocks.offsets.iter().zip(&blocks.scales).map(|(o, s)| o * s);
        let products: Vec<f16> = f16_values(&products.collect::<Vec<_>>())?;
        let offsets = match products.iter().any(|product| *product != f16::ZERO) {
            true => {
                let (name, shape) = (format!("{}.offsets", tensor.name), [rows, cols / BLOCK]);
                let bytes = bytemuck::cast_slice(&products);
                Some(self.composer.tensor(TensorSpec::constant(
                    &name,
                    DType::F16,
                    &shape,
                    bytes,
                ))?)
            }
            false => None,
        };
        Ok(Some((filter, Integers { range, offsets })))
    }

    /// The layer `y = x · wᵀ + bias`: integers times integers, and with offsets the sums of `x` over blocks times these.
    pub(super) fn linear_of_integers(
        &mut self,
        node: &Node,
        integers: Integers,
        inputs: &[TensorHandle],
    ) -> Result<()> {
        let (&[x, filter, ref bias @ ..], Some(&from)) = (inputs, node.inputs.first()) else {
            let what = format!("{}: a linear layer without a weight", node.name);
            return Err(Error::new(ErrorKind::Internal, what));
        };
        let (from, to) = (self.graph.tensor(from)?, self.graph.tensor(node.output)?);
        let (input, output) = (from.shape.clone(), to.shape.clone());
        let (cols, n) = (input.last().copied().unwrap_or(1), output.last().copied().unwrap_or(1));
        let rows = input.iter().product::<usize>() / cols.max(1);
        let laid_out = |width: usize| match rows <= FEW {
            true => [1, 1, rows * width / DENSE, DENSE],
            false => [1, 1, rows, width],
        };
        let step = encoding(integers.range.inputs * INPUTS);
        let key = (x, integers.range.inputs.to_bits());
        let whole = match self.whole.get(&key) {
            Some(&whole) => whole,
            None => {
                let shape = laid_out(cols);
                let wide = self.between(node, &shape, "dense", "Reshape", &[], &[x])?;
                let whole = self.whole(node, &shape, "whole", ("Quantize", &[]), &[wide], &step)?;
                let shape = [1, 1, rows, cols];
                let whole = self.whole(node, &shape, "x", ("Reshape", &[]), &[whole], &step)?;
                self.whole.insert(key, whole);
                whole
            }
        };
        let (ones, zeros) = ([1, 1], [0; 4]);
        let params = [
            ("stride", Param::U32s(&[2], &ones)),
            ("pad_amount", Param::U32s(&[2, 2], &zeros)),
            ("dilation", Param::U32s(&[2], &ones)),
            ("group", Param::U32(1)),
        ];
        let step = encoding(integers.range.outputs * OUTPUTS);
        let conv = ("Conv2d", &params[..]);
        let y = self.whole(node, &[1, 1, rows, n], "y", conv, &[whole, filter], &step)?;
        let shape = laid_out(n);
        let y = self.whole(node, &shape, "y.dense", ("Reshape", &[]), &[y], &step)?;
        let y = self.between(node, &shape, "y.wide", "Dequantize", &[], &[y])?;
        let Some(offsets) = integers.offsets else {
            let &[bias] = bias else { return self.emit(node, "Reshape", &[], &[y]) };
            let y = self.between(node, &output, "y.rows", "Reshape", &[], &[y])?;
            return self.emit(node, "ElementWiseAdd", &[], &[y, bias]);
        };
        let y = self.between(node, &output, "y.rows", "Reshape", &[], &[y])?;
        let sums = match self.sums.get(&x) {
            Some(&sums) => sums,
            None => {
                let sums = self.sums_of_blocks(node, x, [rows, cols])?;
                self.sums.insert(x, sums);
                sums
            }
        };
        let given: Vec<_> = [sums, offsets].into_iter().chain(bias.iter().copied()).collect();
        let of_offsets = self.between(node, &[rows, n], "offset", "FullyConnected", &[], &given)?;
        let of_offsets = match output[..] == [rows, n] {
            true => of_offsets,
            false => self.between(node, &output, "offset.rows", "Reshape", &[], &[of_offsets])?,
        };
        self.emit(node, "ElementWiseAdd", &[], &[y, of_offsets])
    }

    /// Sums of the blocks of each row. Of many rows they are a matmul with ones: on v73 the library's `ReduceSum` of 120
    /// rows of 2,560 takes 1.7 ms, and the matmul 0.05.
    fn sums_of_blocks(
        &mut self,
        node: &Node,
        x: TensorHandle,
        [rows, cols]: [usize; 2],
    ) -> Result<TensorHandle> {
        let blocks = cols / BLOCK;
        if rows > FEW {
            let ones = match self.ones.get(&cols) {
                Some(&ones) => ones,
                None => {
                    let of_block = |at: usize| at % cols / BLOCK == at / cols;
                    let one = |at| if of_block(at) { f16::ONE } else { f16::ZERO };
                    let values: Vec<f16> = (0..blocks * cols).map(one).collect();
                    let (name, shape) = (format!("ones.{cols}"), [blocks, cols]);
                    let bytes = bytemuck::cast_slice(&values);
                    let spec = TensorSpec::constant(&name, DType::F16, &shape, bytes);
                    let ones = self.composer.tensor(spec)?;
                    self.ones.insert(cols, ones);
                    ones
                }
            };
            return self.between(node, &[rows, blocks], "sums", "FullyConnected", &[], &[x, ones]);
        }
        let parts = self.between(node, &[rows * blocks, BLOCK], "parts", "Reshape", &[], &[x])?;
        let axes = [1];
        let params = [("axes", Param::U32s(&[1], &axes)), ("keep_dims", Param::Bool(true))];
        let shape = [rows * blocks, 1];
        let sums = self.between(node, &shape, "sums", "ReduceSum", &params, &[parts])?;
        self.between(node, &[rows, blocks], "sums.rows", "Reshape", &[], &[sums])
    }

    /// A step on the way whose result is 16-bit integers.
    fn whole(
        &mut self,
        node: &Node,
        shape: &[usize],
        suffix: &str,
        (op, params): (&str, &[(&str, Param<'_>)]),
        inputs: &[TensorHandle],
        quantization: &Quantization,
    ) -> Result<TensorHandle> {
        let name = format!("{}.{suffix}", node.name);
        let spec = TensorSpec::native(&name, DType::UFixed16, shape);
        let output = self.composer.tensor(spec.quantized(quantization.clone()))?;
        self.composer.node(&name, op, params, inputs, &[output])?;
        Ok(output)
    }
}

/// Encoding of values up to `largest`.
fn encoding(largest: f32) -> Quantization {
    let largest = largest.max(f32::from(f16::MIN_POSITIVE));
    Quantization::PerTensor { scale: largest / 32_767.0, offset: -32_768 }
}
