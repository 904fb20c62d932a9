//! Softmax attention of decoders and encoders, and the inputs that its layers share.

use std::sync::Arc;

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{AttentionInputs, Elem, TensorId};
use qhx_types::MASK_VALUE;

use super::layers::Layers;
use super::step::Step;
use crate::recipe::Caches;

/// Rows of a tile of f16 in the NPU's memory.
const TILE_ROWS: usize = 8;

/// Inputs that attention layers of a graph share, and the sizes that go with them.
///
/// A model in which some layers slide over the last positions and others see all of them has two of these in
/// one graph, each with inputs of its own.
#[derive(Debug, Clone, Copy)]
pub struct Attend {
    /// Cosines and sines of the rotary tables, `[rows, 1, rotary / 2]`; none where positions are in the rows already.
    pub tables: Option<[TensorId; 2]>,
    /// The mask that is added to the scores, `[1, 1, rows or 1, capacity + rows]`; `[1, 1, capacity + 1]` for one row.
    /// None where all rows see each other.
    pub mask: Option<TensorId>,
    /// Tokens that the graph takes at once.
    pub rows: usize,
    /// Rows of the layers' caches: positions of the context, or of a window where the host keeps the cache as a
    /// ring. 0 without caches.
    pub capacity: usize,
    /// Element type of the caches.
    pub caches: Caches,
}

/// Names and sizes of the inputs of an [`Attend`].
#[derive(Debug, Clone, Copy)]
pub struct AttendInputs<'a> {
    /// Names of the cosines, the sines and the mask. That of the mask begins with `cmask`: then
    /// [`crate::ForgeOptions::check`] knows it for one.
    pub names: [&'a str; 3],
    /// Elements of a head that rotary embedding turns: all, or the first of them. Even; 0 without rotary embedding.
    pub rotary: usize,
    /// Tokens that the graph takes at once.
    pub rows: usize,
    /// Rows of the mask: [`AttendInputs::rows`], or 1 where all tokens see the same.
    pub mask_rows: usize,
    /// See [`Attend::capacity`].
    pub capacity: usize,
    /// See [`Attend::caches`].
    pub caches: Caches,
}

impl AttendInputs<'_> {
    /// The names `cos`, `sin` and `cmask`.
    pub const NAMES: [&'static str; 3] = ["cos", "sin", "cmask"];

    /// Inputs under [`AttendInputs::NAMES`], a row of the mask for each token.
    pub const fn new(rotary: usize, rows: usize, capacity: usize) -> Self {
        let (mask_rows, caches) = (rows, Caches::F16);
        Self { names: Self::NAMES, rotary, rows, mask_rows, capacity, caches }
    }

    /// Inputs under [`AttendInputs::NAMES`] of a decoder's graph, for layers that see all of the context.
    pub const fn of(rotary: usize, step: Step) -> Self {
        Self { caches: step.caches, ..Self::new(rotary, step.rows, step.positions) }
    }

    /// Adds inputs for cosines and sines `[rows, rotary / 2]` alone, for [`rotate`]; gives them as
    /// `[rows, 1, rotary / 2]`.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn tables(&self, b: &mut GraphBuilder) -> Result<[TensorId; 2]> {
        let ([cos, sin, _], half) = (self.names, self.rotary / 2);
        let cos = b.input(cos, Elem::Activation, &[self.rows, half])?;
        let sin = b.input(sin, Elem::Activation, &[self.rows, half])?;
        Ok([b.reshape(cos, &[self.rows, 1, half])?, b.reshape(sin, &[self.rows, 1, half])?])
    }
}

