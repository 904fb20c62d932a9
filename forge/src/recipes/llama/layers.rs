//! One decoder layer, several up to one with experts, and the head.

use std::ops::Range;

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, TensorId};

use super::classes::{HeadNorms, Norms};
use super::config::{Config, Sparse};
use crate::kit::{Attend, AttendInputs, Attention, Layers, Mlp};

/// Inputs that layers of a graph share: those of full and of sliding ones, and what queries are multiplied by.
pub(super) struct Shared {
    pub full: Option<Attend>,
    pub local: Option<Attend>,
    pub growth: Option<TensorId>,
}

/// Input of a graph: growth of each row's queries, `[rows, 1]`.
const GROWTH: &str = "q_scale";
/// Names of the inputs of sliding layers.
const LOCAL: [&str; 3] = ["cos_local", "sin_local", "cmask_local"];

impl Shared {
    /// Inputs of the layers of `range`. `ring` has the rows of the caches of sliding layers, where these are apart.
    pub fn inputs(
        b: &mut GraphBuilder,
        config: &Config,
        range: Range<usize>,
        inputs: &AttendInputs<'_>,
        ring: Option<usize>,
    ) -> Result<Self> {
        // Where no layer turns, nothing reads the tables.
        let turned = config.turned[range.clone()].contains(&true);
        let own = config.local.is_some();
        let tables = (turned && !own).then(|| inputs.tables(b)).transpose()?;
        let mut attend = |local: bool, names, capacity| {
            let used = range.clone().any(|layer| config.slides(layer, ring) == local);
            let inputs = AttendInputs { names, capacity, ..*inputs };
            match (used, own) {
                (false, _) => Ok(None),
                (true, false) => Attend::over(b, tables, &inputs).map(Some),
                (true, true) => Attend::inputs(b, &inputs).map(Some),
            }
        };
        let full = attend(false, inputs.names, inputs.capacity)?;
        let local = attend(true, LOCAL, ring.unwrap_or(0))?;
        let growth = match config.growth {
            None => None,
            Some(_) => {
                let growth = b.input(GROWTH, Elem::Activation, &[inputs.rows, 1])?;
                Some(b.reshape(growth, &[inputs.rows, 1, 1])?)
            }
        };
        Ok(Self { full, local, growth })
    }
}

/// Norms before and after attention, and before and after the MLP.
const fn norms(of: Norms) -> [[Option<&'static str>; 2]; 2] {
    let after = Some("post_attention_layernorm");
    match of {
        Norms::Before => [[Some("input_layernorm"), None], [after, None]],
        Norms::After => [[None, after], [None, Some("post_feedforward_layernorm")]],
        Norms::Both => [
            [Some("input_layernorm"), after],
            [Some("pre_feedforward_layernorm"), Some("post_feedforward_layernorm")],
        ],
    }
}

/// Norms of the hidden states between layers: as of the reference, their epsilon beside a mean of squares.
pub(super) fn residual<'a>(layers: &Layers<'a>, config: &Config) -> Layers<'a> {
    Layers { eps: layers.eps * config.residual * config.residual, ..*layers }
}

/// One layer on rows `[rows, hidden]`: attention and a gated MLP, with norms where the class has them.
pub(super) fn layer(
    layers: &Layers<'_>,
    config: &Config,
    b: &mut GraphBuilder,
    h: TensorId,
    layer: usize,
    attend: &Attend,
    growth: Option<TensorId>,
) -> Result<TensorId> {
    let class = config.class;
    let name = format!("layers.{layer}");
    let attention = Attention { growth, ..attention(config, layer, attend) };
    let mlp = Mlp {
        bias: config.mlp_bias,
        down_bias: config.mlp_bias,
        joined: class.joined.then_some("gate_up_proj"),
        ..Mlp::new(format!("{name}.mlp"), config.intermediate)
    };
    let [of_attention, of_mlp] = norms(class.norms);
    let before = |b: &mut GraphBuilder, h, norm: Option<&str>| match norm {
        Some(norm) => residual(layers, config).norm(b, h, &format!("{name}.{norm}")),
        None => Ok(h),
    };
    let add = |b: &mut GraphBuilder, h, out, norm: Option<&str>| {
        let out = match norm {
            Some(norm) => layers.scaled_norm(b, out, &format!("{name}.{norm}"), config.residual)?,
            None if config.added_scale != 1.0 => b.scale(out, config.added_scale)?,
            None => out,
        };
        b.add(h, out)
    };
    b.scope(format!("l{layer}_attn"));
    let x = before(b, h, of_attention[0])?;
    let out = layers.attention(b, x, &attention, attend)?;
    let h = add(b, h, out, of_attention[1])?;
    b.scope(format!("l{layer}_mlp"));
    let x = before(b, h, of_mlp[0])?;
    let act = if class.gemma { GraphBuilder::gelu_tanh } else { GraphBuilder::silu };
    let out = layers.mlp(b, x, &mlp, act)?;
    add(b, h, out, of_mlp[1])
}

