//! Which files of a repository are wanted: one bundle's folder, or what a checkpoint consists of.

use std::collections::{BTreeMap, BTreeSet};

use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use qhx_base::{Error, ErrorKind, Result, error};
use serde::Serialize;

use crate::blob::BlobId;
use crate::head::is_program_name;
use crate::kind::Kind;
use crate::listing::{Listing, RemoteFile};
use crate::name::{Name, is_safe_path};

/// A folder with a bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct BundleFolder {
    /// Path in the repository; empty for the repository itself.
    pub path: String,
    /// Hexagon architecture that the path says: 81 for `v81` or `v81-w8`.
    pub arch: Option<u32>,
    /// File names of what may be its manifests.
    pub manifests: Vec<String>,
}

impl BundleFolder {
    /// The bundle in this folder.
    pub(crate) fn of(path: &str) -> Self {
        Self { path: path.to_owned(), arch: arch_of(path), manifests: Vec::new() }
    }
}

/// Which bundle of a repository is wanted.
#[derive(Debug, Clone, Default)]
pub struct Want {
    /// Path of its folder.
    pub folder: Option<String>,
    /// Architectures that will do, the best first. Empty where it is not known what will.
    pub archs: Vec<u32>,
    /// File name of the manifest, with or without `.json`: the folder's other manifests are left out.
    pub manifest: Option<String>,
    /// Patterns of paths in the folder, of which a file has to match one; all files where there is none.
    pub include: Vec<String>,
}

/// Part of a checkpoint that is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckpointFiles {
    /// All that a bundle is made of.
    All,
    /// Configuration and tokenizer.
    Configuration,
}

/// Files of one commit that are to be fetched.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Selection {
    /// Name that was asked for.
    pub name: Name,
    /// The commit.
    pub commit: String,
    /// Bundle or checkpoint.
    pub kind: Kind,
    /// The folder or file in the repository that they make up; empty for the repository itself.
    pub folder: String,
    /// Path, length and hash of each.
    pub files: Vec<Chosen>,
    /// Files in the folder that are programs by their names: they are not fetched.
    pub left_out: Vec<String>,
    /// It is all of the bundle or checkpoint, not some of its files.
    pub whole: bool,
}

/// A file that is to be fetched.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Chosen {
    /// Path in the repository, which stays in its folder on every system.
    pub path: String,
    /// Length.
    pub bytes: u64,
    /// Name of its content.
    pub blob: BlobId,
}

/// The list of modules of `sentence-transformers`.
const MODULES: &str = "modules.json";
/// The folder of a pooling, which older checkpoints have without such a list.
const POOLING: &str = "1_Pooling";

/// End of the names of voices beside an ONNX file.
const VOICES: &str = ".npz";

/// Heads of BGE-M3 for the tokens of a text, beside the weights.
const TOKEN_HEADS: [&str; 2] = ["sparse_linear.pt", "colbert_linear.pt"];

/// JSON files of checkpoints that no bundle's manifest is called like.
fn is_of_checkpoint(name: &str) -> bool {
    name.ends_with(".index.json")
        || ["vocab.json", "added_tokens.json", MODULES, "model_index.json"].contains(&name)
        || ["processor_config.json", "chat_template.json", "quantize_config.json"]
            .iter()
            .any(|end| name.ends_with(end))
}

/// Folder and name of a path.
pub(crate) fn split(path: &str) -> (&str, &str) {
    path.rsplit_once('/').unwrap_or(("", path))
}

/// The path behind a folder, for what lies in it.
pub(crate) fn within<'a>(path: &'a str, folder: &str) -> Option<&'a str> {
    if folder.is_empty() { Some(path) } else { path.strip_prefix(folder)?.strip_prefix('/') }
}

/// Hexagon architecture of a folder's name, such as `v81` or `v81-w8`.
fn arch_of(path: &str) -> Option<u32> {
    path.split('/').find_map(|part| {
        let digits = part.strip_prefix(['v', 'V'])?;
        let end = digits.find(|c: char| !c.is_ascii_digit()).unwrap_or(digits.len());
        let (digits, rest) = digits.split_at_checked(end)?;
        let arch = digits.parse().ok().filter(|arch| (60..=99).contains(arch))?;
        (rest.is_empty() || rest.starts_with(['-', '_', '.'])).then_some(arch)
    })
}