impl Attend {
    /// Adds inputs for cosines and sines `[rows, rotary / 2]`, where there are any, and for the mask
    /// `[mask_rows, capacity + rows]`, which is added to the scores. Its last `rows` columns are the graph's
    /// own tokens.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn inputs(b: &mut GraphBuilder, inputs: &AttendInputs<'_>) -> Result<Self> {
        let tables = (inputs.rotary > 0).then(|| inputs.tables(b)).transpose()?;
        Self::over(b, tables, inputs)
    }

    /// Same as [`Attend::inputs`], with existing cosines and sines: those of other layers of the graph, which have
    /// other caches or another mask.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn over(
        b: &mut GraphBuilder,
        tables: Option<[TensorId; 2]>,
        inputs: &AttendInputs<'_>,
    ) -> Result<Self> {
        let AttendInputs { names: [_, _, mask], rows, mask_rows, capacity, caches, .. } = *inputs;
        let width = capacity + rows;
        let mask = b.input(mask, Elem::Activation, &[mask_rows, width])?;
        let mask = match rows {
            1 => b.reshape(mask, &[1, 1, width])?,
            _ => b.reshape(mask, &[1, 1, mask_rows, width])?,
        };
        Ok(Self { tables, mask: Some(mask), rows, capacity, caches })
    }

    /// Masks of heads, for [`Attention::masks`]: the mask with numbers `[rows, rows]` for each head added, such as one
    /// for the distance of two tokens.
    ///
    /// # Errors
    /// When there is no mask, or the shapes do not fit.
    pub fn biased(
        &self,
        b: &mut GraphBuilder,
        heads: impl IntoIterator<Item = Vec<f32>>,
    ) -> Result<Vec<TensorId>> {
        let Some(mask) = self.mask else { return Err(b.misused("biased", &[], "a mask")) };
        let mut shape = vec![1; b.shape(mask)?.len()];
        let last = shape.len() - 2;
        shape[last..].fill(self.rows);
        let one = |(head, bias)| {
            let bias = b.constant(&format!("bias{head}"), Elem::Activation, &shape, bias)?;
            b.add(bias, mask)
        };
        heads.into_iter().enumerate().map(one).collect()
    }

    /// Rows that all see each other, as an encoder's, with their positions in them: no inputs.
    pub const fn whole(rows: usize) -> Self {
        Self { tables: None, mask: None, rows, capacity: 0, caches: Caches::F16 }
    }

    /// [`Attend::whole`] of `x` `[rows, hidden]` with rows of zeros behind it, hidden from all, up to a number of rows
    /// that the NPU's layout holds without gaps.
    ///
    /// # Errors
    /// When `x` has another form.
    pub fn filled(b: &mut GraphBuilder, x: TensorId) -> Result<(TensorId, Self)> {
        let &[rows, hidden] = b.shape(x)? else {
            return Err(b.misused("filled", &[x], "rows [rows, hidden]"));
        };
        let all = rows.next_multiple_of(TILE_ROWS);
        let behind = all - rows;
        if behind == 0 {
            return Ok((x, Self::whole(rows)));
        }
        let zeros = vec![0.0; behind * hidden];
        let zeros = b.constant("behind", Elem::Activation, &[behind, hidden], zeros)?;
        let mut mask = vec![0.0; all];
        mask[rows..].fill(MASK_VALUE);
        let mask = b.constant("hidden", Elem::Activation, &[1, 1, 1, all], mask)?;
        Ok((b.concat(&[x, zeros], 0)?, Self { mask: Some(mask), ..Self::whole(all) }))
    }

    /// Adds the cache of a layer as the inputs `past_k_<layer>` and `past_v_<layer>`, keys and values
    /// `[groups, capacity, dim]`, those of int8 with their scales `scale_k_<layer>` and `scale_v_<layer>`
    /// `[groups, 1, capacity]`; none without caches.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn past(&self, b: &mut GraphBuilder, layer: usize, heads: Heads) -> Result<Option<Past>> {
        if self.capacity == 0 {
            return Ok(None);
        }
        let cache = [heads.groups, self.capacity, heads.dim];
        let elem = match self.caches {
            Caches::F16 => Elem::Activation,
            Caches::Int8 => Elem::Int8Cache,
        };
        let mut input = |role: &str| {
            let values = b.input(&format!("past_{role}_{layer}"), elem, &cache)?;
            let scales = [heads.groups, 1, self.capacity];
            let scales = (self.caches == Caches::Int8)
                .then(|| b.input(&format!("scale_{role}_{layer}"), Elem::Activation, &scales))
                .transpose()?;
            Ok(Stored { values, scales })
        };
        Ok(Some(Past { k: input("k")?, v: input("v")? }))
    }
}

