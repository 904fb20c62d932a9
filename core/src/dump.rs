//! Arrays written to files, so that a model can be compared with its reference step by step.
//!
//! The files are NumPy's (format 1.0, `numpy.lib.format`), f32, row-major: `numpy.load` reads them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use crate::{Error, ErrorKind, Result};

/// Most bytes of an array's name.
const LONGEST_NAME: usize = 64;

/// A folder that arrays are written to.
#[derive(Debug)]
pub struct Dump {
    folder: PathBuf,
    /// How many arrays of each name there are.
    written: Mutex<HashMap<String, usize>>,
}

impl Dump {
    /// Arrays go to `folder`, which is made if it is not there. Errors when it holds arrays already:
    /// those of two runs could not be told apart.
    pub fn create(folder: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| Error::io(ErrorKind::Io, folder, e);
        std::fs::create_dir_all(folder).map_err(failed)?;
        for entry in std::fs::read_dir(folder).map_err(failed)? {
            let path = entry.map_err(failed)?.path();
            if path.extension().is_some_and(|extension| extension.eq_ignore_ascii_case("npy")) {
                let message = format!(
                    "{}: there already, expected a folder without .npy files",
                    path.display()
                );
                return Err(Error::new(ErrorKind::Usage, message)
                    .hint("name a new folder, or remove the files of an earlier run"));
            }
        }
        Ok(Self { folder: folder.to_owned(), written: Mutex::default() })
    }

    /// Writes an array to `NAME.npy`, or to `NAME-2.npy` when it is the second one of its name, and
    /// so on. The name consists of ASCII letters, digits and `_`. Errors name the array or the file.
    pub fn write(&self, name: &str, shape: &[usize], values: &[f32]) -> Result<()> {
        let legal = |c: u8| c.is_ascii_alphanumeric() || c == b'_';
        if !(1..=LONGEST_NAME).contains(&name.len()) || !name.bytes().all(legal) {
            return Err(Error::new(
                ErrorKind::Plugin,
                format!(
                    "dump {name:?}: expected a name of 1 to {LONGEST_NAME} ASCII letters, digits and _"
                ),
            ));
        }
        let elements = shape.iter().try_fold(1_usize, |n, &d| n.checked_mul(d));
        if elements != Some(values.len()) {
            let message =
                format!("dump {name:?}: {} values, expected the shape {shape:?}", values.len());
            return Err(Error::new(ErrorKind::Plugin, message));
        }
        let count = {
            let mut written = self.written.lock().unwrap_or_else(PoisonError::into_inner);
            let count = written.entry(name.to_owned()).or_default();
            *count += 1;
            *count
        };
        let file = match count {
            1 => format!("{name}.npy"),
            _ => format!("{name}-{count}.npy"),
        };
        let path = self.folder.join(file);
        write_npy(&path, shape, values).map_err(|e| Error::io(ErrorKind::Io, &path, e))
    }
}

fn write_npy(path: &Path, shape: &[usize], values: &[f32]) -> std::io::Result<()> {
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
    file.write_all(b"\x93NUMPY\x01\x00")?;
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
