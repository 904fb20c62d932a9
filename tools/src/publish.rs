//! A bundle for a repository of a hub: its files in a folder for each architecture, and a model card.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use qhx::hub::index::{Does, Entry, Index};
use qhx::hub::{LocalFile, Name, Publication};
use qhx::models::{self, CPU};
use qhx::{folders, hub, prepared};
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use qhx_core::Manifest;
use serde_json::Value;

use crate::verify::is_intact;

/// Name of the model card.
const CARD: &str = "README.md";
/// Folder of a bundle that is compiled where it runs.
const PORTABLE: &str = "portable";

/// Options of a publication.
#[derive(Debug, Clone, Default)]
pub struct PublishOptions {
    /// SPDX identifier of the base model's licence; that of the index if none.
    pub license: Option<String>,
    /// Repository of the checkpoint, such as `Qwen/Qwen3-0.6B`; the one that the bundle was made of if none.
    pub base_model: Option<String>,
    /// Folder in the repository for one bundle; its architecture if none.
    pub variant: Option<String>,
    /// A repository that is made for it is private.
    pub private: bool,
}

/// A bundle of a publication.
struct Part {
    /// Its folder in the repository.
    folder: String,
    manifest: Manifest,
    files: Vec<LocalFile>,
    bytes: u64,
}

/// Collects the files of the bundle at `path`, or of its bundles for several architectures, and writes the model card.
/// Every file that a manifest lists is compared with its hash.
///
/// # Errors
/// When it is no bundle, a file of it is damaged, no licence is known, and when it is cancelled.
pub fn publication(
    path: &Path,
    name: &Name,
    options: &PublishOptions,
    cancel: &CancelToken,
) -> Result<Publication> {
    let resolved = hub::resolve(path)?;
    let targets = folders::targets(&resolved);
    let parts = match (targets.is_empty(), &options.variant) {
        (false, Some(_)) => {
            return Err(error!(Usage, "{}: a variant is the folder of one bundle", path.display())
                .hint("give the folder of one architecture"));
        }
        (false, None) => targets
            .iter()
            .map(|target| part(&target.path, Some(format!("v{}", target.arch)), cancel))
            .collect::<Result<Vec<_>>>()?,
        (true, variant) => {
            let part = part(&resolved, variant.clone(), cancel);
            vec![part.map_err(|e| hub::how_to_fetch(path, e))?]
        }
    };
    let base = options.base_model.clone().or_else(|| base_model(path));
    let entry = base
        .as_deref()
        .and_then(entry_of)
        .or_else(|| models::name_of(path).and_then(|name| Index::builtin().entry(&name)));
    let license = options.license.clone().or_else(|| entry.map(|entry| entry.license.clone()));
    let license = license.ok_or_else(|| {
        error!(Usage, "{}: the licence of the base model is not known", path.display())
            .hint("give it: --license apache-2.0, and --base-model OWNER/NAME")
    })?;
    if [Some(&license), base.as_ref(), options.variant.as_ref()]
        .into_iter()
        .flatten()
        .any(|text| text.chars().any(|c| c.is_control() || "\"\\".contains(c)))
    {
        return Err(error!(Usage, "licence, base model and variant are one line without quotes"));
    }
    let card = card(name, &parts, &license, base.as_deref(), entry);
    let folders: Vec<_> = parts.iter().map(|part| part.folder.as_str()).collect();
    let message = format!("Add {}", folders.join(", "));
    let files = parts.into_iter().flat_map(|part| part.files).collect();
    let mut publication = Publication::new(name.clone(), files, message);
    publication.texts = BTreeMap::from([(CARD.to_owned(), card)]);
    publication.private = options.private;
    Ok(publication)
}

