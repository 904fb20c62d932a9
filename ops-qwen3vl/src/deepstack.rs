//! Rows that are added after the decoder's first layers where an image stands, and zeros where none does.

use qhx_kit::decoder::{Chunk, Filler, GraphVariant};
use qhx_kit::fill::FloatInput;
use qhx_op::{Error, Host, Port, Result};

/// The role of one input for all layers, `[layers, rows, hidden]`; those of one layer are `deepstack_k`.
const ALL: &str = "deepstack";

/// Fills `deepstack_k`, or `deepstack`.
#[derive(Debug)]
pub(crate) struct Deepstack {
    hidden: usize,
    passes: Vec<Inputs>,
    /// Features of the prompt that is being consumed.
    features: Vec<Features>,
}

/// The rows of an image for each layer, from a token of the prompt on.
#[derive(Debug)]
struct Features {
    first: usize,
    layers: Vec<Vec<f32>>,
}

/// The inputs of a pass.
#[derive(Debug, Default)]
struct Inputs {
    /// By layer, with the element that its rows begin at; several where graphs have them in other forms.
    layers: Vec<Vec<(FloatInput, usize)>>,
    /// There are rows of an earlier step.
    used: bool,
}

impl Deepstack {
    /// For rows of `hidden` values.
    pub fn new(hidden: usize) -> Self {
        Self { hidden, passes: Vec::new(), features: Vec::new() }
    }

    /// Puts the rows of images, for each a list by layer, where these tokens of the coming prompt are.
    pub fn put(&mut self, images: Vec<(usize, Vec<Vec<f32>>)>) {
        self.features.extend(images.into_iter().map(|(first, layers)| Features { first, layers }));
    }

    /// The prompt is consumed.
    pub fn clear(&mut self) {
        self.features.clear();
    }

    /// Errors unless a pass, the first for prompts or else that of one token, has inputs for `layers` layers.
    pub fn check(&self, layers: usize) -> Result<()> {
        match self.passes.iter().map(|pass| pass.layers.len()).max() {
            Some(found) if found < layers => Err(missing(layers, found)),
            _ => Ok(()),
        }
    }
}

fn missing(layers: usize, found: usize) -> Error {
    Error::graph(format!(
        "the vision graph gives rows for {layers} layers (deepstack), but the graphs that an image's tokens pass take \
         those of {found}; looked for the inputs deepstack_0 to deepstack_{} or {ALL}; plan.params.tensors can say \
         what they are called",
        layers.saturating_sub(1)
    ))
}

impl Filler for Deepstack {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        let rows = pass.rows * self.hidden;
        let mut inputs = Inputs::default();
        for input in FloatInput::bind_all(host, pass.graphs, ALL)? {
            if rows == 0 || !input.len().is_multiple_of(rows) {
                return Err(unfit(
                    host,
                    pass,
                    ALL,
                    &format!("whole layers of {} x {}", pass.rows, self.hidden),
                ));
            }
            let layers = input.len() / rows;
            inputs.layers.resize_with(layers.max(inputs.layers.len()), Vec::new);
            for (layer, targets) in inputs.layers.iter_mut().enumerate().take(layers) {
                targets.push((input, layer * rows));
            }
        }
        for layer in 0.. {
            let role = format!("{ALL}_{layer}");
            let found = FloatInput::bind_all(host, pass.graphs, &role)?;
            if found.is_empty() {
                break;
            }
            if found.iter().any(|input| input.len() != rows) {
                return Err(unfit(
                    host,
                    pass,
                    &role,
                    &format!("{} x {} values", pass.rows, self.hidden),
                ));
            }
            inputs.layers.resize_with((layer + 1).max(inputs.layers.len()), Vec::new);
            inputs.layers[layer].extend(found.into_iter().map(|input| (input, 0)));
        }
        self.passes.push(inputs);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        let Inputs { layers, used } = &mut self.passes[chunk.pass];
        if *used {
            for (input, _) in layers.iter().flatten() {
                input.fill(host, 0.0);
            }
            *used = false;
        }
        let steps = chunk.index..chunk.index + chunk.tokens.len();
        for Features { first, layers: features } in &self.features {
            let rows = features.first().map_or(0, |values| values.len() / self.hidden.max(1));
            let (start, end) = ((*first).max(steps.start), (first + rows).min(steps.end));
            if start >= end {
                continue;
            }
            if layers.len() < features.len() {
                return Err(missing(features.len(), layers.len()));
            }
            for (targets, values) in layers.iter().zip(features) {
                let values = &values[(start - first) * self.hidden..(end - first) * self.hidden];
                for (input, at) in targets {
                    input.write_at(host, at + (start - steps.start) * self.hidden, values)?;
                }
            }
            *used = true;
        }
        Ok(())
    }
}

fn unfit(host: &Host, pass: GraphVariant<'_>, role: &str, expected: &str) -> Error {
    let with = pass.graphs.iter().find_map(|&graph| {
        let input = host.graph(graph).input(role)?;
        Some(format!(
            "graph {:?}: tensor {}",
            host.graph(graph).name,
            host.tensor(graph, Port::Input(input))
        ))
    });
    Error::graph(format!("{}: expected {expected}", with.unwrap_or_else(|| role.to_owned())))
}
