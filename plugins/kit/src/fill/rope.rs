//! Rotary embeddings: the angles of a position, their cosines and sines, in the inputs of graphs.

use std::ops::Range;

use serde::Deserialize;

use super::input::FloatInput;
use qhx_op::{Error, GraphId, Host, Port, Result};

/// A head is never wider; a manifest that declares it would only cost memory.
const MAX_DIM: usize = 1 << 16;

/// Base of the frequencies when the manifest does not say (RoFormer, arXiv 2104.09864).
const THETA: f64 = 1e4;

/// Scaling of a rotary embedding's frequencies, which are `θ^(−2i/rotary_dim)` without it; `params.rope_scaling` of the
/// manifest. The names are those of `transformers` (`modeling_rope_utils.py`).
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
#[non_exhaustive]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// All are divided by `factor`.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// Low frequencies are divided by `factor`, high ones stay, those between are mixed (Llama 3.1).
    Llama3 {
        /// The divisor.
        factor: f64,
        /// Wavelengths above the original length divided by this are scaled fully.
        low_freq_factor: f64,
        /// Wavelengths below the original length divided by this stay.
        high_freq_factor: f64,
        /// Positions the model was trained on at first.
        original_max_position_embeddings: f64,
    },
    /// Only the first `⌊partial_rotary_factor · rotary_dim / 2⌋` pairs turn, the others stay as they
    /// are: cosine 1, sine 0 (Gemma 4). The rotary dimension is the whole head, for the exponents and
    /// for the distance between the elements of a pair.
    Proportional {
        /// The share of pairs that turn.
        #[serde(default = "one")]
        partial_rotary_factor: f64,
        /// The divisor of the frequencies that are left.
        #[serde(default = "one")]
        factor: f64,
    },
    /// Each pair's frequency is divided by its own number, `factors`, and cosines and sines are multiplied by
    /// `attention_factor` ([`RopeParams::factors`], [`RopeParams::attention_factor`]): what YaRN (arXiv 2309.00071)
    /// and LongRoPE (arXiv 2402.13753) come to for one length of the context.
    Factors,
}

fn one() -> f64 {
    1.0
}

impl RopeScaling {
    /// The pairs that turn, of `pairs`.
    fn turning(self, pairs: usize) -> usize {
        match self {
            Self::Proportional { partial_rotary_factor, .. } => {
                (partial_rotary_factor * pairs as f64) as usize
            }
            _ => pairs,
        }
    }

    fn apply(self, frequency: f32) -> f32 {
        match self {
            Self::Default | Self::Factors => frequency,
            Self::Linear { factor } | Self::Proportional { factor, .. } => {
                frequency / factor as f32
            }
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: length,
            } => {
                let (factor, low, high) = (factor as f32, low as f32, high as f32);
                let length = length as f32;
                let wave = 2.0 * std::f32::consts::PI / frequency;
                if wave < length / high {
                    frequency
                } else if wave > length / low {
                    frequency / factor
                } else {
                    let smooth = (length / wave - low) / (high - low);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }

    fn check(self, pairs: usize) -> Result<()> {
        let (legal, expected) = match self {
            Self::Default | Self::Factors => (true, ""),
            Self::Linear { factor } => (factor > 0.0, "a positive factor"),
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: length,
            } => (
                factor > 0.0 && low > 0.0 && high > low && length > 0.0,
                "positive numbers, high_freq_factor above low_freq_factor",
            ),
            Self::Proportional { partial_rotary_factor: share, factor } => (
                factor > 0.0 && share <= 1.0 && self.turning(pairs) > 0,
                "a positive factor, and a partial_rotary_factor of at most 1 that lets a pair turn",
            ),
        };
        if legal {
            return Ok(());
        }
        Err(Error::manifest(format!("rope_scaling {self:?}: expected {expected}")))
    }
}

/// Which of the three components of a position (time, height, width) turns which pair: M-RoPE.
/// The numbers are the pairs of each, `mrope_section` of `transformers`; they add up to half the
/// rotary dimension.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sections {
    /// The first pairs turn by time, those after by height, the last by width (Qwen2-VL).
    Chunked([usize; 3]),
    /// Time, height, width, time, height, width, … as long as height and width have pairs left; the
    /// rest by time (Qwen3-VL, `apply_interleaved_mrope`).
    Interleaved([usize; 3]),
}

