//! Components of the programs: a bill of materials in the form of CycloneDX, and the licences of what is linked in.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::VERSION;
use crate::cargo::{self, PROGRAM, Result, cargo};
use crate::docs::read;
use crate::kotlinc::at;

/// A crate that is linked into the programs.
#[derive(Debug)]
pub(super) struct Part {
    name: String,
    version: String,
    license: Option<String>,
    /// SHA-256 of what the registry has of it; None for crates of this project.
    checksum: Option<String>,
    folder: PathBuf,
    /// Ids of what it uses.
    uses: Vec<String>,
}

impl Part {
    /// Its package URL, by which it is known in the bill.
    fn url(&self) -> String {
        format!("pkg:cargo/{}@{}", self.name, self.version)
    }
}

/// The crates of the programs by cargo's ids, without those that only builds and tests use.
pub(super) fn parts() -> Result<BTreeMap<String, Part>> {
    let features: Vec<_> = PROGRAM.split(',').map(|one| format!("qhx-cli/{one}")).collect();
    let mut metadata = cargo(&["metadata", "--locked", "--format-version", "1"]);
    metadata.args(["--filter-platform", super::MACHINES[0].target, "--features"]);
    let metadata = cargo::output(metadata.arg(features.join(",")))?;
    let metadata = serde_json::from_str(&metadata).map_err(|e| format!("cargo metadata: {e}"))?;
    let lock = read(&qhx_paths::workspace().join("Cargo.lock"))?;
    linked(&metadata, "qhx-cli", &checksums(&lock))
}

/// Checksums in the lock file, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let value = |part: &str, key: &str| {
        let line = part.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
        line.map(|value| value.trim_end_matches('"').to_owned())
    };
    let part = |part: &str| {
        Some(((value(part, "name")?, value(part, "version")?), value(part, "checksum")?))
    };
    lock.split("[[package]]").filter_map(part).collect()
}

