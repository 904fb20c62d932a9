//! What the names of an ONNX graph stand for: constants, weights in the forms that the forge writes, and nodes.
//!
//! Recognised are `Gemm` with `transB` over f32, over f16 with `Cast`, over int8 with `DequantizeLinear` and a scale
//! for each row or, with a `Reshape` and perhaps offsets, for each block, and `MatMulNBits` of ONNX Runtime with four
//! bits in blocks of 32, also where the blocks' offsets are a term of their own.

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use qhx_core::artifacts::Mapped;
use rten_onnx::onnx::{DataLocation, DataType, GraphProto, NodeProto, TensorProto};

use crate::kernels::BLOCK;
use crate::weights::{Floats, Form, Stored, Weights};

const BLOCK_I64: i64 = BLOCK as i64;

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
        let (weights, bias) = match (domain(node), node.op_type.as_deref()?, &inputs[..]) {
            ("", "Gemm", [_, w, bias @ ..]) => {
                let weights = plain_gemm(node).then(|| self.weights(w)).flatten()?;
                let bias = match bias {
                    [] | [""] => None,
                    [bias] => Some(self.floats(bias, &[weights.rows])?),
                    _ => return None,
                };
                (weights, bias)
            }
            ("", "Add", [product, shift]) => return self.shifted(product, shift),
            ("com.microsoft", "MatMulNBits", [_, w, scales]) => (self.bits(node, w, scales)?, None),
            _ => return None,
        };
        Some(StoredMatmul { x, weights: Box::new(weights), bias })
    }

    /// The node of this kind that makes a value.
    pub(super) fn made_by(&self, name: &str, kind: &str) -> Option<&'a NodeProto> {
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        (domain(node).is_empty() && node.op_type.as_deref() == Some(kind)).then_some(node)
    }

    /// The matmul of four bits to which a term is added that the offsets of their blocks make: the sums of the blocks
    /// of `x` times the offsets.
    fn shifted(&self, product: &str, shift: &str) -> Option<StoredMatmul<'a>> {
        let product = self.graph.node.get(*self.producers.get(product)?)?;
        if (domain(product), product.op_type.as_deref()) != ("com.microsoft", Some("MatMulNBits")) {
            return None;
        }
        let StoredMatmul { x, mut weights, bias: None } = self.stored_matmul(product)? else {
            return None;
        };
        let [sums, offsets] = self.made_by(shift, "MatMul")?.input.as_slice() else { return None };
        let sum = self.made_by(sums, "ReduceSum")?;
        let [parts, axes] = sum.input.as_slice() else { return None };
        let [from, shape] = self.made_by(parts, "Reshape")?.input.as_slice() else { return None };
        let blocks = weights.columns / BLOCK;
        let of_blocks = from == x
            && self.integers(axes)? == [2]
            && integer(sum, "keepdims") == Some(0)
            && matches!(*self.integers(shape)?, [_, n, BLOCK_I64] if usize::try_from(n) == Ok(blocks));
        of_blocks.then_some(())?;
        weights.offsets = Some(self.floats(offsets, &[blocks, weights.rows])?);
        Some(StoredMatmul { x, weights, bias: None })
    }

    /// A matrix that is stored, or that nodes dequantize.
    pub(super) fn weights(&self, name: &str) -> Option<Weights> {
        if let Some(tensor) = self.initializers.get(name) {
            return self.matrix(tensor, DataType::FLOAT, 4, |_| Some(Form::F32));
        }
        if let Some(node) = self.made_by(name, "Reshape") {
            return self.blocks(node);
        }
        let node = self.graph.node.get(*self.producers.get(name)?)?;
        let source = self.initializers.get(node.input.first()?.as_str())?;
        match (domain(node), node.op_type.as_deref()?, node.input.as_slice()) {
            ("", "Cast", [_]) => {
                let float = to_float(node);
                float.then(|| self.matrix(source, DataType::FLOAT16, 2, |_| Some(Form::F16)))?
            }
            ("", "DequantizeLinear", [_, scales]) => {
                let rows = integer(node, "axis") == Some(0)
                    && node.attribute.iter().all(|a| a.name.as_deref() == Some("axis"));
                let form = |rows| self.floats(scales, &[rows]).map(Form::I8);
                rows.then(|| self.matrix(source, DataType::INT8, 1, form))?
            }
            _ => None,
        }
    }

    /// int8 with a scale, and perhaps an offset, for each block, which nodes dequantize and bring into the shape of a
    /// matrix.
    fn blocks(&self, node: &NodeProto) -> Option<Weights> {
        let [scaled, shape] = node.input.as_slice() else { return None };
        let [rows, columns] = *self.integers(shape)? else { return None };
        let (rows, columns) = (positive(rows)?, positive(columns)?);
        let (scaled, offset) = match self.made_by(scaled, "Add").map(|add| add.input.as_slice()) {
            Some([scaled, offset]) => (scaled, Some(offset)),
            Some(_) => return None,
            None => (scaled, None),
        };
        self.made_by(scaled, "DequantizeLinear")?;
        let blocks = self.weights(scaled)?;
        let (count, block) = (blocks.rows, blocks.columns);
        let offsets = match offset {
            Some(name) => Some(self.floats(name, &[count, 1])?),
            None => None,
        };
        let each = columns / block;
        if !columns.is_multiple_of(block) || each.checked_mul(rows) != Some(count) {
            return None;
        }
        if !block.is_multiple_of(BLOCK) {
            let mut values = blocks.dequantized();
            if let Some(offsets) = offsets {
                let added = values.chunks_exact_mut(block).zip(offsets.get());
                added.for_each(|(block, offset)| block.iter_mut().for_each(|w| *w += offset));
            }
            return Some(Weights::own(rows, columns, &values));
        }
        let Form::I8(scales) = blocks.form else { return None };
        // Longer blocks are several with equal scales.
        let pieces = block / BLOCK;
        let scales = match pieces {
            1 => scales,
            _ => {
                let scales = scales.get().iter();
                Floats::Own(scales.flat_map(|scale| std::iter::repeat_n(*scale, pieces)).collect())
            }
        };
        let offsets = offsets.map(|offsets| {
            let at = |place: usize| offsets.get()[place % rows * each + place / rows / pieces];
            Floats::Own((0..rows * each * pieces).map(at).collect())
        });
        Some(Weights {
            rows,
            columns,
            form: Form::I8Blocks(scales),
            stored: blocks.stored,
            offsets,
        })
    }

    fn matrix(
        &self,
        tensor: &TensorProto,
        dtype: DataType,
        size: usize,
        form: impl FnOnce(usize) -> Option<Form>,
    ) -> Option<Weights> {
        let [rows, columns] = *tensor.dims.as_slice() else { return None };
        let (rows, columns) = (positive(rows)?, positive(columns)?);
        let bytes = rows.checked_mul(columns)?.checked_mul(size)?;
        let stored = self.stored(tensor, dtype, bytes, size)?;
        Some(Weights { rows, columns, form: form(rows)?, stored, offsets: None })
    }

    /// The weights of a `MatMulNBits`.
    fn bits(&self, node: &NodeProto, w: &str, scales: &str) -> Option<Weights> {
        let (rows, columns) = (positive(integer(node, "N")?)?, positive(integer(node, "K")?)?);
        let blocks = columns / BLOCK;
        let known = integer(node, "bits") == Some(4)
            && integer(node, "block_size") == Some(BLOCK as i64)
            && columns.is_multiple_of(BLOCK);
        let tensor = self.initializers.get(w)?;
        let dims = [rows, blocks, BLOCK / 2].map(|n| n as i64);
        if !known || tensor.dims != dims {
            return None;
        }
        let bytes = rows.checked_mul(columns)? / 2;
        let stored = self.stored(tensor, DataType::UINT8, bytes, 4)?;
        let flat = rows.checked_mul(blocks)?;
        let scales =
            self.floats(scales, &[rows, blocks]).or_else(|| self.floats(scales, &[flat]))?;
        Some(Weights { rows, columns, form: Form::I4(scales), stored, offsets: None })
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
        let entry = |key: &str| {
            let entry = tensor.external_data.iter().find(|e| e.key.as_deref() == Some(key))?;
            entry.value.as_deref()
        };
        let offset = entry("offset").map_or(Some(0), |text| text.parse().ok())?;
        let length: usize = entry("length").map_or(Some(bytes), |text| text.parse().ok())?;
        let range = Range { start: offset, end: bytes.checked_add(offset)? };
        (length == bytes).then(|| Stored::new(self.files.get(entry("location")?)?, range, align))?
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
        if let Some(node) = self.made_by(name, "Cast").filter(|node| to_float(node)) {
            let tensor = self.initializers.get(node.input.first()?.as_str())?;
            let dims = sizes(&tensor.dims)?;
            let columns = dims.iter().try_fold(1usize, |all, n| all.checked_mul(*n))?;
            let stored = self.stored(tensor, DataType::FLOAT16, columns.checked_mul(2)?, 2)?;
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

/// Whether a `Gemm` is `x · wᵀ + bias`.
pub(super) fn plain_gemm(node: &NodeProto) -> bool {
    integer(node, "transB") == Some(1)
        && node.attribute.iter().all(|a| match a.name.as_deref() {
            Some("transB") => true,
            Some("transA") => a.i == Some(0),
            Some("alpha" | "beta") => a.f == Some(1.0),
            _ => false,
        })
}

/// Whether a `Cast` is one to f32.
pub(super) fn to_float(node: &NodeProto) -> bool {
    integer(node, "to") == Some(i64::from(DataType::FLOAT.0))
}

/// The domain of an operator, empty for that of ONNX.
pub(super) fn domain(node: &NodeProto) -> &str {
    match node.domain.as_deref() {
        None | Some("ai.onnx") => "",
        Some(domain) => domain,
    }
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
