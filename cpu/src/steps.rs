//! A graph as models and products that are executed in turns.

use std::collections::HashMap;
use std::sync::Arc;

use qhx_core::{Error, ErrorKind, Result};
use rten::{Model, NodeId, RunOptions, ThreadPool, Value, ValueOrView, ValueView};
use rten_onnx::onnx::ModelProto;
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

use crate::cut::{self, Cut, Factor};
use crate::product::{Heads, Matrix, Operands, multiply};
use crate::team::Team;
use crate::weights::{Floats, Weights};

/// A whole graph.
pub(crate) struct Steps {
    steps: Vec<Step>,
    /// Where the results are after the last step.
    outputs: Vec<usize>,
    /// How many values are handed from one step to another.
    slots: usize,
}

struct Step {
    model: Option<Part>,
    products: Vec<Product>,
    /// Slots that nobody reads after the products.
    free: Vec<usize>,
}

/// A model, and where its inputs come from.
struct Part {
    model: Model,
    inputs: Vec<(NodeId, Source)>,
    /// Inputs that nobody reads afterwards: the model may write over them.
    last: Vec<(NodeId, usize)>,
    outputs: Vec<NodeId>,
    slots: Vec<usize>,
}

#[derive(Debug, Clone, Copy)]
enum Source {
    /// An input of the graph.
    Input(usize),
    Slot(usize),
}

struct Product {
    x: Source,
    y: usize,
    by: By,
}

/// As [`cut::Factor`].
enum By {
    Stored(Box<Weights>, Option<Floats>),
    Rows(Source),
    Columns(Source),
}

impl Steps {
    /// One model.
    pub(crate) fn whole(model: Model) -> Self {
        let ids = model.input_ids().iter().enumerate();
        let inputs = ids.map(|(index, &id)| (id, Source::Input(index))).collect();
        let outputs = model.output_ids().to_vec();
        let slots: Vec<usize> = (0..outputs.len()).collect();
        let part = Part { model, inputs, last: Vec::new(), outputs, slots: slots.clone() };
        let step = Step { model: Some(part), products: Vec::new(), free: Vec::new() };
        Self { steps: vec![step], slots: slots.len(), outputs: slots }
    }

    /// Loads the parts. `frame` is the loaded frame of `cut`.
    pub(crate) fn load(
        cut: Cut<'_>,
        frame: &Model,
        load: impl Fn(&ModelProto) -> Result<Model>,
    ) -> Result<Self> {
        let mut names = Names::default();
        for (index, &id) in frame.input_ids().iter().enumerate() {
            names.known.insert(name(frame, id)?, Source::Input(index));
        }
        let mut steps = Vec::with_capacity(cut.steps.len());
        for step in cut.steps {
            let model = match step.model {
                Some(model) => Some(names.part(load(&model)?)?),
                None => None,
            };
            let mut products = Vec::with_capacity(step.products.len());
            for cut::Product { x, y, by } in step.products {
                let x = names.find(x)?;
                let by = match by {
                    Factor::Stored(weights, bias) => By::Stored(weights, bias),
                    Factor::Rows(b) => By::Rows(names.find(b)?),
                    Factor::Columns(b) => By::Columns(names.find(b)?),
                };
                products.push(Product { x, y: names.add(y.to_owned()), by });
            }
            steps.push(Step { model, products, free: Vec::new() });
        }
        let outputs = frame.output_ids().iter();
        let outputs = outputs.map(|&id| match names.find(&name(frame, id)?)? {
            Source::Slot(slot) => Ok(slot),
            Source::Input(_) => Err(internal(&"an output is an input")),
        });
        let mut all = Self { steps, outputs: outputs.collect::<Result<_>>()?, slots: names.slots };
        all.release();
        Ok(all)
    }

    /// Finds out who reads each slot last.
    fn release(&mut self) {
        let mut kept = vec![false; self.slots];
        self.outputs.iter().for_each(|&slot| kept[slot] = true);
        let mut seen = |source: Source| match source {
            Source::Slot(slot) => (!std::mem::replace(&mut kept[slot], true)).then_some(slot),
            Source::Input(_) => None,
        };
        for step in self.steps.iter_mut().rev() {
            for product in &step.products {
                step.free.extend(seen(product.x));
                if let By::Rows(b) | By::Columns(b) = product.by {
                    step.free.extend(seen(b));
                }
            }
            if let Some(part) = &mut step.model {
                part.inputs.retain(|&(id, source)| match seen(source) {
                    Some(slot) => {
                        part.last.push((id, slot));
                        false
                    }
                    None => true,
                });
            }
        }
    }