/// The folders of `paths` that are bundles, sorted: those with a file that `is_manifest` and data. A folder within a
/// bundle is part of it. Where folders say an architecture, what lies around them is none.
pub fn bundles<'a>(
    paths: impl Iterator<Item = &'a str> + Clone,
    is_manifest: impl Fn(&str) -> bool,
) -> Vec<BundleFolder> {
    let mut manifests: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    let mut data = BTreeSet::new();
    let mut weights = BTreeSet::new();
    for path in paths {
        let (folder, name) = split(path);
        if is_manifest(name) && !is_of_checkpoint(name) {
            manifests.entry(folder).or_default().push(name.to_owned());
        }
        let is_data = name.ends_with(".bin") || name.ends_with(".onnx");
        if is_data && !name.starts_with("pytorch_model") {
            data.insert(path);
        }
        if name.ends_with(".safetensors") || is_torch(name) || name.ends_with(VOICES) {
            weights.insert(folder);
        }
    }
    manifests.retain(|folder, _| {
        !weights.contains(folder) && data.iter().any(|path| within(path, folder).is_some())
    });
    let folders: Vec<_> = manifests.keys().copied().collect();
    let around = |folder: &str, other: &str| folder != other && within(other, folder).is_some();
    let says_more = |folder: &str| {
        folders.iter().any(|other| around(folder, other) && arch_of(other).is_some())
    };
    let own: Vec<_> = folders
        .iter()
        .copied()
        .filter(|folder| arch_of(folder).is_some() || !says_more(folder))
        .collect();
    let outermost = |folder: &&str| !own.iter().any(|other| around(other, folder));
    let found = own.iter().copied().filter(outermost).map(|folder| {
        let mut manifests = manifests.get(folder).cloned().unwrap_or_default();
        manifests.sort();
        BundleFolder { manifests, ..BundleFolder::of(folder) }
    });
    found.collect()
}

impl Want {
    /// All files of a bundle are wanted.
    fn is_whole(&self) -> bool {
        self.include.is_empty() && self.manifest.is_none()
    }

    /// The one bundle that is wanted.
    ///
    /// # Errors
    /// When there is none, or more than one, with the list of what there is.
    pub fn choose<'a>(&self, name: &Name, found: &'a [BundleFolder]) -> Result<&'a BundleFolder> {
        let repository = name.repository();
        let list = || {
            let all = found.iter().map(|bundle| match bundle.path.as_str() {
                "" => "the repository itself".to_owned(),
                path => path.to_owned(),
            });
            all.collect::<Vec<_>>().join(", ")
        };
        let fail = |what: String| {
            let example = found.iter().find(|bundle| !bundle.path.is_empty());
            let example = example.map_or("FOLDER", |bundle| bundle.path.as_str());
            error!(Usage, "{repository}: {what}")
                .hint(format!("choose one: {}", name.clone().within(example)))
        };
        if found.is_empty() {
            let hint =
                "a bundle is a folder with a manifest (JSON) and context binaries or ONNX graphs";
            return Err(error!(Usage, "{repository}: there is no bundle in it").hint(hint));
        }
        if let Some(folder) = &self.folder {
            let exact = found.iter().find(|bundle| bundle.path == *folder);
            return exact.ok_or_else(|| {
                fail(format!("{folder:?} is no bundle in it; there is {}", list()))
            });
        }
        if let [one] = found
            && (one.arch.is_none() || self.archs.is_empty())
        {
            return Ok(one);
        }
        for arch in &self.archs {
            let of_arch: Vec<_> =
                found.iter().filter(|bundle| bundle.arch == Some(*arch)).collect();
            let plain = of_arch.iter().copied().filter(|bundle| {
                split(&bundle.path).1.strip_prefix(['v', 'V']) == Some(&arch.to_string())
            });
            match (&of_arch[..], &plain.collect::<Vec<_>>()[..]) {
                ([], _) => {}
                ([one], _) | (_, [one]) => return Ok(one),
                _ => {
                    let paths: Vec<_> = of_arch.iter().map(|b| b.path.as_str()).collect();
                    return Err(fail(format!(
                        "there are several bundles for v{arch}: {}",
                        paths.join(", ")
                    )));
                }
            }
        }
        let cpu = found.iter().find(|bundle| bundle.path == "cpu");
        if let Some(cpu) = cpu.filter(|_| self.archs.is_empty()) {
            return Ok(cpu);
        }
        Err(match self.archs.first() {
            None => fail(format!("which bundle? There is {}", list())),
            Some(arch) => fail(format!("no bundle in it runs on v{arch}; there is {}", list())),
        })
    }

    /// The files of the bundle that is wanted.
    ///
    /// # Errors
    /// Errors of [`Want::choose`]; when a manifest is named that is not there, nothing matches, or a file's path,
    /// length or hash cannot be used.
    pub fn select(
        &self,
        listing: &Listing,
        is_manifest: impl Fn(&str) -> bool,
    ) -> Result<Selection> {
        let found = bundles(listing.paths(), is_manifest);
        let bundle = self.choose(&listing.name, &found)?;
        let manifest =
            self.manifest.as_deref().map(|name| chosen_manifest(bundle, name)).transpose()?;
        let globs = globs(&self.include)?;
        let is_other = |path: &str| {
            manifest.is_some_and(|wanted| wanted != path)
                && bundle.manifests.iter().any(|m| m == path)
        };
        let wanted = |file: &&RemoteFile| {
            within(&file.path, &bundle.path).is_some_and(|path| {
                // Without a manifest it is no bundle.
                let included = self.include.is_empty()
                    || globs.is_match(path)
                    || bundle.manifests.iter().any(|manifest| manifest == path);
                included && !is_other(path) && !is_hidden(path)
            })
        };
        let files = listing.files.iter().filter(wanted);
        let whole = self.is_whole();
        Ok(Selection { whole, ..Selection::of(listing, Kind::Bundle, &bundle.path, files)? })
    }
}

