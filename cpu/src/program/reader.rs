//! Names of an ONNX graph: constants, weights in the forms that the forge writes, and nodes.
//!
//! Recognised are `Gemm` with `transB` over f32, over f16 with `Cast`, over int8 with `DequantizeLinear` and a scale
//! for each row or each block ([`DequantizedBlocks`]), and `MatMulNBits` ([`NBits`]).

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use qhx_base::artifacts::Mapped;
use qhx_types::onnx::{
    DequantizedBlocks, ExternalData, NBits, Operator, ROW_AXIS, STORED_FLOATS, attribute,
};
use qhx_types::quantized::{BLOCK, Bits, QuantizedForm, by_block, repeated};
use rten_onnx::onnx::{AttributeProto, DataLocation, DataType, GraphProto, NodeProto, TensorProto};

use crate::weights::{Floats, Form, Scales, Stored, Weights};

/// A graph by its names.
pub(super) struct Reader<'a, 'f> {
    pub(super) graph: &'a GraphProto,
    pub(super) initializers: HashMap<&'a str, &'a TensorProto>,
    pub(super) producers: HashMap<&'a str, usize>,
    files: &'f HashMap<String, Mapped>,
}

/// `y = x · weightsᵀ + bias`.
pub(super) struct StoredMatmul<'a> {
    pub(super) x: &'a str,
    pub(super) weights: Box<Weights>,
    pub(super) bias: Option<Floats>,
}

