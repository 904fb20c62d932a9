//! Modules of `sentence-transformers` behind `Pooling`, through which a pooled vector passes.

use qhx_kit::kernels::Linear;
use qhx_op::{BufferId, DType, Error, Host, Result};
use serde::Deserialize;

/// Min norm that is divided by, as in `torch.nn.functional.normalize`.
const MIN_NORM: f32 = 1e-12;
/// Place of the weight files in the manifest.
const FILES: &str = "/artifacts/modules";

/// A module as the manifest has it; weights are named by their field in `artifacts.modules`.
#[derive(Debug, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Declared {
    /// A dense layer.
    Dense {
        inputs: usize,
        outputs: usize,
        weight: String,
        bias: Option<String>,
        #[serde(default)]
        activation: Activation,
    },
    /// LayerNorm (arXiv 1607.06450).
    LayerNorm { weight: String, bias: String, eps: f32 },
    /// Division by the Euclidean norm.
    Normalize,
    /// The first values alone.
    Truncate { outputs: usize },
}

/// Activation function of a dense layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Activation {
    #[default]
    Identity,
    Tanh,
    Relu,
    Sigmoid,
    Silu,
    Gelu,
    /// GELU by the hyperbolic tangent.
    GeluTanh,
}

impl Activation {
    fn apply(self, values: &mut [f32]) {
        let sigmoid = |x: f32| 1.0 / (1.0 + (-x).exp());
        let change: fn(f32) -> f32 = match self {
            Self::Identity => return,
            Self::Tanh => f32::tanh,
            Self::Relu => |x| x.max(0.0),
            Self::Sigmoid => sigmoid,
            Self::Silu => |x| x / (1.0 + (-x).exp()),
            Self::Gelu => |x| 0.5 * x * (1.0 + erf(x / std::f32::consts::SQRT_2)),
            Self::GeluTanh => |x| {
                let inner = (2.0 / std::f32::consts::PI).sqrt() * (x + 0.044_715 * x * x * x);
                0.5 * x * (1.0 + inner.tanh())
            },
        };
        values.iter_mut().for_each(|value| *value = change(*value));
    }
}

/// The error function, within 2e-7 (Abramowitz and Stegun 1964, 7.1.26).
fn erf(x: f32) -> f32 {
    const TERMS: [f64; 5] =
        [1.061_405_429, -1.453_152_027, 1.421_413_741, -0.284_496_736, 0.254_829_592];
    let x = f64::from(x);
    let t = 1.0 / (1.0 + 0.327_591_1 * x.abs());
    let sum = TERMS.iter().fold(0.0, |sum, term| sum * t + term) * t;
    ((1.0 - sum * (-x * x).exp()) * x.signum()) as f32
}

#[derive(Debug)]
enum Module {
    Dense {
        inputs: usize,
        outputs: usize,
        weight: BufferId,
        bias: Option<BufferId>,
        activation: Activation,
    },
    LayerNorm {
        width: usize,
        weight: BufferId,
        bias: BufferId,
        eps: f32,
    },
    Normalize,
    Truncate {
        outputs: usize,
    },
}

/// Modules in order, and room for what they compute.
#[derive(Debug, Default)]
pub(crate) struct Modules {
    all: Vec<Module>,
    outputs: Option<usize>,
    /// The vector, and that of the module before.
    vectors: [Vec<f32>; 2],
}

