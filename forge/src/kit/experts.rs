//! Layers with many experts, of which a token goes to a few: graphs that have their weights as inputs, and the tables
//! of these weights that the host reads (`qhx_kit::experts`).
//!
//! Graphs of one or several layers end where experts begin:
//!
//! | tensor | shape, P rows | |
//! |---|---|---|
//! | `x` → `y` | `[P, hidden]` | residual in; residual that the experts add to |
//! | → `z` | `[P, hidden]` | normalised, for the experts |
//! | → `router` | `[P, experts]` | scores |
//!
//! One graph more runs the experts of a token and adds the residual, one runs one expert over several tokens. Their
//! weights are inputs: f16, or int8 with scales that the output is multiplied by.

use std::io::Write;
use std::ops::Range;
use std::sync::Arc;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Checkpoint;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Elem, Graph, INT8_STEP, TensorId, UnaryOp};
use qhx_graph::progress::Progress;
use qhx_graph::weight::{RowSource, Storage, Weight, row_order, row_range, transposed};
use serde_json::{Map, Value, json};

use super::contexts::{Decoder, Parts, even, named, steps};
use super::layers::{Layers, Mlp};
use super::reader::Reader;
use super::step::Step;
use crate::recipe::{ContextPlan, RecipeOptions, TableFile, TableSource, Tables};
use crate::registry::RecipeOption;

/// More experts than any model has.
const MAX_EXPERTS: usize = 4096;
/// Factor of activations before they are squared: their squares stay within f16 up to 2,047 instead of 255.
pub(crate) const BEFORE_SQUARE: f32 = 0.125;
/// The most experts of a token: one for each letter of the prefixes of their inputs.
const MAX_A_TOKEN: usize = 26;

/// Option for the weight inputs of the experts' graphs.
pub const EXPERTS: RecipeOption = RecipeOption {
    name: "experts",
    values: &["w8a16", "fp16"],
    help: "precision of the experts' weights as graph inputs: the table's int8, or f16 that the host makes of it",
};

/// Form of the weight inputs of the experts' graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertInputs {
    /// The table's own int8 values, and scales; nothing is converted on the host.
    Int8,
    /// f16 values, which the host makes of the table for each token.
    F16,
}

impl ExpertInputs {
    /// By the option [`EXPERTS`].
    pub fn of(options: &RecipeOptions) -> Self {
        match options.choice(EXPERTS.name) {
            Some("fp16") => Self::F16,
            _ => Self::Int8,
        }
    }

    /// Adds to `plan.params` what the host has to know of the inputs.
    pub fn plan(self, plan: &mut Map<String, Value>) {
        if self == Self::Int8 {
            plan.insert("int8_step".to_owned(), json!(INT8_STEP));
        }
    }
}

/// Arithmetic of an expert; by default SwiGLU without biases.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExpertForm {
    /// All three projections have biases, which are inputs like the weights.
    pub bias: bool,
    /// Gate and up are cut off, and the sigmoid is steeper.
    pub clamp: Option<Clamp>,
    /// Factor of what the expert gives; it stands in the table.
    pub scale: f32,
}

/// `(up + 1) · gate · σ(alpha · gate)` with gates of at most `limit`, and ups within it (gpt-oss).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Clamp {
    /// Steepness of the sigmoid.
    pub alpha: f32,
    /// Bound of gate and up.
    pub limit: f32,
}

impl Default for ExpertForm {
    fn default() -> Self {
        Self { bias: false, clamp: None, scale: 1.0 }
    }
}

/// Sizes of the experts of a model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    /// Elements of a hidden state.
    pub hidden: usize,
    /// Elements of an expert's inner rows.
    pub width: usize,
    /// Experts of a layer.
    pub count: usize,
    /// Number of experts that a token goes to.
    pub a_token: usize,
    /// Arithmetic of an expert.
    pub form: ExpertForm,
    /// True for SwiGLU of three matrices; false for the squared ReLU of two, up and down.
    pub gated: bool,
}

