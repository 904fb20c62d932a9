//! Files that a phone needs: the program, Qualcomm's libraries, plugins, a bundle.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::path::{Path, PathBuf};

use qhx::npu_files::{ANDROID, NpuFile};
use qhx::{prepared, vars};
use qhx_base::hash::sha256;
use qhx_base::{CancelToken, Error, ErrorKind, Result, error};
use qhx_core::Manifest;

use super::PushOptions;

/// Name of the program on the phone.
pub(super) const NAME: &str = "qhx";
/// Folder there for what the program remembers, beside the files that are copied.
pub(super) const CACHE: &str = "cache";
/// Folder there for plugins.
pub(super) const PLUGINS: &str = "plugins";
/// The folder of a bundle's graphs for the CPU.
const ONNX: &str = "onnx";

/// A file of this machine and its place on the phone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    /// Here.
    pub from: PathBuf,
    /// There, below the folder of all; parts are parted by `/`.
    pub to: String,
    pub bytes: u64,
    pub hash: String,
}

/// Files to have on the phone.
#[derive(Debug)]
pub(super) struct Files {
    pub items: Vec<Item>,
    /// Name of the bundle's folder.
    pub bundle: String,
    /// The bundle's manifest there.
    pub manifest: String,
    /// It has graphs to prepare on the phone.
    pub portable: bool,
    /// Origin of the libraries.
    pub libraries: String,
}

impl Files {
    /// Files for a bundle on a phone of this architecture, where those in `there` are already.
    pub(super) fn new(
        options: &PushOptions,
        manifest: &Manifest,
        phone: Option<u32>,
        there: &HashMap<String, String>,
        cancel: &CancelToken,
    ) -> Result<Self> {
        let bundle = folder_name(manifest)?;
        let portable = prepared::is_portable(manifest);
        let mut copies = vec![(options.program.clone(), NAME.to_owned())];
        for plugin in &options.plugins {
            let name = plugin.file_name().unwrap_or_default().to_string_lossy();
            copies.push((plugin.clone(), format!("{PLUGINS}/{name}")));
        }
        // The libraries are the phone's, also where the bundle is for an older one.
        let mut needed = NpuFile::all(ANDROID, phone.or(manifest.model.dsp_arch));
        needed.extend(portable.then(|| NpuFile::compiler(ANDROID)));
        let (libraries, origin) = libraries(options, &needed, there)?;
        copies.extend(libraries);
        collect(&manifest.root, &bundle, options.onnx || portable, &mut copies)?;
        let file = manifest.path.file_name().unwrap_or_default().to_string_lossy();
        let path = format!("{bundle}/{file}");
        if !copies.iter().any(|(_, to)| *to == path) {
            copies.push((manifest.path.clone(), path.clone()));
        }
        let items = copies.into_iter().map(|(from, to)| Item::read(from, to, cancel));
        let items = items.collect::<Result<_>>()?;
        Ok(Self { items, bundle, manifest: path, portable, libraries: origin })
    }

    /// The bundle on the phone, as the program there takes it.
    pub(super) fn bundle_path(&self) -> &str {
        &self.manifest
    }

    /// Folders on the phone that have files of it, beside the folder of all.
    pub(super) fn below(&self) -> [&str; 2] {
        [PLUGINS, &self.bundle]
    }

    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.items.iter().map(|item| item.bytes).sum()
    }

    /// SHA-256 of the files whose places on the phone `wanted` accepts.
    pub(super) fn hashes(&self, wanted: impl Fn(&str) -> bool) -> BTreeMap<String, String> {
        let wanted = self.items.iter().filter(|item| wanted(&item.to));
        wanted.map(|item| (item.to.clone(), item.hash.clone())).collect()
    }
}

impl Item {
    fn read(from: PathBuf, to: String, cancel: &CancelToken) -> Result<Self> {
        let io = |e| Error::io(ErrorKind::Io, &from, e);
        let file = File::open(&from).map_err(io)?;
        let bytes = file.metadata().map_err(io)?.len();
        let hash = sha256(ErrorKind::Artifact, &from, file, |_| cancel.check())?;
        Ok(Self { bytes, hash, to, from })
    }
}