/// Files of Git's own, and what tools leave.
fn is_hidden(path: &str) -> bool {
    path.split('/').any(|part| part.starts_with('.') && part != ".." && part != ".")
}

fn chosen_manifest<'a>(bundle: &'a BundleFolder, name: &str) -> Result<&'a str> {
    let with_end = format!("{name}.json");
    let found =
        bundle.manifests.iter().find(|manifest| **manifest == name || **manifest == with_end);
    found.map(String::as_str).ok_or_else(|| {
        error!(Usage, "{:?}: there is no manifest {name:?}", bundle.path)
            .hint(format!("it has {}", bundle.manifests.join(", ")))
    })
}

fn globs(patterns: &[String]) -> Result<GlobSet> {
    let wrong = |e| Error::caused(ErrorKind::Usage, "--include", e);
    let mut set = GlobSetBuilder::new();
    for pattern in patterns {
        set.add(GlobBuilder::new(pattern).literal_separator(false).build().map_err(wrong)?);
    }
    set.build().map_err(wrong)
}

impl Selection {
    fn of<'a>(
        listing: &Listing,
        kind: Kind,
        folder: &str,
        files: impl Iterator<Item = &'a RemoteFile>,
    ) -> Result<Self> {
        Self::of_read(listing, kind, folder, files, |_| false)
    }

    /// [`Selection::of`]; files for which `read` is true are no programs by their names.
    fn of_read<'a>(
        listing: &Listing,
        kind: Kind,
        folder: &str,
        files: impl Iterator<Item = &'a RemoteFile>,
        read: impl Fn(&RemoteFile) -> bool,
    ) -> Result<Self> {
        let (programs, files): (Vec<_>, Vec<_>) =
            files.partition(|file| is_program_name(&file.path) && !read(file));
        let files = files.into_iter().map(Chosen::of).collect::<Result<Vec<_>>>()?;
        check_apart(&files)?;
        if files.is_empty() {
            return Err(error!(Usage, "{}: nothing of it is wanted", listing.name)
                .hint("is the pattern of --include right?"));
        }
        Ok(Self {
            name: listing.name.clone(),
            commit: listing.commit.clone(),
            kind,
            folder: folder.to_owned(),
            files,
            left_out: programs.into_iter().map(|file| file.path.clone()).collect(),
            whole: true,
        })
    }

    /// The list of modules of `sentence-transformers` beside a checkpoint, if there is one: it names folders that
    /// [`Selection::checkpoint`] is to take.
    ///
    /// # Errors
    /// When its path, length or hash cannot be used.
    pub fn modules(listing: &Listing) -> Result<Option<Self>> {
        let folder = listing.name.folder.clone().unwrap_or_default();
        let listed = |file: &&RemoteFile| within(&file.path, &folder) == Some(MODULES);
        let mut files = listing.files.iter().filter(listed).peekable();
        if files.peek().is_none() {
            return Ok(None);
        }
        let selection = Self::of(listing, Kind::Checkpoint, &folder, files)?;
        Ok(Some(Self { whole: false, ..selection }))
    }

    /// Files that a bundle is made of: the checkpoint in the repository, or in a folder of it, or one GGUF file or one
    /// archive of NeMo.
    /// `modules` are the folders of further modules.
    ///
    /// # Errors
    /// When there is none, or GGUF files are several and none is named.
    pub fn checkpoint(
        listing: &Listing,
        wanted: CheckpointFiles,
        modules: &[String],
    ) -> Result<Self> {
        let folder = listing.name.folder.clone().unwrap_or_default();
        let (place, named) = match is_model(&folder) {
            true => (split(&folder).0.to_owned(), Some(folder.as_str())),
            false => (folder.clone(), None),
        };
        let here = |file: &&RemoteFile| split(&file.path).0 == place;
        let ends = |file: &RemoteFile, end: &str| file.path.to_ascii_lowercase().ends_with(end);
        let names = || listing.files.iter().filter(here).map(|file| split(&file.path).1);
        let form = Weights::ALL.into_iter().find(|form| names().any(|name| form.has(name)));
        let form = form.filter(|form| named.is_none() && form.is_one(names()));
        // Published files of several models have others beside the one that is read.
        let sharded = names().any(|name| name.starts_with("model") && Weights::Safe.has(name));
        let model = if form.is_some() { None } else { Some(one_file(listing, &place, named)?) };
        let is_weights = |file: &RemoteFile| {
            let (inner, name) = split(within(&file.path, &place).unwrap_or_default());
            match (form, inner) {
                (None, _) => false,
                (Some(_), "") if TOKEN_HEADS.contains(&name) => true,
                (Some(Weights::Safe), "") if sharded => {
                    name.starts_with("model") && Weights::Safe.has(name)
                }
                (Some(Weights::Onnx), "") => Weights::Onnx.has(name) || name.ends_with(VOICES),
                (Some(form), "") => form.has(name),
                (Some(Weights::Pth), "voices") => name.ends_with(".pt"),
                (Some(_), module) if modules.iter().any(|folder| folder == module) => {
                    let folder = split(&file.path).0;
                    let newer = format!("{folder}/model.safetensors");
                    name == "model.safetensors"
                        || name == "pytorch_model.bin" && !listing.paths().any(|path| path == newer)
                }
                _ => false,
            }
        };
        let configures = |file: &RemoteFile| {
            let inner = within(&file.path, &place).unwrap_or_default();
            let (inner, name) = split(inner);
            let is_read = ["", POOLING, "additional_chat_templates", "llm_backbone"]
                .contains(&inner)
                || modules.iter().any(|folder| folder == inner);
            let ends = [".json", ".jinja", ".txt", ".model"].iter().any(|end| name.ends_with(end));
            within(&file.path, &place).is_some() && is_read && ends && !is_hidden(name)
        };
        let files = listing.files.iter().filter(|file| {
            let weights = match &model {
                None => within(&file.path, &place).is_some() && is_weights(file),
                Some(parts) => parts.contains(&file.path.as_str()),
            };
            configures(file) || (weights && wanted == CheckpointFiles::All)
        });
        let folder = match &model {
            Some(parts) if !parts.is_empty() => parts.first().map_or(place.as_str(), |part| part),
            _ => &place,
        };
        let configured = listing.files.iter().filter(here).any(|file| ends(file, "config.json"));
        if !configured && model.is_none() {
            return Err(no_checkpoint(listing));
        }
        let whole = wanted == CheckpointFiles::All;
        // What the forge reads of `torch.save` is read and not run, whatever it is called.
        let read = |file: &RemoteFile| is_weights(file);
        Ok(Self { whole, ..Self::of_read(listing, Kind::Checkpoint, folder, files, read)? })
    }

    /// Bytes of all files.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|file| file.bytes).sum()
    }
}

