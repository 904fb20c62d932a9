//! Fillers for the inputs that the host computes: embedding rows, rotary tables, masks.
//!
//! Each reads width and dtype from the tensor when it is made and says what does not fit.

use std::ops::Range;

use half::f16;
use serde::Deserialize;

use crate::kernels::{f16_to_f32, f32_to_f16};
use crate::{BufferId, DType, Error, GraphId, Host, Port, Result};

/// Writes f32 values into a buffer from element `first` on, as the tensor's type.
fn write(host: &mut Host, buffer: BufferId, dtype: DType, first: usize, values: &[f32]) {
    let range = first..first + values.len();
    match dtype {
        DType::F16 => f32_to_f16(values, &mut host.f16s_mut(buffer)[range]),
        _ => host.f32s_mut(buffer)[range].copy_from_slice(values),
    }
}

/// How the frequencies of a rotary embedding differ from `θ^(−2i/rotary_dim)`; `params.rope_scaling`
/// of the manifest. The names are those of `transformers`.
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
    /// Low frequencies are divided by `factor`, high ones stay, those between are mixed
    /// (Llama 3.1; `transformers`, `modeling_rope_utils.py`).
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
}

impl RopeScaling {
    fn apply(self, frequency: f32) -> f32 {
        match self {
            Self::Default => frequency,
            Self::Linear { factor } => frequency / factor as f32,
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

    fn check(self) -> Result<()> {
        let legal = match self {
            Self::Default => true,
            Self::Linear { factor } => factor > 0.0,
            Self::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_max_position_embeddings: length,
            } => factor > 0.0 && low > 0.0 && high > low && length > 0.0,
        };
        if legal {
            return Ok(());
        }
        Err(Error::manifest(format!(
            "manifest /params/rope_scaling: {self:?}: expected positive numbers, \
             high_freq_factor above low_freq_factor"
        )))
    }
}

/// Rotary position tables for the inputs `cos` and `sin` (RoFormer, arXiv 2104.09864).
///
/// The angle of pair `i` at position `p` is `p · θ^(−2i/rotary_dim)`, in f32 as in the reference
/// implementations. A table as wide as half the rotary dimension gets one value a pair; one as
/// wide as the rotary dimension gets them twice, first half and second half alike.
#[derive(Debug)]
pub struct Rope {
    inverse_frequencies: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rope {
    /// Frequencies for `rotary_dim` elements of a head and base `theta`.
    pub fn new(rotary_dim: usize, theta: f64) -> Result<Self> {
        if rotary_dim == 0 || !rotary_dim.is_multiple_of(2) {
            return Err(Error::manifest(format!(
                "rotary dimension {rotary_dim}: expected a positive even number"
            )));
        }
        if !(theta.is_finite() && theta > 0.0) {
            return Err(Error::manifest(format!("rope theta {theta}: expected a positive number")));
        }
        let half = rotary_dim / 2;
        let inverse_frequencies = (0..half)
            .map(|i| 1.0 / (theta as f32).powf((2 * i) as f32 / rotary_dim as f32))
            .collect();
        Ok(Self { inverse_frequencies, cos: vec![0.0; 2 * half], sin: vec![0.0; 2 * half] })
    }

    /// The same with scaled frequencies.
    pub fn scaled(mut self, scaling: RopeScaling) -> Result<Self> {
        scaling.check()?;
        for frequency in &mut self.inverse_frequencies {
            *frequency = scaling.apply(*frequency);
        }
        Ok(self)
    }

    /// Binds the inputs `cos` and `sin` of a graph that takes one position; `None` when it has
    /// neither.
    pub fn bind(&self, host: &mut Host, graph: GraphId) -> Result<Option<RopeSlot>> {
        self.bind_rows(host, graph, 1)
    }

    /// Binds the inputs `cos` and `sin` of a graph that takes `rows` positions, one row each;
    /// `None` when it has neither.
    pub fn bind_rows(
        &self,
        host: &mut Host,
        graph: GraphId,
        rows: usize,
    ) -> Result<Option<RopeSlot>> {
        let info = host.graph(graph);
        let (cos, sin) = match (info.input("cos"), info.input("sin")) {
            (None, None) => return Ok(None),
            (Some(cos), Some(sin)) => (cos, sin),
            (Some(_), None) => return Err(info.require_input("sin").err().unwrap_or_else(both)),
            (None, Some(_)) => return Err(info.require_input("cos").err().unwrap_or_else(both)),
        };
        let half = self.inverse_frequencies.len();
        let dtype = host.require_float(graph, Port::Input(cos))?;
        for port in [cos, sin] {
            let info = host.graph(graph);
            let tensor = &info.inputs[port];
            let values = tensor.elements();
            if tensor.dtype != dtype || (values != rows * half && values != rows * 2 * half) {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {tensor}: expected {dtype} with {rows} rows of {half} \
                     values (half a rotary table) or {} (both halves)",
                    info.name,
                    2 * half
                )));
            }
        }
        let width = host.graph(graph).inputs[cos].elements() / rows;
        if host.graph(graph).inputs[sin].elements() != width * rows {
            return Err(Error::graph(format!(
                "graph {:?}: cos and sin differ in width",
                host.graph(graph).name
            )));
        }
        let cos = host.allocate_for(graph, Port::Input(cos))?;
        let sin = host.allocate_for(graph, Port::Input(sin))?;
        Ok(Some(RopeSlot { cos, sin, rows, width, dtype }))
    }

    /// Binds the inputs `cos` and `sin` of graphs that take `rows` positions in one step. Graphs
    /// whose tables are alike read the same buffers; a graph with neither input needs none.
    pub fn bind_all(&self, host: &mut Host, graphs: &[GraphId], rows: usize) -> Result<RopeTables> {
        let mut slots: Vec<RopeSlot> = Vec::new();
        for &graph in graphs {
            match slots.iter().find(|slot| slot.misfit(host, graph).is_none()) {
                Some(alike) => alike.bind_also(host, graph)?,
                None => slots.extend(self.bind_rows(host, graph, rows)?),
            }
        }
        Ok(RopeTables { slots, rows, first: None })
    }

    /// Computes the tables of a position. [`RopeSlot::write`] puts them into a graph's inputs.
    pub fn compute(&mut self, position: usize) {
        let half = self.inverse_frequencies.len();
        let (cos_low, cos_high) = self.cos.split_at_mut(half);
        let (sin_low, sin_high) = self.sin.split_at_mut(half);
        for (i, &frequency) in self.inverse_frequencies.iter().enumerate() {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            cos_low[i] = cos;
            sin_low[i] = sin;
        }
        cos_high.copy_from_slice(cos_low);
        sin_high.copy_from_slice(sin_low);
    }
}

