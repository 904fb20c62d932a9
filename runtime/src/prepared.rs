//! Bundles that were prepared on this machine: context binaries for its chip, compiled once from a portable bundle.
//!
//! A portable bundle has none. `qhx prepare` puts a bundle with them into `prepared/<key>` beside its files, or, where
//! that folder cannot be written, into the user's cache folder. Opening the portable bundle then takes that one.

use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use qhx_base::hash::sha256;
use qhx_base::rights::runs_with_extra_rights;
use qhx_base::{Error, ErrorKind, Result, error};
use qhx_core::manifest::Manifest;
use qhx_qnn::{Platform, Target};
use serde::{Deserialize, Serialize};

use crate::bundle::Bundle;
use crate::cache;
use crate::libraries::Libraries;

/// The folder of prepared bundles, in that of the portable bundle and in the user's cache folder.
pub const FOLDER: &str = "prepared";
/// The key that portable bundles' manifests have.
const PORTABLE: &str = "portable";
/// The key that prepared bundles' manifests have.
const PREPARED: &str = "prepared";
/// Target of bundles prepared for the emulator, which has no chip of its own.
const EMULATED: Target = Target::V81;
/// Prepared bundles that are looked at.
const MAX_CANDIDATES: usize = 256;
/// Log of preparations in the background, in the folder of prepared bundles.
const LOG: &str = "prepare.log";
/// Bytes of the log from which on it is begun again.
const MAX_LOG: u64 = 64 << 10;

/// Source, chip and library build of a prepared bundle.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Prepared {
    /// SHA-256 of the portable bundle's manifest, which has the hashes of all its files.
    pub source: String,
    /// The chip.
    pub target: Target,
    /// The build of the library that compiled it.
    pub build_id: String,
}

impl Prepared {
    /// Description of the bundle that is prepared from a portable one for a chip, with a library of this build.
    ///
    /// # Errors
    /// When the manifest cannot be hashed.
    pub fn new(manifest: &Manifest, target: Target, build_id: &str) -> Result<Self> {
        let source = hash(&manifest.path, &manifest.raw)?;
        Ok(Self { source, target, build_id: build_id.to_owned() })
    }

    /// The name of its folder: the architecture, and a hash of all that it depends on.
    ///
    /// # Errors
    /// When it cannot be hashed.
    pub fn key(&self) -> Result<String> {
        // What another version compiles may differ.
        let hash = hash(Path::new(PREPARED), &(env!("CARGO_PKG_VERSION"), self))?;
        Ok(format!("{}-{}", self.target, hash.get(..16).unwrap_or(&hash)))
    }

    /// Entry of a bundle's manifest; `None` if the bundle was not prepared.
    pub fn of(manifest: &Manifest) -> Option<Self> {
        serde_json::from_value(manifest.raw.get(PREPARED)?.clone()).ok()
    }

    /// Why these context binaries are not for `chip`, or any chip where that is not known, and libraries of this build;
    /// none where they are.
    fn unfit(&self, chip: Option<Target>, build_id: &str) -> Option<String> {
        if self.build_id != build_id {
            return Some(format!("made by libraries of {}, these are {build_id}", self.build_id));
        }
        let chip = chip?;
        if (chip.arch, chip.soc) != (self.target.arch, self.target.soc) {
            return Some(format!("made for {}, this is {}", named(self.target), named(chip)));
        }
        let needed = self.target.vtcm_mb?;
        let there = chip.vtcm_mb.filter(|there| *there < needed)?;
        Some(format!(
            "made for {needed} MB of tightly coupled memory (VTCM), this chip has {there}"
        ))
    }
}

/// A chip in words.
fn named(chip: Target) -> String {
    let name = chip.name().unwrap_or_else(|| format!("SoC {}", chip.soc));
    if name == chip.to_string() { name } else { format!("{name} ({chip})") }
}

fn hash(path: &Path, value: &impl Serialize) -> Result<String> {
    let json = serde_json::to_vec(value)
        .map_err(|e| Error::caused(ErrorKind::Internal, path.display(), e))?;
    sha256(ErrorKind::Manifest, path, &json[..], |_| Ok(()))
}

/// True for a bundle that is compiled where it runs.
pub fn is_portable(manifest: &Manifest) -> bool {
    manifest.raw.get(PORTABLE).is_some()
}

/// The command that prepares a bundle.
pub fn how_to(manifest: &Manifest) -> String {
    let named = manifest.path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let folder = named.unwrap_or(Path::new("."));
    let chip =
        if Platform::is_emulated() { format!(" --target {EMULATED}") } else { String::new() };
    format!("qhx prepare {}{chip}", folder.display())
}

/// Candidate folders for bundles prepared from this one, the first choice first.
pub fn folders(manifest: &Manifest) -> Vec<PathBuf> {
    let beside = manifest.path.with_file_name(FOLDER);
    let cached = if runs_with_extra_rights() { None } else { cache::dir().ok() };
    std::iter::once(beside).chain(cached.map(|dir| dir.join(FOLDER))).collect()
}

