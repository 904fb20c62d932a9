//! Parts of Kokoro that the host computes, in f32: embeddings, LSTMs, durations. The file of its values is read in the
//! order in which the forge writes it (`host_values` of the recipe).

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use qhx_op::{BufferId, Error, Host, Result};

use crate::dense::{Cursor, Linear, dot, normalise};
use crate::ports::PLACE;

/// Epsilon of ALBERT's LayerNorm, and of the others.
const ALBERT_EPS: f32 = 1e-12;
const EPS: f32 = 1e-5;

/// Sizes of the model.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sizes {
    pub(super) tokens: usize,
    pub(super) embedding: usize,
    pub(super) positions: usize,
    pub(super) width: usize,
    pub(super) hidden: usize,
    pub(super) style: usize,
    pub(super) layers: usize,
    pub(super) durations: usize,
    pub(super) sines: usize,
}

/// Positions of each part's values in the file.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) sizes: Sizes,
    file: BufferId,
    words: Range<usize>,
    places: Range<usize>,
    norm: [Range<usize>; 2],
    into_albert: Linear,
    out_of_albert: Linear,
    symbols: Range<usize>,
    text: Lstm,
    duration: Vec<(Lstm, Linear)>,
    lasting: (Lstm, Linear),
    shared: Lstm,
    /// Taps and bias of the convolutions of F0 and N.
    halving: [[Range<usize>; 2]; 2],
    merge: Linear,
}

/// Both directions: input weights, state weights, bias. Gates in the order of `torch.nn.LSTM`.
#[derive(Debug)]
struct Lstm {
    parts: [[Range<usize>; 3]; 2],
    inputs: usize,
    size: usize,
}

impl Weights {
    pub(super) fn open(host: &mut Host, sizes: Sizes) -> Result<Self> {
        let Sizes { tokens, embedding, positions, width, hidden, style, layers, durations, sines } =
            sizes;
        let (mut all, half, styled) = (Cursor(0), hidden / 2, hidden.saturating_add(style));
        let path: String = host.require("/artifacts/speech/host/path")?;
        let file = host.artifact("/artifacts/speech/host/path", &path)?;
        if positions < 3 || embedding == 0 || half == 0 || layers > 1 << 10 {
            return Err(Error::manifest(format!(
                "{}: {positions} positions, {embedding} values of an embedding, {hidden} of a symbol, {layers} layers: \
                 expected 3, 1 and 2 or more, and 1024 layers at most",
                PLACE
            )));
        }
        let weights = Self {
            sizes,
            file,
            words: all.take(tokens.saturating_mul(embedding)),
            places: all.take(positions.saturating_mul(embedding)),
            norm: [all.take(embedding), all.take(embedding)],
            into_albert: all.linear(width, embedding),
            out_of_albert: all.linear(hidden, width),
            symbols: all.take(tokens.saturating_mul(hidden)),
            text: Lstm::take(&mut all, hidden, half),
            duration: (0..layers)
                .map(|_| (Lstm::take(&mut all, styled, half), all.linear(2 * hidden, style)))
                .collect(),
            lasting: (Lstm::take(&mut all, styled, half), all.linear(durations, hidden)),
            shared: Lstm::take(&mut all, styled, half),
            halving: [[all.take(3), all.take(1)], [all.take(3), all.take(1)]],
            merge: all.linear(1, sines),
        };
        let expected = all.0.saturating_mul(size_of::<f32>());
        if host.len(file) != expected {
            return Err(Error::artifact(format!(
                "{path}: {} bytes, expected {expected} as the sizes of {} have it",
                host.len(file),
                PLACE
            )));
        }
        Ok(weights)
    }