fn both() -> Error {
    Error::graph("a graph needs both cos and sin")
}

/// The bound inputs `cos` and `sin` of one graph.
#[derive(Debug, Clone, Copy)]
pub struct RopeSlot {
    cos: BufferId,
    sin: BufferId,
    rows: usize,
    width: usize,
    dtype: DType,
}

impl RopeSlot {
    /// Binds the same tables to the inputs `cos` and `sin` of another graph, so that one fill serves
    /// both. Errors when they differ in size or element type.
    pub fn bind_also(&self, host: &mut Host, graph: GraphId) -> Result<()> {
        if let Some(error) = self.misfit(host, graph) {
            return Err(error);
        }
        for (role, buffer) in [("cos", self.cos), ("sin", self.sin)] {
            let port = Port::Input(host.graph(graph).require_input(role)?);
            host.bind(graph, port, buffer, 0)?;
        }
        Ok(())
    }

    /// Why a graph cannot read these tables.
    fn misfit(&self, host: &Host, graph: GraphId) -> Option<Error> {
        let info = host.graph(graph);
        for role in ["cos", "sin"] {
            let tensor = match info.require_input(role) {
                Ok(port) => &info.inputs[port],
                Err(error) => return Some(error),
            };
            if tensor.dtype != self.dtype || tensor.elements() != self.rows * self.width {
                return Some(Error::graph(format!(
                    "graph {:?}: tensor {tensor}: expected {} with {} rows of {} values, as in \
                     the graphs before it",
                    info.name, self.dtype, self.rows, self.width
                )));
            }
        }
        None
    }

    /// Writes the tables that [`Rope::compute`] made.
    pub fn write(&self, host: &mut Host, rope: &Rope) {
        self.write_row(host, rope, 0);
    }

    /// Fills all rows with the tables of the positions from `first` on.
    pub fn fill(&self, host: &mut Host, rope: &mut Rope, first: usize) {
        for row in 0..self.rows {
            rope.compute(first + row);
            self.write_row(host, rope, row);
        }
    }

    fn write_row(&self, host: &mut Host, rope: &Rope, row: usize) {
        let first = row * self.width;
        write(host, self.cos, self.dtype, first, &rope.cos[..self.width]);
        write(host, self.sin, self.dtype, first, &rope.sin[..self.width]);
    }
}