impl<'a, 'f> Reader<'a, 'f> {
    /// Refuses graphs with names that mean two things, and with graphs in them.
    pub(super) fn new(
        graph: &'a GraphProto,
        files: &'f HashMap<String, Mapped>,
    ) -> Result<Self, String> {
        let mut reader =
            Self { graph, initializers: HashMap::new(), producers: HashMap::new(), files };
        let mut names = HashSet::new();
        let mut new = |name: &'a str| match names.insert(name) {
            true => Ok(name),
            false => Err(format!("the name {name:?} stands for two values")),
        };
        for input in &graph.input {
            new(input.name.as_deref().ok_or("an input has no name")?)?;
        }
        for tensor in &graph.initializer {
            let name = new(tensor.name.as_deref().ok_or("a constant has no name")?)?;
            reader.initializers.insert(name, tensor);
        }
        for (at, node) in graph.node.iter().enumerate() {
            if node.attribute.iter().any(|attribute| attribute.g.is_some()) {
                return Err("a node has a graph of its own".to_owned());
            }
            for output in node.output.iter().filter(|name| !name.is_empty()) {
                reader.producers.insert(new(output)?, at);
            }
        }
        Ok(reader)
    }

    /// The matmul with stored weights that ends with a node, if it is one.
    pub(super) fn stored_matmul(&self, node: &'a NodeProto) -> Option<StoredMatmul<'a>> {
        let [_] = node.output.as_slice() else { return None };
        let x = node.input.first()?;
        let inputs: Vec<&str> = node.input.iter().map(String::as_str).collect();
        let (weights, bias) = match (operator(node)?, &inputs[..]) {
            (Operator::Gemm, [_, w, bias @ ..]) => {
                let weights = plain_gemm(node).then(|| self.weights(w)).flatten()?;
                let bias = match bias {
                    [] | [""] => None,
                    [bias] => Some(self.floats(bias, &[weights.rows])?),
                    _ => return None,
                };
                (weights, bias)
            }
            (Operator::Add, [product, shift]) => return self.shifted(product, shift),
            (Operator::MatMulNBits, [_, w, scales]) => (self.bits(node, w, scales)?, None),
            _ => return None,
        };
        Some(StoredMatmul { x, weights: Box::new(weights), bias })
    }

    /// The node of this kind that makes a value.
    pub(super) fn made_by(&self, name: &str, kind: Operator) -> Option<&'a NodeProto> {
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        (operator(node) == Some(kind)).then_some(node)
    }

    /// The matmul of four bits to which a term is added that the offsets of their blocks make: the sums of the blocks
    /// of `x` times the offsets.
    fn shifted(&self, product: &str, shift: &str) -> Option<StoredMatmul<'a>> {
        let product = self.made_by(product, Operator::MatMulNBits)?;
        let packed = NBits::of(|name| integer(product, name))?;
        let StoredMatmul { x, mut weights, bias: None } = self.stored_matmul(product)? else {
            return None;
        };
        let shift = self.made_by(shift, Operator::MatMul)?;
        let [sums, offsets] = shift.input.as_slice() else { return None };
        let sum = self.made_by(sums, Operator::ReduceSum)?;
        let [parts, axes] = sum.input.as_slice() else { return None };
        let parts = self.made_by(parts, Operator::Reshape)?;
        let [from, shape] = parts.input.as_slice() else { return None };
        let shape = self.integers(shape)?;
        let [_, shape @ ..] = shape.as_slice() else { return None };
        let of_blocks = from == x
            && self.integers(axes)? == [NBits::SUM_AXIS]
            && integer(sum, attribute::KEEP_DIMS) == Some(NBits::SUM_KEEP_DIMS)
            && sizes(shape)? == packed.parts(1)[1..];
        of_blocks.then_some(())?;
        weights.offsets = Some(self.floats(offsets, &packed.shift_dims())?);
        Some(StoredMatmul { x, weights, bias: None })
    }

    /// A matrix that is stored, or that nodes dequantize.
    pub(super) fn weights(&self, name: &str) -> Option<Weights> {
        if let Some(tensor) = self.initializers.get(name) {
            return self.matrix(tensor, DataType::FLOAT, 4, |_| Some(Form::F32));
        }
        if let Some(node) = self.made_by(name, Operator::Reshape) {
            return self.blocks(node);
        }
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        let source = self.initializers.get(node.input.first()?.as_str())?;
        match (operator(node)?, node.input.as_slice()) {
            (STORED_FLOATS, [_]) => {
                let float = to_float(node);
                float.then(|| self.matrix(source, DataType::FLOAT16, 2, |_| Some(Form::F16)))?
            }
            (Operator::DequantizeLinear, [_, scales]) => {
                let rows = integer(node, attribute::AXIS) == Some(ROW_AXIS)
                    && node.attribute.iter().all(|a| a.name.as_deref() == Some(attribute::AXIS));
                let form = |[rows, columns]: [usize; 2]| {
                    let form = QuantizedForm::symmetric(Bits::Eight, columns);
                    let scales = self.scales(scales, &DequantizedBlocks::scale_dims(rows))?;
                    Form::quantized(form, columns, scales)
                };
                rows.then(|| self.matrix(source, DataType::INT8, 1, form))?
            }
            _ => None,
        }
    }

    /// The matrix of [`DequantizedBlocks`] that ends with a `Reshape`.
    fn blocks(&self, node: &NodeProto) -> Option<Weights> {
        let [scaled, shape] = node.input.as_slice() else { return None };
        let [rows, columns] = *self.integers(shape)? else { return None };
        let (rows, columns) = (positive(rows)?, positive(columns)?);
        let add = self.made_by(scaled, Operator::Add).map(|add| add.input.as_slice());
        let (scaled, shifts) = match add {
            Some([scaled, shifts]) => (scaled, Some(shifts)),
            Some(_) => return None,
            None => (scaled, None),
        };
        self.made_by(scaled, Operator::DequantizeLinear)?;
        let blocks = self.weights(scaled)?;
        let (count, block) = (blocks.rows, blocks.columns);
        let shifts = match shifts {
            Some(name) => Some(self.floats(name, &DequantizedBlocks::shift_dims(count))?),
            None => None,
        };
        if (DequantizedBlocks { rows, columns, block }).count() != Some(count) {
            return None;
        }
        let Some(pieces) = QuantizedForm::symmetric(Bits::Eight, block).pieces() else {
            let mut values = blocks.dequantized();
            if let Some(shifts) = shifts {
                let added = values.chunks_exact_mut(block).zip(shifts.get());
                added.for_each(|(block, shift)| block.iter_mut().for_each(|w| *w += shift));
            }
            return Some(Weights::own(rows, columns, &values));
        };
        let Form::Quantized(form, scales) = blocks.form else { return None };
        let scales = scales.repeated(pieces);
        let offsets = shifts
            .map(|shifts| Floats::Own(by_block(&repeated(shifts.get(), pieces), columns / BLOCK)));
        let form = Form::quantized(QuantizedForm { block: BLOCK, ..form }, columns, scales)?;
        Some(Weights { rows, columns, form, stored: blocks.stored, offsets })
    }

    fn matrix(
        &self,
        tensor: &TensorProto,
        dtype: DataType,
        size: usize,
        form: impl FnOnce([usize; 2]) -> Option<Form>,
    ) -> Option<Weights> {
        let [rows, columns] = *tensor.dims.as_slice() else { return None };
        let (rows, columns) = (positive(rows)?, positive(columns)?);
        let bytes = rows.checked_mul(columns)?.checked_mul(size)?;
        let stored = self.stored(tensor, dtype, bytes, size)?;
        Some(Weights { rows, columns, form: form([rows, columns])?, stored, offsets: None })
    }

    /// The weights of a `MatMulNBits`.
    fn bits(&self, node: &NodeProto, w: &str, scales_name: &str) -> Option<Weights> {
        let packed = NBits::of(|name| integer(node, name))?;
        let NBits { rows, columns } = packed;
        let tensor = self.initializers.get(w)?;
        if sizes(&tensor.dims)? != packed.integer_dims() {
            return None;
        }
        let integers = u64::try_from(rows.checked_mul(columns)?).ok()?;
        let bytes = usize::try_from(NBits::FORM.bits.packed(integers)).ok()?;
        let stored = self.stored(tensor, DataType::UINT8, bytes, 4)?;
        let flat = rows.checked_mul(packed.blocks())?;
        let scales = self.scales(scales_name, &packed.scale_dims());
        let scales = scales.or_else(|| self.scales(scales_name, &[flat]))?;
        let form = Form::quantized(NBits::FORM, columns, scales)?;
        Some(Weights { rows, columns, form, stored, offsets: None })
    }

    /// The elements of a constant that has `bytes`: those of a file, which must be aligned, or of the model.
    fn stored(
        &self,
        tensor: &TensorProto,
        dtype: DataType,
        bytes: usize,
        align: usize,
    ) -> Option<Stored> {
        if tensor.data_type != Some(dtype) {
            return None;
        }
        if tensor.data_location != Some(DataLocation::EXTERNAL) {
            let raw = tensor.raw_data.as_ref()?.borrow();
            return (raw.len() == bytes).then(|| Stored::copied(&raw));
        }
        let external = ExternalData::of(|key| {
            let entry = tensor.external_data.iter().find(|e| e.key.as_deref() == Some(key))?;
            entry.value.as_deref()
        })?;
        let length = external.length.map_or(Ok(bytes), usize::try_from).ok()?;
        let start = usize::try_from(external.offset).ok()?;
        let range = Range { start, end: bytes.checked_add(start)? };
        let file = self.files.get(&external.location)?;
        (length == bytes).then(|| Stored::new(file, range, align))?
    }

    /// Scales of this shape: f32, or f16 that a node makes f32.
    fn scales(&self, name: &str, shape: &[usize]) -> Option<Scales> {
        if let Some(scales) = self.floats(name, shape) {
            return Some(Scales::F32(scales));
        }
        let (stored, dims) = self.halves(name)?;
        (dims == shape).then_some(Scales::F16(stored))
    }

    /// A constant of f16 that a node makes f32, and its sizes.
    fn halves(&self, name: &str) -> Option<(Stored, Vec<usize>)> {
        let node = self.made_by(name, STORED_FLOATS).filter(|node| to_float(node))?;
        let tensor = self.initializers.get(node.input.first()?.as_str())?;
        let dims = sizes(&tensor.dims)?;
        let bytes = dims.iter().try_fold(2usize, |bytes, n| bytes.checked_mul(*n))?;
        Some((self.stored(tensor, DataType::FLOAT16, bytes, 2)?, dims))
    }

    /// A constant of f32 and of this shape.
    pub(super) fn floats(&self, name: &str, shape: &[usize]) -> Option<Floats> {
        let tensor = self.initializers.get(name)?;
        (sizes(&tensor.dims)? == shape).then(|| self.words(tensor, DataType::FLOAT))?
    }

    /// The elements of a constant of four bytes each.
    pub(super) fn words(&self, tensor: &TensorProto, dtype: DataType) -> Option<Floats> {
        let dims = sizes(&tensor.dims)?;
        let bytes = dims.iter().try_fold(4usize, |bytes, n| bytes.checked_mul(*n))?;
        Some(Floats::Stored(self.stored(tensor, dtype, bytes, 4)?))
    }

    /// A constant as f32 with its shape, also one that a node dequantizes.
    pub(super) fn constant(&self, name: &str) -> Option<(Floats, Vec<usize>)> {
        if let Some(tensor) = self.initializers.get(name) {
            return Some((self.words(tensor, DataType::FLOAT)?, sizes(&tensor.dims)?));
        }
        if let Some((stored, dims)) = self.halves(name) {
            let columns = dims.iter().product();
            let row = Weights { rows: 1, columns, form: Form::F16, stored, offsets: None };
            return Some((Floats::Own(row.dequantized()), dims));
        }
        let weights = self.weights(name).filter(|weights| weights.offsets.is_none())?;
        Some((Floats::Own(weights.dequantized()), vec![weights.rows, weights.columns]))
    }

    /// A constant of int64.
    pub(super) fn integers(&self, name: &str) -> Option<Vec<i64>> {
        let tensor = self.initializers.get(name)?;
        if tensor.data_type != Some(DataType::INT64)
            || tensor.data_location == Some(DataLocation::EXTERNAL)
        {
            return None;
        }
        let Some(raw) = &tensor.raw_data else { return Some(tensor.int64_data.clone()) };
        let raw = raw.borrow();
        let (whole, rest) = raw.as_chunks::<8>();
        rest.is_empty().then(|| whole.iter().map(|bytes| i64::from_le_bytes(*bytes)).collect())
    }
}

