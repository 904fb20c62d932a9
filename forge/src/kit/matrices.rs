//! Tensors of a checkpoint as files of a bundle, for ops that read them on the host.

use std::io::Write;
use std::sync::Arc;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::progress::Progress;
use qhx_graph::quantize::BLOCK;
use qhx_graph::weight::{RowSource, Storage, Weight, beyond_f16, row_range, stream, to_f16};
use qhx_types::DType;

use crate::recipe::{EIGHT, Precision, TableFile, TableSource, Tables};

/// Values of them that are held at once.
const VALUES: usize = 1 << 24;

/// A matrix that becomes a file of raw rows without gaps.
#[derive(Debug, Clone)]
pub struct MatrixFile {
    field: String,
    name: String,
    source: Arc<dyn RowSource>,
    dtype: DType,
}

impl MatrixFile {
    /// The file `<model>_<name>_f16.bin`, or `…_f32.bin` where the checkpoint holds f32, under `field` of its object in
    /// the manifest.
    pub fn stored(field: &str, name: &str, source: Arc<dyn RowSource>) -> Self {
        let wide = source.stored_dtype() == DType::F32;
        Self::new(field, name, source, if wide { DType::F32 } else { DType::F16 })
    }

    /// The same, or the file `<model>_<name>_i8.bin` of int8 in blocks where weights of the precision have less than 16
    /// bits and the rows can have blocks.
    pub fn in_precision(
        precision: Precision,
        field: &str,
        name: &str,
        source: Arc<dyn RowSource>,
    ) -> Self {
        let whole = source.shape()[1].is_multiple_of(BLOCK);
        match precision {
            Precision::W8A16 | Precision::W4A16 if whole => {
                Self::new(field, name, source, DType::I8)
            }
            _ => Self::stored(field, name, source),
        }
    }

    /// The file `<model>_<name>_f32.bin`, whatever the checkpoint holds.
    pub fn in_f32(field: &str, name: &str, source: Arc<dyn RowSource>) -> Self {
        Self::new(field, name, source, DType::F32)
    }

    fn new(field: &str, name: &str, source: Arc<dyn RowSource>, dtype: DType) -> Self {
        Self { field: field.to_owned(), name: format!("{name}_{dtype}.bin"), source, dtype }
    }

    fn bytes(&self) -> u64 {
        table_bytes(self.source.shape(), self.dtype)
    }
}

/// Tables under `artifacts.<key>` of the manifest. They are read and written some rows at a time, however large they
/// are.
pub fn matrices(key: &str, files: Vec<MatrixFile>) -> Tables {
    let table = |file: &MatrixFile| TableFile {
        field: file.field.clone(),
        name: file.name.clone(),
        dtype: Some(file.dtype).filter(|dtype| *dtype != DType::F16),
        block: (file.dtype == DType::I8).then_some(BLOCK),
    };
    Tables {
        key: key.to_owned(),
        files: files.iter().map(table).collect(),
        source: Arc::new(Matrices(files)),
    }
}

#[derive(Debug)]
struct Matrices(Vec<MatrixFile>);

impl TableSource for Matrices {
    fn bytes(&self) -> u64 {
        self.0.iter().map(MatrixFile::bytes).fold(0, u64::saturating_add)
    }

    fn write(&self, files: &mut [&mut dyn Write], progress: &mut dyn Progress) -> Result<()> {
        let mut done = 0;
        for (MatrixFile { source, dtype, name, .. }, target) in self.0.iter().zip(files) {
            write_rows((source, *dtype), &mut **target, name, &mut done, progress)?;
        }
        Ok(())
    }
}

/// Bytes of a matrix in a file, see [`write_rows`].
pub(crate) fn table_bytes(shape: [usize; 2], dtype: DType) -> u64 {
    let [rows, cols] = shape.map(|count| count as u64);
    match dtype {
        DType::I8 => EIGHT.bytes(rows, cols, size_of::<f16>() as u64),
        _ => rows.saturating_mul(cols).saturating_mul(dtype.size() as u64),
    }
}

/// Writes a matrix as raw little-endian rows, some at a time, and counts the bytes; `name` is the file's. Behind all
/// rows of int8 are the scales of their blocks of [`BLOCK`], in f16.
pub(crate) fn write_rows(
    (source, dtype): (&Arc<dyn RowSource>, DType),
    target: &mut dyn Write,
    name: &str,
    done: &mut u64,
    progress: &mut dyn Progress,
) -> Result<()> {
    let mut write = |bytes: &[u8]| {
        progress.stop_if_cancelled()?;
        target.write_all(bytes).map_err(|e| Error::caused(ErrorKind::Io, name, e))?;
        *done += bytes.len() as u64;
        progress.advance(*done);
        Ok(())
    };
    let mut half = Vec::new();
    if dtype == DType::I8 {
        let [rows, cols] = source.shape();
        let most = (VALUES / cols.max(1)).max(1);
        for first in (0..rows).step_by(most) {
            let part = row_range(source, first..rows.min(first + most));
            let part = Weight::new(part, Storage::Blocks(EIGHT)).to_blocks(EIGHT)?;
            write(bytemuck::cast_slice(&part.values))?;
            half.extend(part.scales.into_iter().map(f16::from_f32));
        }
        return write(bytemuck::cast_slice(&half));
    }
    stream(&**source, |wide| {
        if dtype != DType::F16 {
            return write(bytemuck::cast_slice(wide));
        }
        half.resize(wide.len(), f16::ZERO);
        to_f16(wide, &mut half).map_err(|_| beyond_f16(&**source))?;
        write(bytemuck::cast_slice(&half))
    })
}