/// The chip of this machine; none for the emulator, which runs the binaries of all, and where the library does not say.
///
/// # Errors
/// When the libraries or the device cannot be opened.
pub fn chip(libraries: &Libraries) -> Result<Option<Target>> {
    let Some(platform) = libraries.platform()? else { return Ok(None) };
    let (Some(arch), Some(soc)) = (platform.arch, platform.soc) else { return Ok(None) };
    let vtcm_mb = platform.vtcm_mb.and_then(|mb| u32::try_from(mb).ok()).filter(|mb| *mb > 0);
    Ok(Some(Target { arch, soc, vtcm_mb }))
}

/// A prepared bundle that is not taken.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unfit {
    /// Its folder.
    pub folder: PathBuf,
    /// Why not.
    pub reason: String,
}

impl std::fmt::Display for Unfit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.folder.display(), self.reason)
    }
}

/// Result of searching for bundles prepared from a portable one.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct Search {
    /// The one for the chip of this machine with these libraries, if it is whole.
    pub bundle: Option<Bundle>,
    /// Candidates that were checked first and do not fit.
    pub unfit: Vec<Unfit>,
}

/// The folders of prepared bundles below `folder`, the latest architecture first, for the emulator.
fn prepared_in(folder: &Path) -> Vec<PathBuf> {
    // Absent as a rule.
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let mut paths: Vec<_> = paths.filter(|path| is_named(path)).take(MAX_CANDIDATES).collect();
    paths.sort_by(|a, b| b.cmp(a));
    paths
}

/// Looks for the bundle that was prepared of a portable one for the chip of this machine with these libraries.
///
/// # Errors
/// When the libraries cannot be opened.
pub fn find(manifest: &Manifest, libraries: &Libraries) -> Result<Search> {
    let candidates: Vec<_> = folders(manifest).iter().flat_map(|dir| prepared_in(dir)).collect();
    let mut search = Search::default();
    if candidates.is_empty() {
        return Ok(search);
    }
    let source = hash(&manifest.path, &manifest.raw)?;
    let mut made_of_it = Vec::new();
    for folder in candidates {
        let Ok(bundle) = Bundle::open_one(&folder, None) else { continue };
        let record = Prepared::of(bundle.manifest()).filter(|record| record.source == source);
        made_of_it.extend(record.map(|record| (folder, bundle, record)));
    }
    if made_of_it.is_empty() {
        return Ok(search);
    }
    let library = libraries.open()?;
    // Where it is not known, the backend compares architectures.
    let chip = chip(libraries).unwrap_or_default();
    for (folder, bundle, record) in made_of_it {
        let damaged = || {
            let missing = first_missing(bundle.manifest())?;
            Some(format!("{missing} is missing or has another length"))
        };
        match record.unfit(chip, library.build_id()).or_else(damaged) {
            Some(reason) => search.unfit.push(Unfit { folder, reason }),
            None => {
                search.bundle = Some(bundle);
                break;
            }
        }
    }
    Ok(search)
}

/// Prepared bundles that these libraries and this qhx use no more: made of the same portable bundle by libraries or a
/// qhx of another version, and those beside the bundle that were made of an earlier one in its place.
///
/// # Errors
/// When a key cannot be made.
pub fn outdated(manifest: &Manifest, current: &Prepared) -> Result<Vec<Unfit>> {
    let mut found = Vec::new();
    for (index, dir) in folders(manifest).into_iter().enumerate() {
        let beside = index == 0;
        for folder in prepared_in(&dir) {
            // What is a link was put there by somebody else.
            let is_folder = std::fs::symlink_metadata(&folder).is_ok_and(|data| data.is_dir());
            let opened = Bundle::open_one(&folder, None).ok().filter(|_| is_folder);
            let Some(record) = opened.and_then(|bundle| Prepared::of(bundle.manifest())) else {
                continue;
            };
            let key = record.key()?;
            let is_key = folder.file_name().is_some_and(|name| *name == *key);
            let reason = if record.source != current.source {
                if !beside {
                    continue;
                }
                "made of an earlier bundle in this place".to_owned()
            } else if let Some(reason) = record.unfit(None, &current.build_id) {
                reason
            } else if !is_key {
                "made by another version of qhx".to_owned()
            } else {
                continue;
            };
            found.push(Unfit { folder, reason });
        }
    }
    Ok(found)
}

/// The first folder of [`folders`] that can be written.
///
/// # Errors
/// When none of them can.
pub fn writable(manifest: &Manifest) -> Result<PathBuf> {
    let mut refused = Vec::new();
    for folder in folders(manifest) {
        let probe = || {
            std::fs::create_dir_all(&folder)?;
            tempfile::Builder::new().prefix(".qhx-prepare-").tempfile_in(&folder).map(drop)
        };
        match probe() {
            Ok(()) => return Ok(folder),
            Err(e) => refused.push(format!("{}: {e}", folder.display())),
        }
    }
    Err(error!(Io, "there is no folder for the prepared bundle: {}", refused.join("; ")).hint(
        format!(
            "make the bundle's folder writable, or set {} to a folder that is",
            crate::vars::CACHE_DIR
        ),
    ))
}

