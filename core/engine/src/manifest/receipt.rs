//! The receipt of a bundle's weights, and the files that it belongs to.

use std::collections::BTreeMap;

use qhx_base::hash::hex;
use qhx_base::{Result, error};
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use super::Manifest;

/// Hash of a bundle's files, by their paths and their own hashes. Golden steps, which are made of a bundle that is
/// there, are not to be among them.
pub fn files_hash<'a>(files: impl IntoIterator<Item = (&'a str, &'a str)>) -> String {
    let mut hash = Sha256::new();
    for (path, sha256) in files.into_iter().collect::<BTreeMap<_, _>>() {
        for part in [path, "\0", sha256, "\n"] {
            hash.update(part);
        }
    }
    hex(hash.finalize())
}

impl Manifest {
    /// `model.receipt`: what the weights cost the model's predictions, as the forge measured it; none where it did not.
    ///
    /// # Errors
    /// When the receipt belongs to other files than the bundle's.
    pub fn receipt(&self) -> Result<Option<&Value>> {
        let Some(receipt) = self.raw.pointer("/model/receipt") else { return Ok(None) };
        let golden = self.artifacts.golden.as_deref();
        let files = self.artifacts.files.iter().filter(|(path, _)| Some(&***path) != golden);
        let found =
            files_hash(files.filter_map(|(path, file)| Some((&**path, file.sha256.as_deref()?))));
        match receipt.get("files").and_then(Value::as_str) {
            Some(files) if files == found => Ok(Some(receipt)),
            files => Err(error!(
                Manifest,
                "{}: /model/receipt: measured with files whose hash is {}, and those of the bundle have {found}",
                self.path.display(),
                files.unwrap_or("missing")
            )
            .hint("it belongs to other weights: forge the bundle again, or remove the receipt")),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use serde_json::json;

    use super::*;

    #[test]
    fn a_receipt_of_other_files_is_refused() {
        let sha256 = "ab".repeat(32);
        let files = files_hash([("decode.bin", &*sha256)]);
        let document = json!({
            "schema_version": 1,
            "model": {"name": "a", "receipt": {"kl": 0.01, "files": files}},
            "artifacts": {
                "contexts": {"decode": {"bin": "decode.bin"}},
                "golden": "golden.json",
                "files": {"decode.bin": {"sha256": sha256}, "golden.json": {"sha256": "cd".repeat(32)}},
            },
        });
        let read = |document: &Value| {
            Manifest::from_value(Path::new("a.json"), document.clone(), None).unwrap()
        };
        assert_eq!(read(&document).receipt().unwrap().unwrap()["kl"], json!(0.01));
        for (pointer, value) in [
            ("/artifacts/files/decode.bin/sha256", json!("ef".repeat(32))),
            ("/model/receipt/files", json!(null)),
        ] {
            let mut other = document.clone();
            *other.pointer_mut(pointer).unwrap() = value;
            let error = read(&other).receipt().unwrap_err();
            assert!(error.message().contains("/model/receipt: measured with files"), "{error}");
        }
    }
}
