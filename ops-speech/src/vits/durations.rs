//! Embeddings and the duration predictor, in f32. The file of their values is read in the order in which the forge
//! writes it (`host_values` of the recipe).

use std::f32::consts::FRAC_1_SQRT_2;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use qhx_op::{BufferId, Error, Host, Result};
use serde::Deserialize;

use crate::dense::{Cursor, Linear, normal, normalise};
use crate::ports::PLACE;

/// Epsilon of the predictor's LayerNorms.
const EPS: f32 = 1e-5;
/// Least width, height and derivative of a bin.
const LEAST: f32 = 1e-3;
/// Greatest number of layers, flows and bins, and size of a kernel.
const MAX_LAYERS: usize = 64;
/// Rows that a thread takes at once.
const ROWS: usize = 16;

/// `params.speech.durations` of the manifest.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(untagged)]
pub(super) enum DurationsParams {
    /// Flows over noise, of which the first but one is not used.
    Stochastic {
        flows: usize,
        kernel: usize,
        layers: usize,
        bins: usize,
        /// Bound beyond which a flow changes nothing.
        tail: f32,
    },
    Plain {
        inner: usize,
        kernel: usize,
    },
}

/// Sizes of the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    pub(super) hidden: usize,
    pub(super) speakers: usize,
    pub(super) speaker: usize,
}

/// Positions of each part's values in the file.
#[derive(Debug)]
pub(super) struct Durations {
    pub(super) sizes: Sizes,
    file: BufferId,
    embedding: Range<usize>,
    /// Embeddings of the speakers, and what of them is added to symbols.
    speakers: Option<(Range<usize>, Linear)>,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    Plain {
        convolutions: [(Convolution, Norm); 2],
        last: Linear,
    },
    Stochastic {
        first: Linear,
        separable: Vec<Separable>,
        last: Linear,
        flows: Vec<Flow>,
        translate: Range<usize>,
        scale: Range<usize>,
        bins: usize,
        tail: f32,
    },
}

/// `[outputs, inputs, kernel]` and a bias, over rows.
#[derive(Debug)]
struct Convolution {
    weight: Range<usize>,
    bias: Range<usize>,
    inputs: usize,
    kernel: usize,
}

/// Gain and shift of a LayerNorm.
#[derive(Debug)]
struct Norm([Range<usize>; 2]);

/// A convolution of each channel by itself, and one of each row by itself.
#[derive(Debug)]
struct Separable {
    taps: Range<usize>,
    bias: Range<usize>,
    dilation: usize,
    kernel: usize,
    inner: Norm,
    point: Linear,
    outer: Norm,
}

/// A flow that moves one of two channels by a spline that the other chooses.
#[derive(Debug)]
struct Flow {
    first: Linear,
    separable: Vec<Separable>,
    last: Linear,
}

