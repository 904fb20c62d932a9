//! A graph that runs experts, and how their weights get into it.
//!
//! Inputs for each expert of the graph, with a prefix where there are several (`a_`, `b_`, …): `gate`, `up`
//! `[width, hidden]`, `down` `[hidden, width]`. Experts of two matrices have no `gate`.
//!
//! - int8 inputs are bound where the weights lie in the mapped file: nothing is read, copied or
//!   converted on the host. `gate_scale`, `up_scale` `[1, width]`, `down_scale` `[1, hidden]` are bound
//!   the same way; the graph multiplies by them after the matmul.
//! - `gate_bias`, `up_bias` `[1, width]` and `down_bias` `[1, hidden]`, where there are such, are bound like scales.
//! - f16 or f32 inputs are filled from the mapped file by all threads.

use super::table::{Sizes, Table};
use crate::kernels::{int8_to_f16, int8_to_f32};
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result};

/// Bytes that one thread fills at a time.
const BLOCK_VALUES: usize = 1 << 17;

/// The most experts of a graph for one token: one for each letter.
const MAX_A_TOKEN: usize = 26;

/// Prefixes of the experts of a graph for one token, as many as it has inputs for: `a_`, `b_`, ….
pub(super) fn prefixes(host: &Host, graph: GraphId) -> Vec<String> {
    let info = host.graph(graph);
    let names = (b'a'..=b'z').take(MAX_A_TOKEN).map(|letter| format!("{}_", char::from(letter)));
    names.take_while(|prefix| info.input(&format!("{prefix}up")).is_some()).collect()
}

/// True if the experts have gates.
pub(super) fn gated(host: &Host, graph: GraphId, prefix: &str) -> bool {
    host.graph(graph).input(&format!("{prefix}gate")).is_some()
}

/// The inputs of one expert.
#[derive(Debug)]
struct Expert {
    weights: Vec<Port>,
    scales: Vec<Port>,
}

/// Form in which weights get into the graph.
#[derive(Debug)]
enum Form {
    /// Bound where they lie, with the scales.
    Int8 { experts: Vec<Expert>, scales: BufferId, scale_size: usize },
    /// Filled: a buffer for each matrix of each expert, one after the other.
    Float { dtype: DType, targets: Vec<BufferId> },
}

/// A graph of one or several experts.
#[derive(Debug)]
pub(super) struct Ffn {
    pub graph: GraphId,
    form: Form,
    biases: Option<Biases>,
}

/// Biases of the experts of a graph, bound where they lie.
#[derive(Debug)]
struct Biases {
    ports: Vec<Vec<Port>>,
    buffer: BufferId,
    size: usize,
}

/// The sizes that a graph's weight inputs have.
pub(super) fn width(host: &Host, graph: GraphId, prefix: &str) -> Result<usize> {
    let port = host.input(graph, &format!("{prefix}up"))?;
    match host.tensor(graph, port).shape[..] {
        [width, _] => Ok(width),
        _ => Err(host.misfit(graph, port, "expected [width, hidden]")),
    }
}

/// An input of a wanted shape.
fn port(host: &Host, graph: GraphId, role: &str, shape: [usize; 2], layout: &str) -> Result<Port> {
    let port = host.input(graph, role)?;
    if host.tensor(graph, port).shape == shape {
        return Ok(port);
    }
    Err(host.misfit(graph, port, format_args!("expected the shape {shape:?}, {layout}")))
}

impl Ffn {
    /// Finds and checks the weight inputs of the experts with the given prefixes, and binds buffers to
    /// those that are filled. `step` is what one step of int8 inputs is worth inside the graph.
    pub fn open(
        host: &mut Host,
        graph: GraphId,
        prefixes: &[String],
        table: &Table,
        step: f32,
    ) -> Result<Self> {
        let Sizes { hidden, width, .. } = table.sizes;
        let layout = format!("as [outputs, inputs] of hidden {hidden}, width {width}");
        let mut ports = Vec::new();
        for prefix in prefixes {
            for (matrix, name) in table.sizes.matrices().iter().enumerate() {
                let role = format!("{prefix}{name}");
                ports.push(port(host, graph, &role, table.sizes.shape(matrix), &layout)?);
            }
        }
        let dtype = host.tensor(graph, ports[0]).dtype;
        if let Some(&other) = ports.iter().find(|p| host.tensor(graph, **p).dtype != dtype) {
            let what = format!("expected {dtype}, as {}", host.tensor(graph, ports[0]));
            return Err(host.misfit(graph, other, what));
        }
        let form = match dtype {
            DType::I8 | DType::SFixed8 => int8(host, graph, prefixes, table, &ports, step)?,
            DType::F16 | DType::F32 => {
                let fill = |&port: &Port| host.allocate_for(graph, port);
                Form::Float { dtype, targets: ports.iter().map(fill).collect::<Result<_>>()? }
            }
            other => {
                let what = format!("{other} weights, expected int8, f16 or f32");
                return Err(host.misfit(graph, ports[0], what));
            }
        };
        let biases = biases(host, graph, prefixes, table)?;
        Ok(Self { graph, form, biases })
    }

