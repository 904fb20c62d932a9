//! Parts of layers, from the tensors of a checkpoint.

use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use qhx_graph::quantize::QuantizedForm;
use qhx_graph::weight::{Reordered, RowSource, Storage, Weight, row_order, row_range};

use crate::recipe::{Precision, RecipeOptions};

/// Builds parts of layers from the tensors of a checkpoint. Names of tensors are given without the decoder's
/// prefix and, unless noted otherwise, without `.weight`: `layers.3.mlp.up_proj`. The last part of such a
/// name is the weight's name in the graph, after the builder's scope.
#[derive(Debug, Clone, Copy)]
pub struct Layers<'a> {
    /// The checkpoint that holds the tensors.
    pub checkpoint: &'a Checkpoint,
    /// Precision of the weights that may be quantized.
    pub precision: Precision,
    /// Epsilon of the norms.
    pub eps: f32,
    /// Added to the weights of the norms: 0, or 1 where a checkpoint stores the difference from one, as Gemma's
    /// do.
    pub norm_offset: f32,
    /// Precision of the head's weight.
    pub head: Precision,
}

impl<'a> Layers<'a> {
    /// Layers whose norms have the weights that the checkpoint stores, and whose head is not quantized.
    pub const fn new(checkpoint: &'a Checkpoint, precision: Precision, eps: f32) -> Self {
        Self { checkpoint, precision, eps, norm_offset: 0.0, head: Precision::Fp16 }
    }

    /// Layers of a decoder and its head, in the precisions of the options.
    pub fn decoder(checkpoint: &'a Checkpoint, options: &RecipeOptions, eps: f32) -> Self {
        Self { head: options.head(), ..Self::new(checkpoint, options.precision, eps) }
    }