impl Durations {
    pub(super) fn open(host: &mut Host, sizes: Sizes, params: DurationsParams) -> Result<Self> {
        let path: String = host.require("/artifacts/speech/host/path")?;
        let file = host.artifact("/artifacts/speech/host/path", &path)?;
        let Sizes { tokens, hidden, speakers, speaker } = sizes;
        let numbers = match params {
            DurationsParams::Plain { inner, kernel } => [inner.min(MAX_LAYERS), kernel, 1, 1],
            DurationsParams::Stochastic { flows, kernel, layers, bins, .. } => {
                [flows, kernel, layers, bins]
            }
        };
        let odd = numbers[1] % 2 == 1 && numbers[1] <= 15;
        let dilated =
            u32::try_from(numbers[2]).ok().and_then(|layers| numbers[1].checked_pow(layers));
        let tail = match params {
            DurationsParams::Stochastic { tail, .. } => tail,
            DurationsParams::Plain { .. } => 1.0,
        };
        let legal = numbers.iter().all(|n| (1..=MAX_LAYERS).contains(n))
            && odd
            && tail > 0.0
            && tail.is_finite();
        if !legal || dilated.is_none_or(|n| n > 1 << 20) {
            return Err(Error::manifest(format!(
                "{PLACE}/durations: {params:?}, expected numbers from 1 to {MAX_LAYERS}, an odd kernel, and a bound above 0"
            )));
        }
        let mut all = Cursor(0);
        let embedding = all.take(tokens.saturating_mul(hidden));
        let speakers = (speaker > 0)
            .then(|| (all.take(speakers.saturating_mul(speaker)), all.linear(hidden, speaker)));
        let kind = match params {
            DurationsParams::Plain { inner, kernel } => {
                let mut one = |inputs: usize| {
                    let weight = all.take(inner.saturating_mul(inputs).saturating_mul(kernel));
                    let convolution = Convolution { weight, bias: all.take(inner), inputs, kernel };
                    (convolution, Norm([all.take(inner), all.take(inner)]))
                };
                let convolutions = [one(hidden), one(inner)];
                Kind::Plain { convolutions, last: all.linear(1, inner) }
            }
            DurationsParams::Stochastic { flows, kernel, layers, bins, tail } => {
                let separable = |all: &mut Cursor| -> Vec<Separable> {
                    let layer = |at: usize| Separable {
                        taps: all.take(hidden.saturating_mul(kernel)),
                        bias: all.take(hidden),
                        dilation: kernel.pow(at as u32),
                        kernel,
                        inner: Norm([all.take(hidden), all.take(hidden)]),
                        point: all.linear(hidden, hidden),
                        outer: Norm([all.take(hidden), all.take(hidden)]),
                    };
                    (0..layers).map(layer).collect()
                };
                Kind::Stochastic {
                    first: all.linear(hidden, hidden),
                    separable: separable(&mut all),
                    last: all.linear(hidden, hidden),
                    flows: (1..flows)
                        .map(|_| Flow {
                            first: all.linear(hidden, 1),
                            separable: separable(&mut all),
                            last: all.linear(3 * bins - 1, hidden),
                        })
                        .collect(),
                    translate: all.take(2),
                    scale: all.take(2),
                    bins,
                    tail,
                }
            }
        };
        let expected = all.0.saturating_mul(size_of::<f32>());
        if host.len(file) != expected {
            return Err(Error::artifact(format!(
                "{path}: {} bytes, expected {expected} as the sizes of {PLACE} have it",
                host.len(file)
            )));
        }
        Ok(Self { sizes, file, embedding, speakers, kind })
    }

    /// Embedded symbols, times √hidden.
    pub(super) fn embedded(&self, host: &Host, ids: &[u32]) -> Vec<f32> {
        let (table, width) = (&host.f32s(self.file)[self.embedding.clone()], self.sizes.hidden);
        let scale = (width as f32).sqrt();
        let rows = ids.iter().flat_map(|id| &table[*id as usize * width..][..width]);
        rows.map(|value| value * scale).collect()
    }

    /// Embedding of a speaker; empty without speakers.
    pub(super) fn style(&self, host: &Host, speaker: usize) -> Vec<f32> {
        let Some((table, _)) = &self.speakers else { return Vec::new() };
        let width = self.sizes.speaker;
        host.f32s(self.file)[table.clone()][speaker * width..][..width].to_vec()
    }