    /// Puts the weights of experts of a layer into the graph's inputs, one for each of its prefixes.
    pub fn load(
        &self,
        host: &mut Host,
        table: &Table,
        layer: usize,
        chosen: impl Iterator<Item = usize>,
    ) -> Result<()> {
        let (mut experts, mut count) = ([0; MAX_A_TOKEN], 0);
        for (expert, index) in experts.iter_mut().zip(chosen) {
            *expert = index;
            count += 1;
        }
        let all = experts;
        let chosen = experts.into_iter().take(count);
        if let Some(Biases { ports, buffer, size }) = &self.biases {
            for (ports, index) in ports.iter().zip(chosen.clone()) {
                for (matrix, port) in ports.iter().enumerate() {
                    let at = table.scales(layer, index, matrix).start * size;
                    host.bind(self.graph, *port, *buffer, at)?;
                }
            }
        }
        match &self.form {
            Form::Int8 { experts, scales, scale_size } => {
                let [weights, _] = table.buffers();
                for (expert, index) in experts.iter().zip(chosen) {
                    for matrix in 0..table.sizes.matrices().len() {
                        let at = table.weights(layer, index, matrix).start;
                        host.bind(self.graph, expert.weights[matrix], weights, at)?;
                        let at = table.scales(layer, index, matrix).start * scale_size;
                        host.bind(self.graph, expert.scales[matrix], *scales, at)?;
                    }
                }
                Ok(())
            }
            Form::Float { dtype, targets } => fill(host, table, layer, &all, *dtype, targets),
        }
    }
}

/// Finds and checks the inputs for biases; none where neither the graph nor the table has any.
fn biases(
    host: &mut Host,
    graph: GraphId,
    prefixes: &[String],
    table: &Table,
) -> Result<Option<Biases>> {
    let first = prefixes.first().map_or("", String::as_str);
    let names = table.sizes.matrices();
    let takes = host.graph(graph).input(&format!("{first}{}_bias", names[0])).is_some();
    if takes != table.has_offsets() {
        let [has, lacks] = ["the graph has inputs for biases", "artifacts.experts has offsets"];
        let [has, lacks] = if takes { [has, lacks] } else { [lacks, has] };
        return Err(Error::graph(format!(
            "graph {:?}: biases of experts: {has}, expected that {lacks}, too",
            host.graph(graph).name
        )));
    }
    if !takes {
        return Ok(None);
    }
    let mut ports = Vec::with_capacity(prefixes.len());
    for prefix in prefixes {
        let mut of_expert = Vec::with_capacity(names.len());
        for (matrix, name) in names.iter().enumerate() {
            let shape = [1, table.sizes.shape(matrix)[0]];
            let role = format!("{prefix}{name}_bias");
            of_expert.push(port(host, graph, &role, shape, "one bias for each output")?);
        }
        ports.push(of_expert);
    }
    let dtype = host.require_float(graph, ports[0][0])?;
    for &port in ports.iter().flatten() {
        if host.tensor(graph, port).dtype != dtype {
            let what = format!("expected {dtype}, as the other biases");
            return Err(host.misfit(graph, port, what));
        }
    }
    let buffer = table.offsets(host, dtype)?;
    Ok(buffer.map(|buffer| Biases { ports, buffer, size: dtype.size() }))
}

fn int8(
    host: &mut Host,
    graph: GraphId,
    prefixes: &[String],
    table: &Table,
    weights: &[Port],
    step: f32,
) -> Result<Form> {
    if !(step.is_finite() && step > 0.0) {
        return Err(Error::manifest(format!(
            "manifest /plan/params/int8_step: {step}, expected a positive number"
        )));
    }
    let mut experts = Vec::new();
    let matrices = table.sizes.matrices();
    for (prefix, weights) in prefixes.iter().zip(weights.chunks_exact(matrices.len())) {
        let scale = |(matrix, name): (usize, &&str)| {
            let shape = [1, table.sizes.shape(matrix)[0]];
            let role = format!("{prefix}{name}_scale");
            port(host, graph, &role, shape, "one scale for each output")
        };
        let scales = matrices.iter().enumerate().map(scale).collect::<Result<_>>()?;
        experts.push(Expert { weights: weights.to_vec(), scales });
    }
    let dtype = host.require_float(graph, experts[0].scales[0])?;
    for port in experts.iter().flat_map(|e| e.scales.iter().copied()) {
        if host.tensor(graph, port).dtype != dtype {
            let what = format!("expected {dtype}, as the other scales");
            return Err(host.misfit(graph, port, what));
        }
    }
    let scales = table.scaled(host, step, dtype)?;
    Ok(Form::Int8 { experts, scales, scale_size: dtype.size() })
}

/// Converts the matrices of the chosen experts into `targets`, on all threads.
fn fill(
    host: &mut Host,
    table: &Table,
    layer: usize,
    chosen: &[usize],
    dtype: DType,
    targets: &[BufferId],
) -> Result<()> {
    let (size, matrices) = (dtype.size(), table.sizes.matrices().len());
    host.parallel_fill(
        table.buffers(),
        targets,
        BLOCK_VALUES,
        |[weights, scales], target, first, bytes| {
            let (expert, matrix) = (chosen[target / matrices], target % matrices);
            let columns = table.sizes.shape(matrix)[1];
            let values: &[i8] =
                bytemuck::cast_slice(&weights[table.weights(layer, expert, matrix)]);
            let scales: &[f32] = bytemuck::cast_slice(scales);
            let scales = &scales[table.scales(layer, expert, matrix)];
            let (first, count) = (first / size, bytes.len() / size);
            let values = &values[first..first + count];
            match dtype {
                DType::F16 => {
                    int8_to_f16(values, scales, columns, first, bytemuck::cast_slice_mut(bytes));
                }
                _ => int8_to_f32(values, scales, columns, first, bytemuck::cast_slice_mut(bytes)),
            }
        },
    )
}
