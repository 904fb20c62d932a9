//! Softmax attention as one node, and as the nodes that it stands for.

use std::borrow::Cow;

use qhx_base::Result;

use super::GraphBuilder;
use crate::graph::{AttentionInputs, Constant, Elem, Graph, Node, Op, Origin, TensorId, UnaryOp};

/// Axis of scores `[groups, queries, positions]` along which those of cache and rows lie side by side.
const POSITIONS: usize = 2;

/// Sizes of an attention.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    groups: usize,
    repeat: usize,
    rows: usize,
    capacity: usize,
}

impl Sizes {
    /// Positions that a query has scores for.
    const fn width(self) -> usize {
        self.capacity + self.rows
    }
}

impl GraphBuilder {
    /// Softmax attention, see [`AttentionInputs`].
    ///
    /// # Errors
    /// When the shapes or element types do not fit; the message names the node.
    pub fn attention(&mut self, inputs: AttentionInputs<TensorId>) -> Result<TensorId> {
        let (op, list) = (Op::Attention(inputs.form()), inputs.list());
        let Some(sizes) = self.attention_sizes(&inputs)? else {
            let expected = "queries [groups, n · rows, dim], keys and values [groups, rows, dim], caches \
                            [groups, capacity, dim], scales [groups, 1, capacity] of those of int8 alone, a mask of \
                            capacity + rows columns, a cap of one value, and sinks [groups, n · rows, 1]";
            return Err(self.mismatch(&op, &list, expected));
        };
        let tensor = self.graph.tensor(inputs.q)?;
        let (elem, shape) = (tensor.elem, tensor.shape.clone());
        let output = self.node(op, list, elem, shape)?;
        self.next += counts(&inputs, sizes).1 - 1;
        Ok(output)
    }

    /// Same as [`GraphBuilder::attention`], with a cap by its value.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::attention`].
    pub fn capped_attention(
        &mut self,
        mut inputs: AttentionInputs<TensorId>,
        cap: f32,
    ) -> Result<TensorId> {
        // Its name is that of a scalar made where it is read.
        let before = counts(&inputs, Sizes { groups: 1, repeat: 1, rows: 1, capacity: 1 }).0;
        self.next += before;
        let cap = self.scalar(inputs.q, cap);
        self.next -= before;
        inputs.cap = Some(cap?);
        self.attention(inputs)
    }

    /// The sizes of an attention; none where they do not fit.
    fn attention_sizes(&self, inputs: &AttentionInputs<TensorId>) -> Result<Option<Sizes>> {
        let AttentionInputs { q, k, v, past, scales, mask, cap, sinks } = *inputs;
        let tensor = |id| self.graph.tensor(id);
        let (&[groups, queries, dim], &[heads, rows, width]) = (self.shape(q)?, self.shape(k)?)
        else {
            return Ok(None);
        };
        let elem = tensor(q)?.elem;
        let floats = matches!(elem, Elem::Activation | Elem::F32);
        let mut fits = floats && heads == groups && width == dim && queries.is_multiple_of(rows);
        for id in [k, v] {
            fits &= tensor(id)?.elem == elem && self.shape(id)? == [groups, rows, dim];
        }
        let mut capacity = 0;
        for id in past.into_iter().flatten() {
            let cache = tensor(id)?;
            let &[heads, positions, width] = &cache.shape[..] else { return Ok(None) };
            let known = if scales.is_some() { cache.elem.is_int8() } else { cache.elem == elem };
            fits &= known && heads == groups && width == dim;
            fits &= capacity == 0 || capacity == positions;
            capacity = positions;
        }
        fits &= past.is_some() || scales.is_none();
        for id in scales.into_iter().flatten() {
            fits &= tensor(id)?.elem == elem && self.shape(id)? == [groups, 1, capacity];
        }
        let Some(width) = capacity.checked_add(rows) else { return Ok(None) };
        if let Some(mask) = mask {
            fits &= tensor(mask)?.elem == elem;
            fits &= match (rows, self.shape(mask)?) {
                (1, &[1, 1, columns]) => columns == width,
                (2.., &[1, 1, of, columns]) => columns == width && (of == 1 || of == rows),
                _ => false,
            };
        }
        if let Some(cap) = cap {
            let cap = tensor(cap)?;
            fits &= matches!(cap.origin, Origin::Constant(Constant::Float(_)));
            fits &= cap.elem == elem && cap.shape == [1, 1, 1];
        }
        if let Some(sinks) = sinks {
            fits &= tensor(sinks)?.elem == elem && self.shape(sinks)? == [groups, queries, 1];
        }
        Ok(fits.then(|| Sizes { groups, repeat: queries / rows, rows, capacity }))
    }

