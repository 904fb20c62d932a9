//! Silero VAD: the probability that somebody speaks in 512 samples, from what stood before them.
//!
//! Arithmetic: `TinySileroVAD` of the package `silero-vad` 6.2.3, whose weights for 16 kHz are linked in: a short-time
//! Fourier transform as a convolution, four convolutions over its magnitudes, an LSTM cell and a sigmoid. The last 64
//! samples and the state of the cell go on from chunk to chunk.

use std::sync::{Arc, OnceLock};

use qhx_base::{Error, ErrorKind, Result};
use safetensors::{Dtype, SafeTensors};

/// The tensors of the package's `silero_vad.jit` for 16 kHz, but for the transform (MIT licence, `silero/LICENSE`).
static WEIGHTS: &[u8] = include_bytes!("../../silero/vad_16k.safetensors");

/// Samples a second.
pub(super) const RATE: u32 = 16_000;
/// Samples of a chunk.
pub(super) const CHUNK: usize = 512;
/// Samples of the chunk before that a chunk is seen with.
const CONTEXT: usize = 64;
/// Samples that are mirrored behind a chunk.
const MIRRORED: usize = 64;
const FFT: usize = 256;
const HOP: usize = 128;
/// Frames of a chunk.
const FRAMES: usize = 4;
const BINS: usize = FFT / 2 + 1;
/// Width of the LSTM cell.
const HIDDEN: usize = 128;

/// Outputs that are summed at once.
const LANES: usize = 8;

/// A matrix, in blocks of outputs: of each block the weights of the first input, of the second, and so on.
#[derive(Debug)]
struct Dense {
    inputs: usize,
    blocks: Vec<[f32; LANES]>,
    bias: Vec<f32>,
}

impl Dense {
    /// A matrix `[bias.len(), inputs]`.
    fn new(weights: &[f32], inputs: usize, bias: Vec<f32>) -> Self {
        let rows: Vec<&[f32]> = weights.chunks_exact(inputs).collect();
        let mut blocks = Vec::with_capacity(rows.len().div_ceil(LANES) * inputs);
        for rows in rows.chunks(LANES) {
            blocks.extend((0..inputs).map(|input| {
                let mut lanes = [0.0; LANES];
                for (lane, row) in lanes.iter_mut().zip(rows) {
                    *lane = row.get(input).copied().unwrap_or_default();
                }
                lanes
            }));
        }
        Self { inputs, blocks, bias }
    }

    /// Multiplies `N` columns at once.
    fn apply<const N: usize>(&self, columns: &[[f32; N]]) -> Vec<[f32; N]> {
        let blocks = self.blocks.chunks_exact(self.inputs).zip(self.bias.chunks(LANES));
        let mut results = Vec::with_capacity(self.bias.len());
        for (weights, bias) in blocks {
            let mut sums = [[0.0f32; LANES]; N];
            for (lanes, values) in weights.iter().zip(columns) {
                for (sums, value) in sums.iter_mut().zip(values) {
                    for (sum, weight) in sums.iter_mut().zip(lanes) {
                        *sum += weight * value;
                    }
                }
            }
            results.extend(
                bias.iter().enumerate().map(|(lane, bias)| sums.map(|sums| sums[lane] + bias)),
            );
        }
        results
    }
}

/// The weights.
#[derive(Debug)]
pub(super) struct Network {
    transform: Dense,
    convolutions: [Dense; 4],
    cell: Dense,
    last: Dense,
}

impl Network {
    /// The network that is linked in.
    pub(super) fn shared() -> Result<Arc<Self>> {
        static SHARED: OnceLock<Arc<Network>> = OnceLock::new();
        if let Some(network) = SHARED.get() {
            return Ok(Arc::clone(network));
        }
        let network = Self::read(WEIGHTS)?;
        Ok(Arc::clone(SHARED.get_or_init(|| Arc::new(network))))
    }

    fn read(bytes: &[u8]) -> Result<Self> {
        let failed = |e| Error::caused(ErrorKind::Internal, "the weights of Silero VAD", e);
        let file = SafeTensors::deserialize(bytes).map_err(failed)?;
        let values = |name: &str, shape: &[usize]| {
            let tensor = file.tensor(name).map_err(failed)?;
            if tensor.dtype() != Dtype::F32 || tensor.shape() != shape {
                let found = format!("{name}: {:?} {:?}", tensor.dtype(), tensor.shape());
                let what = format!("the weights of Silero VAD: {found}, expected F32 {shape:?}");
                return Err(Error::new(ErrorKind::Internal, what));
            }
            let bytes = tensor.data().as_chunks().0.iter();
            Ok(bytes.map(|bytes| f32::from_le_bytes(*bytes)).collect::<Vec<f32>>())
        };
        let transform = Dense::new(&transform(), FFT, vec![0.0; 2 * BINS]);
        let convolution = |index: usize, inputs: usize, outputs: usize| {
            let weights = values(&format!("conv{index}.weight"), &[outputs, inputs, 3])?;
            let bias = values(&format!("conv{index}.bias"), &[outputs])?;
            Ok::<_, Error>(Dense::new(&weights, 3 * inputs, bias))
        };
        let convolutions = [
            convolution(1, BINS, HIDDEN)?,
            convolution(2, HIDDEN, 64)?,
            convolution(3, 64, 64)?,
            convolution(4, 64, HIDDEN)?,
        ];
        let side = |part: &str| values(&format!("lstm_cell.weight_{part}"), &[4 * HIDDEN, HIDDEN]);
        let [input, state] = [side("ih")?, side("hh")?];
        let rows = input.chunks_exact(HIDDEN).zip(state.chunks_exact(HIDDEN));
        let both: Vec<f32> = rows.flat_map(|(input, state)| [input, state].concat()).collect();
        let bias = |part: &str| values(&format!("lstm_cell.bias_{part}"), &[4 * HIDDEN]);
        let bias = bias("ih")?.into_iter().zip(bias("hh")?).map(|(a, b)| a + b).collect();
        let cell = Dense::new(&both, 2 * HIDDEN, bias);
        let last = values("final_conv.weight", &[1, HIDDEN, 1])?;
        let last = Dense::new(&last, HIDDEN, values("final_conv.bias", &[1])?);
        Ok(Self { transform, convolutions, cell, last })
    }
}