/// The rotary tables of all graphs of a step, which [`Rope::bind_all`] makes.
#[derive(Debug)]
pub struct RopeTables {
    /// One for each size and element type of `cos` and `sin` among the graphs.
    slots: Vec<RopeSlot>,
    rows: usize,
    /// The position that the tables are filled from.
    first: Option<usize>,
}

impl RopeTables {
    /// Fills all rows with the tables of the positions from `first` on. Each position is computed
    /// once; tables that are filled from `first` already stay as they are.
    pub fn fill(&mut self, host: &mut Host, rope: &mut Rope, first: usize) {
        if self.first == Some(first) || self.slots.is_empty() {
            return;
        }
        for row in 0..self.rows {
            rope.compute(first + row);
            for slot in &self.slots {
                slot.write_row(host, rope, row);
            }
        }
        self.first = Some(first);
    }
}

/// What an additive mask adds to hidden scores.
///
/// So far below any score that the weight underflows to 0, and so far above the lowest f16 that the
/// sum with a score cannot overflow: one score of −∞ makes the NPU's softmax give 0 to the whole
/// row. Rows of a cache that are hidden hold what an earlier text left there, which
/// [`crate::state::StateCarrier`] has found to be finite.
pub const HIDDEN: f32 = -30_000.0;

/// Writes 0 (visible) or [`HIDDEN`] into elements of an additive mask.
fn set(host: &mut Host, buffer: BufferId, dtype: DType, range: Range<usize>, visible: bool) {
    let value = if visible { 0.0 } else { HIDDEN };
    match dtype {
        DType::F16 => host.f16s_mut(buffer)[range].fill(f16::from_f32(value)),
        _ => host.f32s_mut(buffer)[range].fill(value),
    }
}

/// The causal mask of a one-token step for the input `cmask`: 0 where the token may look,
/// [`HIDDEN`] elsewhere.
///
/// A mask one wider than the cache has the current token in its last slot; one as wide as the
/// cache has it at its position, where the graph inserts it.
#[derive(Debug)]
pub struct Mask {
    buffer: BufferId,
    dtype: DType,
    width: usize,
    current_is_last: bool,
    /// Number of cache slots that are open, or `usize::MAX` before the first fill.
    open: usize,
}

impl Mask {
    /// Binds the input `cmask` of a graph over caches of `capacity` rows; `None` when the graph
    /// has no such input.
    pub fn bind(host: &mut Host, graph: GraphId, capacity: usize) -> Result<Option<Self>> {
        let Some(port) = host.graph(graph).input("cmask") else { return Ok(None) };
        let dtype = host.require_float(graph, Port::Input(port))?;
        let info = host.graph(graph);
        let tensor = &info.inputs[port];
        let width = tensor.elements();
        if width != capacity && width != capacity + 1 {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor}: expected {capacity} values (the cache) or {} (the \
                 cache and the current token)",
                info.name,
                capacity + 1
            )));
        }
        let buffer = host.allocate_for(graph, Port::Input(port))?;
        let current_is_last = width == capacity + 1;
        Ok(Some(Self { buffer, dtype, width, current_is_last, open: usize::MAX }))
    }

    /// Fills the mask for the token at `position`. In a sequence of steps only one slot changes.
    pub fn fill(&mut self, host: &mut Host, position: usize) {
        let open = if self.current_is_last { position } else { position + 1 };
        if self.open != usize::MAX && open == self.open + 1 {
            self.set(host, open - 1..open, true);
        } else if open != self.open {
            self.set(host, 0..open, true);
            self.set(host, open..self.width, false);
            if self.current_is_last {
                self.set(host, self.width - 1..self.width, true);
            }
        }
        self.open = open;
    }

    fn set(&self, host: &mut Host, range: Range<usize>, visible: bool) {
        set(host, self.buffer, self.dtype, range, visible);
    }
}

/// The causal mask of a step of `rows` tokens over a cache, for the input `cmask`
/// `[rows, capacity + rows]`: the last `rows` columns are the tokens of the step themselves.
#[derive(Debug)]
pub struct ChunkMask {
    buffer: BufferId,
    dtype: DType,
    rows: usize,
    capacity: usize,
    /// Number of cache slots that are open in every row.
    open: usize,
}

