//! Softmax attention of many rows with ops of its own for each head, and masks that are added in parts.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use qhx_base::Result;

use super::GraphBuilder;
use crate::graph::{Constant, Elem, Graph, Node, Op, Origin, Tensor, TensorId};

/// Rows from which on a head has ops of its own. With fewer, one matmul over all heads is as quick.
const MIN_ROWS: usize = 16;
/// Parts of a mask for which queries are in parts, too. Beyond it the scores of a head are taken apart for the addition
/// alone: the compiler takes very long for that number of matmuls.
const MAX_BLOCKS: usize = 2;
/// The same of a graph whose mask is added in parts.
const MIN_MASKED_ROWS: usize = 2;

impl Graph {
    /// The same graph with softmax attention of many rows head by head: an op for each head in the place of one over
    /// all of them, without transpositions between rows and heads. A mask of more than `max_mask` bytes of f16 is added
    /// in parts of some rows each. Values are the same. Composites stay: see [`Graph::decomposed`].
    ///
    /// # Errors
    /// When names collide.
    pub fn by_heads(&self, max_mask: usize) -> Result<Cow<'_, Self>> {
        let blocks = self.mask_blocks(max_mask);
        let seeds = self.attention_products();
        if blocks.is_empty() && !seeds.iter().any(|seed| *seed) {
            return Ok(Cow::Borrowed(self));
        }
        let min_rows = if blocks.is_empty() { MIN_ROWS } else { MIN_MASKED_ROWS };
        let split = Splitter {
            wanted: self.read_by(&seeds),
            b: GraphBuilder::new(&*self.name),
            old: self,
            seeds,
            blocks,
            min_rows,
            max_mask,
            places: vec![Place::default(); self.tensors.len()],
            pieces: HashMap::new(),
        };
        split.build().map(Cow::Owned)
    }

    /// For numbers of rows of a mask with more than `max` bytes: in how many parts of rows it is added.
    fn mask_blocks(&self, max: usize) -> HashMap<usize, usize> {
        let mut found = HashMap::new();
        for node in &self.nodes {
            if let Some((rows, blocks)) = self.masks(node, max) {
                let most: &mut usize = found.entry(rows).or_default();
                *most = blocks.max(*most);
            }
        }
        found
    }

    /// Rows of the mask of more than `max` bytes that `node` adds, and parts of them that have no more.
    fn masks(&self, node: &Node, max: usize) -> Option<(usize, usize)> {
        let (Op::Binary(_), out) = (&node.op, self.tensors.get(node.output.index())?) else {
            return None;
        };
        let operands = node.inputs.iter().filter_map(|id| self.tensors.get(id.index()));
        let broadcast = operands.filter(|t| t.shape.len() > 2 && t.elements() < out.elements());
        let parts = broadcast.filter_map(|mask| {
            let [.., rows, width] = mask.shape[..] else { return None };
            let fits = |parts: &usize| {
                rows.is_multiple_of(*parts) && (rows / parts).saturating_mul(2 * width) <= max
            };
            let single = mask.elements() == rows * width && rows * width > max / 2;
            single.then(|| (rows, (1..=rows).find(fits).unwrap_or(rows)))
        });
        parts.max_by_key(|(_, blocks)| *blocks)
    }

    /// For each node: whether it is a matmul of softmax attention, of scores or of weights with values.
    fn attention_products(&self) -> Vec<bool> {
        let mut seeds = vec![false; self.nodes.len()];
        // Scores: what a softmax is made of, up to the matmuls.
        let mut scores = vec![false; self.tensors.len()];
        for (node, seed) in self.nodes.iter().zip(&mut seeds).rev() {
            let of_scores = scores[node.output.index()];
            if of_scores && is_product(&node.op) {
                *seed = true;
            } else if of_scores && passes(&node.op) || self.softmax_of_heads(node) {
                node.inputs.iter().for_each(|id| scores[id.index()] = true);
            }
        }
        // What is made of the weights, up to the matmuls.
        let mut weights = vec![false; self.tensors.len()];
        for (node, seed) in self.nodes.iter().zip(&mut seeds) {
            let read = node.inputs.iter().any(|id| weights[id.index()]);
            if is_product(&node.op) {
                *seed |= node.inputs.first().is_some_and(|id| weights[id.index()]);
            } else if read && passes(&node.op) || self.softmax_of_heads(node) {
                weights[node.output.index()] = true;
            }
        }
        for (node, seed) in self.nodes.iter().zip(&mut seeds) {
            let shape = self.tensors.get(node.output.index()).map(|tensor| &tensor.shape[..]);
            *seed &= matches!(shape, Some([_, rows, _]) if *rows > 1);
        }
        seeds
    }

    fn softmax_of_heads(&self, node: &Node) -> bool {
        let output = self.tensors.get(node.output.index());
        node.op == Op::Softmax && output.is_some_and(|tensor| tensor.shape.len() > 2)
    }

    /// For each tensor: whether one of these nodes reads it, or a tensor that is made of its heads one by one.
    fn read_by(&self, nodes: &[bool]) -> Vec<bool> {
        let mut wanted = vec![false; self.tensors.len()];
        for (node, seed) in self.nodes.iter().zip(nodes).rev() {
            if *seed || passes(&node.op) && wanted[node.output.index()] {
                node.inputs.iter().for_each(|id| wanted[id.index()] = true);
            }
        }
        wanted
    }
}

