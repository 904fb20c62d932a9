//! Decoders in which Mamba-2 layers stand among layers of attention or beside them: Granite 4, Falcon-H1, Nemotron-H.
//!
//! Graphs `decode` take one token, graphs `prefill<P>` take P tokens of a prompt over the same states; the head is a
//! graph of its own.
//!
//! | tensor | shape, P = 1 for `decode` | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in and out; normalised after the last layer |
//! | `cos`, `sin` | `[P, head_dim / 2]` | half tables; where attention turns |
//! | `cmask` | `[P, max_ctx + P]` | added to scores; the last P slots are the graph's own tokens |
//! | `past_k_i`, `past_v_i` → `new_k_i`, `new_v_i` | `[kv_heads, max_ctx, head_dim]` → `[kv_heads, P, head_dim]` | layers with attention |
//! | `past_conv_i`, `past_ssm_i`, `valid`, `keep` | | layers with Mamba-2, see [`crate::kit::Mamba2`] |
//! | head: `x` → `logits` | `[1, hidden]` → `[1, vocab]` | |
//!
//! In models with experts, graphs `decode<n>` and `prefill<P>_<n>` end before them, see [`crate::kit::Experts`], and
//! the head normalises.

mod falcon;
mod granite;
mod nemotron;

use std::ops::Range;

use qhx_base::Result;
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};
use serde_json::{Value, json};

use crate::kit::{
    Attend, AttendInputs, Attention, BEFORE_SQUARE, Decoder, DecoderParams, ExpertNames, Experts,
    GateNorm, Heads, Layers, Mamba2, Mlp, PREFILL_ROWS, Reader, Scan, Step, check_shape, decoder,
    expert_decoder, prefill_rows, scaled,
};
use crate::recipe::{Recipe, RecipeOptions};

/// A decoder as its configuration describes it.
#[derive(Debug)]
struct Model {
    /// `model.family` of the manifest.
    family: &'static str,
    hidden: usize,
    vocab: usize,
    eps: f32,
    tied: bool,
    max_positions: Option<usize>,
    layers: Vec<Vec<Part>>,
    heads: Heads,
    /// Base of the rotary embedding; none for attention that knows no positions.
    rope_theta: Option<f64>,
    /// Queries, keys, values and the projection back have biases.
    attention_bias: bool,
    mamba: Option<Mamba2>,
    sparse: Option<Sparse>,
    factors: Factors,
    /// Name of the norm behind the layers.
    norm: &'static str,
}

impl Model {
    /// A model with what all classes have under the same keys. Attention has neither positions nor biases, and there are
    /// neither layers yet nor Mamba-2 or experts.
    fn of(reader: &Reader<'_>, heads: Heads) -> Result<Self> {
        Ok(Self {
            family: "",
            hidden: reader.size("hidden_size")?,
            vocab: reader.size("vocab_size")?,
            eps: 0.0,
            tied: reader.tied(false)?,
            max_positions: reader.maybe_size("max_position_embeddings")?,
            layers: Vec::new(),
            heads,
            rope_theta: None,
            attention_bias: false,
            mamba: None,
            sparse: None,
            factors: Factors::of(heads),
            norm: "norm",
        })
    }
}

/// Numbers that parts are multiplied by.
#[derive(Debug, Clone, Copy)]
struct Factors {
    embeddings: f32,
    logits: f32,
    /// Factor of all that is added to the residual.
    added: f32,
    /// Factor of the scores.
    scores: f32,
    attention_in: f32,
    attention_out: f32,
    mamba_out: f32,
    /// Factors of the MLP's gate before its activation, and of what the MLP adds.
    mlp: [f32; 2],
}

impl Factors {
    /// None but that of the scores, 1 / √dim.
    fn of(heads: Heads) -> Self {
        let scores = heads.scale();
        Self {
            embeddings: 1.0,
            logits: 1.0,
            added: 1.0,
            scores,
            attention_in: 1.0,
            attention_out: 1.0,
            mamba_out: 1.0,
            mlp: [1.0; 2],
        }
    }
}

