//! Tensors of a checkpoint as files of a bundle, for ops that read them on the host.

use std::io::Write;
use std::sync::Arc;

use half::f16;
use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::progress::Progress;
use qhx_graph::weight::{RowSource, beyond_f16, stream, to_f16};
use qhx_types::DType;

use crate::recipe::{TableFile, TableSource, Tables};

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

    /// The file `<model>_<name>_f32.bin`, whatever the checkpoint holds.
    pub fn in_f32(field: &str, name: &str, source: Arc<dyn RowSource>) -> Self {
        Self::new(field, name, source, DType::F32)
    }

    fn new(field: &str, name: &str, source: Arc<dyn RowSource>, dtype: DType) -> Self {
        let end = if dtype == DType::F32 { "f32" } else { "f16" };
        Self { field: field.to_owned(), name: format!("{name}_{end}.bin"), source, dtype }
    }

    fn bytes(&self) -> u64 {
        let [rows, cols] = self.source.shape().map(|n| n as u64);
        rows.saturating_mul(cols).saturating_mul(self.dtype.size() as u64)
    }
}

/// Tables under `artifacts.<key>` of the manifest. They are read and written some rows at a time, however large they
/// are.
pub fn matrices(key: &str, files: Vec<MatrixFile>) -> Tables {
    let table = |file: &MatrixFile| TableFile {
        field: file.field.clone(),
        name: file.name.clone(),
        dtype: (file.dtype == DType::F32).then_some(DType::F32),
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
            write_rows((&**source, *dtype), &mut **target, name, &mut done, progress)?;
        }
        Ok(())
    }
}

/// Writes a matrix as raw rows, some at a time, and counts the bytes; `name` is the file's.
pub(crate) fn write_rows(
    (source, dtype): (&dyn RowSource, DType),
    target: &mut dyn Write,
    name: &str,
    done: &mut u64,
    progress: &mut dyn Progress,
) -> Result<()> {
    let fail = |e: std::io::Error| Error::caused(ErrorKind::Io, name, e);
    let mut half = Vec::new();
    stream(source, |wide| {
        progress.stop_if_cancelled()?;
        if dtype == DType::F16 {
            half.resize(wide.len(), f16::ZERO);
            to_f16(wide, &mut half).map_err(|_| beyond_f16(source))?;
            target.write_all(bytemuck::cast_slice(&half)).map_err(fail)?;
        } else {
            target.write_all(bytemuck::cast_slice(wide)).map_err(fail)?;
        }
        *done += (wide.len() * dtype.size()) as u64;
        progress.advance(*done);
        Ok(())
    })
}
