//! A bundle's folder and manifest, and what users name instead.

use std::io::Read as _;
use std::path::Path;
use std::sync::Arc;

use qhx_base::{Error, ErrorKind, Result, error, files};
use qhx_core::Manifest;
use qhx_text::forms;

/// A bundle that was found: its manifest is read and checked, nothing else is opened. Clones share it.
///
/// ```no_run
/// let mut model = qhx::Bundle::open("qwen35/v81")?.model()?;
/// for piece in model.complete("The capital of France is")? {
///     print!("{}", piece?);
/// }
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Bundle {
    manifest: Arc<Manifest>,
}

impl Bundle {
    /// Reads the manifest of one bundle; `root` is the folder that its paths resolve against.
    pub(crate) fn open_one(path: &Path, root: Option<&Path>) -> Result<Self> {
        let mut manifest =
            Manifest::load_with_root(path, root).map_err(|e| not_forged(path).unwrap_or(e))?;
        // Published bundles leave out what their chat template implies.
        if let Some(chat) = &mut manifest.chat {
            forms::complete(chat);
        }
        Ok(Self { manifest: Arc::new(manifest) })
    }

    /// The manifest, whose chat template is complete.
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    pub(crate) fn shared_manifest(&self) -> &Arc<Manifest> {
        &self.manifest
    }
}

/// The error of a checkpoint's or an adapter's folder, or of a GGUF file, with what makes a bundle of it. `None` for
/// anything else.
pub fn not_forged(path: &Path) -> Option<Error> {
    let is_adapter = path.join("adapter_config.json").is_file();
    let shown = path.display();
    let (what, command) = match (path.is_dir(), is_adapter) {
        (true, true) => ("the folder of an adapter", format!("qhx forge BASE --lora {shown}")),
        (true, false) => (checkpoint(path)?, format!("qhx forge {shown}")),
        (false, _) => (gguf(path)?, format!("qhx forge {shown}")),
    };
    let hint = format!("make one of it: {command} --out FOLDER");
    Some(error!(Manifest, "{shown}: {what}, expected a bundle").hint(hint))
}

fn checkpoint(folder: &Path) -> Option<&'static str> {
    let names = std::fs::read_dir(folder).ok()?.filter_map(|entry| Some(entry.ok()?.file_name()));
    let weights = |name: &std::ffi::OsString| {
        let name = name.to_string_lossy();
        let ends = [".safetensors", ".safetensors.index.json", ".pth"];
        name.starts_with("pytorch_model") || ends.iter().any(|end| name.ends_with(end))
    };
    let found =
        folder.join("config.json").is_file() && names.into_iter().any(|name| weights(&name));
    found.then_some("the folder of a checkpoint")
}

fn gguf(file: &Path) -> Option<&'static str> {
    let mut head = [0; 4];
    files::open(ErrorKind::Manifest, file).ok()?.read_exact(&mut head).ok()?;
    (head == *b"GGUF").then_some("a GGUF file")
}