/// A preparation in a process of its own.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Preparation {
    /// The number of the process.
    pub process: u32,
    /// The file that it reports to.
    pub log: PathBuf,
}

/// Starts `qhx`, the program, to prepare a bundle with these libraries, in a process that outlives this one and gets no
/// Ctrl-C. `arch` is that of the emulator, which has no chip of its own.
///
/// # Errors
/// When there is no folder for it, or the program cannot be started.
pub fn start(
    manifest: &Manifest,
    libraries: &Libraries,
    qhx: &Path,
    arch: Option<u32>,
) -> Result<Preparation> {
    let log = writable(manifest)?.join(LOG);
    let fail = |e| Error::io(ErrorKind::Io, &log, e);
    let long = log.metadata().is_ok_and(|data| data.len() > MAX_LOG);
    let mut options = File::options();
    let file = if long { options.write(true).truncate(true) } else { options.append(true) };
    let file = file.create(true).open(&log).map_err(fail)?;
    let target = match Platform::is_emulated() {
        true => format!("v{}", arch.unwrap_or(EMULATED.arch)),
        false => "this".to_owned(),
    };
    let bundle = std::path::absolute(&manifest.path);
    let bundle = bundle.map_err(|e| Error::io(ErrorKind::Io, &manifest.path, e))?;
    let words: [OsString; 9] = [
        "prepare".into(),
        "--target".into(),
        target.into(),
        "--htp".into(),
        libraries.htp.clone().into(),
        "--qnn-system".into(),
        libraries.system.clone().into(),
        "--".into(),
        bundle.into(),
    ];
    let mut command = Command::new(qhx);
    command.args(words).stdin(Stdio::null()).stdout(Stdio::null()).stderr(file);
    apart(&mut command);
    let mut child = command.spawn().map_err(|e| Error::io(ErrorKind::Io, qhx, e))?;
    let process = child.id();
    // A process that has ended stays in the table until somebody has waited for it.
    let waits = std::thread::Builder::new().name("qhx-prepare".to_owned());
    if let Err(e) = waits.spawn(move || child.wait()) {
        tracing::debug!("the process that prepares is not waited for: {e}");
    }
    Ok(Preparation { process, log })
}

/// Ctrl-C of this process's terminal is not for the other one.
fn apart(command: &mut Command) {
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(command, 0);
    #[cfg(windows)]
    {
        const CREATE_NEW_PROCESS_GROUP: u32 = 0x200;
        const CREATE_NO_WINDOW: u32 = 0x0800_0000;
        let flags = CREATE_NEW_PROCESS_GROUP | CREATE_NO_WINDOW;
        std::os::windows::process::CommandExt::creation_flags(command, flags);
    }
    #[cfg(not(any(unix, windows)))]
    let _ = command;
}

/// The name is one that [`Prepared::key`] gives.
fn is_named(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('v'))
}

/// True when every file that the manifest lists is there with its length.
pub fn is_whole(manifest: &Manifest) -> bool {
    first_missing(manifest).is_none()
}

/// A file that the manifest lists and that is not there with its length.
fn first_missing(manifest: &Manifest) -> Option<&str> {
    let artifacts = manifest.open_artifacts();
    let missing = manifest.artifacts.files.iter().find(|(path, expected)| {
        let found = artifacts
            .resolve("/artifacts/files", path)
            .and_then(|file| file.metadata().map_err(|e| Error::io(ErrorKind::Artifact, &file, e)));
        !found.is_ok_and(|found| {
            found.is_file() && expected.bytes.is_none_or(|bytes| bytes == found.len())
        })
    });
    missing.map(|(path, _)| path.as_str())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn for_chip(soc: &str) -> Prepared {
        let target = Target::named(soc).unwrap();
        Prepared { source: "s".to_owned(), target, build_id: "v2.51.0".to_owned() }
    }

    #[test]
    fn what_does_not_fit_says_why() {
        let chip = |soc: &str| Target::named(soc);
        let reason = |made: &str, chip, build| for_chip(made).unfit(chip, build);
        assert_eq!(reason("SM8550", chip("SM8550"), "v2.51.0"), None);
        assert_eq!(reason("SM8550", None, "v2.51.0"), None, "an emulator runs all");
        for (made, chip, build, expected) in [
            ("v81", None, "v2.50.0", "made by libraries of v2.51.0, these are v2.50.0"),
            ("v73", chip("x-elite"), "v2.51.0", "made for v73, this is SC8380XP (v73)"),
            ("v73", chip("v79"), "v2.51.0", "made for v73, this is v79"),
        ] {
            assert_eq!(reason(made, chip, build).as_deref(), Some(expected));
        }
        let smaller = Target { vtcm_mb: Some(4), ..Target::V73 };
        assert_eq!(
            for_chip("v73").unfit(Some(smaller), "v2.51.0").as_deref(),
            Some("made for 8 MB of tightly coupled memory (VTCM), this chip has 4")
        );
        let unknown = Target { vtcm_mb: None, ..Target::V73 };
        assert_eq!(for_chip("v73").unfit(Some(unknown), "v2.51.0"), None);
    }
}