impl Sections {
    fn axes(self, pairs: usize) -> Result<Vec<u8>> {
        let (Self::Chunked(sections) | Self::Interleaved(sections)) = self;
        let sum = sections.iter().try_fold(0_usize, |sum, &n| sum.checked_add(n));
        if sum != Some(pairs) {
            return Err(Error::manifest(format!(
                "mrope_section {sections:?}: expected three numbers that add up to {pairs}, half \
                 the rotary dimension"
            )));
        }
        let [time, height, width] = sections;
        let axis = |pair: usize| match self {
            Self::Chunked(_) if pair < time => 0,
            Self::Chunked(_) if pair < time + height => 1,
            Self::Chunked(_) => 2,
            Self::Interleaved(_) if pair % 3 == 1 && pair / 3 < height => 1,
            Self::Interleaved(_) if pair % 3 == 2 && pair / 3 < width => 2,
            Self::Interleaved(_) => 0,
        };
        Ok((0..pairs).map(axis).collect())
    }
}

/// Declaration of a rotary embedding in a manifest. An op with other defaults sets the absent fields.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct RopeParams {
    /// The place in the manifest, for messages.
    pub pointer: String,
    /// `rotary_dim`, or `head_dim` times `partial_rotary_factor`.
    pub rotary_dim: Option<usize>,
    /// `rope_theta`.
    pub theta: Option<f64>,
    /// `rope_scaling`.
    pub scaling: Option<RopeScaling>,
    /// `rope_scaling.mrope_section`, in the order that `rope_scaling.mrope_interleaved` declares.
    pub sections: Option<Sections>,
    /// `rope_scaling.factors`, of [`RopeScaling::Factors`]: what divides each pair's frequency.
    pub factors: Option<Vec<f64>>,
    /// `rope_scaling.attention_factor`, of [`RopeScaling::Factors`]: what multiplies cosines and sines.
    pub attention_factor: Option<f64>,
}

impl RopeParams {
    /// Reads the keys `rotary_dim`, `head_dim`, `partial_rotary_factor`, `rope_theta` and
    /// `rope_scaling` of the object at `pointer`: `/params`, or another one for a second rope.
    ///
    /// # Errors
    /// When a key has another type than expected.
    pub fn read(host: &Host, pointer: &str) -> Result<Self> {
        let at = |key: &str| format!("{pointer}/{key}");
        let mut rotary_dim = host.value::<usize>(&at("rotary_dim"))?;
        if rotary_dim.is_none()
            && let Some(head_dim) = host.value::<usize>(&at("head_dim"))?
        {
            let share = host.value::<f64>(&at("partial_rotary_factor"))?.unwrap_or(1.0);
            rotary_dim = Some((head_dim as f64 * share).round() as usize);
        }
        let sections = host.value::<[usize; 3]>(&at("rope_scaling/mrope_section"))?;
        let interleaved = host.value::<bool>(&at("rope_scaling/mrope_interleaved"))?;
        let order =
            if interleaved == Some(true) { Sections::Interleaved } else { Sections::Chunked };
        let scaling = host.value(&at("rope_scaling"))?;
        let listed = scaling == Some(RopeScaling::Factors);
        let factors = at("rope_scaling/factors");
        Ok(Self {
            pointer: pointer.to_owned(),
            rotary_dim,
            theta: host.value(&at("rope_theta"))?,
            scaling,
            sections: sections.map(order),
            factors: listed.then(|| host.require(&factors)).transpose()?,
            attention_factor: match listed {
                true => host.value(&at("rope_scaling/attention_factor"))?,
                false => None,
            },
        })
    }

    /// The rope for the inputs `cos` and `sin`. Theta is 10,000 where nothing else is declared.
    ///
    /// Without a dimension, the rope serves graphs that have no such inputs; binding one that has
    /// them is an error.
    ///
    /// # Errors
    /// When the parameters are invalid, or do not fit each other.
    pub fn rope(&self) -> Result<Rope> {
        let at_pointer = |e: Error| Error::manifest(format!("manifest {}: {e}", self.pointer));
        let Some(dim) = self.rotary_dim else {
            return Ok(Rope::with_pairs(0, 0, THETA));
        };
        let mut rope = Rope::new(dim, self.theta.unwrap_or(THETA)).map_err(at_pointer)?;
        if let Some(scaling) = self.scaling {
            rope = rope.scaled(scaling).map_err(at_pointer)?;
        }
        if let Some(factors) = &self.factors {
            let attention = self.attention_factor.unwrap_or(1.0);
            rope = rope.divided(factors, attention).map_err(at_pointer)?;
        }
        if let Some(sections) = self.sections {
            rope = rope.sectioned(sections).map_err(at_pointer)?;
        }
        Ok(rope)
    }
}

