//! Arrays in NumPy's files (`.npy`, `numpy.lib.format`).
//!
//! Written here: a file of a suite is untrusted, so that its size is compared with its shape before anything is
//! allocated, and f16 is among the element types.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use half::f16;
use qhx_base::{ErrorKind, Result, error, files};

const MAGIC: &[u8] = b"\x93NUMPY";

/// An array in single precision.
#[derive(Debug, Clone, PartialEq)]
pub struct Array {
    /// Elements of each dimension; none for a single number.
    pub shape: Vec<usize>,
    /// The elements, row-major; their number is the product of the shape.
    pub values: Vec<f32>,
}

impl Array {
    /// Reads a file of at most `limit` bytes that `numpy.save` wrote: f16, f32 or f64, little-endian, row-major.
    ///
    /// # Errors
    /// When the file is anything else; the error names the file, what was found and what was expected.
    pub fn read(path: &Path, limit: u64) -> Result<Self> {
        let bytes = files::read(ErrorKind::Artifact, path, limit)?;
        Self::parse(&bytes).map_err(|what| {
            error!(Artifact, "{}: {what}", path.display())
                .hint("write it with numpy.save(path, array.astype(\"<f4\", order=\"C\"))")
        })
    }

    /// An array of the bytes of a file, or what is wrong with them.
    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let none = || "not a .npy file".to_owned();
        let rest = bytes.strip_prefix(MAGIC).ok_or_else(none)?;
        let (header, data) = match rest {
            [1, _, low, high, rest @ ..] => {
                rest.split_at_checked(u16::from_le_bytes([*low, *high]).into())
            }
            [2 | 3, _, a, b, c, d, rest @ ..] => {
                rest.split_at_checked(u32::from_le_bytes([*a, *b, *c, *d]) as usize)
            }
            _ => None,
        }
        .ok_or_else(none)?;
        let header = str::from_utf8(header).map_err(|_| none())?;
        let field = |name: &str| {
            let (_, value) = header.split_once(&format!("'{name}':"))?;
            Some(value.trim_start())
        };
        let missing = || format!("the header {header:?}, expected descr, fortran_order and shape");
        if !field("fortran_order").ok_or_else(missing)?.starts_with("False") {
            return Err("elements in column-major order, expected row-major".to_owned());
        }
        let shape = field("shape").and_then(|text| text.strip_prefix('(')?.split_once(')'));
        let sizes = shape.ok_or_else(missing)?.0.split(',').map(str::trim);
        let shape = sizes.filter(|size| !size.is_empty()).map(str::parse);
        let shape: Vec<usize> = shape.collect::<Result<_, _>>().map_err(|_| missing())?;
        let dtype = field("descr").and_then(|text| text.strip_prefix('\'')?.split_once('\''));
        let values: Vec<f32> = match dtype.ok_or_else(missing)?.0 {
            "<f2" => elements(data, &shape, |b| f16::from_le_bytes(b).to_f32()),
            "<f4" => elements(data, &shape, f32::from_le_bytes),
            "<f8" => elements(data, &shape, |b| f64::from_le_bytes(b) as f32),
            other => return Err(format!("elements of type {other:?}, expected <f4, <f2 or <f8")),
        }
        .ok_or_else(|| {
            format!("{} bytes of elements, which the shape {shape:?} does not have", data.len())
        })?;
        Ok(Self { shape, values })
    }

    /// Elements of a row: the last dimension.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

/// The elements of an array, of N bytes each. None where there are more bytes or fewer.
fn elements<const N: usize>(
    data: &[u8],
    shape: &[usize],
    of: impl Fn([u8; N]) -> f32,
) -> Option<Vec<f32>> {
    let count = shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d))?;
    let (elements, rest) = data.as_chunks::<N>();
    (elements.len() == count && rest.is_empty()).then(|| elements.iter().map(|b| of(*b)).collect())
}