    /// `x·Wᵀ (+ b)` for x `[rows, in]`, with the tensors `<name>.weight` `[outputs, in]` and, if `bias`,
    /// `<name>.bias`. Gives `[rows, outputs]`.
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape.
    pub fn linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        outputs: usize,
        bias: bool,
    ) -> Result<TensorId> {
        let parts = self.parts(name, [outputs, b.width(x)?], bias)?;
        parts.build(b, x, self.precision)
    }

    /// Same as [`Layers::linear`], with a weight that is never quantized: for sensitive layers with few outputs, such
    /// as a router.
    ///
    /// # Errors
    /// Errors of [`Layers::linear`].
    pub fn exact_linear(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        outputs: usize,
        bias: bool,
    ) -> Result<TensorId> {
        Self { precision: Precision::Fp16, ..*self }.linear(b, x, name, outputs, bias)
    }

    /// The weight and, if `bias`, the bias of the projection `name`.
    fn parts(&self, name: &str, shape: [usize; 2], bias: bool) -> Result<Projection> {
        let weight = self.checkpoint.matrix(&format!("{name}.weight"), shape)?;
        let bias = bias.then(|| self.checkpoint.values(&format!("{name}.bias"), &[shape[0]]));
        Ok(Projection { name: last_part(name).to_owned(), weight, bias: bias.transpose()? })
    }

    /// The projections of these names and numbers of outputs below `place`, which of them have biases; with `joined`,
    /// each has as many rows of that one matrix, in order.
    pub(super) fn rows_of<const N: usize>(
        &self,
        place: &str,
        joined: Option<&str>,
        parts: [(&str, usize, bool); N],
        inputs: usize,
    ) -> Result<[Projection; N]> {
        let Some(joined) = joined else {
            let part = |(name, outputs, bias)| {
                self.parts(&format!("{place}.{name}"), [outputs, inputs], bias)
            };
            return each(parts, part);
        };
        let all = parts.iter().map(|(_, outputs, _)| outputs).sum();
        let bias = parts.iter().any(|(_, _, bias)| *bias);
        let whole = self.parts(&format!("{place}.{joined}"), [all, inputs], bias)?;
        let mut first = 0;
        each(parts, |(name, outputs, _)| {
            let rows = first..first + outputs;
            first = rows.end;
            let bias = whole.bias.as_ref().map(|bias| bias[rows.clone()].to_vec());
            Ok(Projection { name: name.to_owned(), weight: row_range(&whole.weight, rows), bias })
        })
    }

    /// The outputs of projections of the same rows.
    pub(super) fn build_all<const N: usize>(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        parts: [Projection; N],
    ) -> Result<[TensorId; N]> {
        each(parts, |part| part.build(b, x, self.precision))
    }

    /// RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467) along the last axis of x, hidden states or heads, with
    /// the tensor `<name>.weight` of that axis.
    ///
    /// # Errors
    /// When the tensor is missing, or has another shape.
    pub fn norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        self.scaled_norm(b, x, name, 1.0)
    }

    /// Same as [`Layers::norm`], with the result times `scale`.
    ///
    /// # Errors
    /// Errors of [`Layers::norm`].
    pub fn scaled_norm(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        scale: f32,
    ) -> Result<TensorId> {
        let mut weight = self.checkpoint.values(&format!("{name}.weight"), &[b.width(x)?])?;
        weight.iter_mut().for_each(|w| *w = (*w + self.norm_offset) * scale);
        let weight = b.row(last_part(name), weight)?;
        b.rms_norm(x, self.eps, weight)
    }

    /// LayerNorm (Ba et al. 2016, arXiv 1607.06450) along the last axis of x, with the tensors `<name>.weight` and
    /// `<name>.bias` of that axis.
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape.
    pub fn layer_norm(&self, b: &mut GraphBuilder, x: TensorId, name: &str) -> Result<TensorId> {
        let (width, short) = ([b.width(x)?], last_part(name));
        let weight = self.checkpoint.values(&format!("{name}.weight"), &width)?;
        let bias = self.checkpoint.values(&format!("{name}.bias"), &width)?;
        let weight = b.row(&format!("{short}_weight"), weight)?;
        let bias = b.row(&format!("{short}_bias"), bias)?;
        b.layer_norm(x, self.eps, weight, bias)
    }

    /// A gated MLP (Shazeer 2020, arXiv 2002.05202) on rows `[rows, hidden]`: `down(act(gate(x)) · up(x))`.
    /// `act` is a method of the builder, such as [`GraphBuilder::silu`].
    ///
    /// # Errors
    /// Errors of [`Layers::linear`] and of `act`.
    pub fn mlp(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        mlp: &Mlp<'_>,
        act: impl Fn(&mut GraphBuilder, TensorId) -> Result<TensorId>,
    ) -> Result<TensorId> {
        let hidden = b.width(x)?;
        let [gate, up, down] = mlp.parts;
        let inner = [(gate, mlp.width, mlp.bias), (up, mlp.width, mlp.bias)];
        let [mut gate, mut up] = self.rows_of(&mlp.name, mlp.joined, inner, hidden)?;
        let down = format!("{}.{down}", mlp.name);
        let mut down = self.parts(&down, [hidden, mlp.width], mlp.bias)?;
        // What stands between them has no order: the outputs before take that of the inputs behind.
        if let Some(Reordered { source, order }) = down.in_order(self.precision) {
            down.weight = source;
            gate.reorder_outputs(&order);
            up.reorder_outputs(&order);
        }
        let [gate, up] = self.build_all(b, x, [gate, up])?;
        let gate = act(b, gate)?;
        let inner = b.mul(gate, up)?;
        down.build(b, inner, self.precision)
    }

    /// A feed-forward of two projections with biases on rows `[rows, hidden]` (Vaswani et al. 2017, arXiv 1706.03762):
    /// `second(act(first(x)))`, `width` elements between them.
    ///
    /// # Errors
    /// Errors of [`Layers::linear`] and of `act`.
    pub fn feed_forward(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        [first, second]: [&str; 2],
        width: usize,
        act: impl Fn(&mut GraphBuilder, TensorId) -> Result<TensorId>,
    ) -> Result<TensorId> {
        let hidden = b.width(x)?;
        let inner = self.linear(b, x, first, width, true)?;
        let inner = act(b, inner)?;
        self.linear(b, inner, second, hidden, true)
    }

    /// Logits `[rows, vocab]` of normalised rows: with `lm_head`, or with the embedding table if `tied` and the
    /// checkpoint has no `lm_head`; where it has one, that counts, as it does in `transformers`. The weight has the
    /// precision of the field `head`.
    ///
    /// # Errors
    /// When the tensor is missing, or has another shape.
    pub fn head(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        vocab: usize,
        tied: bool,
        bias: bool,
    ) -> Result<TensorId> {
        let shared = tied && !self.checkpoint.has("lm_head.weight");
        let name = if shared { "embed_tokens" } else { "lm_head" };
        let weight = self.checkpoint.matrix(&format!("{name}.weight"), [vocab, b.width(x)?])?;
        let bias = bias.then(|| self.checkpoint.values("lm_head.bias", &[vocab])).transpose()?;
        Projection { name: "head".to_owned(), weight, bias }.build(b, x, self.head)
    }

    /// The graph `lmhead`: a row `x` `[1, hidden]` to `logits` `[1, vocab]`, see [`Layers::head`]. The row is normalised,
    /// or becomes so by the final norm `norm`.
    ///
    /// # Errors
    /// Errors of [`Layers::head`].
    pub fn lmhead(
        &self,
        hidden: usize,
        vocab: usize,
        tied: bool,
        norm: Option<&str>,
    ) -> Result<Graph> {
        let mut b = GraphBuilder::new("lmhead");
        let mut x = b.input("x", Elem::Activation, &[1, hidden])?;
        if let Some(norm) = norm {
            b.scope("final");
            x = self.norm(&mut b, x, norm)?;
        }
        let logits = self.head(&mut b, x, vocab, tied, false)?;
        b.output("logits", logits)?;
        b.finish()
    }
}

