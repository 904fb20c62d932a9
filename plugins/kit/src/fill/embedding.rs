//! Embedding tables in files of the bundle.

use std::ops::Range;

use half::f16;
use serde::Deserialize;

use super::input::FloatInput;
use crate::kernels::{f16_to_f32, f32_to_f16};
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result};

/// Elements that are converted at once.
const BLOCK: usize = 256;

/// Bytes of a scale behind rows of int8.
const SCALE: usize = size_of::<f16>();

/// An embedding table: raw rows of `hidden` values, one for each token.
///
/// In the manifest it is a path (f16 values), or `{"path": …, "dtype": "f16" | "f32" | "i8"}`. Behind all rows of int8
/// are their scales, an f16 for each row, or for each `block` values of a row.
#[derive(Debug)]
pub struct Embedding {
    table: BufferId,
    dtype: DType,
    /// Values that share a scale, of int8.
    block: usize,
    hidden: usize,
    vocab: usize,
    scale: f32,
    path: String,
}

impl Embedding {
    /// Maps the table `artifacts.embed` and checks that its size is a whole number of rows, `vocab`
    /// of them when the manifest declares how many.
    ///
    /// # Errors
    /// When the table is missing, or has another size.
    pub fn open(host: &mut Host, hidden: usize, vocab: Option<usize>) -> Result<Self> {
        Self::open_at(host, "/artifacts/embed", hidden, vocab)
    }

    /// The same for rows of the input `x` of `graph`.
    ///
    /// # Errors
    /// Errors of [`Embedding::open`], or if the manifest's own numbers, `params.hidden` and `params.vocab`, are others.
    pub fn open_for(host: &mut Host, graph: GraphId) -> Result<Self> {
        let input = host.input(graph, "x")?;
        let (_, hidden) = host.rows_of(graph, input)?;
        if let Some(declared) = host.value::<usize>("/params/hidden")?
            && declared != hidden
        {
            let what = format!("expected rows of {declared} values, the manifest's params.hidden");
            return Err(host.misfit(graph, input, what));
        }
        let vocab = host.value("/params/vocab")?;
        Self::open(host, hidden, vocab)
    }

