//! The manifest for winget, of three files around the zips for Windows.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::formula::filled;
use crate::cargo::{self, Result};
use crate::files::{read, write};
use crate::python;

/// The parts, with what winget's repository calls each.
const PARTS: [(&str, &str); 3] = [
    ("version", "Qhx.Qhx.yaml"),
    ("installer", "Qhx.Qhx.installer.yaml"),
    ("defaultLocale", "Qhx.Qhx.locale.en-US.yaml"),
];

/// Checks YAML.
const YAMLLINT: &str = "yamllint==1.37.1";

/// Writes the manifest, with the hashes of the zips at `url`, into a folder, and checks it. Returns the folder.
///
/// # Errors
/// A zip is not there, or the manifest is no YAML: for people.
pub(super) fn manifest(sums: &[(String, String)], url: &str, out: &Path) -> Result<PathBuf> {
    let folder = out.join("winget");
    let mut files = Vec::new();
    for (part, name) in PARTS {
        let template = read(&qhx_paths::workspace().join(format!("packaging/winget/{part}.yaml")))?;
        let text = filled(&template, ".zip", sums, url);
        files.push((folder.join(name), text.map_err(|why| format!("{part}: {why}"))?));
    }
    // All or none.
    for (file, text) in &files {
        write(file, text)?;
    }
    let rules = "{extends: default, rules: {line-length: disable, document-start: disable}}";
    let mut lint = Command::new(python::program(YAMLLINT, "yamllint")?);
    cargo::run(lint.args(["--strict", "--config-data", rules]).arg(&folder))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::release::{MACHINES, System, VERSION};

    #[test]
    fn a_manifest_has_each_zip_with_its_hash_and_programs() {
        if python::lacks(YAMLLINT, "yamllint") {
            return;
        }
        let out = tempfile::tempdir().unwrap();
        let machines = MACHINES.iter().filter(|machine| machine.system == System::Windows);
        let mut sums: Vec<_> = machines
            .enumerate()
            .map(|(index, machine)| {
                (format!("qhx-{VERSION}-{}.zip", machine.name), format!("{index:064x}"))
            })
            .collect();
        assert_eq!(sums.len(), 2);
        let folder = manifest(&sums, "https://example.org", out.path()).unwrap();
        let parts = PARTS.map(|(part, name)| {
            let text = read(&folder.join(name)).unwrap();
            assert!(text.contains(&format!("\nManifestType: {part}\n")), "{text}");
            assert!(text.contains(&format!("\nPackageVersion: \"{VERSION}\"\n")), "{text}");
            text
        });
        for (name, hash) in &sums {
            let lines =
                format!("\"https://example.org/{name}\"\n    InstallerSha256: \"{hash}\"\n");
            assert!(parts[1].contains(&lines), "{lines} is in\n{}", parts[1]);
            let folder = name.trim_end_matches(".zip");
            for program in python::PROGRAMS {
                let path = format!("RelativeFilePath: '{folder}\\{program}.exe'\n");
                let alias = format!("{path}        PortableCommandAlias: {program}\n");
                assert!(parts[1].contains(&alias), "{alias} is in\n{}", parts[1]);
            }
        }
        std::fs::remove_dir_all(&folder).unwrap();
        sums.pop();
        let why = manifest(&sums, "https://example.org", out.path()).unwrap_err();
        assert_eq!(why, "installer: there is no archive for windows-arm64");
        assert!(!folder.exists());
    }
}
