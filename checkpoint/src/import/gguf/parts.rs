//! A model in several files (`llama-gguf-split`): `NAME-00001-of-00003.gguf`, and in each file its number, the number
//! of files and that of tensors.

use std::path::{Path, PathBuf};

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};

use super::file::File;

/// A file of a model.
#[derive(Debug)]
pub(super) struct Part {
    pub map: Mapped,
    pub file: File,
}

/// The file, or all files of the model that it is a part of, the first one first: that has the metadata.
pub(super) fn open(path: &Path) -> Result<Vec<Part>> {
    let part = one(path)?;
    let count = part.file.size("split.count").unwrap_or(1);
    if count <= 1 {
        return Ok(vec![part]);
    }
    let fail = |path: &Path, what: String| {
        Error::new(ErrorKind::Artifact, format!("{}: {what}", path.display()))
            .hint("put all parts of the model, under the names that they were published by, into one folder")
    };
    let Some(stem) = stem(path, count) else {
        return Err(fail(
            path,
            format!(
                "one of {count} parts, expected a name that ends with -00001-of-{count:05}.gguf"
            ),
        ));
    };
    let mut parts = Vec::new();
    for number in 0..count {
        let path = path.with_file_name(format!("{stem}-{:05}-of-{count:05}.gguf", number + 1));
        if !path.exists() {
            return Err(fail(&path, "missing".to_owned()));
        }
        let part = one(&path)?;
        for (key, expected) in [("split.no", number), ("split.count", count)] {
            if part.file.size(key) != Some(expected) {
                let found = part.file.size(key);
                return Err(fail(
                    &path,
                    format!("{key} is {found:?}, expected {expected}: a part of another model"),
                ));
            }
        }
        parts.push(part);
    }
    let tensors: usize = parts.iter().map(|part| part.file.tensors.len()).sum();
    let said = parts.first().and_then(|part| part.file.size("split.tensors.count"));
    match said.filter(|said| *said != tensors) {
        Some(said) => {
            Err(fail(path, format!("its {count} parts have {tensors} tensors, expected {said}")))
        }
        None => Ok(parts),
    }
}

fn one(path: &Path) -> Result<Part> {
    let map = Mapped::open(path)?;
    let file = File::read(&map)?;
    Ok(Part { map, file })
}

/// The name of a part without what all parts end with; none where it does not end so.
fn stem(path: &Path, count: usize) -> Option<String> {
    let name = PathBuf::from(path.file_name()?);
    let stem = name.file_stem()?.to_str()?.strip_suffix(&format!("-of-{count:05}"))?.to_owned();
    let (stem, number) = stem.rsplit_once('-')?;
    (number.len() == 5 && number.bytes().all(|b| b.is_ascii_digit())).then(|| stem.to_owned())
}