/// Experts of a model.
#[derive(Debug)]
struct Sparse {
    experts: Experts,
    /// `params.router` of the manifest.
    router: Value,
    /// Names below a layer.
    names: fn(String) -> ExpertNames,
    /// Place of the router below a layer.
    gate: &'static str,
}

/// A norm, and what is added to the residual behind it.
#[derive(Debug, Clone, Copy)]
struct Part {
    /// Name of the norm below the layer.
    norm: &'static str,
    kind: Kind,
}

/// Layers of these kinds have names below the layer.
#[derive(Debug, Clone, Copy)]
enum Kind {
    Attention(&'static str),
    Mamba(&'static str),
    /// Attention and Mamba-2 of the same rows.
    Both([&'static str; 2]),
    Inner(Inner),
    /// A feed-forward that every token goes to, and experts.
    Experts(Inner),
}

/// A feed-forward.
#[derive(Debug, Clone, Copy)]
struct Inner {
    name: &'static str,
    form: Form,
    width: usize,
    bias: bool,
}

#[derive(Debug, Clone, Copy)]
enum Form {
    /// Gated, with the names of gate, up and down, or of the matrix that gate and up are rows of, and down.
    Gated([&'static str; 3]),
    Joined([&'static str; 2]),
    /// `down(relu(up(x))²)` (So et al. 2021, arXiv 2109.08668).
    Squared,
}

impl Kind {
    const fn has_attention(self) -> bool {
        matches!(self, Self::Attention(_) | Self::Both(_))
    }

    const fn has_mamba(self) -> bool {
        matches!(self, Self::Mamba(_) | Self::Both(_))
    }
}

/// Names of kinds in lists of layers.
fn kind_names(mamba: Kind, attention: Kind) -> [(&'static str, Kind); 4] {
    [
        ("mamba", mamba),
        ("attention", attention),
        ("linear_attention", mamba),
        ("full_attention", attention),
    ]
}

/// The keys `mamba_*`, as Granite and Falcon-H1 have them, of heads that together are `inner` wide.
fn mamba_sizes(reader: &Reader<'_>, inner: usize) -> Result<Mamba2> {
    let heads = reader.size_or("mamba_n_heads", 128)?;
    let dim = match reader.get("mamba_d_head") {
        Some(Value::String(auto)) if auto == "auto" => inner / heads,
        _ => reader.size_or("mamba_d_head", inner / heads)?,
    };
    if heads * dim != inner {
        return Err(reader.fault(format!(
            "mamba_n_heads {heads} of mamba_d_head {dim} are {} elements, expected {inner} (mamba_d_ssm, or \
             mamba_expand times hidden_size)",
            heads * dim
        )));
    }
    let mamba = Mamba2 {
        heads,
        dim,
        groups: reader.size_or("mamba_n_groups", 1)?,
        state: reader.size_or("mamba_d_state", 256)?,
        kernel: reader.size_or("mamba_d_conv", 4)?,
        conv_bias: reader.flag_or("mamba_conv_bias", true)?,
        in_bias: reader.flag("mamba_proj_bias")?,
        out_bias: reader.flag("mamba_proj_bias")?,
        norm: GateNorm::After,
        limits: Mamba2::limits(reader, "time_step_limit")?,
        in_factor: 1.0,
        factors: [1.0; 5],
    };
    mamba.check(reader)
}

/// True if one of the parts is such a one.
fn any(layers: &[Vec<Part>], is: fn(Kind) -> bool) -> bool {
    layers.iter().flatten().any(|part| is(part.kind))
}

/// The graphs of a model, and the plan that runs them with `decoder_generate`.
fn recipe(checkpoint: &Checkpoint, options: &RecipeOptions, model: &Model) -> Result<Recipe> {
    let Model { hidden, vocab, heads, factors, .. } = *model;
    let count = model.layers.len();
    check_shape(options, count, model.max_positions)?;
    let layers = Layers::decoder(checkpoint, options, model.eps);
    let make = |name: &str, range, step| model.graph(&layers, name, range, step);
    let rope_theta = model.rope_theta.unwrap_or(1e4);
    let mut params =
        DecoderParams { hidden, vocab, layers: count, heads, rope_theta }.map(options.max_ctx);
    let rows = prefill_rows(options, &PREFILL_ROWS)?;
    let head = model.head(&layers)?;
    let (decoder, tables) = match &model.sparse {
        None => (decoder(options, count, &rows, make, head)?, Vec::new()),
        Some(Sparse { experts, router, names, .. }) => {
            params.insert("n_experts".to_owned(), json!(experts.count));
            params.insert("router".to_owned(), router.clone());
            let last = |parts: &Vec<Part>| parts.last().map(|part| part.kind);
            let sparse = model.layers.iter().map(|p| matches!(last(p), Some(Kind::Experts(_))));
            let sparse: Vec<_> = sparse.collect();
            let with = (0..count).filter(|layer| sparse[*layer]);
            let tables = experts.tables(checkpoint, with.map(|i| names(format!("layers.{i}"))))?;
            (expert_decoder(options, &sparse, &rows, experts, make, head)?, vec![tables])
        }
    };
    let both = any(&model.layers, |kind| matches!(kind, Kind::Both(_)));
    if any(&model.layers, Kind::has_mamba) {
        params.insert("states".to_owned(), json!(["conv", "ssm"]));
    }
    if both {
        params.insert("states_beside_caches".to_owned(), json!(true));
    }
    let stateless = |parts: &[Part]| {
        !parts.iter().any(|part| part.kind.has_attention() || part.kind.has_mamba())
    };
    let stateless: Vec<_> = (0..count).filter(|i| stateless(&model.layers[*i])).collect();
    if !stateless.is_empty() {
        params.insert("stateless".to_owned(), json!(stateless));
    }
    if factors.embeddings != 1.0 {
        params.insert("embed_scale".to_owned(), json!(factors.embeddings));
    }
    let Decoder { contexts, plan_params } = decoder;
    Ok(Recipe::new(model.family, "decoder_generate", contexts, plan_params)
        .embed(checkpoint.matrix("embed_tokens.weight", [vocab, hidden])?)
        .params(params)
        .tables(tables))
}

impl Model {
    /// The graph `lmhead`, which normalises where experts stand before it.
    fn head(&self, layers: &Layers<'_>) -> Result<Graph> {
        let mut b = GraphBuilder::new("lmhead");
        let mut x = b.input("x", Elem::Activation, &[1, self.hidden])?;
        if self.sparse.is_some() {
            b.scope("final");
            x = layers.norm(&mut b, x, self.norm)?;
        }
        x = scaled(&mut b, x, self.factors.logits)?;
        let logits = layers.head(&mut b, x, self.vocab, self.tied, false)?;
        b.output("logits", logits)?;
        b.finish()
    }

    /// Tokens through the layers of `range`.
    fn graph(
        &self,
        layers: &Layers<'_>,
        name: &str,
        range: Range<usize>,
        step: Step,
    ) -> Result<Graph> {
        let mut b = GraphBuilder::new(name);
        let mut h = b.input("x", Elem::Activation, &[step.rows, self.hidden])?;
        let members = &self.layers[range.clone()];
        let inputs =
            AttendInputs::of(if self.rope_theta.is_some() { self.heads.dim } else { 0 }, step);
        let attend = any(members, Kind::has_attention);
        let attend = attend.then(|| Attend::inputs(&mut b, &inputs)).transpose()?;
        let mamba = self.mamba.as_ref().filter(|_| any(members, Kind::has_mamba));
        let scan = mamba.map(|mamba| Scan::inputs(&mut b, mamba, step.rows)).transpose()?;
        let last = range.end == self.layers.len() && self.sparse.is_none();
        for (index, parts) in range.zip(members) {
            for Part { norm, kind } in parts {
                b.scope(format!("l{index}_{}", kind.scope()));
                let place = |name: &str| format!("layers.{index}.{name}");
                let normed = layers.norm(&mut b, h, &place(norm))?;
                let attention = |b: &mut GraphBuilder, name: &str| match &attend {
                    Some(attend) => {
                        self.attention(layers, b, normed, (&place(name), index), attend)
                    }
                    None => Ok(normed),
                };
                let recurrent = |b: &mut GraphBuilder, name: &str| match (mamba, &scan) {
                    (Some(mamba), Some(scan)) => {
                        let out = layers.mamba2(b, normed, (&place(name), index), mamba, scan)?;
                        scaled(b, out, self.factors.mamba_out)
                    }
                    _ => Ok(normed),
                };
                let out = match kind {
                    Kind::Attention(name) => attention(&mut b, name)?,
                    Kind::Mamba(name) => recurrent(&mut b, name)?,
                    Kind::Both([of_attention, of_mamba]) => {
                        let out = attention(&mut b, of_attention)?;
                        let other = recurrent(&mut b, of_mamba)?;
                        b.add(out, other)?
                    }
                    Kind::Inner(inner) | Kind::Experts(inner) => {
                        self.inner(layers, &mut b, normed, &place(inner.name), inner)?
                    }
                };
                let out = scaled(&mut b, out, self.factors.added)?;
                h = b.add(h, out)?;
                if let (Kind::Experts(_), Some(sparse)) = (kind, &self.sparse) {
                    layers.route(&mut b, [h, normed], &place(sparse.gate), &sparse.experts)?;
                    return b.finish();
                }
            }
        }
        if last {
            b.scope("final");
            h = layers.norm(&mut b, h, self.norm)?;
        }
        b.output("y", h)?;
        b.finish()
    }

    fn attention(
        &self,
        layers: &Layers<'_>,
        b: &mut GraphBuilder,
        x: TensorId,
        (name, layer): (&str, usize),
        attend: &Attend,
    ) -> Result<TensorId> {
        let attention = Attention {
            scale: self.factors.scores,
            bias: [self.attention_bias; 3],
            out_bias: self.attention_bias,
            ..Attention::new(name, layer, self.heads)
        };
        let x = scaled(b, x, self.factors.attention_in)?;
        let out = layers.attention(b, x, &attention, attend)?;
        scaled(b, out, self.factors.attention_out)
    }

    fn inner(
        &self,
        layers: &Layers<'_>,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        inner: &Inner,
    ) -> Result<TensorId> {
        let Inner { form, width, bias, .. } = *inner;
        let [of_gate, of_out] = self.factors.mlp;
        let mlp = Mlp { bias, down_bias: bias, ..Mlp::new(name, width) };
        let mlp = match form {
            Form::Gated(parts) => Mlp { parts, ..mlp },
            Form::Joined([joined, down]) => {
                Mlp { parts: ["gate", "up", down], joined: Some(joined), ..mlp }
            }
            Form::Squared => {
                let up = layers.linear(b, x, &format!("{name}.up_proj"), width, bias)?;
                let act = b.relu(up)?;
                let act = b.scale(act, BEFORE_SQUARE)?;
                let act = b.mul(act, act)?;
                let down = format!("{name}.down_proj");
                let out = layers.linear(b, act, &down, self.hidden, false)?;
                let out = b.scale(out, BEFORE_SQUARE.powi(-2))?;
                if !bias {
                    return Ok(out);
                }
                let bias = layers.checkpoint.values(&format!("{down}.bias"), &[self.hidden])?;
                let bias = b.row("down_bias", bias)?;
                return b.add(out, bias);
            }
        };
        let act = |b: &mut GraphBuilder, gate: TensorId| {
            let gate = scaled(b, gate, of_gate)?;
            b.silu(gate)
        };
        let out = layers.mlp(b, x, &mlp, act)?;
        scaled(b, out, of_out)
    }
}

impl Kind {
    /// Scope of its nodes.
    const fn scope(self) -> &'static str {
        match self {
            Self::Attention(_) => "attn",
            Self::Mamba(_) => "mamba",
            Self::Both(_) => "mix",
            Self::Inner(_) | Self::Experts(_) => "mlp",
        }
    }
}