    /// Logarithm of the frames that each symbol lasts, of encoded symbols; with the deviation of the noise and its
    /// seed.
    pub(super) fn durations(
        &self,
        host: &Host,
        mut rows: Vec<f32>,
        style: &[f32],
        (deviation, seed): (f32, u64),
    ) -> Result<Vec<f32>> {
        let (all, hidden) = (host.f32s(self.file), self.sizes.hidden);
        let styled = self.speakers.as_ref().map(|(_, linear)| linear.rows(all, style));
        let add = |rows: &mut [f32]| {
            for row in rows.chunks_exact_mut(hidden) {
                row.iter_mut()
                    .zip(styled.iter().flatten())
                    .for_each(|(value, more)| *value += more);
            }
        };
        match &self.kind {
            Kind::Plain { convolutions, last } => {
                add(&mut rows);
                for (convolution, norm) in convolutions {
                    rows = convolution.run(host, all, &rows)?;
                    rows.iter_mut().for_each(|value| *value = value.max(0.0));
                    norm.run(all, &mut rows);
                }
                Ok(last.rows(all, &rows))
            }
            Kind::Stochastic { first, separable, last, flows, translate, scale, bins, tail } => {
                let mut rows = over_rows(host, all, first, &rows)?;
                add(&mut rows);
                for layer in separable {
                    layer.add(host, all, &mut rows, hidden)?;
                }
                let seen = over_rows(host, all, last, &rows)?;
                let count = seen.len() / hidden;
                let drawn = |channel: usize| -> Vec<f32> {
                    (0..count)
                        .map(|at| match deviation {
                            0.0 => 0.0,
                            deviation => deviation * normal(seed, (channel * count + at) as u64),
                        })
                        .collect()
                };
                let mut latents = [drawn(0), drawn(1)];
                for flow in flows {
                    latents.reverse();
                    let [chooser, moved] = &mut latents;
                    let mut rows = flow.first.rows(all, chooser);
                    rows.iter_mut().zip(&seen).for_each(|(value, more)| *value += more);
                    for layer in &flow.separable {
                        layer.add(host, all, &mut rows, hidden)?;
                    }
                    let chosen = over_rows(host, all, &flow.last, &rows)?;
                    let root = (hidden as f32).sqrt();
                    for (value, numbers) in moved.iter_mut().zip(chosen.chunks_exact(3 * bins - 1))
                    {
                        *value = inverse_spline(*value, numbers, *bins, root, *tail);
                    }
                }
                latents.reverse();
                let (shift, scale) = (all[translate.start], all[scale.start]);
                let [first, _] = latents;
                Ok(first.into_iter().map(|value| (value - shift) * scale).collect())
            }
        }
    }
}

impl Norm {
    fn run(&self, all: &[f32], rows: &mut [f32]) {
        let [gain, shift] = self.0.clone().map(|range| &all[range]);
        for row in rows.chunks_exact_mut(gain.len().max(1)) {
            normalise(row, EPS);
            let parts = gain.iter().zip(shift);
            row.iter_mut()
                .zip(parts)
                .for_each(|(value, (gain, shift))| *value = *value * gain + shift);
        }
    }
}

impl Convolution {
    /// Rows `[count, inputs]` to `[count, outputs]`, with zeros around them.
    fn run(&self, host: &Host, all: &[f32], rows: &[f32]) -> Result<Vec<f32>> {
        let (inputs, kernel) = (self.inputs, self.kernel);
        let count = rows.len() / inputs.max(1);
        // The taps of a row side by side, as the weights have them: input by input.
        let mut seen = vec![0.0; count * inputs * kernel];
        for (at, row) in seen.chunks_exact_mut(inputs * kernel).enumerate() {
            for tap in 0..kernel {
                let Some(from) = (at + tap).checked_sub(kernel / 2).filter(|from| *from < count)
                else {
                    continue;
                };
                for input in 0..inputs {
                    row[input * kernel + tap] = rows[from * inputs + input];
                }
            }
        }
        let linear = Linear {
            weight: self.weight.clone(),
            bias: self.bias.clone(),
            inputs: inputs * kernel,
        };
        over_rows(host, all, &linear, &seen)
    }
}