/// Rotary position tables (RoFormer, arXiv 2104.09864) for the inputs `cos` and `sin`, or those that
/// [`Rope::named`] declares.
///
/// The angle of pair `i` at position `p` is `p · θ^(−2i/rotary_dim)`, in f32 as in the reference
/// implementations. A table as wide as half the rotary dimension gets one value a pair; one as
/// wide as the rotary dimension gets them twice, first half and second half alike. Where only some
/// pairs turn, a table may also be as wide as their number.
#[derive(Debug, Clone)]
pub struct Rope {
    cos_role: &'static str,
    sin_role: &'static str,
    /// Inverse frequencies of the pairs that turn.
    inverse_frequencies: Vec<f32>,
    /// Factor of cosines and sines.
    amplitude: f32,
    /// For each pair, the component of the position that turns it.
    axes: Vec<u8>,
    /// One value per rotary dimension.
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// Frequencies for `rotary_dim` elements of a head and base `theta`.
    ///
    /// # Errors
    /// When `rotary_dim` is odd or too large, or `theta` is out of range.
    pub fn new(rotary_dim: usize, theta: f64) -> Result<Self> {
        if !(2..=MAX_DIM).contains(&rotary_dim) || !rotary_dim.is_multiple_of(2) {
            return Err(Error::manifest(format!(
                "rotary dimension {rotary_dim}: expected a positive even number up to {MAX_DIM}"
            )));
        }
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::manifest(format!("rope theta {theta}: expected a positive number")));
        }
        Ok(Self::with_pairs(rotary_dim, rotary_dim / 2, theta))
    }

    fn with_pairs(rotary_dim: usize, pairs: usize, theta: f64) -> Self {
        let inverse_frequencies = (0..pairs)
            .map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / rotary_dim as f32))
            .collect();
        Self {
            cos_role: "cos",
            sin_role: "sin",
            inverse_frequencies,
            amplitude: 1.0,
            axes: vec![0; pairs],
            cos: vec![1.0; 2 * pairs],
            sin: vec![0.0; 2 * pairs],
        }
    }

    /// Tables declared in the manifest at `pointer`: [`RopeParams::read`], then [`RopeParams::rope`].
    ///
    /// # Errors
    /// Errors of [`RopeParams::read`] and [`RopeParams::rope`].
    pub fn from_params(host: &Host, pointer: &str) -> Result<Self> {
        RopeParams::read(host, pointer)?.rope()
    }

    /// The same for other inputs, such as `cos_local` and `sin_local`.
    #[must_use]
    pub fn named(mut self, cos: &'static str, sin: &'static str) -> Self {
        (self.cos_role, self.sin_role) = (cos, sin);
        self
    }

    /// The same with scaled frequencies.
    ///
    /// # Errors
    /// When the scaling is out of range.
    pub fn scaled(mut self, scaling: RopeScaling) -> Result<Self> {
        let pairs = self.pairs();
        scaling.check(pairs)?;
        self.inverse_frequencies.truncate(scaling.turning(pairs));
        for frequency in &mut self.inverse_frequencies {
            *frequency = scaling.apply(*frequency);
        }
        Ok(self)
    }

    /// The same with the frequency of each pair divided by its own factor, and cosines and sines multiplied by
    /// `attention_factor`.
    ///
    /// # Errors
    /// When there is not one factor for each pair, or a number is not positive.
    pub fn divided(mut self, factors: &[f64], attention_factor: f64) -> Result<Self> {
        let pairs = self.inverse_frequencies.len();
        let positive = |number: &f64| number.is_finite() && *number > 0.0;
        if factors.len() != pairs || !factors.iter().chain([&attention_factor]).all(positive) {
            return Err(Error::manifest(format!(
                "rope_scaling: {} factors and the attention_factor {attention_factor}, expected {pairs} factors, half \
                 the rotary dimension, and positive numbers",
                factors.len()
            )));
        }
        for (frequency, factor) in self.inverse_frequencies.iter_mut().zip(factors) {
            *frequency /= *factor as f32;
        }
        self.amplitude = attention_factor as f32;
        self.cos.fill(self.amplitude);
        Ok(self)
    }

    /// The same for positions of three components.
    ///
    /// # Errors
    /// When the sections do not cover the frequencies.
    pub fn sectioned(mut self, sections: Sections) -> Result<Self> {
        self.axes = sections.axes(self.pairs())?;
        Ok(self)
    }

    /// Half the rotary dimension.
    fn pairs(&self) -> usize {
        self.axes.len()
    }

    /// Pairs that turn.
    fn turning(&self) -> usize {
        self.inverse_frequencies.len()
    }

    /// Computes the tables of a position.
    fn compute(&mut self, position: usize) {
        self.compute_at([position; 3]);
    }

    /// Computes the tables of a position in time, height and width.
    fn compute_at(&mut self, position: [usize; 3]) {
        let (pairs, turning, amplitude) = (self.pairs(), self.turning(), self.amplitude);
        let (cos_low, cos_high) = self.cos.split_at_mut(pairs);
        let (sin_low, sin_high) = self.sin.split_at_mut(pairs);
        let tables = cos_low.iter_mut().zip(sin_low.iter_mut()).zip(&self.inverse_frequencies);
        let turn = |((cos, sin), &frequency): ((&mut f32, &mut f32), &f32), position: f32| {
            let (of_sin, of_cos) = (position * frequency).sin_cos();
            (*sin, *cos) = (of_sin * amplitude, of_cos * amplitude);
        };
        // Converted once: a conversion for each pair costs as much as a few of the multiplications.
        let components = position.map(|component| component as f32);
        if position == [position[0]; 3] {
            tables.for_each(|pair| turn(pair, components[0]));
        } else {
            let axes = self.axes.iter().map(|&axis| components[usize::from(axis)]);
            tables.zip(axes).for_each(|(pair, component)| turn(pair, component));
        }
        cos_high[..turning].copy_from_slice(&cos_low[..turning]);
        sin_high[..turning].copy_from_slice(&sin_low[..turning]);
    }

    /// Binds the tables of graphs that take `rows` positions in one step. Graphs whose tables are
    /// alike read the same buffers; a graph with neither input needs none.
    ///
    /// # Errors
    /// When an input has another shape or element type, or the rope has no dimension.
    pub fn bind_all(&self, host: &mut Host, graphs: &[GraphId], rows: usize) -> Result<RopeTables> {
        for &graph in graphs {
            self.check(host, graph, rows)?;
        }
        let cos = FloatInput::bind_all(host, graphs, self.cos_role)?;
        let sin = FloatInput::bind_all(host, graphs, self.sin_role)?;
        let positions = vec![usize::MAX; if cos.is_empty() { 0 } else { rows }];
        Ok(RopeTables { cos, sin, rows, positions })
    }

    /// Errors when a graph has one of the inputs alone, or when one is not `rows` rows of a width that the rope has.
    fn check(&self, host: &Host, graph: GraphId, rows: usize) -> Result<()> {
        let info = host.graph(graph);
        let roles = [self.cos_role, self.sin_role];
        if roles.iter().all(|role| info.input(role).is_none()) {
            return Ok(());
        }
        let (pairs, turning) = (self.pairs(), self.turning());
        if pairs == 0 {
            return Err(Error::manifest(format!(
                "manifest: rotary_dim or head_dim is missing where the rope is described, usually \
                 /params; the rotary tables {} of graph {:?} are made for it",
                roles.join(" and "),
                info.name
            )));
        }
        for role in roles {
            let port = info.require_input(role)?;
            host.require_float(graph, Port::Input(port))?;
            let tensor = &info.inputs[port];
            let fits = |width| rows.checked_mul(width) == Some(tensor.elements());
            if ![pairs, 2 * pairs, turning].into_iter().any(fits) {
                let part = if turning == pairs {
                    String::new()
                } else {
                    format!(" or {turning} (the pairs that turn)")
                };
                let what = format!(
                    "expected {rows} rows of {pairs} values (half a \
                     rotary table) or {} (both halves){part}",
                    2 * pairs
                );
                return Err(host.misfit(graph, Port::Input(port), what));
            }
        }
        Ok(())
    }
}

