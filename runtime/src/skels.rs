//! Says to the DSP's loader where the libraries for the DSP are, the skels: beside libQnnHtp in most cases.
//!
//! The loader reads a variable of the process's environment when the first of them is opened.

#![expect(
    unsafe_code,
    reason = "sets a variable of the environment, which no other thread may read meanwhile"
)]

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use qhx_qnn::{Platform, SKEL_FOLDERS};

use crate::libraries::LibraryFiles;

/// Sets the variable for the libraries that `files` name, unless it is set already. Where the libraries emulate the NPU
/// there are no skels, and nothing is done.
///
/// To be called by `main`, before anything else: no other thread may run yet.
pub fn announce(files: &LibraryFiles) {
    if Platform::is_emulated() || env::var_os(SKEL_FOLDERS).is_some_and(|value| !value.is_empty()) {
        return;
    }
    // What is wrong with them is reported when the libraries are opened.
    let Ok(Some(libraries)) = files.find() else { return };
    let search = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let Some(value) = value(&folders(&libraries.htp, &search)) else { return };
    // SAFETY: `main` calls this while there is one thread, as the function's description demands.
    unsafe { env::set_var(SKEL_FOLDERS, value) };
}

/// Folders, parted as the DSP's loader wants it.
fn value(folders: &[PathBuf]) -> Option<OsString> {
    let mut value = OsString::new();
    for folder in folders {
        if !value.is_empty() {
            value.push(";");
        }
        value.push(folder);
    }
    (!value.is_empty()).then_some(value)
}

/// Folders of skels that belong to `htp`: its own, or else those of the same QAIRT SDK, where the libraries of a
/// platform lie in `lib/aarch64-android` and skels in `lib/hexagon-v81/unsigned`. A bare file name is looked for in the
/// folders of `search`, as the system's loader does.
fn folders(htp: &Path, search: &OsString) -> Vec<PathBuf> {
    let mut beside: Vec<PathBuf> = htp.parent().into_iter().map(Path::to_owned).collect();
    if htp.components().count() == 1 && !htp.exists() {
        beside = env::split_paths(search).filter(|folder| folder.join(htp).exists()).collect();
    }
    let Some(Ok(own)) = beside.first().map(|folder| std::path::absolute(folder.join("."))) else {
        return Vec::new();
    };
    if has_skel(&own) {
        return vec![own];
    }
    let Some(Ok(others)) = own.parent().map(fs::read_dir) else { return Vec::new() };
    let mut of_sdk: Vec<PathBuf> = others
        .filter_map(Result::ok)
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("hexagon-v"))
        .map(|entry| entry.path().join("unsigned"))
        .filter(|folder| has_skel(folder))
        .collect();
    of_sdk.sort();
    of_sdk
}

fn has_skel(folder: &Path) -> bool {
    let is_skel = |name: &str| name.starts_with("libQnnHtpV") && name.ends_with("Skel.so");
    fs::read_dir(folder).is_ok_and(|entries| {
        entries.filter_map(Result::ok).any(|entry| is_skel(&entry.file_name().to_string_lossy()))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: PathBuf) -> PathBuf {
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(&path, b"").expect("a file");
        path
    }

    #[test]
    fn skels_are_found_beside_the_library_and_in_the_sdk() {
        let root = tempfile::tempdir().expect("a folder");
        let root = root.path();
        let none = OsString::new();
        let htp = file(root.join("lib/aarch64-android/libQnnHtp.so"));
        assert_eq!(folders(&htp, &none), Vec::<PathBuf>::new());
        let v79 = file(root.join("lib/hexagon-v79/unsigned/libQnnHtpV79Skel.so"));
        let v81 = file(root.join("lib/hexagon-v81/unsigned/libQnnHtpV81Skel.so"));
        file(root.join("lib/hexagon-v68/signed/libQnnHtpV68Skel.so"));
        let of_sdk = folders(&htp, &none);
        assert_eq!(of_sdk, [v79.parent().expect("a folder"), v81.parent().expect("a folder")]);
        let value = value(&of_sdk).expect("a value").into_string().expect("UTF-8");
        assert_eq!(value.split(';').count(), 2, "{value}");
        // What lies beside the library is what came with it.
        let own = file(root.join("lib/aarch64-android/libQnnHtpV81Skel.so"));
        let own = own.parent().expect("a folder");
        assert_eq!(folders(&htp, &none), [own]);
        // As bundles document it: bare names, and the folder is the loader's.
        assert_eq!(folders(Path::new("libQnnHtp.so"), &own.into()), [own]);
        assert_eq!(folders(Path::new("libQnnHtp.so"), &none), Vec::<PathBuf>::new());
    }
}