impl Experts {
    /// Reads `num_experts`, `num_experts_per_tok` and `moe_intermediate_size`, checked.
    ///
    /// # Errors
    /// When one is no size, or a token goes to more experts than there are.
    pub fn read(reader: &Reader<'_>, hidden: usize) -> Result<Self> {
        let key = match reader.get("num_experts") {
            None if reader.get("num_local_experts").is_some() => "num_local_experts",
            _ => "num_experts",
        };
        Self::of(reader, hidden, [key, "moe_intermediate_size"])
    }

    /// Same as [`Experts::read`], with other keys for the number of experts and for their width.
    ///
    /// # Errors
    /// Errors of [`Experts::read`].
    pub fn of(reader: &Reader<'_>, hidden: usize, [key, width]: [&str; 2]) -> Result<Self> {
        let count = reader.bounded(key, MAX_EXPERTS)?;
        let a_token = reader.bounded("num_experts_per_tok", MAX_A_TOKEN)?;
        if count < 2 || a_token > count {
            return Err(reader.fault(format!(
                "{key} is {count} and num_experts_per_tok {a_token}, expected 2 experts or more, and no more of them \
                 for a token"
            )));
        }
        Ok(Self {
            hidden,
            width: reader.size(width)?,
            count,
            a_token,
            gated: true,
            form: ExpertForm::default(),
        })
    }