const fn is_product(op: &Op) -> bool {
    matches!(op, Op::MatMul { .. })
}

/// Ops that compute each head of their input alone, or can.
const fn passes(op: &Op) -> bool {
    matches!(
        op,
        Op::Binary(_)
            | Op::Unary(_)
            | Op::Clamp { .. }
            | Op::Softmax
            | Op::RmsNorm { .. }
            | Op::LayerNorm { .. }
            | Op::Reshape
            | Op::Transpose { .. }
            | Op::Concat { .. }
            | Op::Slice { .. }
            | Op::Cast
    )
}

/// A tensor as matrices `[rows, width]`, one for each head, or several with some of its rows.
#[derive(Debug, Clone)]
struct Heads {
    parts: Parts,
    count: usize,
    rows: usize,
    width: usize,
    /// The parts lie one behind the other, `[…, rows, width]`, and not side by side in rows, `[rows, …, width]`.
    outer: bool,
}

#[derive(Debug, Clone)]
enum Parts {
    Made(Vec<TensorId>),
    /// Columns of a matrix, from this part on; sliced when they are read.
    Columns(TensorId, usize),
}

impl Heads {
    fn like(&self, parts: Vec<TensorId>, width: usize) -> Self {
        Self { count: parts.len(), parts: Parts::Made(parts), width, ..*self }
    }

    fn fits(&self, other: &Self) -> bool {
        (self.count, self.rows, self.outer) == (other.count, other.rows, other.outer)
    }
}

/// A tensor of the old graph in the new one; nothing as long as nothing has read a constant.
#[derive(Debug, Clone, Default)]
struct Place {
    whole: Option<TensorId>,
    heads: Option<Heads>,
}

/// The other operand of a binary op on heads.
enum Operand {
    Heads(Heads),
    /// The same matrix for each head, in this number of parts of its rows.
    Common([usize; 2], usize),
    /// A row or a matrix for each head, one behind the other.
    Each([usize; 2]),
}

/// A piece of a tensor of the new graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Piece {
    Range { axis: usize, start: usize, end: usize },
    Shape([usize; 2]),
}

struct Splitter<'g> {
    old: &'g Graph,
    b: GraphBuilder,
    seeds: Vec<bool>,
    wanted: Vec<bool>,
    blocks: HashMap<usize, usize>,
    min_rows: usize,
    max_mask: usize,
    places: Vec<Place>,
    pieces: HashMap<(TensorId, Piece), TensorId>,
}