/// The attention of a layer.
fn attention(config: &Config, layer: usize, attend: &Attend) -> Attention<'static> {
    let class = config.class;
    Attention {
        joined: class.joined.then_some("qkv_proj"),
        norms: match (class.head_norms, class.late_norms) {
            (HeadNorms::None, _) => None,
            (_, true) => Some(["query_layernorm", "key_layernorm"]),
            (_, false) => Some(["q_norm", "k_norm"]),
        },
        late_norms: class.late_norms,
        neighbours: class.pairs,
        whole_norms: class.head_norms == HeadNorms::Whole,
        turned: config.turned.get(layer).copied().unwrap_or(true),
        scale: config.scale,
        cap: config.score_cap,
        bias: [config.qkv_bias; 3],
        sinks: class.sinks.then_some("sinks"),
        // Beside a sink, the scores of keys must not become smaller.
        centred: (config.qkv_bias && !class.sinks).then_some(config.rope.theta),
        out_bias: config.o_bias,
        cached: attend.capacity > 0,
        ..Attention::new(format!("layers.{layer}.self_attn"), layer, config.heads)
    }
}

/// Tokens through the layers of `range`, of which only the last may have experts: the graph ends where they begin.
pub(super) fn until_experts(
    layers: &Layers<'_>,
    config: &Config,
    sparse: &Sparse,
    name: &str,
    range: Range<usize>,
    (inputs, ring): (&AttendInputs<'_>, Option<usize>),
) -> Result<Graph> {
    let mut b = GraphBuilder::new(name);
    let mut h = b.input("x", Elem::Activation, &[inputs.rows, config.hidden])?;
    let Shared { full, local, .. } = Shared::inputs(&mut b, config, range.clone(), inputs, ring)?;
    if range.start == 0 && config.residual != 1.0 {
        h = b.scale(h, config.residual)?;
    }
    for index in range {
        let Some(attend) = (if config.slides(index, ring) { &local } else { &full }) else {
            continue;
        };
        if sparse.layers.get(index) != Some(&true) {
            h = layer(layers, config, &mut b, h, index, attend, None)?;
            continue;
        }
        let (name, attention) = (format!("layers.{index}"), attention(config, index, attend));
        let outer = residual(layers, config);
        b.scope(format!("l{index}_attn"));
        let normed = outer.norm(&mut b, h, &format!("{name}.input_layernorm"))?;
        let mut mixed = layers.attention(&mut b, normed, &attention, attend)?;
        if config.residual != 1.0 {
            mixed = b.scale(mixed, config.residual)?;
        }
        h = b.add(h, mixed)?;
        b.scope(format!("l{index}_mlp"));
        let normed = outer.norm(&mut b, h, &format!("{name}.post_attention_layernorm"))?;
        let router = format!("{name}.mlp.{}", sparse.router);
        layers.route(&mut b, [h, normed], &router, &sparse.experts)?;
        return b.finish();
    }
    b.output("y", h)?;
    b.finish()
}

/// The graph `lmhead`: a normalised row `x` `[1, hidden]` to `logits` `[1, vocab]`, before their cap.
pub(super) fn head(layers: &Layers<'_>, config: &Config) -> Result<Graph> {
    let mut b = GraphBuilder::new("lmhead");
    let mut x = b.input("x", Elem::Activation, &[1, config.hidden])?;
    if config.logits_scale != 1.0 {
        x = b.scale(x, config.logits_scale)?;
    }
    let logits = layers.head(&mut b, x, config.vocab, config.tied, false)?;
    b.output("logits", logits)?;
    b.finish()
}