    /// The experts of a token: `y = residual + m1 · a(x) + m2 · b(x) + …`.
    ///
    /// # Errors
    /// Errors of the builder.
    pub fn token_graph(&self, name: &str, inputs: ExpertInputs) -> Result<Graph> {
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[1, self.hidden])?;
        let residual = b.input("residual", Elem::Activation, &[1, self.hidden])?;
        let multipliers = (1..=self.a_token)
            .map(|number| b.input(&format!("m{number}"), Elem::Activation, &[1, 1]))
            .collect::<Result<Vec<_>>>()?;
        let experts = (b'a'..)
            .take(self.a_token)
            .map(|letter| self.expert(&mut b, x, &format!("{}_", char::from(letter)), inputs))
            .collect::<Result<Vec<_>>>()?;
        let mut sum = None;
        for (expert, multiplier) in experts.into_iter().zip(multipliers) {
            let part = b.mul(expert, multiplier)?;
            sum = Some(match sum {
                Some(sum) => b.add(sum, part)?,
                None => part,
            });
        }
        let y = match sum {
            Some(sum) => b.add(residual, sum)?,
            None => residual,
        };
        b.output("y", y)?;
        b.finish()
    }

    /// One expert over `rows` tokens.
    ///
    /// # Errors
    /// Errors of the builder.
    pub fn rows_graph(&self, name: &str, inputs: ExpertInputs, rows: usize) -> Result<Graph> {
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[rows, self.hidden])?;
        let y = self.expert(&mut b, x, "", inputs)?;
        b.output("y", y)?;
        b.finish()
    }

    /// SwiGLU (Shazeer 2020, arXiv 2002.05202), [`Clamp`], or a squared ReLU (So et al. 2021, arXiv 2109.08668), with
    /// weights that are inputs.
    fn expert(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        prefix: &str,
        inputs: ExpertInputs,
    ) -> Result<TensorId> {
        let (hidden, width) = (self.hidden, self.width);
        b.scope(format!("{prefix}expert"));
        let matmul = |b: &mut GraphBuilder, x: TensorId, name: &str, shape: [usize; 2]| {
            let name = format!("{prefix}{name}");
            let y = match inputs {
                ExpertInputs::F16 => {
                    let weight = b.input(&name, Elem::Activation, &shape)?;
                    b.matmul(x, weight, true)?
                }
                ExpertInputs::Int8 => {
                    let weight = b.input(&name, Elem::Int8, &shape)?;
                    let scale =
                        b.input(&format!("{name}_scale"), Elem::Activation, &[1, shape[0]])?;
                    let y = b.matmul(x, weight, true)?;
                    b.mul(y, scale)?
                }
            };
            if !self.form.bias {
                return Ok(y);
            }
            let bias = b.input(&format!("{name}_bias"), Elem::Activation, &[1, shape[0]])?;
            b.add(y, bias)
        };
        if !self.gated {
            let up = matmul(b, x, "up", [width, hidden])?;
            let inner = b.relu(up)?;
            let inner = b.scale(inner, BEFORE_SQUARE)?;
            let inner = b.mul(inner, inner)?;
            let out = matmul(b, inner, "down", [hidden, width])?;
            return b.scale(out, BEFORE_SQUARE.powi(-2));
        }
        let gate = matmul(b, x, "gate", [width, hidden])?;
        let up = matmul(b, x, "up", [width, hidden])?;
        let inner = match self.form.clamp {
            None => {
                let gate = b.silu(gate)?;
                b.mul(gate, up)?
            }
            Some(Clamp { alpha, limit }) => {
                let gate = b.clamp(gate, f16::MIN.to_f32(), limit)?;
                let up = b.clamp(up, -limit, limit)?;
                let steep = b.scale(gate, alpha)?;
                let open = b.unary(UnaryOp::Sigmoid, steep)?;
                let gate = b.mul(gate, open)?;
                // (up + 1) · gate
                let product = b.mul(up, gate)?;
                b.add(product, gate)?
            }
        };
        matmul(b, inner, "down", [hidden, width])
    }

    /// Rows of the graph of one expert beside graphs of `rows` tokens: twice what an expert gets when tokens spread
    /// evenly, in steps of 8.
    pub fn rows_of(&self, rows: usize) -> usize {
        let even = (2 * rows * self.a_token).div_ceil(self.count);
        even.next_multiple_of(8).min(rows)
    }

    /// Tables `experts_i8.bin` and `experts_scale.f32` under `artifacts.experts`: for each layer and expert gate
    /// `[width, hidden]`, up `[width, hidden]`, down `[hidden, width]`, row-major int8 without gaps; one f32 scale for
    /// each of these rows in the same order. Experts that are not gated have no gate. With a `bias` also
    /// `experts_bias.f32`, a value for each expert of each layer; where the projections have biases also
    /// `experts_offset.f32`, in the order of the scales.
    ///
    /// # Errors
    /// When a tensor is missing, or has another shape.
    pub fn tables(
        &self,
        checkpoint: &Checkpoint,
        layers: impl IntoIterator<Item = ExpertNames>,
    ) -> Result<Tables> {
        let (mut matrices, mut bias, mut offsets) = (Vec::new(), Vec::new(), Vec::new());
        for layer in layers {
            matrices.extend(self.layer(checkpoint, &layer)?);
            if self.form.bias {
                self.offsets(checkpoint, &layer, &mut offsets)?;
            }
            if let Some(name) = &layer.bias {
                bias.extend(checkpoint.values(name, &[self.count])?);
            }
        }
        let file = |field: &str, name: &str| TableFile {
            field: field.to_owned(),
            name: name.to_owned(),
            dtype: None,
            block: None,
        };
        let mut files =
            vec![file("weights", "experts_i8.bin"), file("scales", "experts_scale.f32")];
        if !bias.is_empty() {
            files.push(file("bias", "experts_bias.f32"));
        }
        if !offsets.is_empty() {
            files.push(file("offsets", "experts_offset.f32"));
        }
        let source = Arc::new(Table { matrices, bias, offsets, scale: self.form.scale });
        Ok(Tables { key: "experts".to_owned(), files, source })
    }

    /// The biases of a layer's projections, expert by expert: `gate_up_proj_bias` `[experts, 2 · width]`, of which
    /// every other one is the gate's, and `down_proj_bias` `[experts, hidden]`; or one by one.
    fn offsets(
        &self,
        checkpoint: &Checkpoint,
        names: &ExpertNames,
        out: &mut Vec<f32>,
    ) -> Result<()> {
        let Self { hidden, width, count, .. } = *self;
        let scaled = |down: Vec<f32>| down.into_iter().map(|value| value * self.form.scale);
        let gate_up = format!("{}.gate_up_proj_bias", names.stacks);
        if checkpoint.has(&gate_up) || checkpoint.seed().is_some() {
            let gate_up = checkpoint.values(&gate_up, &[count, 2 * width])?;
            let down =
                checkpoint.values(&format!("{}.down_proj_bias", names.stacks), &[count, hidden])?;
            let down: Vec<_> = scaled(down).collect();
            for (gate_up, down) in gate_up.chunks_exact(2 * width).zip(down.chunks_exact(hidden)) {
                out.extend(gate_up.iter().step_by(2));
                out.extend(gate_up.iter().skip(1).step_by(2));
                out.extend(down);
            }
            return Ok(());
        }
        for expert in 0..count {
            let bias = |part: usize, len| {
                let name = format!("{}.{expert}.{}.bias", names.experts, names.parts[part]);
                checkpoint.values(&name, &[len])
            };
            out.extend(bias(0, width)?);
            out.extend(bias(1, width)?);
            out.extend(scaled(bias(2, hidden)?));
        }
        Ok(())
    }

    /// The experts of a layer in stacks whose rows of gate and up alternate: of outputs and inputs, or, if `turned`, of
    /// inputs and outputs.
    fn interleaved(
        &self,
        checkpoint: &Checkpoint,
        stacks: &str,
        turned: bool,
    ) -> Result<Vec<Matrices>> {
        let Self { hidden, width, count, .. } = *self;
        let stack = |name: &str, outputs: usize, inputs: usize| {
            let [rows, columns] = if turned { [inputs, outputs] } else { [outputs, inputs] };
            let stack = checkpoint.stack(&format!("{stacks}.{name}"), [count, rows, columns])?;
            Ok(move |expert: usize| {
                let one = row_range(&stack, expert * rows..(expert + 1) * rows);
                if turned { transposed(one) } else { one }
            })
        };
        let gate_up = stack("gate_up_proj", 2 * width, hidden)?;
        let down = stack("down_proj", hidden, width)?;
        let rows = 0..2 * width as u32;
        let order: Arc<[u32]> = rows.clone().step_by(2).chain(rows.skip(1).step_by(2)).collect();
        let expert = |expert: usize| {
            let gate_up = row_order(gate_up(expert), Arc::clone(&order));
            let [gate, up] = [0..width, width..2 * width].map(|rows| row_range(&gate_up, rows));
            vec![gate, up, down(expert)]
        };
        Ok((0..count).map(expert).collect())
    }

    /// The experts of a layer, one by one or as stacks `gate_up_proj` `[experts, 2 · width, hidden]` and `down_proj`
    /// `[experts, hidden, width]`; without a gate, `up_proj` `[experts, width, hidden]`.
    fn layer(&self, checkpoint: &Checkpoint, names: &ExpertNames) -> Result<Vec<Matrices>> {
        let Self { hidden, width, count, .. } = *self;
        let inner = if self.gated { 2 * width } else { width };
        let gate_up = if self.gated { "gate_up_proj" } else { "up_proj" };
        let gate_up = format!("{}.{gate_up}", names.stacks);
        if let Some(turned) = names.interleaved
            && (checkpoint.has(&gate_up) || checkpoint.seed().is_some())
        {
            return self.interleaved(checkpoint, &names.stacks, turned);
        }
        if checkpoint.has(&gate_up) {
            let gate_up = checkpoint.stack(&gate_up, [count, inner, hidden])?;
            let down = format!("{}.down_proj", names.stacks);
            let down = checkpoint.stack(&down, [count, hidden, width])?;
            let expert = |expert: usize| {
                let first = expert * inner;
                let rows = (first..first + inner).step_by(width);
                let rows = rows.map(|row| row_range(&gate_up, row..row + width));
                rows.chain([row_range(&down, expert * hidden..(expert + 1) * hidden)]).collect()
            };
            return Ok((0..count).map(expert).collect());
        }
        let expert = |expert: usize| {
            let matrix = |part: usize, shape| {
                let name = format!("{}.{expert}.{}.weight", names.experts, names.parts[part]);
                checkpoint.matrix(&name, shape)
            };
            let shapes = [[width, hidden], [width, hidden], [hidden, width]];
            let parts = usize::from(!self.gated)..shapes.len();
            parts.map(|part| matrix(part, shapes[part])).collect()
        };
        (0..count).map(expert).collect()
    }
}