fn part(path: &Path, folder: Option<String>, cancel: &CancelToken) -> Result<Part> {
    let manifest = Manifest::load(path)?;
    if !manifest.artifacts.files.is_empty() && !is_intact(&manifest, cancel)? {
        let root = manifest.root.display();
        return Err(error!(Artifact, "{root}: a file is not the one that its manifest lists")
            .hint("qhx verify BUNDLE names it"));
    }
    let folder = folder.unwrap_or_else(|| folder_of(&manifest));
    let mut files = Vec::new();
    let bytes = collect(&manifest.root, &folder, &mut files)?;
    Ok(Part { folder, manifest, files, bytes })
}

/// Folder of a bundle by what runs it.
fn folder_of(manifest: &Manifest) -> String {
    match manifest.model.dsp_arch {
        _ if prepared::is_portable(manifest) => PORTABLE.to_owned(),
        Some(arch) => format!("v{arch}"),
        None => CPU.to_owned(),
    }
}

/// Adds the files below a folder, but for hidden ones. Returns their bytes.
fn collect(folder: &Path, to: &str, files: &mut Vec<LocalFile>) -> Result<u64> {
    let io = |e| Error::io(ErrorKind::Artifact, folder, e);
    let mut entries: Vec<PathBuf> = std::fs::read_dir(folder)
        .and_then(|entries| entries.map(|entry| entry.map(|entry| entry.path())).collect())
        .map_err(io)?;
    entries.sort();
    let mut bytes = 0;
    for path in entries {
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let to = format!("{to}/{name}");
        if name.starts_with('.') {
            continue;
        }
        if path.is_dir() {
            bytes += collect(&path, &to, files)?;
            continue;
        }
        bytes +=
            std::fs::metadata(&path).map_err(|e| Error::io(ErrorKind::Artifact, &path, e))?.len();
        files.push(LocalFile { path, to });
    }
    Ok(bytes)
}

/// Repository of the checkpoint that a model of this machine was made of.
fn base_model(path: &Path) -> Option<String> {
    let folder = models::folder().ok()?.join(models::name_of(path)?);
    let records = models::records(&folder);
    let (repository, _) = records.first()?.source.split_once('@')?;
    repository.parse::<Name>().ok().map(|name| name.repository())
}

/// Entry of the index whose checkpoint this is.
fn entry_of(base: &str) -> Option<&'static Entry> {
    Index::builtin().models.iter().find(|entry| {
        let source = entry.checkpoint.as_ref().and_then(|source| source.repository.as_ref());
        source.is_some_and(|repository| repository.repository() == base)
    })
}

/// The hub's word for what a model does.
fn pipeline(entry: &Entry) -> &'static str {
    match entry.does[..] {
        [Does::Text, Does::Image, ..] => "image-text-to-text",
        [Does::Text, ..] => "text-generation",
        [Does::Transcribe, ..] => "automatic-speech-recognition",
        [Does::Speak, ..] => "text-to-speech",
        [Does::Rerank, ..] => "text-ranking",
        _ => "feature-extraction",
    }
}