impl ChunkMask {
    /// Binds the input `cmask` of a graph over caches of `capacity` rows; `None` when the graph
    /// has no such input.
    pub fn bind(
        host: &mut Host,
        graph: GraphId,
        capacity: usize,
        rows: usize,
    ) -> Result<Option<Self>> {
        let Some(port) = host.graph(graph).input("cmask") else { return Ok(None) };
        let dtype = host.require_float(graph, Port::Input(port))?;
        let info = host.graph(graph);
        let tensor = &info.inputs[port];
        let width = capacity + rows;
        if tensor.width() != width || tensor.elements() != rows * width {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor}: expected {rows} rows of {width} values (the cache of \
                 {capacity} and the {rows} tokens of a step)",
                info.name
            )));
        }
        let buffer = host.allocate_for(graph, Port::Input(port))?;
        let mask = Self { buffer, dtype, rows, capacity, open: 0 };
        set(host, buffer, dtype, 0..rows * width, false);
        for row in 0..rows {
            let own = row * width + capacity;
            set(host, buffer, dtype, own..own + row + 1, true);
        }
        Ok(Some(mask))
    }

    /// Fills the mask for a step whose first token is at `position`. Only slots that change are
    /// written.
    pub fn fill(&mut self, host: &mut Host, position: usize) {
        let (from, to) = (self.open.min(position), self.open.max(position));
        if from == to {
            return;
        }
        for row in 0..self.rows {
            let first = row * (self.capacity + self.rows);
            set(host, self.buffer, self.dtype, first + from..first + to, position > self.open);
        }
        self.open = position;
    }
}

/// The mask of an encoder with a fixed length for the input `cmask`: padded positions are hidden
/// as keys. `[1, length]` hides them from every query; `[length, length]` can be causal too.
#[derive(Debug)]
pub struct PaddingMask {
    buffer: BufferId,
    dtype: DType,
    rows: usize,
    length: usize,
    causal: bool,
    /// Number of real tokens that the mask is filled for.
    real: usize,
}

impl PaddingMask {
    /// Binds the input `cmask` of a graph over `length` positions; `None` when the graph has no
    /// such input.
    pub fn bind(
        host: &mut Host,
        graph: GraphId,
        length: usize,
        causal: bool,
    ) -> Result<Option<Self>> {
        let Some(port) = host.graph(graph).input("cmask") else { return Ok(None) };
        let dtype = host.require_float(graph, Port::Input(port))?;
        let info = host.graph(graph);
        let tensor = &info.inputs[port];
        let rows = tensor.elements() / length.max(1);
        let legal = if causal { rows == length } else { rows == 1 || rows == length };
        if !legal || tensor.width() != length {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor}: expected {} of {length} values for attention that \
                 is {}",
                info.name,
                if causal { format!("{length} rows") } else { format!("1 or {length} rows") },
                if causal { "causal" } else { "bidirectional" }
            )));
        }
        let buffer = host.allocate_for(graph, Port::Input(port))?;
        Ok(Some(Self { buffer, dtype, rows, length, causal, real: usize::MAX }))
    }

    /// Fills the mask for a text of `real` tokens, at least one.
    pub fn fill(&mut self, host: &mut Host, real: usize) {
        if real == self.real {
            return;
        }
        for row in 0..self.rows {
            let first = row * self.length;
            let open = if self.causal { real.min(row + 1) } else { real };
            set(host, self.buffer, self.dtype, first..first + open, true);
            set(host, self.buffer, self.dtype, first + open..first + self.length, false);
        }
        self.real = real;
    }
}

/// The embedding table `artifacts.embed`: raw rows of `hidden` values, one for each token.
///
/// In the manifest it is a path (f16 values), or `{"path": …, "dtype": "f16" | "f32"}`.
#[derive(Debug)]
pub struct Embedding {
    table: BufferId,
    dtype: DType,
    hidden: usize,
    vocab: usize,
    path: String,
}