    /// The nodes that an attention stands for, group by group.
    fn decompose_by_groups(&mut self, inputs: &AttentionInputs<TensorId>) -> Result<TensorId> {
        let Some(Sizes { groups, .. }) = self.attention_sizes(inputs)? else {
            return Err(self.fault("an attention whose sizes do not fit"));
        };
        let mut parts = Vec::with_capacity(groups);
        for group in 0..groups {
            let mut part = |id| match groups {
                1 => Ok(id),
                _ => self.slice(id, 0, group, group + 1),
            };
            let AttentionInputs { q, k, v, past, .. } = *inputs;
            let [q, k, v] = [part(q)?, part(k)?, part(v)?];
            let past = match past {
                Some([keys, values]) => Some([part(keys)?, part(values)?]),
                None => None,
            };
            let sinks = inputs.sinks.map(&mut part).transpose()?;
            let inputs = AttentionInputs { q, k, v, past, sinks, ..*inputs };
            parts.push(self.decompose(&inputs, true)?);
        }
        self.concat(&parts, 0)
    }

    /// The nodes that an attention stands for.
    ///
    /// Scores of the cache and of the rows themselves are separate matmuls that are joined before the softmax, so that
    /// the cache is read where it lies and not copied to append rows. If `turned`, those of the cache are its keys times
    /// the queries, and turned around then.
    fn decompose(&mut self, inputs: &AttentionInputs<TensorId>, turned: bool) -> Result<TensorId> {
        let AttentionInputs { q, k, v, past, scales, mask, cap, sinks } = *inputs;
        let Some(sizes) = self.attention_sizes(inputs)? else {
            return Err(self.fault("an attention whose sizes do not fit"));
        };
        let Sizes { groups, repeat, rows, capacity } = sizes;
        let scaled = |b: &mut Self, x, of: usize| match scales {
            Some(scales) => b.mul(x, scales[of]),
            None => Ok(x),
        };
        let own = self.matmul(q, k, true)?;
        let mut scores = match past {
            Some([past, _]) => {
                let old = match turned {
                    false => self.matmul(q, past, true)?,
                    true => {
                        let old = self.matmul(past, q, true)?;
                        self.transpose(old, &[0, 2, 1])?
                    }
                };
                let old = scaled(self, old, 0)?;
                self.concat(&[old, own], POSITIONS)?
            }
            None => own,
        };
        if let Some(cap) = cap {
            scores = self.unary(UnaryOp::Tanh, scores)?;
            scores = self.mul(scores, cap)?;
        }
        let weights = match mask {
            Some(mask) if rows == 1 => {
                let scores = self.add(scores, mask)?;
                self.shares(scores, sinks)?
            }
            Some(mask) => {
                let scores = self.reshape(scores, &[groups, repeat, rows, sizes.width()])?;
                let mut scores = self.add(scores, mask)?;
                let all = [groups, repeat * rows, sizes.width()];
                if sinks.is_some() {
                    scores = self.reshape(scores, &all)?;
                    self.shares(scores, sinks)?
                } else {
                    let weights = self.softmax(scores)?;
                    self.reshape(weights, &all)?
                }
            }
            None => self.shares(scores, sinks)?,
        };
        let own = self.slice(weights, POSITIONS, capacity, sizes.width())?;
        // With one row the matmul is that of a column and a row.
        let own = if rows == 1 { self.mul(own, v)? } else { self.matmul(own, v, false)? };
        let Some([_, past]) = past else { return Ok(own) };
        let old = self.slice(weights, POSITIONS, 0, capacity)?;
        let old = scaled(self, old, 1)?;
        let old = self.matmul(old, past, false)?;
        self.add(old, own)
    }
}

impl GraphBuilder {
    /// Softmax of scores, beside which there may be one more.
    fn shares(&mut self, scores: TensorId, sinks: Option<TensorId>) -> Result<TensorId> {
        match sinks {
            Some(sinks) => {
                let scores = self.concat(&[scores, sinks], POSITIONS)?;
                self.softmax(scores)
            }
            None => self.softmax(scores),
        }
    }
}

/// Nodes that an attention stands for: those before its cap, and all.
fn counts(inputs: &AttentionInputs<TensorId>, sizes: Sizes) -> (usize, usize) {
    let (past, scales) = (usize::from(inputs.past.is_some()), usize::from(inputs.scales.is_some()));
    let before = 1 + past * 2 + scales;
    let cap = usize::from(inputs.cap.is_some()) * 2;
    let mask = usize::from(inputs.mask.is_some()) * if sizes.rows == 1 { 1 } else { 3 };
    let sinks = usize::from(inputs.sinks.is_some());
    (before + 1, before + cap + mask + sinks + 2 + past * 4 + scales)
}

