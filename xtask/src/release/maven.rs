//! The Kotlin library for Android as a repository of Maven, to be uploaded or to be named by a project.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{VERSION, archive, epoch};
use crate::android;
use crate::cargo::{self, Result};
use crate::files::{copy, read, write};
use crate::kotlinc::{self, at};

/// The folder of the library: its group and name.
const PLACE: &str = "dev/qhx/qhx";

/// Hashes that repositories have beside each file: their endings, and the programs that make them.
const HASHES: [(&str, &str); 4] =
    [("md5", "md5sum"), ("sha1", "sha1sum"), ("sha256", "sha256sum"), ("sha512", "sha512sum")];

/// Makes a zip of the repository, and returns it with what it holds and how far that was tried.
///
/// # Errors
/// There is no Kotlin compiler, or it fails: for people.
pub(super) fn repository(out: &Path, profile: &str) -> Result<(PathBuf, String)> {
    let tools = kotlinc::tools()?;
    let native = android::native(profile);
    let built =
        android::lay_out(&tools, &cargo::target_folder()?.join("kotlin"), native.as_deref().ok())?;
    let scratch = tempfile::tempdir().map_err(at(out))?;
    let folder = scratch.path().join(format!("qhx-{VERSION}-maven"));
    lay_out(&built, &folder)?;
    let zip = archive::zip(&folder, out)?;
    let holds = match native {
        Ok(_) => "laid out with jni/arm64-v8a".to_owned(),
        Err(why) => format!("laid out without jni/arm64-v8a ({why})"),
    };
    Ok((zip, format!("{holds}; in no app")))
}

/// Lays the archive and the POM that lie in `built` out as a repository, with sources, hashes and metadata.
fn lay_out(built: &Path, repository: &Path) -> Result<()> {
    let place = repository.join(PLACE);
    let version = place.join(VERSION);
    for ending in ["aar", "pom"] {
        let name = format!("qhx-{VERSION}.{ending}");
        copy(&built.join(&name), &version.join(name))?;
    }
    let mut sources = Command::new("jar");
    sources.args(["--create", "--no-manifest", "--file"]);
    sources.arg(version.join(format!("qhx-{VERSION}-sources.jar")));
    cargo::run(sources.arg("-C").arg(kotlinc::folder().join("src")).arg("."))?;
    let mut date = Command::new("date");
    date.args(["-u", "+%Y%m%d%H%M%S", "-d"]).arg(format!("@{}", epoch()?));
    let metadata = read(&qhx_paths::workspace().join("bindings/kotlin/aar/maven-metadata.xml"))?
        .replace("@VERSION@", VERSION)
        .replace("@DATE@", cargo::output(&mut date)?.trim());
    write(&place.join("maven-metadata.xml"), &metadata)?;
    let script = HASHES.map(|(ending, program)| {
        format!("{program} <\"$file\" | cut -d ' ' -f 1 | tr -d '\\n' >\"$file.{ending}\"")
    });
    let mut hash = Command::new("sh");
    let script = format!("find . -type f | while read -r file; do {}; done", script.join("; "));
    cargo::run(hash.args(["-euc", &script]).current_dir(repository))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::works;

    /// Around an archive and a POM that only have the right names: their content is another test's.
    #[test]
    fn a_repository_has_each_file_with_its_hashes() {
        let required = std::env::var("QHX_REQUIRE_TIERS").is_ok_and(|value| value == "1");
        if !works(Command::new("jar").arg("--version")) && !required {
            return;
        }
        let built = tempfile::tempdir().unwrap();
        for ending in ["aar", "pom"] {
            write(&built.path().join(format!("qhx-{VERSION}.{ending}")), ending).unwrap();
        }
        let repository = tempfile::tempdir().unwrap();
        lay_out(built.path(), repository.path()).unwrap();
        let place = repository.path().join("dev/qhx/qhx");
        let pom = read(&qhx_paths::workspace().join("bindings/kotlin/aar/pom.xml")).unwrap();
        for line in ["<groupId>dev.qhx</groupId>", "<artifactId>qhx</artifactId>"] {
            let metadata = read(&place.join("maven-metadata.xml")).unwrap();
            assert!(pom.contains(line) && metadata.contains(line), "{line} is in\n{metadata}");
            assert!(metadata.contains(&format!("<release>{VERSION}</release>")), "{metadata}");
            assert!(!metadata.contains('@'), "{metadata}");
        }
        let files = [
            place.join("maven-metadata.xml"),
            place.join(format!("{VERSION}/qhx-{VERSION}.aar")),
            place.join(format!("{VERSION}/qhx-{VERSION}.pom")),
            place.join(format!("{VERSION}/qhx-{VERSION}-sources.jar")),
        ];
        for file in &files {
            for (ending, program) in HASHES {
                let sum = cargo::output(Command::new(program).arg(file)).unwrap();
                let written = read(&PathBuf::from(format!("{}.{ending}", file.display()))).unwrap();
                assert_eq!(sum.split(' ').next(), Some(&*written), "{}", file.display());
            }
        }
        let mut find = Command::new("find");
        let all = cargo::output(find.arg(repository.path()).args(["-type", "f"])).unwrap();
        assert_eq!(all.lines().count(), files.len() * (1 + HASHES.len()), "{all}");
    }
}