impl Modules {
    /// Maps the weights. `width` is that of the pooled vector.
    pub fn open(host: &mut Host, declared: &[Declared], width: usize) -> Result<Self> {
        let (mut all, mut now) = (Vec::with_capacity(declared.len()), width);
        let mut widest = width;
        for module in declared {
            all.push(match module {
                Declared::Dense { inputs, outputs, weight, bias, activation } => {
                    if *inputs != now {
                        return Err(Error::manifest(format!(
                            "manifest /plan/params/modules: a dense layer of {inputs} inputs gets vectors of {now} values"
                        )));
                    }
                    let weight = open(host, weight, outputs.saturating_mul(*inputs))?;
                    let bias = bias.as_ref().map(|bias| open(host, bias, *outputs)).transpose()?;
                    now = *outputs;
                    Module::Dense { inputs: *inputs, outputs: *outputs, weight, bias, activation: *activation }
                }
                Declared::LayerNorm { weight, bias, eps } => {
                    let (weight, bias) = (open(host, weight, now)?, open(host, bias, now)?);
                    Module::LayerNorm { width: now, weight, bias, eps: *eps }
                }
                Declared::Normalize => Module::Normalize,
                Declared::Truncate { outputs } => {
                    if !(1..=now).contains(outputs) {
                        return Err(Error::manifest(format!(
                            "manifest /plan/params/modules: the first {outputs} of {now} values, expected 1 to {now}"
                        )));
                    }
                    now = *outputs;
                    Module::Truncate { outputs: *outputs }
                }
            });
            widest = widest.max(now);
        }
        let outputs = (!all.is_empty()).then_some(now);
        let vectors = [Vec::with_capacity(widest), Vec::with_capacity(widest)];
        Ok(Self { all, outputs, vectors })
    }

    /// Values of the vector behind them; none without modules.
    pub const fn outputs(&self) -> Option<usize> {
        self.outputs
    }

    /// The vector behind all modules.
    pub fn run(&mut self, host: &Host, vector: &[f32]) -> Result<&[f32]> {
        let [now, before] = &mut self.vectors;
        now.clear();
        now.extend_from_slice(vector);
        for module in &self.all {
            match module {
                Module::Dense { inputs, outputs, weight, bias, activation } => {
                    std::mem::swap(now, before);
                    now.clear();
                    now.resize(*outputs, 0.0);
                    let bias = bias.map(|bias| host.f32s(bias));
                    let layer = Linear::new(host.f32s(*weight), bias, *inputs, *outputs)?;
                    layer.write(host, before, now)?;
                    activation.apply(now);
                }
                Module::LayerNorm { width, weight, bias, eps } => {
                    debug_assert_eq!(now.len(), *width);
                    layer_norm(now, host.f32s(*weight), host.f32s(*bias), *eps);
                }
                Module::Normalize => normalize(now),
                Module::Truncate { outputs } => now.truncate(*outputs),
            }
        }
        Ok(now)
    }
}

fn layer_norm(values: &mut [f32], weight: &[f32], bias: &[f32], eps: f32) {
    let count = values.len().max(1) as f32;
    let mean = values.iter().sum::<f32>() / count;
    let variance = values.iter().map(|value| (value - mean) * (value - mean)).sum::<f32>() / count;
    let factor = 1.0 / (variance + eps).sqrt();
    for ((value, weight), bias) in values.iter_mut().zip(weight).zip(bias) {
        *value = (*value - mean) * factor * weight + bias;
    }
}

/// Divides by the Euclidean norm.
pub(crate) fn normalize(values: &mut [f32]) {
    let squares: f64 = values.iter().map(|value| f64::from(*value) * f64::from(*value)).sum();
    let norm = (squares.sqrt() as f32).max(MIN_NORM);
    values.iter_mut().for_each(|value| *value /= norm);
}

/// Maps a file of this number of f32 values.
pub(crate) fn open(host: &mut Host, field: &str, count: usize) -> Result<BufferId> {
    #[derive(Deserialize)]
    struct Entry {
        path: String,
        dtype: DType,
    }
    let pointer = format!("{FILES}/{field}");
    let Entry { path, dtype } = host.require(&pointer)?;
    if dtype != DType::F32 {
        return Err(Error::manifest(format!(
            "manifest {pointer}/dtype: expected f32, found {dtype}"
        )));
    }
    let buffer = host.artifact(&pointer, &path)?;
    let expected = count.checked_mul(size_of::<f32>()).filter(|bytes| *bytes > 0);
    if expected != Some(host.len(buffer)) {
        return Err(Error::artifact(format!(
            "{path}: {} bytes, expected {count} f32 values; the file may be truncated",
            host.len(buffer)
        )));
    }
    Ok(buffer)
}