    /// The same for the table at another place in the manifest, such as `/artifacts/embed_layers`.
    ///
    /// # Errors
    /// Errors of [`Embedding::open`].
    pub fn open_at(
        host: &mut Host,
        pointer: &str,
        hidden: usize,
        vocab: Option<usize>,
    ) -> Result<Self> {
        #[derive(Deserialize)]
        #[serde(untagged)]
        enum Entry {
            Path(String),
            Typed { path: String, dtype: DType, block: Option<usize> },
        }
        let (path, dtype, block) = match host.require::<Entry>(pointer)? {
            Entry::Path(path) => (path, DType::F16, None),
            Entry::Typed { path, dtype, block } => (path, dtype, block),
        };
        if !matches!(dtype, DType::F16 | DType::F32 | DType::I8) {
            return Err(Error::manifest(format!(
                "manifest {pointer}/dtype: expected f16, f32 or i8, found {dtype}"
            )));
        }
        let block = block.unwrap_or(hidden);
        if block == 0 || !hidden.is_multiple_of(block) {
            return Err(Error::manifest(format!(
                "manifest {pointer}/block: found {block}, expected a divisor of {hidden}, the values of a row"
            )));
        }
        let table = host.artifact(pointer, &path)?;
        let bytes = host.len(table);
        let scales = if dtype == DType::I8 { hidden / block * SCALE } else { 0 };
        let row = hidden.saturating_mul(dtype.size()).saturating_add(scales);
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
                vocab.saturating_mul(row)
            )));
        }
        Ok(Self { table, dtype, block, hidden, vocab: rows, scale: 1.0, path })
    }

    /// The same with every value multiplied by `factor` when it is read, in f32.
    ///
    /// Gemma's factor is √hidden. A reference that holds its weights in another type rounds the root
    /// to that type first, so give the number that the reference has.
    ///
    /// # Errors
    /// When `factor` is not finite.
    pub fn scaled(mut self, factor: f32) -> Result<Self> {
        if !factor.is_finite() {
            return Err(Error::manifest(format!(
                "{}: a factor of {factor} for rows, expected a number",
                self.path
            )));
        }
        self.scale = factor;
        Ok(self)
    }

    /// The mapped file with its element type, for arithmetic that reads all of it. The scale is not applied.
    ///
    /// # Errors
    /// When it is neither f16 nor f32.
    pub fn table(&self) -> Result<(BufferId, DType)> {
        if self.dtype == DType::I8 {
            return Err(Error::manifest(format!(
                "{}: values of i8, expected f16 or f32",
                self.path
            )));
        }
        Ok((self.table, self.dtype))
    }

    /// Number of rows.
    pub fn vocab(&self) -> usize {
        self.vocab
    }

    /// Values of a row.
    pub fn hidden(&self) -> usize {
        self.hidden
    }

    /// Allocates and binds the input `role` of a graph, which holds `rows` rows of this table.
    ///
    /// # Errors
    /// When the graph has no such input, or it does not hold these rows.
    pub fn bind(
        &self,
        host: &mut Host,
        graph: GraphId,
        role: &str,
        rows: usize,
    ) -> Result<FloatInput> {
        let port = Port::Input(host.graph(graph).require_input(role)?);
        self.check_rows(host, graph, port, rows)?;
        FloatInput::require(host, graph, role)
    }

    /// Writes the rows of `tokens` into a bound input, one below the other, and zeros into the rows
    /// after them. More tokens than rows are an error.
    ///
    /// # Errors
    /// When there are more tokens than rows, or a token is beyond the table.
    pub fn fill(&self, host: &mut Host, tokens: &[u32], input: &FloatInput) -> Result<()> {
        self.gather_rows(host, tokens, input.buffer(), input.dtype())
    }

    /// Checks that a graph's input holds one row of f16 or f32.
    ///
    /// # Errors
    /// When it does not.
    pub fn check(&self, host: &Host, graph: GraphId, port: Port) -> Result<()> {
        self.check_rows(host, graph, port, 1)
    }

    /// Checks that a graph's input holds `rows` rows of f16 or f32.
    ///
    /// # Errors
    /// When it does not.
    pub fn check_rows(&self, host: &Host, graph: GraphId, port: Port, rows: usize) -> Result<()> {
        host.require_float(graph, port)?;
        let tensor = host.tensor(graph, port);
        if rows.checked_mul(self.hidden) == Some(tensor.elements()) {
            return Ok(());
        }
        let what = format!("expected {rows} x {} values, rows of {}", self.hidden, self.path);
        Err(host.misfit(graph, port, what))
    }

    /// Writes the row of `token` into a buffer of `dtype`.
    ///
    /// # Errors
    /// When the token is beyond the table, or the buffer is shorter than a row.
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
    ///
    /// # Errors
    /// When there are more tokens than rows, or a token is beyond the table.
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
                have / (self.hidden * dtype.size()).max(1)
            ))
        })?;
        rest.fill(0);
        for (row, &token) in tokens.iter().enumerate() {
            self.gather_row(host, token, target, dtype, row)?;
        }
        Ok(())
    }

    /// Reads columns of the row of `token` as f32, for arithmetic on the host: as many as `out` has,
    /// from `first` on.
    ///
    /// # Errors
    /// When the token or a column is beyond the table.
    pub fn read(&self, host: &Host, token: u32, first: usize, out: &mut [f32]) -> Result<()> {
        let row = self.row(token)?;
        if first.checked_add(out.len()).is_none_or(|end| end > self.hidden) {
            return Err(Error::new(
                qhx_op::ErrorCode::INTERNAL,
                format!(
                    "{}: columns {first} to {} of rows of {}",
                    self.path,
                    first.saturating_add(out.len()),
                    self.hidden
                ),
            ));
        }
        let first = row.start + first;
        self.load(host.bytes(self.table), first, out)
    }

    /// Elements of the row of a token.
    fn row(&self, token: u32) -> Result<Range<usize>> {
        let row = token as usize;
        if row >= self.vocab {
            return Err(Error::prompt(format!(
                "token {token} is outside the vocabulary of {} ({})",
                self.vocab, self.path
            )));
        }
        Ok(row * self.hidden..(row + 1) * self.hidden)
    }

    fn misaligned(&self) -> Error {
        Error::artifact(format!("{}: table is not aligned", self.path))
    }

    /// Elements of the table from `first` on, scaled.
    fn load(&self, table: &[u8], first: usize, out: &mut [f32]) -> Result<()> {
        let range = first..first + out.len();
        match self.dtype {
            DType::I8 => {
                let (values, scales) = table.split_at(self.vocab * self.hidden);
                let (values, mut at): (&[i8], _) = (bytemuck::cast_slice(values), first);
                while at < range.end {
                    let block = at / self.block;
                    let end = range.end.min((block + 1) * self.block);
                    let mut scale = [0; SCALE];
                    scale.copy_from_slice(&scales[block * SCALE..][..SCALE]);
                    let scale = f16::from_le_bytes(scale).to_f32();
                    let out = &mut out[at - first..end - first];
                    for (out, &value) in out.iter_mut().zip(&values[at..end]) {
                        *out = f32::from(value) * scale;
                    }
                    at = end;
                }
            }
            DType::F16 => {
                let table: &[f16] =
                    bytemuck::try_cast_slice(table).map_err(|_| self.misaligned())?;
                f16_to_f32(&table[range], out);
            }
            _ => {
                let table: &[f32] =
                    bytemuck::try_cast_slice(table).map_err(|_| self.misaligned())?;
                out.copy_from_slice(&table[range]);
            }
        }
        if self.scale != 1.0 {
            out.iter_mut().for_each(|value| *value *= self.scale);
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
        let range = self.row(token)?;
        let place = place * self.hidden..(place + 1) * self.hidden;
        if dtype != self.dtype || self.scale != 1.0 {
            return self.convert(host, range.start, target, dtype, place);
        }
        let (table, out) = host.pair(self.table, target);
        let size = dtype.size();
        out[size * place.start..size * place.end]
            .copy_from_slice(&table[size * range.start..size * range.end]);
        Ok(())
    }

    /// Writes elements of the table from `first` on, scaled, to a place in a buffer of `dtype`.
    fn convert(
        &self,
        host: &mut Host,
        first: usize,
        target: BufferId,
        dtype: DType,
        place: Range<usize>,
    ) -> Result<()> {
        let (table, out) = host.pair(self.table, target);
        if dtype != DType::F16 {
            let out: &mut [f32] =
                bytemuck::try_cast_slice_mut(out).map_err(|_| self.misaligned())?;
            return self.load(table, first, &mut out[place]);
        }
        let out: &mut [f16] = bytemuck::try_cast_slice_mut(out).map_err(|_| self.misaligned())?;
        let mut block = [0.0; BLOCK];
        for (index, out) in out[place].chunks_mut(BLOCK).enumerate() {
            let block = &mut block[..out.len()];
            self.load(table, first + index * BLOCK, block)?;
            f32_to_f16(block, out);
        }
        Ok(())
    }
}