/// Name of a bundle's folder, which it has on the phone, too.
pub(super) fn folder_name(manifest: &Manifest) -> Result<String> {
    let io = |e: std::io::Error| Error::io(ErrorKind::Artifact, &manifest.root, e);
    let root = manifest.root.canonicalize().map_err(io)?;
    Ok(root.file_name().unwrap_or_default().to_string_lossy().into_owned())
}

/// Bytes of the files below a folder.
pub(super) fn size(folder: &Path) -> u64 {
    let mut files = Vec::new();
    // What cannot be read has no size, and is an error once it is copied.
    let _ = collect(folder, "", true, &mut files);
    files.iter().filter_map(|(path, _)| Some(path.metadata().ok()?.len())).sum()
}

/// Checks that the program for phones is there.
pub(super) fn check_program(path: &Path) -> Result<()> {
    if path.is_file() {
        return Ok(());
    }
    Err(error!(Usage, "{}: there is no such program", path.display()).hint(
        "build it: cargo build --release --target aarch64-linux-android --package qhx-cli --features builtin-ops, or \
         give it with --program FILE",
    ))
}

/// Adds the files of a folder, with those of the CPU if `onnx`.
fn collect(folder: &Path, to: &str, onnx: bool, copies: &mut Vec<(PathBuf, String)>) -> Result<()> {
    let io = |e: std::io::Error| Error::io(ErrorKind::Artifact, folder, e);
    let mut entries: Vec<_> =
        std::fs::read_dir(folder).and_then(Iterator::collect::<std::io::Result<_>>).map_err(io)?;
    entries.sort_by_key(std::fs::DirEntry::file_name);
    for entry in entries {
        let (path, name) = (entry.path(), entry.file_name());
        let to = format!("{to}/{}", name.to_string_lossy());
        if path.is_file() {
            copies.push((path, to));
        } else if path.is_dir() && (onnx || name != ONNX) {
            collect(&path, &to, onnx, copies)?;
        }
    }
    Ok(())
}

/// The libraries to copy, and where they are from: the folder that is given, or that of the QAIRT SDK, or none where
/// the phone has them all. Those that are missing are named one by one.
fn libraries(
    options: &PushOptions,
    needed: &[NpuFile],
    there: &HashMap<String, String>,
) -> Result<(Vec<(PathBuf, String)>, String)> {
    let in_folder = |folder: &Path| {
        let (mut copies, mut missing) = (Vec::new(), Vec::new());
        for file in needed {
            match file.find(folder) {
                Some(from) => {
                    let name = from.file_name().unwrap_or_default().to_string_lossy().into_owned();
                    copies.push((from, name));
                }
                None => missing.push(file.to_string()),
            }
        }
        if missing.is_empty() { Ok(copies) } else { Err(missing.join(", ")) }
    };
    if let Some(folder) = &options.libraries {
        return match in_folder(folder) {
            Ok(copies) => Ok((copies, "--libraries".to_owned())),
            Err(missing) => Err(error!(Runtime, "{} lacks {missing}", folder.display())
                .hint("give the root of the QAIRT SDK, or a folder with these files")),
        };
    }
    let mut tried = String::new();
    for name in [vars::QAIRT_SDK_ROOT, vars::QNN_SDK_ROOT] {
        let Some(folder) = vars::get(name).map(PathBuf::from) else { continue };
        match in_folder(&folder) {
            Ok(copies) => return Ok((copies, name.to_owned())),
            Err(missing) => {
                tried = format!("{tried}; {name}={} lacks {missing}", folder.display());
            }
        }
    }
    let lacks = |file: &&NpuFile| !there.keys().any(|name| file.is(name));
    let missing: Vec<_> = needed.iter().filter(lacks).map(NpuFile::to_string).collect();
    if missing.is_empty() {
        return Ok((Vec::new(), "on the phone".to_owned()));
    }
    let missing = missing.join(", ");
    Err(error!(Runtime, "{} on the phone lacks {missing}{tried}", options.to)
        .hint("give the folder of the QAIRT SDK: --libraries DIR, or QAIRT_SDK_ROOT"))
}