impl Separable {
    /// Adds what the convolutions make of rows to them.
    fn add(&self, host: &Host, all: &[f32], rows: &mut [f32], width: usize) -> Result<()> {
        let (taps, bias) = (&all[self.taps.clone()], &all[self.bias.clone()]);
        let count = rows.len() / width.max(1);
        let mut made = Vec::with_capacity(rows.len());
        for at in 0..count {
            let start = made.len();
            made.extend_from_slice(bias);
            for tap in 0..self.kernel {
                let from = (at + tap * self.dilation).checked_sub(self.kernel / 2 * self.dilation);
                let Some(from) = from.filter(|from| *from < count) else { continue };
                let row = &rows[from * width..][..width];
                let taps = taps.iter().skip(tap).step_by(self.kernel);
                made[start..]
                    .iter_mut()
                    .zip(row.iter().zip(taps))
                    .for_each(|(sum, (value, tap))| *sum += value * tap);
            }
        }
        self.inner.run(all, &mut made);
        made.iter_mut().for_each(|value| *value = gelu(*value));
        let mut made = over_rows(host, all, &self.point, &made)?;
        self.outer.run(all, &mut made);
        rows.iter_mut().zip(made).for_each(|(value, more)| *value += gelu(more));
        Ok(())
    }
}

/// A dense layer over rows, by the host's threads.
fn over_rows(host: &Host, all: &[f32], linear: &Linear, rows: &[f32]) -> Result<Vec<f32>> {
    let inputs = linear.inputs.max(1);
    let parts: Vec<&[f32]> = rows.chunks(inputs * ROWS).collect();
    let made: Vec<Mutex<Vec<f32>>> = parts.iter().map(|_| Mutex::default()).collect();
    host.parallel_for(parts.len(), |part| {
        let rows = linear.rows(all, parts[part]);
        *made[part].lock().unwrap_or_else(PoisonError::into_inner) = rows;
    })?;
    let made =
        made.into_iter().map(|part| part.into_inner().unwrap_or_else(PoisonError::into_inner));
    Ok(made.flatten().collect())
}

/// `½x · (1 + erf(x / √2))`.
fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * FRAC_1_SQRT_2))
}

/// The value that a monotonic rational-quadratic spline takes to `y` (Durkan et al. 2019, arXiv 1906.04032). `numbers`
/// are those of a flow: widths, heights, and derivatives between bins.
fn inverse_spline(y: f32, numbers: &[f32], bins: usize, root: f32, tail: f32) -> f32 {
    if !(-tail..=tail).contains(&y) {
        return y;
    }
    let (widths, rest) = numbers.split_at(bins);
    let (heights, between) = rest.split_at(bins);
    let (widths, heights) = (borders(widths, root, tail), borders(heights, root, tail));
    // The border that `y` lies behind.
    let bin = heights.iter().take(bins).rposition(|border| y >= *border).unwrap_or(0);
    let derivative = |at: usize| match at {
        0 => 1.0,
        at if at == bins => 1.0,
        at => LEAST + softplus(between[at - 1]),
    };
    let (width, height) = (widths[bin + 1] - widths[bin], heights[bin + 1] - heights[bin]);
    let (delta, before, behind) = (height / width, derivative(bin), derivative(bin + 1));
    let above = y - heights[bin];
    let bend = above * (before + behind - 2.0 * delta);
    let a = height * (delta - before) + bend;
    let b = height * before - bend;
    let c = -delta * above;
    let square = (b * b - 4.0 * a * c).max(0.0);
    let theta = 2.0 * c / (-b - square.sqrt());
    theta * width + widths[bin]
}

/// Borders of bins from `-tail` to `tail` whose sizes are a softmax.
fn borders(numbers: &[f32], root: f32, tail: f32) -> Vec<f32> {
    let largest = numbers.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sizes: Vec<f32> = numbers.iter().map(|value| ((value - largest) / root).exp()).collect();
    let sum: f32 = sizes.iter().sum();
    let bins = numbers.len();
    let mut borders = vec![-tail];
    let mut place = 0.0;
    for size in sizes {
        place += LEAST + (1.0 - LEAST * bins as f32) * (size / sum);
        borders.push(2.0 * tail * place - tail);
    }
    borders[bins] = tail;
    borders
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}