fn no_checkpoint(listing: &Listing) -> Error {
    error!(Usage, "{}: there is no checkpoint in it", listing.name)
        .hint("a checkpoint is config.json with *.safetensors, pytorch_model.bin, one .pth file, or one .onnx file with voices (.npz), or a .gguf or .nemo file")
}

/// The forms in which a checkpoint's weights are read, but for GGUF.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Weights {
    Safe,
    Bin,
    Pth,
    /// An ONNX file with voices beside it.
    Onnx,
}

impl Weights {
    /// All of them, the preferred first.
    const ALL: [Self; 4] = [Self::Safe, Self::Bin, Self::Pth, Self::Onnx];

    /// True for the name of such a file.
    fn has(self, name: &str) -> bool {
        match self {
            Self::Safe => name.ends_with(".safetensors"),
            Self::Bin => is_torch(name),
            Self::Pth => name.ends_with(".pth"),
            Self::Onnx => name.ends_with(".onnx"),
        }
    }

    /// True where the files of these names are one model: `.pth` and `.onnx` files have no index.
    fn is_one<'a>(self, names: impl Iterator<Item = &'a str> + Clone) -> bool {
        match self {
            Self::Safe | Self::Bin => true,
            Self::Onnx if !names.clone().any(|name| name.ends_with(VOICES)) => false,
            Self::Pth | Self::Onnx => names.filter(|name| self.has(name)).count() == 1,
        }
    }
}

