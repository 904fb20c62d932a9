//! Rows of tokens before the first layer: those of the embedding table, and what BERT adds to them.

use std::ops::Range;

use qhx_kit::fill::Embedding;
use qhx_kit::kernels::f32_to_f16;
use qhx_op::{BufferId, DType, Error, Host, Result};
use serde_json::Value;

const POSITIONS: &str = "/artifacts/embeddings/positions";
const TYPES: &str = "/artifacts/embeddings/types";

/// Rows for tokens, by the token, its position in the text, and which text of a pair it belongs to (BERT,
/// arXiv 1810.04805, section 3). The last two are there where the manifest has tables for them.
#[derive(Debug)]
pub(crate) struct Rows {
    tokens: Embedding,
    positions: Option<Embedding>,
    types: Option<Embedding>,
    /// A row, and what is added to it.
    row: Vec<f32>,
    part: Vec<f32>,
}

impl Rows {
    /// Maps the tables beside that of tokens.
    pub fn open(host: &mut Host, tokens: Embedding) -> Result<Self> {
        let hidden = tokens.hidden();
        let mut table = |pointer: &str| match host.value::<Value>(pointer)? {
            Some(_) => Embedding::open_at(host, pointer, hidden, None).map(Some),
            None => Ok(None),
        };
        let (positions, types) = (table(POSITIONS)?, table(TYPES)?);
        Ok(Self { tokens, positions, types, row: vec![0.0; hidden], part: vec![0.0; hidden] })
    }

    /// The table of tokens.
    pub fn tokens(&self) -> &Embedding {
        &self.tokens
    }

    /// Errors when there is no row for each of `length` positions.
    pub fn check_length(&self, length: usize) -> Result<()> {
        match &self.positions {
            Some(table) if table.vocab() < length => Err(Error::manifest(format!(
                "manifest {POSITIONS}: rows for {} positions, the graphs take {length}",
                table.vocab()
            ))),
            _ => Ok(()),
        }
    }

    /// Errors when a text has more `parts` than there are rows for.
    pub fn check_parts(&self, parts: usize) -> Result<()> {
        match &self.types {
            Some(table) if table.vocab() < parts => Err(Error::prompt(format!(
                "a text of {parts} parts, the model tells {} apart",
                table.vocab()
            ))),
            _ => Ok(()),
        }
    }

    /// Writes the rows of texts of these numbers of tokens, which stand one behind the other, and zeros behind them.
    /// In each text the tokens from `second` on belong to the second text of a pair.
    pub fn fill(
        &mut self,
        host: &mut Host,
        tokens: &[u32],
        lengths: &[usize],
        second: usize,
        (target, dtype): (BufferId, DType),
    ) -> Result<()> {
        self.tokens.gather_rows(host, tokens, target, dtype)?;
        if self.positions.is_none() && self.types.is_none() {
            return Ok(());
        }
        let places = lengths.iter().flat_map(|&length| 0..length);
        for (index, (&token, place)) in tokens.iter().zip(places).enumerate() {
            self.tokens.read(host, token, 0, &mut self.row)?;
            let kind = usize::from(place >= second);
            for (table, row) in [(&self.positions, place), (&self.types, kind)] {
                let Some(table) = table else { continue };
                table.read(host, row as u32, 0, &mut self.part)?;
                self.row.iter_mut().zip(&self.part).for_each(|(to, part)| *to += part);
            }
            let width = self.row.len();
            write(host, target, dtype, index * width..(index + 1) * width, &self.row);
        }
        Ok(())
    }
}

/// Writes values into elements of a buffer of f16 or f32 that has them.
fn write(host: &mut Host, target: BufferId, dtype: DType, place: Range<usize>, values: &[f32]) {
    match dtype {
        DType::F16 => f32_to_f16(values, &mut host.f16s_mut(target)[place]),
        _ => host.f32s_mut(target)[place].copy_from_slice(values),
    }
}