/// Weight and bias of the convolution `name`, whose weight has this shape and is never quantized.
pub(crate) fn filters(
    checkpoint: &Checkpoint,
    name: &str,
    shape: &[usize],
) -> Result<(Weight, Vec<f32>)> {
    let weight = checkpoint.rows(&format!("{name}.weight"), shape)?;
    let bias = checkpoint.values(&format!("{name}.bias"), &shape[..1])?;
    Ok((Weight::new(weight, Storage::Float), bias))
}

/// The results of `make` for each, or its first error.
fn each<A, B, const N: usize>(all: [A; N], mut make: impl FnMut(A) -> Result<B>) -> Result<[B; N]> {
    let mut made = Vec::with_capacity(N);
    for one in all {
        made.push(make(one)?);
    }
    made.try_into().map_err(|_| Error::new(ErrorKind::Internal, "one result for each"))
}

/// A projection of a checkpoint.
pub(super) struct Projection {
    /// The weight's name in the graph.
    name: String,
    weight: Arc<dyn RowSource>,
    bias: Option<Vec<f32>>,
}

impl Projection {
    /// The weight with its inputs in the order in which its integers can be kept, where that is another one.
    fn in_order(&self, precision: Precision) -> Option<Reordered> {
        let fits = |form: QuantizedForm| form.fits(self.weight.shape()[1]);
        let found = self.weight.reordered().filter(|_| precision != Precision::Fp16)?;
        found.source.block_form().is_some_and(fits).then_some(found)
    }

    pub(super) fn reorder_outputs(&mut self, order: &Arc<[u32]>) {
        self.weight = row_order(Arc::clone(&self.weight), Arc::clone(order));
        if let Some(bias) = &mut self.bias {
            let place = |place: &u32| bias.get(*place as usize).copied().unwrap_or(0.0);
            *bias = order.iter().map(place).collect();
        }
    }

    fn build(self, b: &mut GraphBuilder, x: TensorId, precision: Precision) -> Result<TensorId> {
        let reordered = self.in_order(precision);
        let Self { name, weight, bias } = self;
        let (x, weight) = match reordered {
            Some(Reordered { source, order }) => (b.reorder(x, &order)?, source),
            None => (x, weight),
        };
        b.linear(&name, x, precision.weight(weight), bias)
    }
}

/// A gated MLP, for [`Layers::mlp`].
#[derive(Debug, Clone)]
pub struct Mlp<'a> {
    /// Prefix of its tensors' names: `layers.3.mlp`.
    pub name: String,
    /// Names of the projections gate, up and down.
    pub parts: [&'a str; 3],
    /// The matrix of which gate and up are the rows, one after the other: `gate_up_proj`. None where each is a tensor
    /// of its own.
    pub joined: Option<&'a str>,
    /// Elements of the inner rows, between up and down (`intermediate_size`).
    pub width: usize,
    /// The projections have biases.
    pub bias: bool,
}

impl Mlp<'_> {
    /// `gate_proj`, `up_proj` and `down_proj` without biases.
    pub fn new(name: impl Into<String>, width: usize) -> Self {
        let parts = ["gate_proj", "up_proj", "down_proj"];
        Self { name: name.into(), parts, joined: None, width, bias: false }
    }
}

/// `up_proj` of `layers.3.mlp.up_proj`.
fn last_part(name: &str) -> &str {
    name.rsplit('.').next().unwrap_or(name)
}