/// True if a `Gemm` is `x · wᵀ + bias`.
pub(super) fn plain_gemm(node: &NodeProto) -> bool {
    integer(node, attribute::TRANS_B) == Some(1) && node.attribute.iter().all(plain_attribute)
}

/// True if an attribute of a `Gemm` leaves it a plain matmul, apart from the order of the second matrix.
pub(super) fn plain_attribute(attribute: &AttributeProto) -> bool {
    match attribute.name.as_deref() {
        Some(attribute::TRANS_B) => true,
        Some(attribute::TRANS_A) => attribute.i == Some(0),
        Some(attribute::ALPHA | attribute::BETA) => attribute.f == Some(1.0),
        _ => false,
    }
}

/// True if a `Cast` is one to f32.
pub(super) fn to_float(node: &NodeProto) -> bool {
    integer(node, attribute::TO) == Some(i64::from(DataType::FLOAT.0))
}

/// The operator of a node, if bundles may have it.
pub(super) fn operator(node: &NodeProto) -> Option<Operator> {
    Operator::of(node.domain.as_deref().unwrap_or_default(), node.op_type.as_deref()?)
}

/// An attribute that is an integer.
pub(super) fn integer(node: &NodeProto, name: &str) -> Option<i64> {
    node.attribute.iter().find(|a| a.name.as_deref() == Some(name))?.i
}

/// An attribute that is a list of integers.
pub(super) fn integers<'a>(node: &'a NodeProto, name: &str) -> Option<&'a [i64]> {
    let found = node.attribute.iter().find(|a| a.name.as_deref() == Some(name))?;
    Some(&found.ints)
}

/// Sizes of a shape, none of which is 0.
pub(super) fn sizes(dims: &[i64]) -> Option<Vec<usize>> {
    dims.iter().map(|&size| positive(size)).collect()
}

/// A size that is not 0.
pub(super) fn positive(size: i64) -> Option<usize> {
    usize::try_from(size).ok().filter(|size| *size > 0)
}
