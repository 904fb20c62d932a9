//! A check of what was changed: formatting, lints and the tests of the changed crates alone.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, cargo};

/// Crates whose tests are no part of a check: the whole matrix of families, and what needs tools of its own.
const SLOW: [&str; 5] = ["qhx-tests", "qhx-jni", "qhx-loom", "qhx-benches", "qhx-fuzz"];

/// Formats and lints the packages that files were changed in since `base`, and runs their tests.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let base = match arguments {
        [] => "HEAD",
        [flag, base] if flag == "--base" => base,
        other => {
            return Err(format!("check: unknown arguments {other:?}, expected --base REVISION"));
        }
    };
    let changed = changed(base)?;
    let packages = packages(&changed, &members()?);
    if packages.is_empty() {
        eprintln!("no crate of the workspace was changed since {base}");
        return Ok(());
    }
    let with = |command: &[&str], packages: &mut dyn Iterator<Item = &String>| {
        let mut command = cargo(command);
        for package in packages {
            command.args(["--package", package]);
        }
        command
    };
    cargo::run(with(&["fmt"], &mut packages.iter()).arg("--check"))?;
    let mut lint = with(&["clippy", "--all-targets"], &mut packages.iter());
    cargo::run(lint.args(["--", "--deny", "warnings"]))?;
    let mut quick = packages.iter().filter(|package| !SLOW.contains(&package.as_str())).peekable();
    if quick.peek().is_some() {
        cargo::run(&mut with(&["test", "--lib", "--bins", "--tests"], &mut quick))?;
    }
    Ok(())
}

/// Paths of files that differ from a revision, and of new ones.
fn changed(base: &str) -> Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for arguments in [
        &["diff", "--name-only", "-z", base][..],
        &["ls-files", "--others", "--exclude-standard", "-z"],
    ] {
        let mut git = Command::new("git");
        let text = cargo::output(git.args(arguments).current_dir(qhx_paths::workspace()))?;
        paths.extend(text.split('\0').filter(|path| !path.is_empty()).map(PathBuf::from));
    }
    Ok(paths)
}

/// Names of the workspace's packages, and their folders within it.
fn members() -> Result<Vec<(String, PathBuf)>> {
    let metadata = cargo::metadata(&["--no-deps"])?;
    let root = qhx_paths::workspace();
    let package = |package: &serde_json::Value| {
        let manifest = Path::new(package["manifest_path"].as_str()?).parent()?;
        let folder = manifest.strip_prefix(root).ok()?;
        Some((package["name"].as_str()?.to_owned(), folder.to_owned()))
    };
    Ok(metadata["packages"].as_array().into_iter().flatten().filter_map(package).collect())
}

/// Packages that the paths lie in: of folders within each other, the inner one.
fn packages(paths: &[PathBuf], members: &[(String, PathBuf)]) -> BTreeSet<String> {
    let of = |path: &PathBuf| {
        let around = members.iter().filter(|(_, folder)| path.starts_with(folder));
        around.max_by_key(|(_, folder)| folder.components().count()).map(|(name, _)| name.clone())
    };
    paths.iter().filter_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_belongs_to_the_innermost_package() {
        let members = [("op", "ops-llama"), ("plugin", "ops-llama/plugin"), ("cpu", "cpu")];
        let members = members.map(|(name, folder)| (name.to_owned(), PathBuf::from(folder)));
        let found = |path: &str| packages(&[PathBuf::from(path)], &members).pop_first();
        assert_eq!(found("ops-llama/src/embed.rs").as_deref(), Some("op"));
        assert_eq!(found("ops-llama/plugin/src/lib.rs").as_deref(), Some("plugin"));
        assert_eq!(found("docs/cli.md"), None);
        assert_eq!(found("cpu2/src/lib.rs"), None);
    }
}