/// Writes a new file of format 1.0, f32.
pub(crate) fn write(path: &Path, shape: &[usize], values: &[f32]) -> std::io::Result<()> {
    /// Magic, version and the length of the rest of the header.
    const BEFORE: usize = 10;
    /// The data begins at a multiple of this.
    const ALIGNMENT: usize = 64;
    let shape = match shape {
        // Python's tuple of one.
        [length] => format!("({length},)"),
        _ => format!("({})", shape.iter().map(usize::to_string).collect::<Vec<_>>().join(", ")),
    };
    let mut header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
    let padding = (BEFORE + header.len() + 1).next_multiple_of(ALIGNMENT) - BEFORE - 1;
    header = format!("{header:padding$}\n");
    let length = u16::try_from(header.len()).map_err(std::io::Error::other)?;
    let mut file = BufWriter::new(File::create_new(path)?);
    file.write_all(MAGIC)?;
    file.write_all(&[1, 0])?;
    file.write_all(&length.to_le_bytes())?;
    file.write_all(header.as_bytes())?;
    for value in values {
        file.write_all(&value.to_le_bytes())?;
    }
    file.flush()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file of format 1.0 with this header and data.
    fn file(header: &str, data: &[u8]) -> Vec<u8> {
        let length = u16::try_from(header.len()).unwrap().to_le_bytes();
        [MAGIC, &[1, 0], &length, header.as_bytes(), data].concat()
    }

    #[test]
    fn what_is_written_is_read() {
        let folder = tempfile::tempdir().unwrap();
        for (index, shape) in [&[2, 3][..], &[6], &[1, 1, 6], &[0, 4]].into_iter().enumerate() {
            let count = shape.iter().product::<usize>() as u8;
            let values: Vec<_> = (0..count).map(|n| f32::from(n) - 2.5).collect();
            let path = folder.path().join(format!("{index}.npy"));
            write(&path, shape, &values).unwrap();
            let array = Array::read(&path, 1 << 10).unwrap();
            assert_eq!(array, Array { shape: shape.to_vec(), values });
            assert_eq!(array.width(), *shape.last().unwrap());
        }
        let error = Array::read(&folder.path().join("0.npy"), 99).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Artifact);
    }

    #[test]
    fn other_precisions_and_orders_of_keys_are_read() {
        let half =
            file("{'shape': (2,), 'fortran_order': False, 'descr': '<f2'}\n", &[0, 60, 0, 192]);
        assert_eq!(Array::parse(&half).unwrap().values, [1.0, -2.0]);
        let mut double =
            file("{'descr': '<f8', 'fortran_order': False, 'shape': (), }", &1.5_f64.to_le_bytes());
        assert_eq!(Array::parse(&double).unwrap(), Array { shape: Vec::new(), values: vec![1.5] });
        // Format 2.0 has four bytes for the length of the header.
        double[6] = 2;
        double.splice(10..10, [0, 0]);
        assert_eq!(Array::parse(&double).unwrap().values, [1.5]);
    }

    #[test]
    fn what_is_no_array_is_named() {
        let with = |header: &str| file(header, &[0; 8]);
        for (bytes, says) in [
            (b"PK\x03\x04".to_vec(), "not a .npy file"),
            (MAGIC.to_vec(), "not a .npy file"),
            (b"\x93NUMPY\x01\x00\xff\xff{}".to_vec(), "not a .npy file"),
            (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}".to_vec(), "not a .npy file"),
            (with("{}"), "expected descr, fortran_order and shape"),
            (with("{'descr': '<f4', 'fortran_order': True, 'shape': (2,), }"), "column-major"),
            (with("{'descr': '>f4', 'fortran_order': False, 'shape': (2,), }"), "type \">f4\""),
            (
                with("{'descr': '<f4', 'fortran_order': False, 'shape': (3,), }"),
                "8 bytes of elements",
            ),
            (with("{'descr': '<f4', 'fortran_order': False, 'shape': (-2,), }"), "expected descr"),
            (
                with(
                    "{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296), }",
                ),
                "8 bytes of elements",
            ),
        ] {
            let error = Array::parse(&bytes).unwrap_err();
            assert!(error.contains(says), "{error}");
        }
    }
}