/// Names of a layer's experts in a checkpoint.
#[derive(Debug, Clone)]
pub struct ExpertNames {
    /// Prefix of the stacks: `layers.3.mlp.experts`, of which there is `.gate_up_proj`.
    pub stacks: String,
    /// Prefix of single experts, of which there is `.5.gate_proj.weight`.
    pub experts: String,
    /// Names of gate, up and down of a single expert.
    pub parts: [&'static str; 3],
    /// The tensor of what is added to the probabilities that choose experts.
    pub bias: Option<String>,
    /// Rows of gate and up alternate in the stacks; true if these are of inputs and outputs instead of outputs and
    /// inputs.
    pub interleaved: Option<bool>,
}

impl ExpertNames {
    /// Stacks and single experts below one prefix, these in `gate_proj`, `up_proj` and `down_proj`, without a bias.
    pub fn new(prefix: String) -> Self {
        let parts = ["gate_proj", "up_proj", "down_proj"];
        Self { stacks: prefix.clone(), experts: prefix, parts, bias: None, interleaved: None }
    }
}

impl Layers<'_> {
    /// Ends a graph where a layer's experts begin: outputs `y`, `z` and `router`. `y` is the residual, `z` the same
    /// normalised, `router` where the router's weight is: `layers.3.mlp.gate`. Where projections of the experts have
    /// biases, the router has one.
    ///
    /// # Errors
    /// When the tensor is missing, or has another shape.
    pub fn route(
        &self,
        b: &mut GraphBuilder,
        [y, z]: [TensorId; 2],
        router: &str,
        experts: &Experts,
    ) -> Result<()> {
        // Scores decide; they stay in the precision of activations.
        let scores = self.exact_linear(b, z, router, experts.count, experts.form.bias)?;
        b.output("y", y)?;
        b.output("z", z)?;
        b.output("router", scores)
    }