impl Splitter<'_> {
    fn build(mut self) -> Result<Graph> {
        let old = self.old;
        for &id in &old.inputs {
            let Tensor { name, elem, shape, .. } = old.tensor(id)?;
            self.places[id.index()].whole = Some(self.b.input(name, *elem, shape)?);
        }
        for (index, node) in old.nodes.iter().enumerate() {
            self.b.scope.clone_from(&node.name);
            let place = match self.split(node, index)? {
                Some(heads) => Place { heads: Some(heads), whole: None },
                None => Place { whole: Some(self.whole_node(node)?), heads: None },
            };
            self.places[node.output.index()] = place;
        }
        for &id in &old.outputs {
            let name = &old.tensor(id)?.name;
            self.b.scope.clone_from(name);
            let whole = self.whole(id)?;
            self.b.output(name, whole)?;
        }
        Ok(self.b.graph)
    }

    /// The node as it was, or in parts of its rows where it adds a mask of too many bytes.
    fn whole_node(&mut self, node: &Node) -> Result<TensorId> {
        let output = self.old.tensor(node.output)?;
        let inputs = node.inputs.iter().map(|&id| self.whole(id)).collect::<Result<Vec<_>>>()?;
        let (elem, shape) = (output.elem, &output.shape);
        let Some((rows, blocks)) = self.old.masks(node, self.max_mask) else {
            return self.b.node_named(
                node.name.clone(),
                node.op.clone(),
                inputs,
                elem,
                shape.clone(),
            );
        };
        let (axis, block) = (shape.len() - 2, rows / blocks);
        let mut parts = Vec::with_capacity(blocks);
        for start in (0..rows).step_by(block) {
            let mut operands = Vec::with_capacity(2);
            for &input in &inputs {
                operands.push(match self.b.shape(input)?[axis] {
                    1 => input,
                    _ => self.b.slice(input, axis, start, start + block)?,
                });
            }
            let mut shape = shape.clone();
            shape[axis] = block;
            parts.push(self.b.node(node.op.clone(), operands, elem, shape)?);
        }
        self.b.concat(&parts, axis)
    }

    /// The output of a node as heads; none where it has to be whole.
    fn split(&mut self, node: &Node, index: usize) -> Result<Option<Heads>> {
        let (old, output) = (self.old, self.old.tensor(node.output)?);
        let Some(&first) = node.inputs.first() else { return Ok(None) };
        let (from, to) = (&old.tensor(first)?.shape[..], &output.shape[..]);
        let [.., width] = *to else { return Ok(None) };
        let heads = self.places[first.index()].heads.clone();
        match (&node.op, heads) {
            (Op::MatMul { transpose_b }, Some(heads)) if self.seeds[index] => {
                self.product(node, &heads, *transpose_b).map(Some)
            }
            (Op::Reshape, None) => Ok(self.columns(node, from, to)?),
            (Op::Reshape, Some(heads)) => Ok(Self::reshaped(heads, to)),
            (Op::Transpose { perm }, Some(heads)) => self.transposed(heads, from, perm),
            (Op::Slice { axis, start, end }, Some(heads)) => {
                self.sliced(heads, from, *axis, *start..*end)
            }
            (Op::Concat { axis }, Some(heads)) if axis + 1 == to.len() => {
                let all = node.inputs.iter().map(|id| self.places[id.index()].heads.clone());
                let Some(all) = all.collect::<Option<Vec<_>>>() else { return Ok(None) };
                if !all.iter().all(|other| other.fits(&heads)) {
                    return Ok(None);
                }
                let all = all.iter().map(|heads| self.parts(heads)).collect::<Result<Vec<_>>>()?;
                let joined = (0..heads.count).map(|i| {
                    let row: Vec<_> = all.iter().map(|parts| parts[i]).collect();
                    self.b.concat(&row, 1)
                });
                let joined = joined.collect::<Result<_>>()?;
                Ok(Some(heads.like(joined, width)))
            }
            (Op::Unary(_) | Op::Clamp { .. } | Op::Softmax | Op::Cast, Some(heads)) => {
                self.each(node, &heads, output.elem, |_, _| Ok(None)).map(Some)
            }
            (Op::RmsNorm { .. } | Op::LayerNorm { .. }, Some(heads)) => {
                let vectors = node.inputs[1..].iter().map(|&id| self.whole(id));
                let vectors = vectors.collect::<Result<Vec<_>>>()?;
                let all = |part| [&[part], &vectors[..]].concat();
                let parts = self.parts(&heads)?.into_iter().map(|part| {
                    let shape = vec![heads.rows, heads.width];
                    self.b.node(node.op.clone(), all(part), output.elem, shape)
                });
                let parts = parts.collect::<Result<_>>()?;
                Ok(Some(heads.like(parts, heads.width)))
            }
            (Op::Binary(_), first) => self.binary(node, first),
            _ => Ok(None),
        }
    }

    /// A matmul for each head.
    fn product(&mut self, node: &Node, a: &Heads, transpose_b: bool) -> Result<Heads> {
        let (old, second) = (self.old, node.inputs[1]);
        let output = old.tensor(node.output)?;
        let shape = &old.tensor(second)?.shape;
        let (groups, width) = (shape[0], output.shape[2]);
        let a = self.in_blocks(a)?;
        let parts = self.parts(&a)?;
        let known = self.places[second.index()].heads.clone();
        let known = known.filter(|b| b.outer && b.count == groups && b.rows == shape[1]);
        let known = known.map(|b| self.parts(&b)).transpose()?;
        let int8 = old.tensor(second)?.elem.is_int8();
        let mut made = Vec::with_capacity(parts.len());
        for (i, part) in parts.into_iter().enumerate() {
            let group = i * groups / a.count;
            made.push(match &known {
                Some(known) => self.b.matmul(part, known[group], transpose_b)?,
                None if int8 => {
                    let whole = self.whole(second)?;
                    let range = Piece::Range { axis: 0, start: group, end: group + 1 };
                    let cache = self.piece(whole, range)?;
                    let part = self.b.reshape(part, &[1, a.rows, a.width])?;
                    let product = self.b.matmul(part, cache, transpose_b)?;
                    self.b.reshape(product, &[a.rows, width])?
                }
                None => {
                    let b = self.of_head(second, group, [shape[1], shape[2]])?;
                    self.b.matmul(part, b, transpose_b)?
                }
            });
        }
        Ok(a.like(made, width))
    }

    /// Queries in as many parts as their mask.
    fn in_blocks(&mut self, heads: &Heads) -> Result<Heads> {
        let few = |blocks: &&usize| heads.outer && **blocks <= MAX_BLOCKS;
        let Some(&blocks) = self.blocks.get(&heads.rows).filter(few) else {
            return Ok(heads.clone());
        };
        let rows = heads.rows / blocks;
        let mut parts = Vec::with_capacity(heads.count * blocks);
        for part in self.parts(heads)? {
            for start in (0..heads.rows).step_by(rows) {
                let range = Piece::Range { axis: 0, start, end: start + rows };
                parts.push(self.piece(part, range)?);
            }
        }
        Ok(Heads { rows, ..heads.like(parts, heads.width) })
    }

    /// A matrix whose columns are those of heads, where they are read head by head.
    fn columns(&mut self, node: &Node, from: &[usize], to: &[usize]) -> Result<Option<Heads>> {
        let (&[rows, _], &[first, ref heads @ .., width]) = (from, to) else { return Ok(None) };
        let count: usize = heads.iter().product();
        let elem = self.old.tensor(node.output)?.elem;
        let float = matches!(elem, Elem::Activation | Elem::F32);
        let wanted = self.wanted[node.output.index()] && float;
        if !wanted || heads.is_empty() || count < 2 || rows != first || rows < self.min_rows {
            return Ok(None);
        }
        let parts = Parts::Columns(self.whole(node.inputs[0])?, 0);
        Ok(Some(Heads { parts, count, rows, width, outer: false }))
    }

    /// Heads that are seen in another shape.
    fn reshaped(heads: Heads, to: &[usize]) -> Option<Heads> {
        let Heads { count, rows, width, outer, .. } = heads;
        let same = to.last() == Some(&width);
        let inner = to[0] == rows || to == [rows * count, width];
        (same && (outer && to.len() > 1 || !outer && inner)).then_some(heads)
    }

    /// Heads one behind the other instead of side by side, and back: nothing moves.
    fn transposed(
        &mut self,
        heads: Heads,
        from: &[usize],
        perm: &[usize],
    ) -> Result<Option<Heads>> {
        match (heads.outer, perm) {
            (false, [1, 0, 2] | [1, 2, 0, 3]) if from[0] == heads.rows => {
                Ok(Some(Heads { outer: true, ..heads }))
            }
            (true, [1, 0, 2] | [2, 0, 1, 3]) => {
                let rows = from[from.len() - 2];
                if !rows.is_multiple_of(heads.rows) {
                    return Ok(None);
                }
                let blocks = rows / heads.rows;
                if blocks == 1 {
                    return Ok(Some(Heads { outer: false, ..heads }));
                }
                let parts = self.parts(&heads)?;
                let joined = parts.chunks_exact(blocks).map(|part| self.b.concat(part, 0));
                let joined = joined.collect::<Result<_>>()?;
                Ok(Some(Heads { rows, outer: false, ..heads.like(joined, heads.width) }))
            }
            _ => Ok(None),
        }
    }

    fn sliced(
        &mut self,
        heads: Heads,
        from: &[usize],
        axis: usize,
        range: std::ops::Range<usize>,
    ) -> Result<Option<Heads>> {
        let (start, end) = (range.start, range.end);
        if axis + 1 == from.len() {
            let range = Piece::Range { axis: 1, start, end };
            let parts = self.parts(&heads)?.into_iter().map(|part| self.piece(part, range));
            let parts = parts.collect::<Result<_>>()?;
            return Ok(Some(heads.like(parts, end - start)));
        }
        // Some of the heads.
        let side = !heads.outer && from.len() == 3 && axis == 1 && from[1] == heads.count;
        let behind = heads.outer && from.len() == 3 && axis == 0 && from[0] == heads.count;
        if !side && !behind {
            return Ok(None);
        }
        let parts = match heads.parts {
            Parts::Made(parts) => Parts::Made(parts[range].to_vec()),
            Parts::Columns(of, first) => Parts::Columns(of, first + start),
        };
        Ok(Some(Heads { parts, count: end - start, ..heads }))
    }

    fn binary(&mut self, node: &Node, first: Option<Heads>) -> Result<Option<Heads>> {
        let &[a, b] = &node.inputs[..] else { return Ok(None) };
        let output = self.old.tensor(node.output)?;
        let second = self.places[b.index()].heads.clone();
        let (heads, other, swapped) = match (first, second) {
            (Some(heads), _) => (heads, b, false),
            (None, Some(heads)) => (heads, a, true),
            (None, None) => return Ok(None),
        };
        // What is broadcast has fewer elements.
        let own = self.old.tensor(if swapped { b } else { a })?;
        if own.shape != output.shape {
            return Ok(None);
        }
        let Some(operand) = self.operand(&heads, &output.shape, other)? else { return Ok(None) };
        let others = match operand {
            Operand::Heads(other) => self.parts(&other)?,
            Operand::Common(shape, blocks) => {
                let whole = self.matrix(other, shape)?;
                let rows = shape[0] / blocks;
                if (2 * rows).saturating_mul(shape[1]) > self.max_mask && rows > 1 {
                    return self.in_rows(node, &heads, whole, blocks, swapped).map(Some);
                }
                let parts = (0..blocks).map(|block| {
                    let (start, end) = (block * rows, (block + 1) * rows);
                    self.piece(whole, Piece::Range { axis: 0, start, end })
                });
                parts.collect::<Result<Vec<_>>>()?
            }
            Operand::Each(shape) => {
                let parts = (0..heads.count).map(|head| self.of_head(other, head, shape));
                parts.collect::<Result<Vec<_>>>()?
            }
        };
        let other = |i: usize| others[i % others.len()];
        self.each(node, &heads, output.elem, |i, part| {
            Ok(Some(if swapped { vec![other(i), part] } else { vec![part, other(i)] }))
        })
        .map(Some)
    }

    /// The op of `node` on heads and a mask of too many bytes, some rows after the other.
    fn in_rows(
        &mut self,
        node: &Node,
        heads: &Heads,
        mask: TensorId,
        blocks: usize,
        swapped: bool,
    ) -> Result<Heads> {
        let (elem, most) = (self.old.tensor(node.output)?.elem, self.max_mask / 2 / heads.width);
        let fits = |rows: &usize| heads.rows.is_multiple_of(*rows) && *rows <= most;
        let step = (1..heads.rows).rev().find(fits).unwrap_or(1);
        let mut made = Vec::with_capacity(heads.count);
        for (i, part) in self.parts(heads)?.into_iter().enumerate() {
            let first = i % blocks * heads.rows;
            let mut added = Vec::with_capacity(heads.rows / step);
            for start in (0..heads.rows).step_by(step) {
                let rows = |start| Piece::Range { axis: 0, start, end: start + step };
                let both = [self.piece(part, rows(start))?, self.piece(mask, rows(first + start))?];
                let inputs = if swapped { vec![both[1], both[0]] } else { both.to_vec() };
                added.push(self.b.node(node.op.clone(), inputs, elem, vec![step, heads.width])?);
            }
            made.push(self.b.concat(&added, 0)?);
        }
        Ok(heads.like(made, heads.width))
    }

    /// Place of the other operand of a binary op on `heads`, whose shape is `to`, beside them.
    fn operand(&self, heads: &Heads, to: &[usize], other: TensorId) -> Result<Option<Operand>> {
        if let Some(other) = &self.places[other.index()].heads {
            let same = other.fits(heads) && [1, heads.width].contains(&other.width);
            return Ok(same.then(|| Operand::Heads(other.clone())));
        }
        let shape = &self.old.tensor(other)?.shape[..];
        let (&[ref before @ .., rows, width], &[ref outer @ .., whole, _]) = (shape, to) else {
            return Ok(None);
        };
        let one = |dims: &[usize]| dims.iter().all(|size| *size == 1);
        if !heads.outer {
            let common = match shape {
                [rows, between @ .., width] if one(between) => Some([*rows, *width]),
                _ => None,
            };
            let common = common.filter(|[rows, _]| *rows == 1 || to[0] == *rows && to.len() > 2);
            return Ok(common.map(|shape| Operand::Common(shape, 1)));
        }
        if one(before) && rows == 1 {
            return Ok(Some(Operand::Common([1, width], 1)));
        }
        if one(before) && rows == whole && rows.is_multiple_of(heads.rows) {
            return Ok(Some(Operand::Common([rows, width], rows / heads.rows)));
        }
        let each = before == outer
            && outer.iter().product::<usize>() == heads.count
            && (rows == 1 || rows == heads.rows);
        Ok(each.then_some(Operand::Each([rows, width])))
    }

    /// The op of `node` on each part, with the inputs that `inputs` says.
    fn each(
        &mut self,
        node: &Node,
        heads: &Heads,
        elem: Elem,
        inputs: impl Fn(usize, TensorId) -> Result<Option<Vec<TensorId>>>,
    ) -> Result<Heads> {
        let mut made = Vec::with_capacity(heads.count);
        for (i, part) in self.parts(heads)?.into_iter().enumerate() {
            let inputs = inputs(i, part)?.unwrap_or_else(|| vec![part]);
            let shape = vec![heads.rows, heads.width];
            made.push(self.b.node(node.op.clone(), inputs, elem, shape)?);
        }
        Ok(heads.like(made, heads.width))
    }

    fn parts(&mut self, heads: &Heads) -> Result<Vec<TensorId>> {
        match &heads.parts {
            Parts::Made(parts) => Ok(parts.clone()),
            &Parts::Columns(of, first) => (first..first + heads.count)
                .map(|head| {
                    let (start, end) = (head * heads.width, (head + 1) * heads.width);
                    self.piece(of, Piece::Range { axis: 1, start, end })
                })
                .collect(),
        }
    }

    /// A tensor of the old graph in one piece.
    fn whole(&mut self, id: TensorId) -> Result<TensorId> {
        let Place { whole, heads } = &self.places[id.index()];
        if let Some(whole) = whole {
            return Ok(*whole);
        }
        let Tensor { name, elem, shape, origin } = self.old.tensor(id)?;
        let made = match heads.clone() {
            None => self.b.push(name.clone(), *elem, shape.clone(), origin.clone())?,
            Some(heads) => self.joined(&heads, shape)?,
        };
        self.places[id.index()].whole = Some(made);
        Ok(made)
    }

    fn joined(&mut self, heads: &Heads, shape: &[usize]) -> Result<TensorId> {
        let Heads { count, rows, width, outer, .. } = *heads;
        let joined = match &heads.parts {
            Parts::Made(parts) => self.b.concat(parts, usize::from(!outer))?,
            &Parts::Columns(of, first) => {
                let columns = self.b.slice(of, 1, first * width, (first + count) * width)?;
                if outer {
                    let heads = self.b.reshape(columns, &[rows, count, width])?;
                    self.b.transpose(heads, &[1, 0, 2])?
                } else {
                    columns
                }
            }
        };
        self.reshape(joined, shape)
    }

    fn reshape(&mut self, x: TensorId, shape: &[usize]) -> Result<TensorId> {
        if self.b.shape(x)? == shape { Ok(x) } else { self.b.reshape(x, shape) }
    }

    /// A piece of a tensor of the new graph, once.
    fn piece(&mut self, of: TensorId, piece: Piece) -> Result<TensorId> {
        if let Some(known) = self.pieces.get(&(of, piece)) {
            return Ok(*known);
        }
        let made = match piece {
            Piece::Range { axis, start, end } => self.b.slice(of, axis, start, end)?,
            Piece::Shape(shape) => self.reshape(of, &shape)?,
        };
        self.pieces.insert((of, piece), made);
        Ok(made)
    }

    /// A tensor of the old graph as a matrix.
    fn matrix(&mut self, id: TensorId, shape: [usize; 2]) -> Result<TensorId> {
        let tensor = self.old.tensor(id)?;
        if let Origin::Constant(constant) = &tensor.origin {
            return self.constant(id, constant.clone(), Piece::Shape(shape), shape);
        }
        let whole = self.whole(id)?;
        self.piece(whole, Piece::Shape(shape))
    }

    /// The matrix of one head of a tensor of the old graph, whose heads lie one behind the other.
    fn of_head(&mut self, id: TensorId, head: usize, shape: [usize; 2]) -> Result<TensorId> {
        let tensor = self.old.tensor(id)?;
        let size = shape[0] * shape[1];
        let (start, end) = (head * size, (head + 1) * size);
        if let Origin::Constant(constant) = &tensor.origin {
            let part = match constant {
                Constant::Float(all) => {
                    Constant::Float(all.get(start..end).map_or_else(|| Arc::clone(all), Arc::from))
                }
                Constant::Int(all) => {
                    Constant::Int(all.get(start..end).map_or_else(|| Arc::clone(all), Arc::from))
                }
            };
            return self.constant(id, part, Piece::Range { axis: 0, start, end }, shape);
        }
        let rank = tensor.shape.len();
        let whole = self.whole(id)?;
        let whole = match rank {
            3 => whole,
            _ => self.reshape(whole, &[tensor.elements() / size, shape[0], shape[1]])?,
        };
        let part = self.piece(whole, Piece::Range { axis: 0, start: head, end: head + 1 })?;
        self.piece(part, Piece::Shape(shape))
    }

    /// A part of a constant of the old graph, once.
    fn constant(
        &mut self,
        of: TensorId,
        values: Constant,
        piece: Piece,
        shape: [usize; 2],
    ) -> Result<TensorId> {
        if let Some(known) = self.pieces.get(&(of, piece)) {
            return Ok(*known);
        }
        let Tensor { name, elem, .. } = self.old.tensor(of)?;
        let name = format!("{name}_part{}", self.b.graph.tensors.len());
        let made = self.b.push(name, *elem, shape.to_vec(), Origin::Constant(values))?;
        self.pieces.insert((of, piece), made);
        Ok(made)
    }
}