impl Embedding {
    /// Maps the table and checks that its size is a whole number of rows, `vocab` of them when
    /// the manifest says how many.
    pub fn open(host: &mut Host, hidden: usize, vocab: Option<usize>) -> Result<Self> {
        const POINTER: &str = "/artifacts/embed";
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Entry {
            Path(String),
            Typed { path: String, dtype: DType },
        }
        let (path, dtype) = match host.require::<Entry>(POINTER)? {
            Entry::Path(path) => (path, DType::F16),
            Entry::Typed { path, dtype } => (path, dtype),
        };
        if !matches!(dtype, DType::F16 | DType::F32) {
            return Err(Error::manifest(format!(
                "manifest {POINTER}/dtype: expected f16 or f32, found {dtype}"
            )));
        }
        let table = host.artifact(POINTER, &path)?;
        let bytes = host.len(table);
        let row = hidden * dtype.size();
        if row == 0 || bytes == 0 || !bytes.is_multiple_of(row) {
            return Err(Error::artifact(format!(
                "{path}: {bytes} bytes are no whole number of rows of {hidden} {dtype} values \
                 ({row} bytes); the file may be truncated"
            )));
        }
        let rows = bytes / row;
        if let Some(vocab) = vocab
            && vocab != rows
        {
            return Err(Error::artifact(format!(
                "{path}: {bytes} bytes are {rows} rows of {hidden} {dtype} values, but the \
                 manifest's vocab is {vocab}; expected {} bytes",
                vocab * row
            )));
        }
        Ok(Self { table, dtype, hidden, vocab: rows, path })
    }

    /// Number of rows.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Checks that a graph's input holds one row of f16 or f32.
    pub fn check(&self, host: &Host, graph: GraphId, port: Port) -> Result<()> {
        self.check_rows(host, graph, port, 1)
    }

    /// Checks that a graph's input holds `rows` rows of f16 or f32.
    pub fn check_rows(&self, host: &Host, graph: GraphId, port: Port, rows: usize) -> Result<()> {
        host.require_float(graph, port)?;
        let tensor = host.tensor(graph, port);
        if tensor.elements() == rows * self.hidden {
            return Ok(());
        }
        Err(Error::graph(format!(
            "graph {:?}: tensor {tensor}: expected {rows} x {} values, rows of {}",
            host.graph(graph).name,
            self.hidden,
            self.path
        )))
    }

    /// Writes the row of `token` into a buffer of `dtype`.
    pub fn gather(
        &self,
        host: &mut Host,
        token: u32,
        target: BufferId,
        dtype: DType,
    ) -> Result<()> {
        self.gather_row(host, token, target, dtype, 0)
    }

    /// Writes the rows of `tokens` into a buffer of `dtype`, one below the other, and zeros into
    /// the rows after them. Tokens beyond the buffer's rows are an error.
    pub fn gather_rows(
        &self,
        host: &mut Host,
        tokens: &[u32],
        target: BufferId,
        dtype: DType,
    ) -> Result<()> {
        let start = tokens.len() * self.hidden * dtype.size();
        let have = host.len(target);
        let rest = host.bytes_mut(target).get_mut(start..).ok_or_else(|| {
            Error::prompt(format!(
                "{} tokens do not fit into a graph's input of {} rows",
                tokens.len(),
                have / (self.hidden * dtype.size())
            ))
        })?;
        rest.fill(0);
        for (row, &token) in tokens.iter().enumerate() {
            self.gather_row(host, token, target, dtype, row)?;
        }
        Ok(())
    }

    fn gather_row(
        &self,
        host: &mut Host,
        token: u32,
        target: BufferId,
        dtype: DType,
        place: usize,
    ) -> Result<()> {
        let row = token as usize;
        if row >= self.vocab {
            return Err(Error::prompt(format!(
                "token {token} is outside the vocabulary of {} ({})",
                self.vocab, self.path
            )));
        }
        let range = row * self.hidden..(row + 1) * self.hidden;
        let place = place * self.hidden..(place + 1) * self.hidden;
        let (table, out) = host.pair(self.table, target);
        let fail = |_| Error::artifact(format!("{}: table is not aligned", self.path));
        match (self.dtype, dtype) {
            (DType::F16, DType::F16) => {
                out[2 * place.start..2 * place.end]
                    .copy_from_slice(&table[2 * range.start..2 * range.end]);
            }
            (DType::F16, _) => {
                let table: &[f16] = bytemuck::try_cast_slice(table).map_err(fail)?;
                let out: &mut [f32] = bytemuck::try_cast_slice_mut(out).map_err(fail)?;
                f16_to_f32(&table[range], &mut out[place]);
            }
            (_, DType::F16) => {
                let table: &[f32] = bytemuck::try_cast_slice(table).map_err(fail)?;
                let out: &mut [f16] = bytemuck::try_cast_slice_mut(out).map_err(fail)?;
                f32_to_f16(&table[range], &mut out[place]);
            }
            (_, _) => {
                out[4 * place.start..4 * place.end]
                    .copy_from_slice(&table[4 * range.start..4 * range.end]);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_scaling_keeps_high_frequencies_divides_low_ones_and_mixes_between() {
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