/// Cosines and sines under a Hann window, `[2 · BINS, FFT]`.
fn transform() -> Vec<f32> {
    let turn = std::f64::consts::TAU / FFT as f64;
    let wave = |wave: fn(f64) -> f64, bin: usize, at: usize| {
        let window = 0.5 - 0.5 * (turn * at as f64).cos();
        (window * wave(turn * (bin * at % FFT) as f64)) as f32
    };
    let rows = (0..2 * BINS).flat_map(|row| (0..FFT).map(move |at| (row, at)));
    let value = |(row, at): (usize, usize)| match row.checked_sub(BINS) {
        None => wave(f64::cos, row, at),
        Some(bin) => -wave(f64::sin, bin, at),
    };
    rows.map(value).collect()
}

/// The network with what goes on from chunk to chunk.
#[derive(Debug)]
pub(super) struct Detector {
    network: Arc<Network>,
    context: [f32; CONTEXT],
    /// Output and cell of the LSTM.
    state: [[f32; HIDDEN]; 2],
}

impl Detector {
    pub(super) fn new() -> Result<Self> {
        let (context, state) = ([0.0; CONTEXT], [[0.0; HIDDEN]; 2]);
        Ok(Self { network: Network::shared()?, context, state })
    }

    /// Probability of speech in the next 512 samples. Fewer count as if silence came behind them.
    pub(super) fn probability(&mut self, chunk: &[f32]) -> f32 {
        let mut samples = [0.0; CONTEXT + CHUNK + MIRRORED];
        let (context, rest) = samples.split_at_mut(CONTEXT);
        context.copy_from_slice(&self.context);
        for (to, sample) in rest.iter_mut().zip(chunk.iter().take(CHUNK)) {
            // What is no number would stay in the state for ever.
            *to = if sample.is_finite() { sample.clamp(-1.0, 1.0) } else { 0.0 };
        }
        self.context.copy_from_slice(&samples[CHUNK..][..CONTEXT]);
        let end = CONTEXT + CHUNK;
        for at in 0..MIRRORED {
            samples[end + at] = samples[end - 2 - at];
        }
        let Network { transform, convolutions, cell, last } = &*self.network;
        let columns: [[f32; FRAMES]; FFT] =
            std::array::from_fn(|at| std::array::from_fn(|frame| samples[frame * HOP + at]));
        let parts = transform.apply(&columns);
        let (real, imaginary) = parts.split_at(BINS);
        let magnitudes: Vec<[f32; FRAMES]> = real
            .iter()
            .zip(imaginary)
            .map(|(a, b)| std::array::from_fn(|at| (a[at] * a[at] + b[at] * b[at]).sqrt()))
            .collect();
        let [first, second, third, fourth] = convolutions;
        let h = convolved::<FRAMES, 4>(first, &magnitudes, 1);
        let h = convolved::<4, 2>(second, &h, 2);
        let h = convolved::<2, 1>(third, &h, 2);
        let h = convolved::<1, 1>(fourth, &h, 1);
        let [output, memory] = &mut self.state;
        let both: Vec<[f32; 1]> =
            h.into_iter().chain(output.iter().map(|value| [*value])).collect();
        let gates = cell.apply(&both);
        let gate = |gate: usize, at: usize| gates[gate * HIDDEN + at][0];
        for at in 0..HIDDEN {
            let kept = sigmoid(gate(1, at)) * memory[at];
            memory[at] = kept + sigmoid(gate(0, at)) * gate(2, at).tanh();
            output[at] = sigmoid(gate(3, at)) * memory[at].tanh();
        }
        let h: Vec<[f32; 1]> = output.iter().map(|value| [value.max(0.0)]).collect();
        last.apply(&h).first().map_or(0.0, |[logit]| sigmoid(*logit))
    }
}

/// A convolution of three taps over `N` columns with one zero on either side, and a ReLU.
fn convolved<const N: usize, const M: usize>(
    layer: &Dense,
    columns: &[[f32; N]],
    stride: usize,
) -> Vec<[f32; M]> {
    let tap = |values: &[f32; N], tap: usize| -> [f32; M] {
        std::array::from_fn(|at| {
            let place = (at * stride + tap).checked_sub(1);
            place.and_then(|place| values.get(place)).copied().unwrap_or_default()
        })
    };
    let taps: Vec<[f32; M]> =
        columns.iter().flat_map(|values| [0, 1, 2].map(|at| tap(values, at))).collect();
    let mut results = layer.apply(&taps);
    results.iter_mut().flatten().for_each(|value| *value = value.max(0.0));
    results
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
