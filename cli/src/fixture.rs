//! The tiny checkpoint of the demo, carried in the program.

use std::path::Path;

use qhx_base::hash::hex;
use qhx_base::{Error, ErrorKind, Result};
use sha2::{Digest as _, Sha256};

macro_rules! files {
    ($($name:literal),* $(,)?) => {
        &[$(($name, include_bytes!(concat!("../../tests/fixtures/qwen35-tied/", $name)))),*]
    };
}

/// Name and contents of every file.
const FILES: &[(&str, &[u8])] = files![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
];

/// Writes the checkpoint into a folder.
pub(crate) fn write(dir: &Path) -> Result<()> {
    std::fs::create_dir_all(dir).map_err(|e| Error::io(ErrorKind::Io, dir, e))?;
    for (name, bytes) in FILES {
        let path = dir.join(name);
        std::fs::write(&path, bytes).map_err(|e| Error::io(ErrorKind::Io, &path, e))?;
    }
    Ok(())
}

/// Tells one version of the checkpoint from another.
pub(crate) fn fingerprint() -> String {
    let mut hash = Sha256::new();
    for (name, bytes) in FILES {
        hash.update(name.as_bytes());
        hash.update(bytes);
    }
    hex(&hash.finalize()[..6])
}