/// The rotary tables of all graphs of a step, which [`Rope::bind_all`] makes.
#[derive(Debug)]
pub struct RopeTables {
    /// One for each size and element type among the graphs.
    cos: Vec<FloatInput>,
    sin: Vec<FloatInput>,
    rows: usize,
    /// The position of each row; `usize::MAX` where it is another one, or has three components.
    positions: Vec<usize>,
}

impl RopeTables {
    /// Fills all rows with the tables of the positions from `first` on. Each position is computed
    /// once; rows that have their position already stay as they are.
    pub fn fill(&mut self, host: &mut Host, rope: &mut Rope, first: usize) {
        self.fill_rows(host, rope, 0..self.rows, first);
    }

    /// Fills the first rows for texts of these numbers of tokens that stand one behind the other: the positions of each
    /// begin at 0. Rows after them, and rows that have their position already, stay as they are.
    pub fn fill_texts(&mut self, host: &mut Host, rope: &mut Rope, lengths: &[usize]) {
        let mut row = 0_usize;
        for &length in lengths {
            let end = self.rows.min(row.saturating_add(length));
            self.fill_rows(host, rope, row..end, 0);
            row = end;
        }
    }

    fn fill_rows(&mut self, host: &mut Host, rope: &mut Rope, rows: Range<usize>, first: usize) {
        if self.is_empty() {
            return;
        }
        for (row, position) in rows.zip(first..) {
            if self.positions[row] != position {
                rope.compute(position);
                self.write_row(host, rope, row);
                self.positions[row] = position;
            }
        }
    }

