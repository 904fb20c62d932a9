//! A folder with the bundles of one model for several architectures: `qwen35` with `v73`, `v79` and `v81`, as bundles
//! are published.

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_core::manifest::candidates;
use qhx_qnn::runs_on;
use serde::Serialize;

/// The bundle of one architecture within a folder of several.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[non_exhaustive]
pub struct TargetFolder {
    /// Hexagon architecture that its name says: 73 for `v73`.
    pub arch: u32,
    /// The bundle's folder.
    pub path: PathBuf,
}

/// The bundles in `folder` by architecture, the oldest first. Empty where the folder holds a manifest itself, so that
/// it is a bundle, or where it holds no folders that are called `v73` or the like and hold one.
pub fn targets(folder: &Path) -> Vec<TargetFolder> {
    if !folder.is_dir() || candidates(folder).map_or(true, |found| !found.is_empty()) {
        return Vec::new();
    }
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let path = entry.ok()?.path();
            let digits = path.file_name()?.to_str()?.strip_prefix('v')?;
            let arch =
                digits.parse().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit()))?;
            let holds_one = path.is_dir() && candidates(&path).is_ok_and(|found| !found.is_empty());
            holds_one.then_some(TargetFolder { arch, path })
        })
        .collect();
    found.sort();
    found
}

/// Bundle for a device of the architecture `arch`: the one of that architecture, otherwise the newest one that the
/// device runs. For an unknown device, such as an emulator, which runs all, it is the newest.
///
/// # Errors
/// When the device runs none of them.
pub fn choose(targets: &[TargetFolder], arch: Option<u32>) -> Result<&TargetFolder> {
    let runs = |target: &&TargetFolder| arch.is_none_or(|device| runs_on(target.arch, device));
    targets.iter().rev().find(runs).ok_or_else(|| {
        let folder =
            targets.first().and_then(|target| target.path.parent()).unwrap_or(Path::new("."));
        let list: Vec<_> = targets.iter().map(|target| format!("v{}", target.arch)).collect();
        let device =
            arch.map_or_else(|| "this device".to_owned(), |arch| format!("this v{arch} device"));
        let message = format!("{}: {device} runs none of {}", folder.display(), list.join(", "));
        let target = arch.map_or_else(|| "this".to_owned(), |arch| format!("v{arch}"));
        let hint =
            format!("forge the bundle for it: qhx forge CHECKPOINT --out FOLDER --target {target}");
        Error::new(ErrorKind::Manifest, message).hint(hint)
    })
}

/// The bundle that `path` means: itself, or where it holds bundles of several architectures the one for a device of the
/// architecture `arch`, which is asked for then only.
pub(crate) fn resolve(path: &Path, arch: impl FnOnce() -> Option<u32>) -> Result<PathBuf> {
    let targets = targets(path);
    if targets.is_empty() {
        return Ok(path.to_owned());
    }
    let chosen = choose(&targets, arch())?;
    tracing::info!(folder = %chosen.path.display(), "the folder holds bundles of several architectures");
    Ok(chosen.path.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            std::fs::create_dir(folder.path().join(name)).unwrap();
            std::fs::write(folder.path().join(name).join("m.json"), "{}").unwrap();
        }
        folder
    }

    #[test]
    fn a_device_takes_its_own_or_the_newest_that_it_runs() {
        let folder = folder(&["v68", "v73", "v79", "v81", "onnx", "v", "vx", "v+7"]);
        std::fs::create_dir(folder.path().join("v75")).unwrap();
        let targets = targets(folder.path());
        let archs: Vec<_> = targets.iter().map(|target| target.arch).collect();
        assert_eq!(archs, [68, 73, 79, 81], "an empty folder is no bundle");
        for (device, taken) in
            [(Some(79), 79), (Some(75), 73), (Some(85), 81), (Some(69), 68), (None, 81)]
        {
            assert_eq!(choose(&targets, device).unwrap().arch, taken, "{device:?}");
        }
        let error = choose(&targets[1..], Some(69)).unwrap_err();
        assert!(error.message().ends_with("this v69 device runs none of v73, v79, v81"), "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.ends_with("--target v69")));
    }

    #[test]
    fn a_bundle_is_no_folder_of_bundles() {
        let folder = folder(&["v73"]);
        std::fs::write(folder.path().join("manifest.json"), "{}").unwrap();
        assert!(targets(folder.path()).is_empty());
        assert!(targets(&folder.path().join("absent")).is_empty());
        assert_eq!(resolve(folder.path(), || Some(81)).unwrap(), folder.path());
    }
}
