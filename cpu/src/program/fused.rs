//! Nodes that are computed together with those before them.

use std::collections::HashMap;

use qhx_types::onnx::{Operator, attention, attribute, swapped};
use rten_onnx::onnx::{DataType, NodeProto};

use super::reader::{Reader, StoredMatmul, integer, integers, operator};

/// Computation of the nodes up to one of a graph. Nodes before it are left out where nothing else reads them.
pub(super) enum Fused<'a> {
    /// A matmul with stored weights.
    Stored(StoredMatmul<'a>),
    /// A matmul with int8 that an input of the graph holds.
    Input(InputMatmul<'a>),
    /// Softmax attention over a cache.
    Attention(Attention<'a>),
}

/// `x · bᵀ · scale`, where `b` is an input `[rows, columns]` of the graph.
pub(super) struct InputMatmul<'a> {
    pub(super) x: &'a str,
    pub(super) b: &'a str,
    pub(super) scale: &'a str,
}

/// `softmax(q · [past_k; k]ᵀ + mask) · [past_v; v]` for each head. Of caches of int8, scores and weights are multiplied
/// with the scales of the rows.
pub(super) struct Attention<'a> {
    /// `[heads, repeat · rows, dim]`
    pub(super) q: &'a str,
    /// `[heads, capacity, dim]` and `[heads, rows, dim]`, which may be transposed.
    pub(super) keys: [&'a str; 2],
    /// The values, in the shapes of the keys.
    pub(super) values: [&'a str; 2],
    /// Scales of the caches' rows, which are int8 then: `[heads, 1, capacity]` of the keys and of the values, and a
    /// constant that all are multiplied with.
    pub(super) scales: Option<([&'a str; 2], &'a str)>,
    /// `[1 or rows, capacity + rows]` behind dimensions of 1.
    pub(super) mask: &'a str,
}

impl<'a> Fused<'a> {
    /// The computation that ends in the node, if there is one.
    fn of(reader: &Reader<'a, '_>, node: &'a NodeProto) -> Option<Self> {
        if let Some(matmul) = reader.stored_matmul(node) {
            return Some(Self::Stored(matmul));
        }
        match operator(node)? {
            Operator::MatMul => InputMatmul::of(reader, node).map(Self::Input),
            Operator::Add => Attention::of(reader, node).map(Self::Attention),
            _ => None,
        }
    }

    /// All of a graph, by the places of their last nodes.
    pub(super) fn all(reader: &Reader<'a, '_>) -> HashMap<usize, Self> {
        let nodes = reader.graph.node.iter().enumerate();
        nodes.filter_map(|(at, node)| Some((at, Self::of(reader, node)?))).collect()
    }

    /// The values that it reads.
    pub(super) fn reads(&self) -> Vec<&'a str> {
        match self {
            Self::Stored(matmul) => vec![matmul.x],
            Self::Input(InputMatmul { x, b, .. }) => vec![*x, *b],
            Self::Attention(Attention { q, keys, values, scales, mask }) => {
                let scales = scales.as_ref().map_or(&[][..], |(scales, _)| scales);
                [&[*q, *mask], keys.as_slice(), values, scales].concat()
            }
        }
    }
}

impl<'a> InputMatmul<'a> {
    fn of(reader: &Reader<'a, '_>, node: &'a NodeProto) -> Option<Self> {
        let [x, turned] = node.input.as_slice() else { return None };
        let [b] = transposed(reader, turned, 2)?;
        let [b, scale] = dequantized(reader, b)?;
        Some(Self { x, b, scale })
    }
}

/// An input of int8, and its scale, which `name` is dequantized from.
fn dequantized<'a>(reader: &Reader<'a, '_>, name: &str) -> Option<[&'a str; 2]> {
    let [x, scale] = inputs(reader.made_by(name, Operator::DequantizeLinear)?)?;
    let info = reader.graph.input.iter().find(|input| input.name.as_deref() == Some(x))?;
    let is_int8 = info.r#type.as_ref()?.tensor_type.as_ref()?.elem_type? == DataType::INT8;
    is_int8.then_some([x, scale])
}

impl<'a> Attention<'a> {
    fn of(reader: &Reader<'a, '_>, node: &'a NodeProto) -> Option<Self> {
        let [old, own] = inputs(node)?;
        let [old, past_v] = inputs(reader.made_by(old, Operator::MatMul)?)?;
        let (old, scale_v) = scaled(reader, old);
        // With one token the matmul is one of a column and a row.
        let own =
            reader.made_by(own, Operator::MatMul).or_else(|| reader.made_by(own, Operator::Mul))?;
        let [own, v] = inputs(own)?;
        let (weights, _, middle) = slice(reader, old)?;
        let (same, start, _) = slice(reader, own)?;
        if weights != same || start != middle {
            return None;
        }
        let scores = past_reshape(reader, weights);
        let softmax = reader.made_by(scores, Operator::Softmax)?;
        if !matches!(integer(softmax, attribute::AXIS), None | Some(-1)) {
            return None;
        }
        let [sum] = inputs(softmax)?;
        let [scores, mask] = inputs(reader.made_by(sum, Operator::Add)?)?;
        let concat = reader.made_by(past_reshape(reader, scores), Operator::Concat)?;
        let [old, own] = inputs(concat)?;
        let (old, scale_k) = scaled(reader, old);
        let [q, past_k] = inputs(reader.made_by(old, Operator::MatMul)?)?;
        let [same, k] = inputs(reader.made_by(own, Operator::MatMul)?)?;
        let keys = [past_k, k].map(|name| transposed(reader, name, attention::RANK));
        let [Some([past_k]), Some([k])] = keys else { return None };
        let joined = integer(concat, attribute::AXIS) == Some(POSITION_AXIS) && q == same;
        let of = |past_k, past_v, scales| {
            joined.then_some(Self { q, keys: [past_k, k], values: [past_v, v], scales, mask })
        };
        match (scale_k, scale_v, dequantized(reader, past_k), dequantized(reader, past_v)) {
            (None, None, None, None) => of(past_k, past_v, None),
            (Some(k), Some(v), Some([past_k, step]), Some([past_v, same])) if step == same => {
                of(past_k, past_v, Some(([k, v], step)))
            }
            _ => None,
        }
    }
}

const POSITION_AXIS: i64 = attention::POSITION_AXIS as i64;

/// The inputs of a node that has `N`.
fn inputs<const N: usize>(node: &NodeProto) -> Option<[&str; N]> {
    let all: &[String; N] = node.input.as_slice().try_into().ok()?;
    Some(all.each_ref().map(String::as_str))
}

/// First factor of a product, and its other factor; the value itself where it is no product.
fn scaled<'a>(reader: &Reader<'a, '_>, name: &'a str) -> (&'a str, Option<&'a str>) {
    match reader.made_by(name, Operator::Mul).and_then(inputs) {
        Some([x, scale]) => (x, Some(scale)),
        None => (name, None),
    }
}

/// The matrix that is read with rows and columns swapped.
fn transposed<'a>(reader: &Reader<'a, '_>, name: &str, rank: usize) -> Option<[&'a str; 1]> {
    let node = reader.made_by(name, Operator::Transpose)?;
    if integers(node, attribute::PERM)? == swapped(rank) { inputs(node) } else { None }
}

/// Source of a slice along the last of three dimensions, with start and end of the slice.
fn slice<'a>(reader: &Reader<'a, '_>, name: &str) -> Option<(&'a str, i64, i64)> {
    let [x, start, end, axis] = inputs(reader.made_by(name, Operator::Slice)?)?;
    let one = |name: &str| match *reader.integers(name)? {
        [only] => Some(only),
        _ => None,
    };
    (one(axis)? == POSITION_AXIS).then_some((x, one(start)?, one(end)?))
}

/// The value itself, or what it is a reshaping of.
fn past_reshape<'a>(reader: &Reader<'a, '_>, name: &'a str) -> &'a str {
    let node = reader.made_by(name, Operator::Reshape);
    node.and_then(|node| node.input.first()).map_or(name, String::as_str)
}