/// Keys and values of a layer's cache.
#[derive(Debug, Clone, Copy)]
pub struct Past {
    k: Stored,
    v: Stored,
}

/// Keys or values `[groups, capacity, dim]`.
#[derive(Debug, Clone, Copy)]
struct Stored {
    values: TensorId,
    /// Scales of the rows, `[groups, 1, capacity]`.
    scales: Option<TensorId>,
}

impl Stored {
    /// `x` `[groups, …, capacity]`, whose columns belong to the rows, times their scales.
    fn scaled(self, b: &mut GraphBuilder, x: TensorId) -> Result<TensorId> {
        self.scales.map_or(Ok(x), |scales| b.mul(x, scales))
    }
}

/// Heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Heads {
    /// Heads of queries, a multiple of `groups`.
    pub query: usize,
    /// Heads of keys and values.
    pub groups: usize,
    /// Elements of a head.
    pub dim: usize,
}

impl Heads {
    /// 1 / √dim, which multiplies the scores (Vaswani et al. 2017, arXiv 1706.03762).
    pub fn scale(self) -> f32 {
        1.0 / (self.dim as f32).sqrt()
    }
}

/// One attention layer of the usual form, for [`Layers::attention`].
#[derive(Debug, Clone)]
pub struct Attention<'a> {
    /// Prefix of its tensors' names: `layers.3.self_attn`.
    pub name: String,
    /// Index of the layer in the names of its caches.
    pub layer: usize,
    /// Numbers and width of its heads.
    pub heads: Heads,
    /// Factor of the scores, 1 / √dim as a rule.
    pub scale: f32,
    /// The matrix of which `q_proj`, `k_proj` and `v_proj` are the rows, one after the other: `qkv_proj`. None where
    /// each is a tensor of its own.
    pub joined: Option<&'a str>,
    /// Norms of the heads of queries and keys, where there are any: `q_norm`, `k_norm`.
    pub norms: Option<[&'a str; 2]>,
    /// True if each norm covers all heads together instead of each head.
    pub whole_norms: bool,
    /// The norms come behind rope instead of before it; each head has its own.
    pub late_norms: bool,
    /// Queries and keys are turned by the rotary tables.
    pub turned: bool,
    /// Masks of each head in the place of one for all, see [`Attend::biased`]. Each head has keys of its own then.
    pub masks: Option<&'a [TensorId]>,
    /// Factor of each row's queries, `[rows, 1, 1]`, where they have one.
    pub growth: Option<TensorId>,
    /// Elements that turn together are neighbours in the checkpoint, as in GLM, and not of two halves. The rows of both
    /// projections are put into the order of halves, which leaves scores as they are.
    pub neighbours: bool,
    /// Scores `s` become `c · tanh(s / c)` before the mask (Gemma 2, arXiv 2408.00118).
    pub cap: Option<f32>,
    /// The tensor of scores that belong to no key, one for each head of queries: `sinks`.
    pub sinks: Option<&'a str>,
    /// Which of `q_proj`, `k_proj` and `v_proj` have biases.
    pub bias: [bool; 3],
    /// Base of the rotary frequencies, where keys are to be kept small: the mean of their turned bias is subtracted
    /// from every key. Softmax gives the same, as all scores of a query become smaller by one number; biases of some
    /// hundreds (Qwen2.5) would make scores that f16 holds in steps of 2 to 8. Behind a cap or beside sinks it is not the
    /// same, so that it is not done there.
    pub centred: Option<f64>,
    /// The projection back to hidden states: `o_proj`.
    pub out: &'a str,
    /// True if the projection `out` has a bias.
    pub out_bias: bool,
    /// Keys and values of the graph's tokens are outputs, `new_k_<layer>` and `new_v_<layer>`
    /// `[groups, rows, dim]`: keys after norm and rope.
    pub cached: bool,
}