impl Graph {
    /// The same graph with the nodes that its composites stand for in their place. Their names are those that the
    /// builder would have given them.
    ///
    /// # Errors
    /// When the graph was changed so that names collide.
    pub fn decomposed(&self) -> Result<Cow<'_, Self>> {
        self.decomposed_where(|_| true)
    }

    /// Same as [`Graph::decomposed`] of those composites that `wanted` says.
    ///
    /// # Errors
    /// Errors of [`Graph::decomposed`].
    pub fn decomposed_where(&self, wanted: impl Fn(&Node) -> bool) -> Result<Cow<'_, Self>> {
        self.with_parts(wanted, |b, node, attention| {
            (b.scope, b.next) = numbered(node);
            b.decompose(attention, false)
        })
    }

    /// True of the attention of one row over a cache of floats.
    pub fn is_step(&self, node: &Node) -> bool {
        let Op::Attention(form) = node.op else { return false };
        let inputs = AttentionInputs::of(form, &node.inputs);
        inputs.is_some_and(|AttentionInputs { k, past, scales, .. }| {
            let rows = self.tensor(k).ok().and_then(|keys| keys.shape.get(1).copied());
            past.is_some() && scales.is_none() && rows == Some(1)
        })
    }

    /// Same as [`Graph::decomposed`], with nodes for each group of heads where [`Graph::is_step`], and scores that are
    /// the keys of a cache times queries: the NPU then turns a row around for each query, and not the cache.
    ///
    /// # Errors
    /// Errors of [`Graph::decomposed`].
    pub fn decomposed_by_groups(&self) -> Result<Cow<'_, Self>> {
        self.with_parts(
            |_| true,
            |b, node, attention| {
                if self.is_step(node) {
                    (b.scope, b.next) = (node.name.clone(), 0);
                    return b.decompose_by_groups(attention);
                }
                (b.scope, b.next) = numbered(node);
                b.decompose(attention, false)
            },
        )
    }

    /// The same graph with the nodes that `made` makes in the place of composites that are `wanted`.
    fn with_parts(
        &self,
        wanted: impl Fn(&Node) -> bool,
        made: impl Fn(&mut GraphBuilder, &Node, &AttentionInputs<TensorId>) -> Result<TensorId>,
    ) -> Result<Cow<'_, Self>> {
        let composite = |node: &Node| matches!(node.op, Op::Attention(_)) && wanted(node);
        if !self.nodes.iter().any(&composite) {
            return Ok(Cow::Borrowed(self));
        }
        let mut b = GraphBuilder::new(&*self.name);
        let mut places: Vec<TensorId> = Vec::with_capacity(self.tensors.len());
        let at = |places: &[TensorId], ids: &[TensorId]| -> Vec<TensorId> {
            ids.iter().filter_map(|id| places.get(id.index()).copied()).collect()
        };
        for tensor in &self.tensors {
            let node = match tensor.origin {
                Origin::Node(index) => self.nodes.get(index),
                _ => None,
            };
            let (elem, shape) = (tensor.elem, tensor.shape.clone());
            places.push(match node {
                None => b.push(tensor.name.clone(), elem, shape, tensor.origin.clone())?,
                Some(node) => {
                    let inputs = at(&places, &node.inputs);
                    let attention = match node.op {
                        Op::Attention(form) if wanted(node) => AttentionInputs::of(form, &inputs),
                        _ => None,
                    };
                    if let Some(attention) = attention {
                        made(&mut b, node, &attention)?
                    } else {
                        b.node_named(node.name.clone(), node.op.clone(), inputs, elem, shape)?
                    }
                }
            });
        }
        b.graph.inputs = at(&places, &self.inputs);
        for (id, old) in at(&places, &self.outputs).into_iter().zip(&self.outputs) {
            let name = &self.tensors[old.index()].name;
            b.check_name(name)?;
            b.names.insert(name.clone());
            name.clone_into(&mut b.graph.tensors[id.index()].name);
            b.graph.outputs.push(id);
        }
        Ok(Cow::Owned(b.graph))
    }
}

/// Scope and number in the name of a composite; the name itself where it has no number.
fn numbered(node: &Node) -> (String, usize) {
    let parts = node.name.rsplit_once("attention_");
    let parsed = parts.and_then(|(scope, number)| {
        Some((scope.strip_suffix('_').unwrap_or(scope).to_owned(), number.parse().ok()?))
    });
    parsed.unwrap_or_else(|| (node.name.clone(), 0))
}