    /// Fills the first rows with the tables of positions in time, height and width, one a row. Rows
    /// after them stay as they are.
    ///
    /// # Errors
    /// When there are more positions than rows.
    pub fn fill_at(
        &mut self,
        host: &mut Host,
        rope: &mut Rope,
        positions: &[[usize; 3]],
    ) -> Result<()> {
        if positions.len() > self.rows {
            return Err(Error::prompt(format!(
                "{} positions do not fit into rotary tables of {} rows",
                positions.len(),
                self.rows
            )));
        }
        if self.is_empty() {
            return Ok(());
        }
        for (row, &position) in positions.iter().enumerate() {
            self.positions[row] = usize::MAX;
            rope.compute_at(position);
            self.write_row(host, rope, row);
        }
        Ok(())
    }

    /// True when no graph has such tables.
    pub fn is_empty(&self) -> bool {
        self.cos.is_empty()
    }

    fn write_row(&self, host: &mut Host, rope: &Rope, row: usize) {
        for (inputs, table) in [(&self.cos, &rope.cos), (&self.sin, &rope.sin)] {
            for input in inputs {
                let width = input.len() / self.rows;
                input.put(host, row * width, &table[..width]);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_divides_low_frequencies_and_mixes_between() {
        // Values of `transformers` for theta 1e4, dimension 8, original length 128.
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 128.0,
        };
        let rope = Rope::new(8, 1e4).and_then(|rope| rope.scaled(scaling)).unwrap();
        let expected = [1.0, 0.042_751, 0.001_25, 0.000_125];
        for (found, expected) in rope.inverse_frequencies.iter().zip(expected) {
            assert!((found - expected).abs() < 1e-3 * expected, "{found} is not {expected}");
        }
        let linear = Rope::new(4, 1e4).unwrap().scaled(RopeScaling::Linear { factor: 2.0 });
        assert_eq!(linear.unwrap().inverse_frequencies[0], 0.5);
    }

    #[test]
    fn factors_divide_frequencies_and_one_multiplies_tables() {
        let mut rope = Rope::new(4, 1e4).and_then(|rope| rope.divided(&[2.0, 5.0], 1.5)).unwrap();
        rope.compute(3);
        for (at, angle) in [(0, 1.5f32), (1, 0.006), (2, 1.5), (3, 0.006)] {
            assert!((rope.cos[at] - 1.5 * angle.cos()).abs() < 1e-6, "{:?}", rope.cos);
            assert!((rope.sin[at] - 1.5 * angle.sin()).abs() < 1e-6, "{:?}", rope.sin);
        }
        for (factors, attention) in [(&[2.0][..], 1.0), (&[2.0, 0.0], 1.0), (&[2.0, 5.0], f64::NAN)]
        {
            let error = Rope::new(4, 1e4).unwrap().divided(factors, attention).unwrap_err();
            assert!(error.message().contains("expected 2 factors"), "{error}");
        }
    }

    #[test]
    fn scaling_that_makes_no_sense_is_refused() {
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 4.0,
            high_freq_factor: 4.0,
            original_max_position_embeddings: 128.0,
        };
        let error = Rope::new(8, 1e4).unwrap().scaled(scaling).unwrap_err();
        assert!(error.message().contains("rope_scaling"), "{error}");
        let unknown = serde_json::json!({"rope_type": "yarn", "factor": 4.0});
        let error = serde_json::from_value::<RopeScaling>(unknown).unwrap_err();
        assert!(error.to_string().contains("yarn"), "{error}");
    }
}