impl<'a> Attention<'a> {
    /// Scores scaled by 1 / √dim, no norms, no biases, rope, `o_proj`, over a cache.
    pub fn new(name: impl Into<String>, layer: usize, heads: Heads) -> Self {
        Self {
            name: name.into(),
            layer,
            heads,
            scale: heads.scale(),
            joined: None,
            norms: None,
            whole_norms: false,
            late_norms: false,
            turned: true,
            masks: None,
            growth: None,
            neighbours: false,
            cap: None,
            sinks: None,
            bias: [false; 3],
            centred: None,
            out: "o_proj",
            out_bias: false,
            cached: true,
        }
    }
}

impl Layers<'_> {
    /// An attention layer of the usual form, on rows `[rows, hidden]`: `q_proj`, `k_proj` and `v_proj`, norms of
    /// the heads where there are any, rope, [`mix`], and the projection back.
    ///
    /// # Errors
    /// When a tensor is missing, or shapes do not fit.
    pub fn attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        attention: &Attention<'_>,
        attend: &Attend,
    ) -> Result<TensorId> {
        let Attention { layer, heads, norms, bias, cap, .. } = *attention;
        let (rows, hidden) = (attend.rows, b.width(x)?);
        let past = attend.past(b, layer, heads)?;
        let tensor = |part: &str| format!("{}.{part}", attention.name);
        // What follows is linear in q: the factor of the scores stands in the norm's weight, if there is one.
        let scale = attention.scale / cap.unwrap_or(1.0);
        let norm = |b: &mut GraphBuilder, [q, k]: [TensorId; 2], whole: bool| match norms {
            Some([of_q, of_k]) if whole == attention.whole_norms => {
                Ok([self.scaled_norm(b, q, &tensor(of_q), scale)?, self.norm(b, k, &tensor(of_k))?])
            }
            _ => Ok([q, k]),
        };
        let [query, group] = [heads.query, heads.groups].map(|count| count * heads.dim);
        let parts =
            [("q_proj", query, bias[0]), ("k_proj", group, bias[1]), ("v_proj", group, bias[2])];
        let mut parts = self.rows_of(&attention.name, attention.joined, parts, hidden)?;
        if let Some([cos, _]) = attend.tables.filter(|_| attention.neighbours) {
            let half = b.width(cos)?;
            for (part, count) in parts.iter_mut().zip([heads.query, heads.groups]) {
                part.reorder_outputs(&halves(count, heads.dim, half));
            }
        }
        let [q, k, v] = self.build_all(b, x, parts)?;
        let [q, k] = norm(b, [q, k], true)?;
        let q = b.reshape(q, &[rows, heads.query, heads.dim])?;
        let k = b.reshape(k, &[rows, heads.groups, heads.dim])?;
        let v = b.reshape(v, &[rows, heads.groups, heads.dim])?;
        let [q, k] = if attention.late_norms { [q, k] } else { norm(b, [q, k], false)? };
        let [q, k] = match attention.turned {
            true => [rope(b, q, attend)?, rope(b, k, attend)?],
            false => [q, k],
        };
        let [q, k] = if attention.late_norms { norm(b, [q, k], false)? } else { [q, k] };
        let cancels = bias[1] && attention.turned && cap.is_none() && attention.sinks.is_none();
        let k = match attention.centred.filter(|_| cancels) {
            Some(theta) => {
                let bias =
                    self.checkpoint.values(&format!("{}.bias", tensor("k_proj")), &[group])?;
                let turned = attend.tables.map(|[cos, _]| b.width(cos)).transpose()?.unwrap_or(0);
                let mean = mean_turned(&bias, heads.dim, turned, theta);
                let shape = [1, heads.groups, heads.dim];
                let mean = b.constant("centre", Elem::Activation, &shape, mean)?;
                b.sub(k, mean)?
            }
            None => k,
        };
        let q = if norms.is_some() { q } else { b.scale(q, scale)? };
        let q = attention.growth.map_or(Ok(q), |growth| b.mul(q, growth))?;
        let sinks = match attention.sinks {
            None => None,
            Some(sinks) => {
                let sinks = self.checkpoint.values(&tensor(sinks), &[heads.query])?;
                let all = sinks.iter().flat_map(|sink| std::iter::repeat_n(*sink, rows)).collect();
                let repeat = heads.query / heads.groups;
                let shape = [heads.groups, repeat * rows, 1];
                Some(b.constant("sinks", Elem::Activation, &shape, all)?)
            }
        };
        let mixed = match attention.masks {
            Some(masks) => mix_by_heads(b, [q, k, v], heads, attend, masks)?,
            None => capped_mix(b, [q, k, v], past, heads, attend, (cap, sinks))?,
        };
        let joined = b.reshape(mixed.out, &[rows, heads.query * heads.dim])?;
        let out = self.linear(b, joined, &tensor(attention.out), hidden, attention.out_bias)?;
        if attention.cached {
            mixed.outputs(b, layer)?;
        }
        Ok(out)
    }
}

