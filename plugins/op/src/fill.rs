//! Fillers for the inputs that the host computes: embedding rows, rotary tables, masks.
//!
//! Each reads width and dtype from the tensor when it is made and says what does not fit.

use half::f16;

use crate::kernels::{f16_to_f32, f32_to_f16};
use crate::{BufferId, DType, Error, GraphId, Host, Port, Result};

/// Writes f32 values into a buffer as the tensor's type.
fn write(host: &mut Host, buffer: BufferId, dtype: DType, values: &[f32]) {
    match dtype {
        DType::F16 => f32_to_f16(values, &mut host.f16s_mut(buffer)[..values.len()]),
        _ => host.f32s_mut(buffer)[..values.len()].copy_from_slice(values),
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

    /// Binds the inputs `cos` and `sin` of a graph; `None` when it has neither.
    pub fn bind(&self, host: &mut Host, graph: GraphId) -> Result<Option<RopeSlot>> {
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
            let width = tensor.elements();
            if tensor.dtype != dtype || (width != half && width != 2 * half) {
                return Err(Error::graph(format!(
                    "graph {:?}: tensor {tensor}: expected {dtype} with {half} values (half a \
                     rotary table) or {} (both halves)",
                    info.name,
                    2 * half
                )));
            }
        }
        let width = host.graph(graph).inputs[cos].elements();
        if host.graph(graph).inputs[sin].elements() != width {
            return Err(Error::graph(format!(
                "graph {:?}: cos and sin differ in width",
                host.graph(graph).name
            )));
        }
        let cos = host.allocate_for(graph, Port::Input(cos))?;
        let sin = host.allocate_for(graph, Port::Input(sin))?;
        Ok(Some(RopeSlot { cos, sin, width, dtype }))
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
    width: usize,
    dtype: DType,
}

impl RopeSlot {
    /// Writes the tables that [`Rope::compute`] made.
    pub fn write(&self, host: &mut Host, rope: &Rope) {
        write(host, self.cos, self.dtype, &rope.cos[..self.width]);
        write(host, self.sin, self.dtype, &rope.sin[..self.width]);
    }
}

/// The causal mask of a one-token step for the input `cmask`: 0 where the token may look, the
/// lowest finite value elsewhere.
///
/// A mask one wider than the cache has the current token in its last slot; one as wide as the
/// cache has it at its position, where the graph inserts it. (A finite value instead of −∞ keeps
/// half-precision softmax free of NaN and gives the same weights: exp underflows to 0.)
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

    fn set(&self, host: &mut Host, range: std::ops::Range<usize>, visible: bool) {
        match self.dtype {
            DType::F16 => {
                let value = if visible { f16::ZERO } else { f16::MIN };
                host.f16s_mut(self.buffer)[range].fill(value);
            }
            _ => {
                let value = if visible { 0.0 } else { f32::MIN };
                host.f32s_mut(self.buffer)[range].fill(value);
            }
        }
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
        #[derive(serde::Deserialize)]
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

    /// Checks that a graph's input holds a whole number of rows of f16 or f32.
    pub fn check(&self, host: &Host, graph: GraphId, port: Port) -> Result<()> {
        host.require_float(graph, port)?;
        let tensor = host.tensor(graph, port);
        if tensor.elements() == self.hidden {
            return Ok(());
        }
        Err(Error::graph(format!(
            "graph {:?}: tensor {tensor}: expected {} values, one row of {}",
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
        let row = token as usize;
        if row >= self.vocab {
            return Err(Error::prompt(format!(
                "token {token} is outside the vocabulary of {} ({})",
                self.vocab, self.path
            )));
        }
        let range = row * self.hidden..(row + 1) * self.hidden;
        let (table, out) = host.pair(self.table, target);
        let fail = |_| Error::artifact(format!("{}: table is not aligned", self.path));
        match (self.dtype, dtype) {
            (DType::F16, DType::F16) => {
                let bytes = self.hidden * 2;
                out[..bytes].copy_from_slice(&table[row * bytes..(row + 1) * bytes]);
            }
            (DType::F16, _) => {
                let table: &[f16] = bytemuck::try_cast_slice(table).map_err(fail)?;
                let out: &mut [f32] = bytemuck::try_cast_slice_mut(out).map_err(fail)?;
                f16_to_f32(&table[range], &mut out[..self.hidden]);
            }
            (_, DType::F16) => {
                let table: &[f32] = bytemuck::try_cast_slice(table).map_err(fail)?;
                let out: &mut [f16] = bytemuck::try_cast_slice_mut(out).map_err(fail)?;
                f32_to_f16(&table[range], &mut out[..self.hidden]);
            }
            (_, _) => {
                let bytes = self.hidden * 4;
                out[..bytes].copy_from_slice(&table[row * bytes..(row + 1) * bytes]);
            }
        }
        Ok(())
    }
}
