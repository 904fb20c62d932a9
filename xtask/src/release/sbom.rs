//! Components of the programs: a bill of materials in the form of CycloneDX, and the licences of what is linked in.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;

use super::{Machine, VERSION, epoch};
use crate::cargo::{self, PROGRAM, Result};
use crate::files::read;
use crate::kotlinc::at;

/// The version of cargo-cyclonedx, which makes the bill.
const CYCLONEDX: &str = "0.5.9";

/// Values of a list.
fn list<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> {
    value[key].as_array().into_iter().flatten()
}

/// Writes the bill of materials, of CycloneDX 1.5, of what is linked into the programs for a machine, and returns it
/// with its file.
pub(super) fn bill(machine: Machine, out: &Path) -> Result<(PathBuf, Value)> {
    let root = qhx_paths::workspace();
    let name = format!("qhx-{VERSION}-{}.cdx", machine.name);
    let file = format!("{name}.json");
    let mut make = Command::new(cargo::installed("cargo-cyclonedx", CYCLONEDX, &[])?);
    make.args(["cyclonedx", "--quiet", "--format", "json", "--spec-version", "1.5"]);
    make.args(["--no-build-deps", "--target", machine.target, "--features", PROGRAM]);
    make.args(["--manifest-path", "cli/Cargo.toml", "--override-filename", &name]);
    cargo::run(make.env("SOURCE_DATE_EPOCH", epoch()?).current_dir(root))?;
    // Crates of this project are known by where they lie, which is another folder elsewhere.
    let bill = read(&root.join("cli").join(&file))?.replace(&root.display().to_string(), "");
    // It makes a bill for each of them.
    for package in list(&cargo::metadata(&["--no-deps"])?, "packages") {
        let bill = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        std::fs::remove_file(bill.with_file_name(&file)).map_err(at(bill))?;
    }
    let file = out.join(file);
    std::fs::write(&file, &bill).map_err(at(&file))?;
    let bill = serde_json::from_str(&bill).map_err(|e| format!("{}: {e}", file.display()))?;
    Ok((file, bill))
}

/// Licence of the weights that `qhx-media` links in.
const SILERO: &str = include_str!("../../../media/silero/LICENSE");

/// The texts of the licences of all crates of the bill that are not this project's, each once, behind the crates that
/// have it.
///
/// # Errors
/// A file cannot be read.
pub(super) fn notices(bill: &Value) -> Result<String> {
    let label =
        |one: &Value| Some(format!("{} {}", one["name"].as_str()?, one["version"].as_str()?));
    // The registry has a hash of each of its crates.
    let linked: BTreeSet<_> =
        list(bill, "components").filter(|one| one["hashes"].is_array()).filter_map(label).collect();
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in list(&cargo::metadata(&["--locked"])?, "packages") {
        let Some(label) = label(package).filter(|label| linked.contains(label)) else { continue };
        let mut folder = PathBuf::from(package["manifest_path"].as_str().unwrap_or_default());
        folder.pop();
        let mut found = false;
        for entry in std::fs::read_dir(&folder).map_err(at(&folder))? {
            let path = entry.map_err(at(&folder))?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().to_uppercase();
            let names = ["LICENSE", "LICENCE", "UNLICENSE", "COPYING", "NOTICE"];
            if path.is_file() && names.iter().any(|one| name.starts_with(one)) {
                let text = std::fs::read(&path).map_err(at(&path))?;
                let text = String::from_utf8_lossy(&text).trim().to_owned();
                texts.entry(text).or_default().insert(label.clone());
                found = true;
            }
        }
        if !found {
            let license = package["license"].as_str().unwrap_or("see its text");
            let text = format!("Its package has no text; it is under {license}.");
            texts.entry(text).or_default().insert(label);
        }
    }
    // Linked in as data.
    texts.entry(SILERO.trim().to_owned()).or_default().insert("weights of Silero VAD".to_owned());
    let rule = "-".repeat(80);
    let mut notices =
        String::from("Licences of the crates and weights that are linked into qhx.\n");
    for (text, crates) in texts {
        let crates = Vec::from_iter(crates).join(", ");
        notices.push_str(&format!("\n{rule}\n{crates}\n\n{text}\n"));
    }
    Ok(notices)
}