/// Places of the elements of heads of which `half` pairs of neighbours turn: the first of each pair, the second of
/// each, and the rest.
fn halves(heads: usize, dim: usize, half: usize) -> Arc<[u32]> {
    let pairs = 2 * half.min(dim / 2);
    let order = (0..pairs).step_by(2).chain((1..pairs).step_by(2)).chain(pairs..dim);
    (0..heads).flat_map(|head| order.clone().map(move |at| (head * dim + at) as u32)).collect()
}

/// Positions over which biases of keys are averaged.
const CENTRED: usize = 4096;

/// Mean over positions of what [`rope`] makes of the same values of heads of `dim`, of which `half` pairs turn.
fn mean_turned(values: &[f32], dim: usize, half: usize, theta: f64) -> Vec<f32> {
    let mut mean = values.to_vec();
    for pair in 0..half.min(dim / 2) {
        let step = theta.powf(-(pair as f64) / half as f64);
        let angles = || (0..CENTRED).map(|position| position as f64 * step);
        let [cos, sin] =
            [f64::cos, f64::sin].map(|f| (angles().map(f).sum::<f64>() / CENTRED as f64) as f32);
        for head in mean.chunks_exact_mut(dim) {
            let (first, second) = (head[pair], head[pair + half]);
            head[pair] = first * cos - second * sin;
            head[pair + half] = second * cos + first * sin;
        }
    }
    mean
}

/// The outputs of attention.
#[derive(Debug, Clone, Copy)]
pub struct Mixed {
    /// The weighted values of each query head, `[rows, query, dim]` in the order of its elements:
    /// `[groups, query / groups, dim]` for one row.
    pub out: TensorId,
    /// The graph's own keys `[groups, rows, dim]`.
    pub k: TensorId,
    /// The graph's own values `[groups, rows, dim]`.
    pub v: TensorId,
}

impl Mixed {
    /// Declares keys and values to be the outputs `new_k_<layer>` and `new_v_<layer>`.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::output`].
    pub fn outputs(&self, b: &mut GraphBuilder, layer: usize) -> Result<()> {
        b.output(&format!("new_k_{layer}"), self.k)?;
        b.output(&format!("new_v_{layer}"), self.v)
    }
}

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): query head `a` uses key
/// head `a / (query / groups)`, so the query heads of a group are rows of one matmul.
///
/// q `[rows, query, dim]` is rotated and scaled, k `[rows, groups, dim]` rotated, v `[rows, groups, dim]`;
/// `past` are keys and values of the cache, `[groups, capacity, dim]`.
///
/// # Errors
/// When the shapes do not fit.
pub fn mix(
    b: &mut GraphBuilder,
    qkv: [TensorId; 3],
    past: Option<Past>,
    heads: Heads,
    attend: &Attend,
) -> Result<Mixed> {
    capped_mix(b, qkv, past, heads, attend, (None, None))
}

/// [`mix`] of heads with a mask and keys each, without a cache.
fn mix_by_heads(
    b: &mut GraphBuilder,
    [q, k, v]: [TensorId; 3],
    heads: Heads,
    attend: &Attend,
    masks: &[TensorId],
) -> Result<Mixed> {
    if masks.len() != heads.query || heads.query != heads.groups {
        return Err(b.misused("mix_by_heads", &[q, k, v], "a mask and keys for each head"));
    }
    let one = Heads { query: 1, groups: 1, dim: heads.dim };
    let mut parts = Vec::with_capacity(masks.len());
    for (head, &mask) in masks.iter().enumerate() {
        let mut part = |x| b.slice(x, 1, head, head + 1);
        let qkv = [part(q)?, part(k)?, part(v)?];
        let attend = Attend { mask: Some(mask), ..*attend };
        parts.push(mix(b, qkv, None, one, &attend)?.out);
    }
    Ok(Mixed { out: b.concat(&parts, 1)?, k, v })
}