    fn all<'a>(&self, host: &'a Host) -> &'a [f32] {
        host.f32s(self.file)
    }

    /// Input of ALBERT's first layer.
    pub(super) fn embedded(&self, host: &Host, tokens: &[u32]) -> Vec<f32> {
        let (all, width) = (self.all(host), self.sizes.embedding);
        let [gain, shift] = self.norm.clone().map(|range| &all[range]);
        let mut rows = Vec::with_capacity(tokens.len() * width);
        for (at, token) in tokens.iter().enumerate() {
            let word = &all[self.words.clone()][*token as usize * width..][..width];
            let place = &all[self.places.clone()][at * width..][..width];
            let mut row: Vec<f32> =
                word.iter().zip(place).map(|(word, place)| word + place).collect();
            normalise(&mut row, ALBERT_EPS);
            rows.extend(
                row.iter().zip(gain).zip(shift).map(|((value, gain), shift)| value * gain + shift),
            );
        }
        self.into_albert.rows(all, &rows)
    }

    /// Rows of the symbols, projected from the output of ALBERT's last layer.
    pub(super) fn seen(&self, host: &Host, rows: &[f32]) -> Vec<f32> {
        self.out_of_albert.rows(self.all(host), rows)
    }

    /// `DurationEncoder` and the durations: rows with the style behind each, and how many frames each symbol lasts.
    pub(super) fn durations(
        &self,
        host: &Host,
        seen: Vec<f32>,
        style: &[f32],
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let (all, hidden) = (self.all(host), self.sizes.hidden);
        let mut rows = beside(&seen, hidden, style);
        for (lstm, styled) in &self.duration {
            let mut made = lstm.run(host, all, &rows)?;
            let scales = styled.rows(all, style);
            let (gamma, beta) = scales.split_at(hidden);
            for row in made.chunks_exact_mut(hidden) {
                normalise(row, EPS);
                let parts = gamma.iter().zip(beta);
                row.iter_mut()
                    .zip(parts)
                    .for_each(|(value, (gamma, beta))| *value = (1.0 + gamma) * *value + beta);
            }
            rows = beside(&made, hidden, style);
        }
        let (lstm, lasting) = &self.lasting;
        let made = lasting.rows(all, &lstm.run(host, all, &rows)?);
        let sum = |row: &[f32]| row.iter().map(|value| sigmoid(*value)).sum();
        Ok((rows, made.chunks_exact(self.sizes.durations.max(1)).map(sum).collect()))
    }

    /// Embedded symbols, for the convolutions over them.
    pub(super) fn symbols(&self, host: &Host, tokens: &[u32]) -> Vec<f32> {
        let (table, width) = (&self.all(host)[self.symbols.clone()], self.sizes.hidden);
        tokens
            .iter()
            .flat_map(|token| &table[*token as usize * width..][..width])
            .copied()
            .collect()
    }

    /// The LSTM behind these convolutions.
    pub(super) fn read_symbols(&self, host: &Host, rows: &[f32]) -> Result<Vec<f32>> {
        self.text.run(host, self.all(host), rows)
    }

    /// The LSTM that F0 and N share, over frames.
    pub(super) fn shared(&self, host: &Host, frames: &[f32]) -> Result<Vec<f32>> {
        self.shared.run(host, self.all(host), frames)
    }

    /// F0 and N at the rate of frames: a convolution of kernel 3 and stride 2, one zero on either side.
    pub(super) fn halved(&self, host: &Host, curves: &[Vec<f32>; 2]) -> [Vec<f32>; 2] {
        let all = self.all(host);
        let mut halved = [Vec::new(), Vec::new()];
        for ((out, curve), [taps, bias]) in halved.iter_mut().zip(curves).zip(&self.halving) {
            let at = |at: Option<usize>| at.and_then(|at| curve.get(at)).copied().unwrap_or(0.0);
            let seen = |frame: usize| {
                [at((2 * frame).checked_sub(1)), at(Some(2 * frame)), at(Some(2 * frame + 1))]
            };
            let value = |frame| dot(&seen(frame), &all[taps.clone()]) + all[bias.start];
            out.extend((0..curve.len() / 2).map(value));
        }
        halved
    }

    /// Weights and bias that merge the sines of the source into one.
    pub(super) fn merge<'a>(&self, host: &'a Host) -> (&'a [f32], f32) {
        let all = self.all(host);
        (&all[self.merge.weight.clone()], all[self.merge.bias.start])
    }
}

impl Lstm {
    fn take(all: &mut Cursor, inputs: usize, size: usize) -> Self {
        let mut part = || {
            let gates = size.saturating_mul(4);
            [
                all.take(gates.saturating_mul(inputs)),
                all.take(gates.saturating_mul(size)),
                all.take(gates),
            ]
        };
        Self { parts: [part(), part()], inputs, size }
    }

    /// Both directions over rows, side by side: `[rows, inputs]` to `[rows, 2 · size]`.
    fn run(&self, host: &Host, all: &[f32], rows: &[f32]) -> Result<Vec<f32>> {
        let (size, count) = (self.size, rows.len() / self.inputs.max(1));
        let out = Mutex::new(vec![0.0; count * 2 * size]);
        host.parallel_for(2, |direction| {
            let made = self.direction(all, rows, direction);
            let mut out = out.lock().unwrap_or_else(PoisonError::into_inner);
            for (row, made) in out.chunks_exact_mut(2 * size).zip(made.chunks_exact(size)) {
                row[direction * size..][..size].copy_from_slice(made);
            }
        })?;
        Ok(out.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    /// Hochreiter and Schmidhuber 1997, as `torch.nn.LSTM`: gates i, f, g, o. The second direction begins at the end.
    fn direction(&self, all: &[f32], rows: &[f32], direction: usize) -> Vec<f32> {
        let [weight, recurrent, bias] = self.parts[direction].clone();
        let (size, count) = (self.size, rows.len() / self.inputs.max(1));
        let inner = Linear { weight, bias, inputs: self.inputs };
        let mut gates = inner.rows(all, rows);
        let recurrent = &all[recurrent];
        let (mut state, mut cell) = (vec![0.0; size], vec![0.0; size]);
        let mut out = vec![0.0; count * size];
        for step in 0..count {
            let at = if direction == 0 { step } else { count - 1 - step };
            let gates = &mut gates[at * 4 * size..][..4 * size];
            let weights = recurrent.chunks_exact(size);
            gates.iter_mut().zip(weights).for_each(|(gate, weights)| *gate += dot(&state, weights));
            for unit in 0..size {
                let gate = |at: usize| gates[at * size + unit];
                cell[unit] = sigmoid(gate(1)) * cell[unit] + sigmoid(gate(0)) * gate(2).tanh();
                state[unit] = sigmoid(gate(3)) * cell[unit].tanh();
            }
            out[at * size..][..size].copy_from_slice(&state);
        }
        out
    }
}

/// Rows of `width` values with the same values behind each.
fn beside(rows: &[f32], width: usize, behind: &[f32]) -> Vec<f32> {
    rows.chunks_exact(width).flat_map(|row| row.iter().chain(behind)).copied().collect()
}

fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + (-x).exp())
}
