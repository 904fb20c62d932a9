//! Times of tokens: the weights that some heads give the encoder's rows, and the path through them that costs least.
//!
//! Arithmetic: `WhisperGenerationMixin._extract_token_timestamps` of `transformers`, which is that of openai-whisper:
//! weights are normalised over the tokens, smoothed by a median over neighbouring rows, and averaged over the heads; by
//! dynamic time warping (Sakoe and Chiba 1978) tokens and rows are put beside each other. The tokens go through the
//! decoder once more, in the graphs that give the weights, so that an answer without times of words costs nothing.

use qhx_kit::decoder::{Chunk, Decoder, Filler, GraphVariant};
use qhx_op::{Error, ErrorCode, Host, Port, Result, View};

/// Seconds of a row of the encoder.
const STEP: f32 = 0.02;
const PREFIX: &str = "align_";
/// Width of the median where the manifest has none, and the widest.
const MEDIAN: usize = 7;
const WIDEST: usize = 99;

/// The outputs of a pass.
#[derive(Debug, Clone, Default)]
struct Outputs {
    rows: usize,
    /// Weights of some heads `[heads, rows, sources]`, with their number.
    views: Vec<(usize, View)>,
    /// Rows of the encoder.
    sources: usize,
}

/// Finds the outputs `align_*`, and times by them.
#[derive(Debug, Default)]
pub(super) struct Alignment {
    median: usize,
    passes: Vec<Outputs>,
}

impl Alignment {
    /// With a median over as many rows of the encoder.
    pub fn new(median: Option<usize>) -> Result<Self> {
        let median = median.unwrap_or(MEDIAN);
        if median.is_multiple_of(2) || median > WIDEST {
            return Err(Error::manifest(format!(
                "manifest /params/transcription/median: found {median}, expected an odd number up to {WIDEST}"
            )));
        }
        Ok(Self { median, passes: Vec::new() })
    }

    /// Outputs found in the graphs, if any has them.
    pub fn take(&mut self) -> Option<Self> {
        self.passes.iter().any(|pass| !pass.views.is_empty()).then(|| std::mem::take(self))
    }

    /// Start and end of each of the tokens `said` behind those `before`, in seconds, in a clip of `frames` of two to
    /// a row. What the decoder has consumed is then both.
    pub fn times(
        &self,
        host: &mut Host,
        decoder: &mut Decoder,
        before: &[u32],
        said: &[u32],
        frames: usize,
    ) -> Result<Vec<[f32; 2]>> {
        let narrowest = (0..).zip(&self.passes).filter(|(_, pass)| !pass.views.is_empty());
        let Some((pass, outputs)) = narrowest.min_by_key(|(_, pass)| pass.rows) else {
            return Err(Error::unsupported("times of words"));
        };
        let columns = (frames / 2).min(outputs.sources);
        let heads: usize = outputs.views.iter().map(|(heads, _)| heads).sum();
        let all = [before, said].concat();
        let mut weights = Weights::new(heads, said.len(), columns);
        let mut done = 0;
        decoder.consume_reading(host, pass, &all, |host, pass, count| {
            for row in 0..count {
                if let Some(token) = (done + row).checked_sub(before.len()) {
                    self.read(host, pass, row, weights.token(token))?;
                }
            }
            done += count;
            Ok(())
        })?;
        if weights.values.iter().any(|value| !value.is_finite()) {
            let message = "times of words: a weight of attention is no finite number";
            return Err(Error::new(ErrorCode::EXECUTE, message));
        }
        let begins = weights.begins(self.median);
        let seconds = |row: usize| row as f32 * STEP;
        let ends = begins.iter().map(|row| seconds(*row));
        Ok(std::iter::once(0.0)
            .chain(ends.clone())
            .zip(ends)
            .map(|(from, to)| [from, to])
            .collect())
    }