/// Attention of one token, q `[1, query, dim]`, to the rows of a cache and not to itself: `[groups, repeat, dim]`.
///
/// # Errors
/// Errors of [`GraphBuilder::matmul`].
pub fn mix_past(
    b: &mut GraphBuilder,
    q: TensorId,
    Past { k, v }: Past,
    heads: Heads,
    attend: &Attend,
) -> Result<TensorId> {
    let q = b.reshape(q, &[heads.groups, heads.query / heads.groups, heads.dim])?;
    let scores = b.matmul(q, k.values, true)?;
    let scores = k.scaled(b, scores)?;
    let scores = match attend.mask {
        Some(mask) => b.add(scores, mask)?,
        None => scores,
    };
    let weights = b.softmax(scores)?;
    let weights = v.scaled(b, weights)?;
    b.matmul(weights, v.values, false)
}

/// Same as [`mix`], with an optional cap c, and sinks. With a cap q is also divided by c, and scores `s` become
/// `c · tanh(s)`.
fn capped_mix(
    b: &mut GraphBuilder,
    [q, k, v]: [TensorId; 3],
    past: Option<Past>,
    heads: Heads,
    attend: &Attend,
    (cap, sinks): (Option<f32>, Option<TensorId>),
) -> Result<Mixed> {
    let (groups, d) = (heads.groups, heads.dim);
    let (repeat, rows) = (heads.query / groups, attend.rows);
    // Groups first: [groups, repeat · rows, d] against [groups, rows, d].
    let (q, k, v) = if rows == 1 {
        (
            b.reshape(q, &[groups, repeat, d])?,
            b.reshape(k, &[groups, 1, d])?,
            b.reshape(v, &[groups, 1, d])?,
        )
    } else {
        let q = b.reshape(q, &[rows, groups, repeat, d])?;
        let q = b.transpose(q, &[1, 2, 0, 3])?;
        (
            b.reshape(q, &[groups, repeat * rows, d])?,
            b.transpose(k, &[1, 0, 2])?,
            b.transpose(v, &[1, 0, 2])?,
        )
    };
    let inputs = AttentionInputs {
        past: past.map(|past| [past.k.values, past.v.values]),
        scales: past.and_then(|past| Some([past.k.scales?, past.v.scales?])),
        mask: attend.mask,
        sinks,
        ..AttentionInputs::new(q, k, v)
    };
    let mixed = match cap {
        Some(cap) => b.capped_attention(inputs, cap)?,
        None => b.attention(inputs)?,
    };
    let out = if rows == 1 {
        mixed
    } else {
        let mixed = b.reshape(mixed, &[groups, repeat, rows, d])?;
        let mixed = b.transpose(mixed, &[2, 0, 1, 3])?;
        b.reshape(mixed, &[rows, heads.query, d])?
    };
    Ok(Mixed { out, k, v })
}