    /// Adds the output of a shared expert, which every token goes to, to the residual `y`: [`Layers::mlp`] of `z`
    /// `[rows, hidden]`, times the sigmoid of the projection `gate` to one value.
    ///
    /// # Errors
    /// Errors of [`Layers::mlp`].
    pub fn shared_expert(
        &self,
        b: &mut GraphBuilder,
        [y, z]: [TensorId; 2],
        mlp: &Mlp<'_>,
        gate: &str,
    ) -> Result<TensorId> {
        let out = self.mlp(b, z, mlp, GraphBuilder::silu)?;
        let gate = self.exact_linear(b, z, gate, 1, false)?;
        let gate = b.unary(UnaryOp::Sigmoid, gate)?;
        let out = b.mul(out, gate)?;
        b.add(y, out)
    }
}

/// Which layers the graphs of a decoder take, of which those marked have experts: each ends with such a layer, but
/// perhaps the last.
pub fn expert_ranges(sparse: &[bool]) -> Vec<Range<usize>> {
    let mut ranges = Vec::new();
    let mut first = 0;
    for (layer, with_experts) in sparse.iter().enumerate() {
        if *with_experts || layer + 1 == sparse.len() {
            ranges.push(first..layer + 1);
            first = layer + 1;
        }
    }
    ranges
}