    /// Executes the graph over its inputs on threads of `pool`.
    pub(crate) fn run(
        &self,
        inputs: &[ValueView<'_>],
        pool: Option<&Arc<ThreadPool>>,
    ) -> Result<Vec<Value>> {
        let shared = pool.map_or_else(|| rten::thread_pool(), Arc::as_ref);
        // Everything happens on a thread of the pool, so that no step has to wake one.
        shared.run(|| self.run_here(inputs, pool))
    }

    fn run_here(
        &self,
        inputs: &[ValueView<'_>],
        pool: Option<&Arc<ThreadPool>>,
    ) -> Result<Vec<Value>> {
        let mut slots: Vec<Option<Value>> = Vec::new();
        slots.resize_with(self.slots, || None);
        for step in &self.steps {
            if let Some(part) = &step.model {
                part.run(inputs, &mut slots, pool)?;
            }
            step.multiply(inputs, &mut slots)?;
        }
        let outputs = self.outputs.iter();
        outputs.map(|&slot| slots[slot].take().ok_or_else(|| internal(&MISSING))).collect()
    }

    /// The weights of all products.
    pub(crate) fn weights(&self) -> impl Iterator<Item = &Weights> {
        let products = self.steps.iter().flat_map(|step| &step.products);
        products.filter_map(|product| match &product.by {
            By::Stored(weights, _) => Some(&**weights),
            By::Rows(_) | By::Columns(_) => None,
        })
    }

    /// Elements of the constants of all models.
    pub(crate) fn constants(&self) -> u64 {
        let models = self.steps.iter().filter_map(|step| step.model.as_ref());
        models.map(|part| part.model.total_params() as u64).sum()
    }
}

const MISSING: &str = "a value is not there";

/// Slots by the names of the values in them.
#[derive(Default)]
struct Names {
    known: HashMap<String, Source>,
    slots: usize,
}

impl Names {
    fn add(&mut self, name: String) -> usize {
        self.known.insert(name, Source::Slot(self.slots));
        self.slots += 1;
        self.slots - 1
    }

    fn find(&self, name: &str) -> Result<Source> {
        self.known.get(name).copied().ok_or_else(|| internal(&format!("no value {name:?}")))
    }

    fn part(&mut self, model: Model) -> Result<Part> {
        let inputs = model.input_ids().iter();
        let inputs = inputs.map(|&id| Ok((id, self.find(&name(&model, id)?)?)));
        let inputs = inputs.collect::<Result<_>>()?;
        let outputs = model.output_ids().to_vec();
        let slots = outputs.iter().map(|&id| Ok(self.add(name(&model, id)?)));
        let slots = slots.collect::<Result<_>>()?;
        Ok(Part { model, inputs, last: Vec::new(), outputs, slots })
    }
}

fn name(model: &Model, id: NodeId) -> Result<String> {
    let name = model.node_info(id).and_then(|info| info.name().map(str::to_owned));
    name.ok_or_else(|| internal(&"a value has no name"))
}

impl Part {
    fn run(
        &self,
        inputs: &[ValueView<'_>],
        slots: &mut [Option<Value>],
        pool: Option<&Arc<ThreadPool>>,
    ) -> Result<()> {
        let mut given: Vec<(NodeId, ValueOrView<'_>)> =
            Vec::with_capacity(self.inputs.len() + self.last.len());
        for &(id, slot) in &self.last {
            given.push((id, slots[slot].take().ok_or_else(|| internal(&MISSING))?.into()));
        }
        for &(id, source) in &self.inputs {
            given.push((id, find(source, inputs, slots)?.into()));
        }
        let options = RunOptions::default().with_thread_pool(pool.cloned());
        let values = self.model.run(given, &self.outputs, Some(options));
        let values = values.map_err(|e| Error::new(ErrorKind::Execute, e.to_string()))?;
        for (&slot, value) in self.slots.iter().zip(values) {
            slots[slot] = Some(value);
        }
        Ok(())
    }
}

impl Step {
    fn multiply(&self, inputs: &[ValueView<'_>], slots: &mut [Option<Value>]) -> Result<()> {
        if self.products.is_empty() {
            return Ok(());
        }
        let mut results = Vec::with_capacity(self.products.len());
        let mut factors = Vec::with_capacity(self.products.len());
        for product in &self.products {
            let floats = |source| match find(source, inputs, slots)? {
                ValueView::FloatTensor(x) => Ok(x),
                _ => Err(refused(product, "no f32")),
            };
            let x = floats(product.x)?;
            let b = match product.by {
                By::Stored(..) => None,
                By::Rows(b) | By::Columns(b) => Some(floats(b)?),
            };
            let shape = product.shape(x.shape().as_ref(), b.as_ref().map(|b| b.shape()));
            let shape = shape.ok_or_else(|| refused(product, &format!("{:?}", x.shape())))?;
            // What is multiplied exists, so that the number of results fits in memory or is refused.
            let length = shape.iter().try_fold(1usize, |length, n| length.checked_mul(*n));
            let length = length.ok_or_else(|| refused(product, &format!("{shape:?}")))?;
            results.push((shape, vec![0f32; length]));
            factors.push((x.to_slice(), b.map(|b| (b.shape().to_vec(), b.to_slice()))));
        }
        let operands = self.products.iter().zip(&factors).zip(&mut results);
        multiply(
            operands
                .filter_map(|((product, (x, b)), (shape, y))| {
                    Some(match (&product.by, b) {
                        (By::Stored(weights, bias), _) => {
                            Operands::Rows(Matrix::stored(weights, bias.as_ref()), x, y)
                        }
                        (by, b) => {
                            let (b_shape, b) = b.as_ref()?;
                            let [_, m, n] = *shape.as_slice() else { return None };
                            let transposed = matches!(by, By::Rows(_));
                            let k = *b_shape.get(if transposed { 2 } else { 1 })?;
                            Operands::Heads(Heads { x, b, y, shape: [m, n, k], transposed })
                        }
                    })
                })
                .collect(),
            &Team::Rayon,
        );
        drop(factors);
        for (product, (shape, y)) in self.products.iter().zip(results) {
            slots[product.y] = Some(Tensor::from_data(shape.as_slice(), y).into());
        }
        self.free.iter().for_each(|&slot| slots[slot] = None);
        Ok(())
    }
}

impl Product {
    /// The shape of the result, or none where `x` cannot be multiplied.
    fn shape(&self, x: &[usize], b: Option<&[usize]>) -> Option<Vec<usize>> {
        let (count, columns, heads) = match (&self.by, b) {
            (By::Stored(weights, _), _) => (weights.rows, weights.columns, None),
            (By::Rows(_), Some(&[heads, n, k])) => (n, k, Some(heads)),
            (By::Columns(_), Some(&[heads, k, n])) => (n, k, Some(heads)),
            _ => return None,
        };
        let mut shape = x.to_vec();
        *shape.last_mut().filter(|last| **last == columns)? = count;
        if let Some(heads) = heads {
            // As in NumPy, one matrix may stand for all.
            let [all, _, _] = shape.as_mut_slice() else { return None };
            *all = match (*all, heads) {
                (1, heads) => heads,
                (all, heads) => Some(all).filter(|all| heads == 1 || heads == *all)?,
            };
        }
        Some(shape)
    }
}

fn find<'a>(
    source: Source,
    inputs: &'a [ValueView<'_>],
    slots: &'a [Option<Value>],
) -> Result<ValueView<'a>> {
    let found = match source {
        Source::Input(index) => inputs.get(index).cloned(),
        Source::Slot(slot) => slots.get(slot).and_then(|value| Some(value.as_ref()?.as_view())),
    };
    found.ok_or_else(|| internal(&MISSING))
}

fn refused(product: &Product, found: &str) -> Error {
    let by = match &product.by {
        By::Stored(weights, _) => format!("weights [{}, {}]", weights.rows, weights.columns),
        By::Rows(_) | By::Columns(_) => "an input of the graph".to_owned(),
    };
    Error::new(ErrorKind::Execute, format!("a product with {by}: what is multiplied is {found}"))
        .hint("the model declares another type or shape than it computes")
}

fn internal(error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("the parts of a graph: {error}"))
}