impl Layers<'_> {
    /// Keys and values of an encoder's rows `x` `[rows, hidden]` for [`Layers::cross_attention`]: keys `[groups, dim,
    /// rows]`, transposed here once and not at every step of a decoder, and values `[groups, rows, dim]`.
    ///
    /// # Errors
    /// When a tensor is missing, or shapes do not fit.
    pub fn cross_keys(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        attention: &Attention<'_>,
    ) -> Result<[TensorId; 2]> {
        let Attention { heads: Heads { groups, dim, .. }, bias, .. } = *attention;
        let rows = b.shape(x)?[0];
        let mut project = |part: &str, bias: bool, order: &[usize]| {
            let y = self.linear(b, x, &format!("{}.{part}", attention.name), groups * dim, bias)?;
            let y = b.reshape(y, &[rows, groups, dim])?;
            b.transpose(y, order)
        };
        Ok([project("k_proj", bias[1], &[1, 2, 0])?, project("v_proj", bias[2], &[1, 0, 2])?])
    }

    /// Attention of rows `x` `[rows, hidden]` to keys and values of [`Layers::cross_keys`]: `q_proj`, softmax, and the
    /// projection back. They see all keys, or those that a mask `[1, 1, keys]` shows. One key head for each query head.
    /// Returns the rows, and the weights `[heads, rows, keys]`.
    ///
    /// # Errors
    /// When a tensor is missing, or shapes do not fit.
    pub fn cross_attention(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        attention: &Attention<'_>,
        [keys, values]: [TensorId; 2],
        mask: Option<TensorId>,
    ) -> Result<[TensorId; 2]> {
        let Attention { heads: Heads { query, dim, .. }, scale, bias, .. } = *attention;
        let (rows, hidden) = (b.shape(x)?[0], b.width(x)?);
        let tensor = |part: &str| format!("{}.{part}", attention.name);
        let q = self.linear(b, x, &tensor("q_proj"), query * dim, bias[0])?;
        let q = b.scale(q, scale)?;
        let heads = |b: &mut GraphBuilder, x, shape: [usize; 3]| {
            let x = b.reshape(x, &shape)?;
            if rows == 1 { Ok(x) } else { b.transpose(x, &[1, 0, 2]) }
        };
        let q = heads(b, q, if rows == 1 { [query, 1, dim] } else { [rows, query, dim] })?;
        let scores = b.matmul(q, keys, false)?;
        let scores = mask.map_or(Ok(scores), |mask| b.add(scores, mask))?;
        let weights = b.softmax(scores)?;
        let mixed = b.matmul(weights, values, false)?;
        let mixed = heads(b, mixed, [query, rows, dim])?;
        let mixed = b.reshape(mixed, &[rows, query * dim])?;
        let out = self.linear(b, mixed, &tensor(attention.out), hidden, attention.out_bias)?;
        Ok([out, weights])
    }
}

/// The mask `[1, 1, rows]` of rows of which `keep` `[rows, 1]` is 1: 0 for these, and below every score for the others,
/// where it is 0.
///
/// # Errors
/// When `keep` has another form.
pub fn kept_mask(b: &mut GraphBuilder, keep: TensorId) -> Result<TensorId> {
    let rows = b.shape(keep)?[0];
    let hidden = b.scale(keep, -MASK_VALUE)?;
    let offset = b.scalar(hidden, MASK_VALUE)?;
    let hidden = b.add(hidden, offset)?;
    b.reshape(hidden, &[1, 1, rows])
}

/// What a decoder attends to of an encoder: rows of a clip, in graphs for clips of several lengths.
#[derive(Debug, Clone, Copy)]
pub struct CrossRows {
    /// Rows of the graph.
    pub rows: usize,
    /// Rows of the graph for the longest clips, which the decoder's inputs have.
    pub longest: usize,
}

impl CrossRows {
    /// Declares keys and values of a layer of the decoder, as [`Layers::cross_keys`] makes them, to be the outputs
    /// `cross_k_<layer>` and `cross_v_<layer>` of an encoder, with zeros behind them up to the longest.
    ///
    /// # Errors
    /// When they have another form.
    pub fn outputs(self, b: &mut GraphBuilder, layer: usize, keys: [TensorId; 2]) -> Result<()> {
        for ((part, axis), x) in [("k", 2), ("v", 1)].into_iter().zip(keys) {
            let x = self.behind(b, x, axis, (&format!("{part}_behind"), 0.0))?;
            b.output(&format!("cross_{part}_{layer}"), x)?;
        }
        Ok(())
    }

    /// Declares a mask of [`kept_mask`] to be the output `cross_mask` `[1, longest]`.
    ///
    /// # Errors
    /// When it has another form.
    pub fn mask_output(self, b: &mut GraphBuilder, mask: TensorId) -> Result<()> {
        let mask = self.behind(b, mask, 2, ("mask_behind", MASK_VALUE))?;
        let mask = b.reshape(mask, &[1, self.longest])?;
        b.output("cross_mask", mask)
    }

