//! The files of Qualcomm's that a device with an NPU needs, and where in the QAIRT SDK they are.

use std::fmt;
use std::path::{Path, PathBuf};

/// The folder of libraries for Android in the SDK.
pub const ANDROID: &str = "lib/aarch64-android";

/// A file that a device needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NpuFile {
    /// Its name up to the architecture, or the whole name.
    start: String,
    /// Its name after the architecture, where that is not known.
    end: &'static str,
    /// Its folder in the SDK.
    folder: String,
}

impl NpuFile {
    /// All of them, for a platform (its folder in the SDK) and for an architecture: 81 for v81. Where that is not known
    /// any will do.
    pub fn all(platform: &str, arch: Option<u32>) -> Vec<Self> {
        let named =
            |name: &str| Self { start: name.to_owned(), end: "", folder: platform.to_owned() };
        let skels = arch.map_or_else(|| "v*".to_owned(), |arch| format!("v{arch}"));
        let per_arch = |end: &'static str, folder: String| match arch {
            Some(arch) => Self { start: format!("libQnnHtpV{arch}{end}"), end: "", folder },
            None => Self { start: "libQnnHtpV".to_owned(), end, folder },
        };
        vec![
            named("libQnnHtp.so"),
            named("libQnnSystem.so"),
            per_arch("Stub.so", platform.to_owned()),
            per_arch("Skel.so", format!("lib/hexagon-{skels}/unsigned")),
        ]
    }

    /// The compiler of portable bundles, which are prepared on the device.
    pub fn compiler(platform: &str) -> Self {
        Self { start: "libQnnHtpPrepare.so".to_owned(), end: "", folder: platform.to_owned() }
    }

    /// True for the name of such a file.
    pub fn is(&self, name: &str) -> bool {
        match name.strip_prefix(&*self.start) {
            Some(rest) if self.end.is_empty() => rest.is_empty(),
            Some(rest) => {
                let arch = rest.strip_suffix(self.end).unwrap_or_default();
                !arch.is_empty() && arch.bytes().all(|b| b.is_ascii_digit())
            }
            None => false,
        }
    }

    /// Finds it in a folder, or in its own folder of an SDK.
    pub fn find(&self, root: &Path) -> Option<PathBuf> {
        let in_folder = |folder: &Path| {
            let entries = std::fs::read_dir(folder).ok()?;
            let mut paths: Vec<_> = entries.filter_map(|entry| Some(entry.ok()?.path())).collect();
            paths.sort();
            let named =
                |path: &PathBuf| path.file_name().is_some_and(|n| self.is(&n.to_string_lossy()));
            paths.into_iter().filter(|path| path.is_file()).find(named)
        };
        in_folder(root).or_else(|| in_folder(&root.join(&self.folder)))
    }
}

impl fmt::Display for NpuFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let any = if self.end.is_empty() { "" } else { "*" };
        write!(f, "{}{any}{} (in the QAIRT SDK: {})", self.start, self.end, self.folder)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_missing_file_is_named_with_its_sdk_folder() {
        let names = |arch| {
            let files = NpuFile::all(ANDROID, arch);
            files.iter().map(NpuFile::to_string).collect::<Vec<_>>()
        };
        assert_eq!(
            names(Some(81)),
            [
                "libQnnHtp.so (in the QAIRT SDK: lib/aarch64-android)",
                "libQnnSystem.so (in the QAIRT SDK: lib/aarch64-android)",
                "libQnnHtpV81Stub.so (in the QAIRT SDK: lib/aarch64-android)",
                "libQnnHtpV81Skel.so (in the QAIRT SDK: lib/hexagon-v81/unsigned)",
            ]
        );
        assert_eq!(
            names(None)[3],
            "libQnnHtpV*Skel.so (in the QAIRT SDK: lib/hexagon-v*/unsigned)"
        );
    }

    #[test]
    fn files_are_found_in_one_folder_and_in_an_sdk() {
        let root = tempfile::tempdir().expect("a folder");
        let file = NpuFile::all(ANDROID, Some(79)).remove(3);
        assert_eq!(file.find(root.path()), None);
        let folder = root.path().join("lib/hexagon-v79/unsigned");
        std::fs::create_dir_all(&folder).expect("a folder");
        for folder in [folder, root.path().to_owned()] {
            let path = folder.join("libQnnHtpV79Skel.so");
            std::fs::write(&path, b"").expect("a file");
            assert_eq!(file.find(root.path()), Some(path));
        }
        let any = NpuFile::all(ANDROID, None).remove(3);
        assert!(any.is("libQnnHtpV81Skel.so") && !any.is("libQnnHtpVSkel.so"));
    }
}
