//! Arrays that a model makes, so that it can be compared with its reference step by step.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use qhx_base::{Error, ErrorKind, Result, bail, error};

use crate::npy::{self, Array};

/// Maximum bytes of an array's name.
const LONGEST_NAME: usize = 64;

/// Destination of arrays: a folder, or memory.
///
/// The second array of a name is called `NAME-2`, the third `NAME-3`.
#[derive(Debug)]
pub struct Dump {
    target: Target,
    dumped: Mutex<Dumped>,
}

#[derive(Debug)]
enum Target {
    /// A folder of NumPy files (format 1.0, f32, row-major).
    Folder(PathBuf),
    /// Memory, for arrays of these names.
    Memory(BTreeSet<String>),
}

/// The arrays of a dump.
#[derive(Debug, Default)]
pub struct Dumped {
    /// Number of arrays of each name.
    pub counts: BTreeMap<String, usize>,
    /// Arrays that were kept.
    pub arrays: BTreeMap<String, Array>,
}

impl Dump {
    /// Arrays go to `folder`, which is made if it is not there.
    ///
    /// # Errors
    /// When it holds arrays already: those of two runs could not be distinguished.
    pub fn create(folder: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| Error::io(ErrorKind::Io, folder, e);
        std::fs::create_dir_all(folder).map_err(failed)?;
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy")) {
                return Err(error!(
                    Usage,
                    "{}: there already, expected a folder without .npy files",
                    path.display()
                )
                .hint("name a new folder, or remove the files of an earlier run"));
            }
        }
        Ok(Self { target: Target::Folder(folder.to_owned()), dumped: Mutex::default() })
    }

    /// Keeps the arrays of these names in memory, and no others.
    pub fn keep(names: impl IntoIterator<Item = String>) -> Self {
        Self { target: Target::Memory(names.into_iter().collect()), dumped: Mutex::default() }
    }

    /// Arrays dumped since the last call. Names begin again, which a folder does not take.
    pub fn take(&self) -> Dumped {
        std::mem::take(&mut *self.dumped.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Takes an array in, to a folder as `NAME.npy`. The name consists of ASCII letters, digits and `_`.
    ///
    /// # Errors
    /// When the name or the shape is invalid, or the file cannot be written; the error names the array or the file.
    pub fn write(&self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        let legal = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
        if !(1..=LONGEST_NAME).contains(&name.len()) || !name.bytes().all(legal) {
            bail!(
                Plugin,
                "dump {name:?}: expected a name of 1 to {LONGEST_NAME} ASCII letters, digits and _"
            );
        }
        let elements = shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        if elements != Some(values.len()) {
            bail!(Plugin, "dump {name:?}: {} values, expected the shape {shape:?}", values.len());
        }
        let mut made = self.dumped.lock().unwrap_or_else(PoisonError::into_inner);
        let count = made.counts.entry(name.to_owned()).or_default();
        *count += 1;
        let name = match *count {
            1 => name.to_owned(),
            _ => format!("{name}-{count}"),
        };
        match &self.target {
            Target::Folder(folder) => {
                drop(made);
                let path = folder.join(format!("{name}.npy"));
                npy::write(&path, shape, values).map_err(|e| Error::io(ErrorKind::Io, &path, e))
            }
            Target::Memory(wanted) => {
                if wanted.contains(&name) {
                    let array = Array { shape: shape.to_vec(), values: values.to_vec() };
                    made.arrays.insert(name, array);
                }
                Ok(())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_as_numpy_writes_them() {
        let folder = tempfile::tempdir().unwrap();
        let dump = Dump::create(&folder.path().join("a/b")).unwrap();
        dump.write("x", &[2, 3], &[0.5, 1.0, -2.0, 3.0, 4.0, 5.0]).unwrap();
        dump.write("x", &[1], &[7.0]).unwrap();
        dump.write("none", &[], &[1.0]).unwrap();
        let read = |name: &str| std::fs::read(folder.path().join("a/b").join(name)).unwrap();
        // What numpy.save writes for these arrays.
        let expected = |shape: &str, values: &[f32]| {
            let header = format!("{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}");
            let mut bytes = b"\x93NUMPY\x01\x00\x76\x00".to_vec();
            bytes.extend(format!("{header:117}\n").bytes());
            bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            bytes
        };
        assert_eq!(read("x.npy"), expected("(2, 3)", &[0.5, 1.0, -2.0, 3.0, 4.0, 5.0]));
        assert_eq!(read("x-2.npy"), expected("(1,)", &[7.0]));
        assert_eq!(read("none.npy"), expected("()", &[1.0]));
    }

    #[test]
    fn names_are_no_paths_and_runs_do_not_mix() {
        let folder = tempfile::tempdir().unwrap();
        let dump = Dump::create(folder.path()).unwrap();
        for name in ["", "../x", "a/b", "a.b", "-", "ä", &"x".repeat(65)] {
            let error = dump.write(name, &[0], &[]).unwrap_err();
            assert!(error.message().contains("letters, digits and _"), "{error}");
        }
        let error = dump.write("x", &[2, usize::MAX], &[1.0]).unwrap_err();
        assert!(error.message().contains("1 values, expected the shape [2, "), "{error}");
        dump.write("x", &[1], &[1.0]).unwrap();
        let error = Dump::create(folder.path()).unwrap_err();
        assert!(error.message().contains("x.npy: there already"), "{error}");
        let error = Dump::create(&folder.path().join("x.npy")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Io);

        // A file that came in between stays, and the error names it.
        std::fs::write(folder.path().join("y.npy"), "mine").unwrap();
        let error = dump.write("y", &[1], &[1.0]).unwrap_err();
        assert!(error.message().contains("y.npy"), "{error}");
        assert_eq!(std::fs::read(folder.path().join("y.npy")).unwrap(), b"mine");
    }
}