/// True for `pytorch_model.bin` and `pytorch_model-00001-of-00002.bin`, and not for variants such as
/// `pytorch_model.fp16.bin`.
fn is_torch(name: &str) -> bool {
    let stem = name.strip_prefix("pytorch_model").and_then(|rest| rest.strip_suffix(".bin"));
    stem.is_some_and(|stem| stem.is_empty() || stem.starts_with('-'))
}

/// The folders of modules that a `modules.json` names, each the name of a folder beside it.
pub(crate) fn module_folders(modules: &[u8]) -> Vec<String> {
    #[derive(serde::Deserialize)]
    struct Module {
        #[serde(default)]
        path: String,
    }
    // What is wrong with it is reported by who reads it.
    let modules: Vec<Module> = serde_json::from_slice(modules).unwrap_or_default();
    let folders = modules.into_iter().map(|module| module.path);
    folders.filter(|path| !path.is_empty() && !path.contains('/') && is_safe_path(path)).collect()
}

/// True for the name of a file that is a whole model: llama.cpp's, and NeMo's archives.
pub(crate) fn is_model(path: &str) -> bool {
    let end = path.rsplit_once('.').map_or("", |(_, end)| end);
    ["gguf", "nemo"].iter().any(|model| end.eq_ignore_ascii_case(model))
}

/// Name and number of files that a GGUF model was split into: `x-00001-of-00003.gguf` is of `x`.
fn gguf_model(path: &str) -> &str {
    let stem = path.rsplit_once('.').map_or(path, |(stem, _)| stem);
    let split = || {
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (rest, number) = rest.rsplit_once('-')?;
        let digits = |text: &str| text.len() == 5 && text.bytes().all(|b| b.is_ascii_digit());
        (digits(count) && digits(number)).then_some(rest)
    };
    split().unwrap_or(stem)
}

/// The parts of the one model of a folder whose files are models, or of the one that is named.
fn one_file<'a>(listing: &'a Listing, folder: &str, named: Option<&str>) -> Result<Vec<&'a str>> {
    let mut models: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for path in listing.paths().filter(|path| split(path).0 == folder) {
        let name = split(path).1.to_ascii_lowercase();
        // The towers of images, which llama.cpp keeps apart.
        if is_model(&name) && !name.starts_with("mmproj") {
            models.entry(gguf_model(path)).or_default().push(path);
        }
    }
    models.values_mut().for_each(|parts| parts.sort_unstable());
    if let Some(named) = named {
        let found = models.into_values().find(|parts| parts.contains(&named));
        return found.ok_or_else(|| {
            error!(Usage, "{}: there is no such file", listing.name)
                .hint("compare the name with the repository's page")
        });
    }
    if models.len() > 1 {
        let names: Vec<_> = models.values().filter_map(|parts| parts.first().copied()).collect();
        let example = listing.name.clone().within(names.first().unwrap_or(&""));
        return Err(error!(
            Usage,
            "{}: which file? There is {}",
            listing.name.repository(),
            names.join(", ")
        )
        .hint(format!("choose one: {example}")));
    }
    models.into_values().next().ok_or_else(|| no_checkpoint(listing))
}

impl Chosen {
    fn of(file: &RemoteFile) -> Result<Self> {
        let refused = |what: &str| {
            error!(Artifact, "{:?}: {what}", file.path)
                .hint("the repository is not what qhx fetches from; tell its author")
        };
        if !is_safe_path(&file.path) {
            return Err(refused("a path that leaves its folder, or is none on every system"));
        }
        let (Some(bytes), Some(blob)) = (file.bytes, file.blob.clone()) else {
            return Err(refused("the hub gives no length or no hash of it"));
        };
        Ok(Self { path: file.path.clone(), bytes, blob })
    }
}

/// Refuses files that would be one file where letters have no case, and a file in the place of a folder.
fn check_apart(files: &[Chosen]) -> Result<()> {
    let paths: BTreeSet<_> = files.iter().map(|file| file.path.to_lowercase()).collect();
    let clash = |file: &&Chosen| {
        let lower = file.path.to_lowercase();
        let mut above = lower.match_indices('/').filter_map(|(at, _)| lower.get(..at));
        above.any(|folder| paths.contains(folder))
    };
    let twice = files.len() != paths.len();
    match files.iter().find(clash) {
        None if !twice => Ok(()),
        found => {
            let what = found.map_or("two files", |file| &file.path);
            Err(error!(Artifact, "{what}: a path of another file, where letters have no case"))
        }
    }
}

#[cfg(test)]
mod tests;