    /// Copies a row's weights of each head.
    fn read<'a>(
        &self,
        host: &Host,
        pass: usize,
        row: usize,
        mut heads: impl Iterator<Item = &'a mut [f32]>,
    ) -> Result<()> {
        let Outputs { rows, views, sources } = &self.passes[pass];
        for (count, view) in views {
            for (head, out) in (0..*count).zip(heads.by_ref()) {
                view.to_f32(host, (head * rows + row) * sources, out)?;
            }
        }
        Ok(())
    }
}

impl Filler for Alignment {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        let mut outputs = Outputs { rows: pass.rows, ..Outputs::default() };
        for &graph in pass.graphs {
            let tensors = host.graph(graph).outputs.iter().enumerate();
            let found = tensors.filter(|(_, tensor)| tensor.role.starts_with(PREFIX));
            for port in found.map(|(index, _)| Port::Output(index)).collect::<Vec<_>>() {
                let tensor = host.tensor(graph, port);
                let (elements, sources) = (tensor.elements(), tensor.width());
                let a_head = pass.rows * sources;
                let same = outputs.views.is_empty() || outputs.sources == sources;
                if a_head == 0 || !elements.is_multiple_of(a_head) || !same {
                    let what =
                        format!("expected weights [heads, {}, rows of the encoder]", pass.rows);
                    return Err(host.misfit(graph, port, what));
                }
                outputs.sources = sources;
                outputs.views.push((elements / a_head, host.view_for(graph, port)?));
            }
        }
        self.passes.push(outputs);
        Ok(())
    }

    fn fill(&mut self, _: &mut Host, _: Chunk<'_>) -> Result<()> {
        Ok(())
    }
}

/// Weights `[heads, tokens, columns]`.
struct Weights {
    values: Vec<f32>,
    tokens: usize,
    columns: usize,
}

impl Weights {
    fn new(heads: usize, tokens: usize, columns: usize) -> Self {
        Self { values: vec![0.0; heads * tokens * columns], tokens, columns }
    }

    /// A token's row of each head.
    fn token(&mut self, token: usize) -> impl Iterator<Item = &mut [f32]> {
        let (tokens, columns) = (self.tokens, self.columns.max(1));
        self.values.chunks_exact_mut(columns).skip(token).step_by(tokens.max(1))
    }

    /// The column that each token begins in.
    fn begins(mut self, median: usize) -> Vec<usize> {
        let Self { tokens, columns, .. } = self;
        if tokens == 0 || columns == 0 {
            return vec![0; tokens];
        }
        let mut sums = vec![0.0f32; tokens * columns];
        let (mut line, mut window) = (vec![0.0; columns], vec![0.0; median]);
        let heads = self.values.len() / (tokens * columns);
        for head in self.values.chunks_exact_mut(tokens * columns) {
            normalize(head, columns);
            for (row, sums) in head.chunks_exact(columns).zip(sums.chunks_exact_mut(columns)) {
                smooth(row, &mut line, &mut window);
                sums.iter_mut().zip(&line).for_each(|(sum, value)| *sum += value);
            }
        }
        sums.iter_mut().for_each(|sum| *sum /= heads as f32);
        path(&sums, columns)
    }
}

/// Less the mean of each column, divided by its deviation.
fn normalize(rows: &mut [f32], columns: usize) {
    let count = (rows.len() / columns) as f32;
    let (mut means, mut scales) = (vec![0.0f32; columns], vec![0.0f32; columns]);
    for row in rows.chunks_exact(columns) {
        means.iter_mut().zip(row).for_each(|(mean, value)| *mean += value);
    }
    means.iter_mut().for_each(|mean| *mean /= count);
    for row in rows.chunks_exact(columns) {
        let pairs = scales.iter_mut().zip(row.iter().zip(&means));
        pairs.for_each(|(sum, (value, mean))| *sum += (value - mean).powi(2));
    }
    // A column of equal weights says nothing.
    let scale = |sum: f32| if sum > 0.0 { (sum / count).sqrt().recip() } else { 0.0 };
    scales.iter_mut().for_each(|sum| *sum = scale(*sum));
    for row in rows.chunks_exact_mut(columns) {
        let pairs = row.iter_mut().zip(means.iter().zip(&scales));
        pairs.for_each(|(value, (mean, scale))| *value = (*value - mean) * scale);
    }
}