/// The contexts of a decoder with experts: graphs `decode<n>` for one token and `prefill<P>_<n>` for each P of
/// `prompts`, the same for smaller contexts (`decode512_<n>`, see [`super::steps`]), each through the layers of one of
/// [`expert_ranges`], spread over the shards of the options; a context of the experts' graphs `ffn` and `ffn_pf`; and
/// the head's, which normalises the residual.
///
/// # Errors
/// Errors of `make`, which makes the graph of the given name and size that goes through some layers.
pub fn expert_decoder(
    options: &RecipeOptions,
    sparse: &[bool],
    prompts: &[usize],
    experts: &Experts,
    make: impl Fn(&str, Range<usize>, Step) -> Result<Graph>,
    head: Graph,
) -> Result<Decoder> {
    let ranges = expert_ranges(sparse);
    let shards = even(ranges.len(), options.shards.min(ranges.len()));
    let inputs = ExpertInputs::of(options);
    let mut parts = Parts::new(options);
    for step in steps(options, prompts) {
        let stem = step.stem(options);
        let between = if stem == "decode" { "" } else { "_" };
        for (shard, (key, members)) in named(&stem, &shards).into_iter().enumerate() {
            let graph = |index: usize| {
                make(&format!("{stem}{between}{index}"), ranges[index].clone(), step)
            };
            parts.add(step, shard, key, members.map(graph).collect::<Result<_>>()?);
        }
    }
    let mut of_experts = vec![experts.token_graph("ffn", inputs)?];
    if let Some(widest) = prompts.iter().max() {
        of_experts.push(experts.rows_graph("ffn_pf", inputs, experts.rows_of(*widest))?);
    }
    let of_experts = ContextPlan::new("experts".to_owned(), Default::default(), of_experts);
    let mut decoder = parts.finish(Some(of_experts), head);
    let plan = &mut decoder.plan_params;
    plan.insert("ffn".to_owned(), json!("ffn"));
    if !prompts.is_empty() {
        plan.insert("ffn_prefill".to_owned(), json!("ffn_pf"));
    }
    inputs.plan(plan);
    Ok(decoder)
}

/// Gate, up and down of one expert, or up and down.
type Matrices = Vec<Arc<dyn RowSource>>;

/// All experts, layer by layer, read when they are written.
#[derive(Debug)]
struct Table {
    /// `[layers · experts]`
    matrices: Vec<Matrices>,
    /// `[layers, experts]`, or nothing.
    bias: Vec<f32>,
    /// For each row of the matrices, or nothing.
    offsets: Vec<f32>,
    /// Factor of the last matrix of each expert.
    scale: f32,
}

impl TableSource for Table {
    fn bytes(&self) -> u64 {
        let sizes = self.matrices.iter().flatten().map(|m| m.shape());
        let bytes = sizes.map(|[rows, cols]| (rows as u64).saturating_mul(cols as u64 + 4));
        let floats = 4 * (self.bias.len() + self.offsets.len()) as u64;
        bytes.fold(floats, u64::saturating_add)
    }

    fn write(&self, files: &mut [&mut dyn Write], progress: &mut dyn Progress) -> Result<()> {
        let [weights, scales, further @ ..] = files else {
            return Err(Error::new(ErrorKind::Internal, "the experts are two files or more"));
        };
        let fail = |e: std::io::Error| Error::caused(ErrorKind::Io, "table of experts", e);
        let mut done = 0;
        let all = self.matrices.iter().flat_map(|matrices| {
            // What an expert gives is made by its last matrix, down.
            let last = matrices.len().saturating_sub(1);
            let scale = move |index: usize| if index == last { self.scale } else { 1.0 };
            matrices.iter().enumerate().map(move |(index, matrix)| (matrix, scale(index)))
        });
        for (matrix, factor) in all {
            progress.stop_if_cancelled()?;
            let rows = Weight::new(Arc::clone(matrix), Storage::Int8).to_int8()?;
            weights.write_all(bytemuck::cast_slice(&rows.values)).map_err(fail)?;
            let scaled = rows.scales.iter().map(|scale| scale * factor);
            let bytes: Vec<u8> = scaled.flat_map(f32::to_le_bytes).collect();
            scales.write_all(&bytes).map_err(fail)?;
            done += (rows.values.len() + bytes.len()) as u64;
            progress.advance(done);
        }
        let tables = [&self.bias, &self.offsets].into_iter().filter(|table| !table.is_empty());
        for (file, table) in further.iter_mut().zip(tables) {
            let bytes: Vec<u8> = table.iter().flat_map(|value| value.to_le_bytes()).collect();
            file.write_all(&bytes).map_err(fail)?;
            done += bytes.len() as u64;
            progress.advance(done);
        }
        Ok(())
    }
}