fn linked(
    metadata: &Value,
    program: &str,
    checksums: &BTreeMap<(String, String), String>,
) -> Result<BTreeMap<String, Part>> {
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let packages = list(&metadata["packages"]);
    let packages: BTreeMap<_, _> = packages.iter().map(|one| (text(&one["id"]), one)).collect();
    let nodes = list(&metadata["resolve"]["nodes"]);
    let uses = |node: &Value| {
        let linked =
            |one: &&Value| list(&one["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        list(&node["deps"]).iter().filter(linked).map(|one| text(&one["pkg"])).collect()
    };
    let nodes: BTreeMap<_, Vec<_>> =
        nodes.iter().map(|node| (text(&node["id"]), uses(node))).collect();
    let mut waiting: Vec<_> = packages
        .iter()
        .filter(|(_, package)| package["name"] == program)
        .map(|(id, _)| id.clone())
        .collect();
    let mut parts = BTreeMap::new();
    while let Some(id) = waiting.pop() {
        if parts.contains_key(&id) {
            continue;
        }
        let package =
            packages.get(&id).ok_or_else(|| format!("cargo metadata: no package {id}"))?;
        let uses = nodes.get(&id).cloned().unwrap_or_default();
        waiting.extend(uses.iter().cloned());
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        let part = Part {
            checksum: checksums.get(&(name.clone(), version.clone())).cloned(),
            // The slash is how it was written once.
            license: package["license"].as_str().map(|license| license.replace('/', " OR ")),
            folder: manifest.parent().unwrap_or(Path::new("")).to_owned(),
            name,
            version,
            uses,
        };
        parts.insert(id, part);
    }
    if parts.is_empty() { Err(format!("cargo metadata: no package {program}")) } else { Ok(parts) }
}

/// The bill of materials, of CycloneDX 1.5, made at `epoch`.
pub(super) fn bill(parts: &BTreeMap<String, Part>, epoch: &str) -> Result<String> {
    let mut date = std::process::Command::new("date");
    date.args(["-u", "+%Y-%m-%dT%H:%M:%SZ", "-d"]).arg(format!("@{epoch}"));
    let date = cargo::output(&mut date)?;
    let component = |part: &Part| {
        let mut component = json!({
            "type": "library",
            "bom-ref": part.url(),
            "name": part.name,
            "version": part.version,
            "purl": part.url(),
        });
        if let Some(license) = &part.license {
            component["licenses"] = json!([{"expression": license}]);
        }
        if let Some(checksum) = &part.checksum {
            component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
        }
        component
    };
    let dependency = |part: &Part| {
        let uses: BTreeSet<_> =
            part.uses.iter().filter_map(|id| Some(parts.get(id)?.url())).collect();
        json!({"ref": part.url(), "dependsOn": uses})
    };
    let (program, others): (Vec<_>, Vec<_>) =
        parts.values().partition(|part| part.name == "qhx-cli");
    let program = program.first().map(|part| {
        let mut program = component(part);
        program["type"] = "application".into();
        program
    });
    let bill = json!({
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "timestamp": date.trim(),
            "tools": {"components": [{"type": "application", "name": "cargo xtask release", "version": VERSION}]},
            "component": program,
        },
        "components": others.into_iter().map(component).collect::<Vec<_>>(),
        "dependencies": parts.values().map(dependency).collect::<Vec<_>>(),
    });
    serde_json::to_string_pretty(&bill).map(|bill| bill + "\n").map_err(|e| e.to_string())
}

/// The texts of the licences of all crates that are not this project's, each once, behind the crates that have it.
///
/// # Errors
/// A file cannot be read.
pub(super) fn notices(parts: &BTreeMap<String, Part>) -> Result<String> {
    let mut texts: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for part in parts.values().filter(|part| part.checksum.is_some()) {
        let label = format!("{} {}", part.name, part.version);
        let license = part.license.as_deref().unwrap_or("see its text");
        let mut found = false;
        for entry in std::fs::read_dir(&part.folder).map_err(at(&part.folder))? {
            let path = entry.map_err(at(&part.folder))?.path();
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
            let text = format!("Its package has no text; it is under {license}.");
            texts.entry(text).or_default().insert(label);
        }
    }
    let rule = "-".repeat(80);
    let mut notices = String::from("Licences of the crates that are linked into qhx.\n");
    for (text, crates) in &texts {
        let crates: Vec<_> = crates.iter().map(String::as_str).collect();
        notices.push_str(&format!("\n{rule}\n{}\n\n{text}\n", crates.join(", ")));
    }
    Ok(notices)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bill_has_what_is_linked_and_no_more() {
        let needs = |id: &str, kind: Value| json!({"pkg": id, "dep_kinds": [{"kind": kind}]});
        let package = |id: &str, license: Value| json!({"id": id, "name": id, "version": "1.0.0", "license": license, "manifest_path": "/nowhere/Cargo.toml"});
        let metadata = json!({
            "packages": [
                package("qhx-cli", json!("MIT OR Apache-2.0")),
                package("used", json!("MIT/Apache-2.0")),
                package("deep", Value::Null),
                package("built", Value::Null),
                package("tested", Value::Null),
            ],
            "resolve": {"nodes": [
                {"id": "qhx-cli", "deps": [
                    needs("used", Value::Null), needs("built", json!("build")), needs("tested", json!("dev"))
                ]},
                {"id": "used", "deps": [needs("deep", Value::Null)]},
            ]},
        });
        let lock = "version = 4\n\n[[package]]\nname = \"used\"\nversion = \"1.0.0\"\nchecksum = \"12ab\"\n\n\
                    [[package]]\nname = \"qhx-cli\"\nversion = \"1.0.0\"\n";
        let parts = linked(&metadata, "qhx-cli", &checksums(lock)).unwrap();
        let bill: Value = serde_json::from_str(&bill(&parts, "0").unwrap()).unwrap();
        assert_eq!(bill["metadata"]["timestamp"], "1970-01-01T00:00:00Z");
        assert_eq!(bill["metadata"]["component"]["purl"], "pkg:cargo/qhx-cli@1.0.0");
        let names: Vec<_> =
            bill["components"].as_array().unwrap().iter().map(|one| &one["name"]).collect();
        assert_eq!(names, ["deep", "used"]);
        let used = &bill["components"][1];
        assert_eq!(used["licenses"], json!([{"expression": "MIT OR Apache-2.0"}]));
        assert_eq!(used["hashes"], json!([{"alg": "SHA-256", "content": "12ab"}]));
        assert_eq!(
            bill["dependencies"][1],
            json!({"ref": "pkg:cargo/qhx-cli@1.0.0", "dependsOn": ["pkg:cargo/used@1.0.0"]})
        );
    }
}