/// The median of each value and its neighbours, mirrored at the ends.
fn smooth(row: &[f32], out: &mut [f32], window: &mut [f32]) {
    let (count, half) = (row.len(), window.len() / 2);
    if count <= half {
        out.copy_from_slice(row);
        return;
    }
    for (at, out) in out.iter_mut().enumerate() {
        for (place, value) in window.iter_mut().enumerate() {
            let index = (at + place).abs_diff(half);
            *value = row[index.min(2 * (count - 1) - index.min(2 * (count - 1)))];
        }
        window.sort_unstable_by(f32::total_cmp);
        *out = window[half];
    }
}

/// The first column of each row on the path through `[rows, columns]` whose values are greatest in all: from the first
/// place to the last one, by a row, a column or both at a time.
fn path(values: &[f32], columns: usize) -> Vec<usize> {
    #[derive(Clone, Copy)]
    enum From {
        Both,
        Row,
        Column,
    }
    let rows = values.len() / columns;
    // Costs of the row before and of this one, with a place in front of the first column.
    let mut before = vec![f32::INFINITY; columns + 1];
    before[0] = 0.0;
    let mut here = vec![f32::INFINITY; columns + 1];
    let mut trace = Vec::with_capacity(values.len());
    for row in values.chunks_exact(columns) {
        here[0] = f32::INFINITY;
        for (column, value) in row.iter().enumerate() {
            let (both, row, along) = (before[column], before[column + 1], here[column]);
            let (cost, from) = if both < row && both < along {
                (both, From::Both)
            } else if row < both && row < along {
                (row, From::Row)
            } else {
                (along, From::Column)
            };
            here[column + 1] = (f64::from(cost) - f64::from(*value)) as f32;
            trace.push(from);
        }
        std::mem::swap(&mut before, &mut here);
    }
    let mut begins = vec![0; rows];
    let (mut row, mut column) = (rows - 1, columns - 1);
    loop {
        begins[row] = column;
        // In the first row and column there is one way only.
        let from = match (row, column) {
            (0, 0) => break,
            (0, _) => From::Column,
            (_, 0) => From::Row,
            _ => trace[row * columns + column],
        };
        match from {
            From::Both => (row, column) = (row - 1, column - 1),
            From::Row => row -= 1,
            From::Column => column -= 1,
        }
    }
    begins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_mirrors_the_ends() {
        let row = [9.0, 1.0, 2.0, 8.0, 3.0];
        let mut out = [0.0; 5];
        smooth(&row, &mut out, &mut [0.0; 3]);
        assert_eq!(out, [1.0, 2.0, 2.0, 3.0, 8.0]);
        smooth(&row, &mut out, &mut [0.0; 7]);
        assert_eq!(out, [2.0, 2.0, 3.0, 3.0, 2.0]);
        smooth(&row, &mut out, &mut [0.0; 11]);
        assert_eq!(out, row, "as it is where there is nothing to mirror");
    }

    #[test]
    fn tokens_begin_where_their_weights_do() {
        let peak = |at: usize| (0..8).map(move |column| if column / 2 == at { 0.9 } else { 0.0 });
        let mut weights = Weights::new(2, 3, 8);
        for (token, at) in [0, 1, 3].into_iter().enumerate() {
            for head in weights.token(token) {
                head.iter_mut().zip(peak(at)).for_each(|(value, peak)| *value = peak);
            }
        }
        let begins = weights.begins(1);
        assert_eq!(begins[0], 0);
        assert_eq!(begins[1], 2);
        assert!((4..=6).contains(&begins[2]), "{begins:?}");
        // One token alone, equal weights, and no column at all.
        assert_eq!(Weights::new(2, 1, 8).begins(7), [0]);
        assert_eq!(Weights::new(1, 2, 0).begins(7), [0, 0]);
        assert!(Weights::new(1, 0, 8).begins(7).is_empty());
    }
}