fn card(
    name: &Name,
    parts: &[Part],
    license: &str,
    base: Option<&str>,
    entry: Option<&Entry>,
) -> String {
    let mut text = format!("---\nlicense: \"{license}\"\nlibrary_name: qhx\n");
    if let Some(base) = base {
        let _ = writeln!(text, "base_model: \"{base}\"");
    }
    if let Some(entry) = entry {
        let _ = writeln!(text, "pipeline_tag: {}", pipeline(entry));
    }
    text.push_str("tags:\n- qhx\n- qnn\n- hexagon\n- npu\n---\n\n");
    let id = name.repository();
    let title = entry.map_or(name.name.as_str(), |entry| entry.title.as_str());
    let _ = writeln!(text, "# {title} for Qualcomm's Hexagon NPU\n");
    let of = base.map(|base| format!(" of [{base}](https://huggingface.co/{base})"));
    let _ = writeln!(text, "A bundle{} for [qhx](https://docs.rs/qhx).\n", of.unwrap_or_default());
    text.push_str(
        "| folder | for | weights | context | size | made by |\n|---|---|---|---|---|---|\n",
    );
    for part in parts {
        let manifest = &part.manifest;
        let runs = match manifest.model.dsp_arch {
            _ if part.folder == PORTABLE => "any, compiled where it runs".to_owned(),
            Some(arch) => format!("Hexagon v{arch} and later"),
            None => "any CPU".to_owned(),
        };
        let field = |pointer: &str| match manifest.raw.pointer(pointer) {
            Some(Value::String(text)) => inert(text),
            Some(Value::Number(number)) => number.to_string(),
            _ => String::new(),
        };
        let _ = writeln!(
            text,
            "| `{}` | {runs} | {} | {} | {} | {} |",
            part.folder,
            field("/model/precision"),
            field("/params/max_ctx"),
            megabytes(part.bytes),
            field("/model/made_by"),
        );
    }
    receipts(&mut text, parts);
    let first = parts.first().map_or("v81", |part| part.folder.as_str());
    let _ = write!(
        text,
        "\n## Run it\n\n```sh\nqhx run {id}                  # takes the folder for this machine\n\
         qhx pull {id}/{first} && qhx serve {id}/{first}\n```\n"
    );
    text.push_str("\n## Files\n\n| file | size |\n|---|---|\n");
    for file in parts.iter().flat_map(|part| &part.files) {
        let bytes = std::fs::metadata(&file.path).map_or(0, |data| data.len());
        let _ = writeln!(text, "| `{}` | {} |", inert(&file.to), megabytes(bytes));
    }
    let _ = write!(text, "\n## Licence\n\nThat of the base model: {license}");
    let _ = match base {
        Some(base) => writeln!(text, ", see [{base}](https://huggingface.co/{base})."),
        None => writeln!(text, "."),
    };
    text
}

/// Cost of the weights, as the forge measured it.
fn receipts(text: &mut String, parts: &[Part]) {
    let mut begun = false;
    for part in parts {
        let Ok(Some(receipt)) = part.manifest.receipt() else { continue };
        let texts = receipt.get("texts").and_then(Value::as_object);
        let mut row = |name: &str, values: &Value| {
            let number = |key: &str| values.get(key).and_then(Value::as_f64);
            let Some(kl) = number("kl") else { return };
            if !begun {
                text.push_str(
                    "\n## Exactness\n\nDistance from the same model with f16 weights: mean KL divergence in nats, \
                     positions with the same likeliest token, perplexity beside that of f16.\n\n\
                     | folder | texts | KL | same token | perplexity | f16 |\n|---|---|---|---|---|---|\n",
                );
                begun = true;
            }
            let shown = |value: Option<f64>, digits: usize| {
                value.map(|value| format!("{value:.digits$}")).unwrap_or_default()
            };
            let same = number("agreement").map(|share| format!("{:.1} %", share * 100.0));
            let _ = writeln!(
                text,
                "| `{}` | {} | {kl:.4} | {} | {} | {} |",
                part.folder,
                inert(name),
                same.unwrap_or_default(),
                shown(number("perplexity"), 2),
                shown(number("f16_perplexity"), 2),
            );
        };
        match texts {
            Some(texts) => texts.iter().for_each(|(name, values)| row(name, values)),
            None => row("all", receipt),
        }
    }
}

/// Text of a manifest that cannot end a cell or begin a tag.
fn inert(text: &str) -> String {
    text.chars().filter(|c| !c.is_control() && !"|<>`[]".contains(*c)).take(80).collect()
}

fn megabytes(bytes: u64) -> String {
    match bytes {
        0..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.2} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_of_a_manifest_stay_in_their_cells() {
        assert_eq!(inert("a|b<script>`x`\n[y](z)"), "abscriptxy(z)");
        assert_eq!(inert(&"x".repeat(1000)).len(), 80);
    }

    #[test]
    fn a_base_model_is_found_in_the_index() {
        let entry = entry_of("Qwen/Qwen3-0.6B").expect("an entry");
        assert_eq!((entry.name.as_str(), pipeline(entry)), ("qwen3-0.6b", "text-generation"));
        assert!(entry_of("nobody/nothing").is_none());
    }
}