    /// Adds the inputs of a decoder that [`CrossRows::outputs`] of a layer are bound to.
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn inputs(self, b: &mut GraphBuilder, layer: usize, heads: Heads) -> Result<[TensorId; 2]> {
        let Heads { query, dim, .. } = heads;
        let keys = [query, dim, self.longest];
        let k = b.input(&format!("cross_k_{layer}"), Elem::Activation, &keys)?;
        let values = [query, self.longest, dim];
        let v = b.input(&format!("cross_v_{layer}"), Elem::Activation, &values)?;
        Ok([k, v])
    }

    /// Adds the input `cross_mask`, for [`Layers::cross_attention`].
    ///
    /// # Errors
    /// Errors of [`GraphBuilder::input`].
    pub fn mask_input(self, b: &mut GraphBuilder) -> Result<TensorId> {
        let mask = b.input("cross_mask", Elem::Activation, &[1, self.longest])?;
        b.reshape(mask, &[1, 1, self.longest])
    }

    /// `x` with a value behind it along an axis, of a constant of this name.
    fn behind(
        self,
        b: &mut GraphBuilder,
        x: TensorId,
        axis: usize,
        (name, value): (&str, f32),
    ) -> Result<TensorId> {
        let behind = self.longest.saturating_sub(self.rows);
        if behind == 0 {
            return Ok(x);
        }
        let mut shape = b.shape(x)?.to_vec();
        shape[axis] = behind;
        let values = vec![value; shape.iter().product()];
        let filling = b.constant(name, Elem::Activation, &shape, values)?;
        b.concat(&[x, filling], axis)
    }
}

/// Rotary embedding of heads `[rows, heads, dim]` in the half-split form (RoFormer, arXiv 2104.09864): each row
/// has the tables of its own position. The first `rotary` elements of a head are turned, the rest pass; all of them
/// where there are no tables.
///
/// # Errors
/// When the tables are wider than the heads.
pub fn rope(b: &mut GraphBuilder, x: TensorId, attend: &Attend) -> Result<TensorId> {
    attend.tables.map_or(Ok(x), |tables| rotate(b, x, tables))
}

/// Same as [`rope`], with cosines and sines `[rows, 1, rotary / 2]`, which may be constants.
///
/// # Errors
/// When the tables are wider than the heads.
pub fn rotate(b: &mut GraphBuilder, x: TensorId, [cos, sin]: [TensorId; 2]) -> Result<TensorId> {
    let (half, width) = (b.width(cos)?, b.width(x)?);
    if 2 * half > width {
        let expected = format!("tables of at most {} for heads of {width}", width / 2);
        return Err(b.misused("rope", &[x, cos, sin], &expected));
    }
    let first = b.slice(x, 2, 0, half)?;
    let second = b.slice(x, 2, half, 2 * half)?;
    let first_cos = b.mul(first, cos)?;
    let second_sin = b.mul(second, sin)?;
    let second_cos = b.mul(second, cos)?;
    let first_sin = b.mul(first, sin)?;
    let mut parts = vec![b.sub(first_cos, second_sin)?, b.add(second_cos, first_sin)?];
    if width > 2 * half {
        parts.push(b.slice(x, 2, 2 * half, width)?);
    }
    b.concat(&parts, 2)
}

#[cfg(test)]
mod tests {
    use qhx_graph::builder::GraphBuilder;
    use qhx_graph::graph::Elem;

    use super::super::{Attend, AttendInputs, rope};

    #[test]
    fn a_rope_wider_than_its_head_says_so() {
        let mut b = GraphBuilder::new("g");
        let attend = Attend::inputs(&mut b, &AttendInputs::new(64, 1, 8)).unwrap();
        let heads = b.input("heads", Elem::Activation, &[1, 4, 32]).unwrap();
        b.scope("l0_attn");
        let error = rope(&mut b, heads, &attend).unwrap_err().to_string();
        assert!(
            error.contains("rope \"l0_attn_rope_3\": found heads activation[1, 4, 32]"),
            "{error}"
        );
        assert!(error.contains("tables of at most 16 for heads of 32"), "{error}");
    }
}
