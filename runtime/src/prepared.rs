//! Bundles that were prepared on this machine: context binaries for its chip, compiled once from a portable bundle.
//!
//! A portable bundle has none. `qhx prepare` puts a bundle with them into `prepared/<key>` beside its files, or, where
//! that folder cannot be written, into the user's cache folder. Opening the portable bundle then takes that one.

use std::path::{Path, PathBuf};

use qhx_core::hash::sha256;
use qhx_core::manifest::Manifest;
use qhx_core::qnn::{Platform, Target};
use qhx_core::rights::runs_with_extra_rights;
use qhx_core::{Error, ErrorKind, Result};
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
/// Prepared bundles that are looked at.
const MAX_CANDIDATES: usize = 256;

/// What a prepared bundle was made of and for.
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
    /// What is made of the portable bundle for a chip, with a library of this build.
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

    /// What a bundle's manifest says of this; none where it was not prepared.
    fn of(manifest: &Manifest) -> Option<Self> {
        serde_json::from_value(manifest.raw.get(PREPARED)?.clone()).ok()
    }

    /// True when its context binaries run on `chip`; on any where that is not known.
    fn fits(&self, chip: Option<Target>) -> bool {
        let needed = self.target.vtcm_mb.unwrap_or(0);
        chip.is_none_or(|chip| {
            chip.arch == self.target.arch
                && chip.soc == self.target.soc
                && chip.vtcm_mb.is_none_or(|there| needed <= there)
        })
    }
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
    let chip = if Platform::is_emulated() { " --target v81" } else { "" };
    format!("qhx prepare {}{chip}", folder.display())
}

/// Where bundles that are prepared of this one may lie, the first choice first.
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

/// The bundle that was prepared of a portable one for the chip of this machine with these libraries, and is whole.
///
/// # Errors
/// When the libraries cannot be opened.
pub fn find(manifest: &Manifest, libraries: &Libraries) -> Result<Option<Bundle>> {
    let mut candidates = Vec::new();
    for folder in folders(manifest) {
        // Absent as a rule.
        let Ok(entries) = std::fs::read_dir(&folder) else { continue };
        let paths = entries.filter_map(|entry| Some(entry.ok()?.path()));
        let mut paths: Vec<_> = paths.take(MAX_CANDIDATES).collect();
        // The latest architecture first, for the emulator.
        paths.sort_by(|a, b| b.cmp(a));
        candidates.extend(paths);
    }
    let source =
        if candidates.is_empty() { None } else { Some(hash(&manifest.path, &manifest.raw)?) };
    candidates.retain(|path| is_named(path));
    let candidates = candidates.into_iter().filter_map(|path| Bundle::open_one(&path, None).ok());
    let made_of_it = candidates.filter_map(|bundle| {
        let prepared = Prepared::of(bundle.manifest())?;
        (Some(&prepared.source) == source.as_ref()).then_some((bundle, prepared))
    });
    let made_of_it: Vec<_> = made_of_it.collect();
    if made_of_it.is_empty() {
        return Ok(None);
    }
    let library = libraries.open()?;
    // Where it is not known, the backend compares architectures.
    let chip = chip(libraries).unwrap_or_default();
    let mut fitting = made_of_it.into_iter().filter(|(bundle, prepared)| {
        let fits = prepared.build_id == library.build_id() && prepared.fits(chip);
        fits && is_whole(bundle.manifest())
    });
    Ok(fitting.next().map(|(bundle, _)| bundle))
}

/// The name is one that [`Prepared::key`] gives.
fn is_named(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with('v'))
}

/// True when every file that the manifest lists is there with its length.
pub fn is_whole(manifest: &Manifest) -> bool {
    let artifacts = manifest.open_artifacts();
    manifest.artifacts.files.iter().all(|(path, expected)| {
        let found = artifacts
            .resolve("/artifacts/files", path)
            .and_then(|file| file.metadata().map_err(|e| Error::io(ErrorKind::Artifact, &file, e)));
        found.is_ok_and(|found| {
            found.is_file() && expected.bytes.is_none_or(|bytes| bytes == found.len())
        })
    })
}
