//! The package for Debian and its like, with the service of systemd.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::archive::Content;
use super::{VERSION, epoch};
use crate::cargo::{self, Result, works};
use crate::docs::{copy, write};
use crate::kotlinc::at;
use crate::python::PROGRAMS;

/// Whom the packages name.
const MAINTAINER: &str = "The qhx developers <qhx@example.org>";

/// Makes the package of a machine.
pub(super) fn package(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let machine = content.built.machine.debian;
    let folder = scratch.join(machine);
    let source = qhx_paths::workspace().join("packaging/debian");
    content.lay_out(&folder.join("usr"))?;
    let share = folder.join("usr/share");
    // Debian's zsh looks there.
    let [from, to] = ["zsh/site-functions", "zsh/vendor-completions"].map(|name| share.join(name));
    std::fs::rename(&from, to).map_err(at(&from))?;
    let documents = share.join("doc/qhx");
    copy(&source.join("copyright"), &documents.join("copyright"))?;
    write(&documents.join("NOTICES.txt"), content.notices)?;
    write(&documents.join("changelog"), &changelog()?)?;
    copy(&source.join("qhx.service"), &folder.join("lib/systemd/system/qhx.service"))?;
    copy(&source.join("qhx.default"), &folder.join("etc/default/qhx"))?;
    let pages = share.join("man/man1");
    let pages = std::fs::read_dir(&pages).map_err(at(&pages))?;
    let mut gzip = Command::new("gzip");
    gzip.arg("-9n").args(pages.filter_map(|page| Some(page.ok()?.path())));
    cargo::run(gzip.args(["NOTICES.txt", "changelog"].map(|name| documents.join(name))))?;
    let control = folder.join("DEBIAN");
    let programs = PROGRAMS.map(|program| folder.join("usr/bin").join(program));
    let libc = glibc(&programs)?;
    let size = cargo::output(Command::new("du").args(["-sk", "--apparent-size"]).arg(&folder))?;
    let size = size.split_whitespace().next().unwrap_or_default().to_owned();
    write(&control.join("control"), &description(machine, &libc, &size))?;
    write(&control.join("conffiles"), "/etc/default/qhx\n")?;
    for script in ["postinst", "prerm", "postrm"] {
        copy(&source.join(script), &control.join(script))?;
    }
    let sums = "cd \"$0\" && find etc lib usr -type f -print0 | sort -z | xargs -0 md5sum";
    let sums = cargo::output(Command::new("sh").args(["-c", sums]).arg(&folder))?;
    write(&control.join("md5sums"), &sums)?;
    let modes = "chmod -R u=rwX,go=rX \"$0\" && find \"$0\" -type f ! -path '*/bin/*' -exec chmod 644 {} + && \
                 chmod 755 \"$0\"/usr/bin/* \"$0\"/DEBIAN/p*";
    cargo::run(Command::new("sh").args(["-c", modes]).arg(&folder))?;
    let package = out.join(format!("qhx_{VERSION}_{machine}.deb"));
    let mut build = Command::new("dpkg-deb");
    build.env("SOURCE_DATE_EPOCH", epoch()?).args(["--root-owner-group", "-Zxz", "-z2", "--build"]);
    cargo::run(build.arg(&folder).arg(&package))?;
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

fn description(machine: &str, libc: &str, size: &str) -> String {
    format!(
        "Package: qhx
Version: {VERSION}
Architecture: {machine}
Maintainer: {MAINTAINER}
Installed-Size: {size}
Depends: libc6 (>= {libc}), libgcc-s1 (>= 4.2)
Recommends: libatomic1
Suggests: python3-pip
Section: science
Priority: optional
Description: runtime for QHexRT bundles on Hexagon NPUs
 Runs models of language, images and audio on Qualcomm's Hexagon NPU, on its
 emulator and on the CPU, and makes their bundles of Hugging Face checkpoints.
 .
 The service qhx answers clients of OpenAI's and Anthropic's interfaces.
"
    )
}

/// The version of the C library that programs need.
fn glibc(programs: &[PathBuf]) -> Result<String> {
    let needed = cargo::output(Command::new("readelf").args(["-VW"]).args(programs))?;
    newest(&needed).ok_or_else(|| "readelf names no version of glibc: is this a program?".into())
}

/// The newest version among those that `readelf -V` lists.
fn newest(needed: &str) -> Option<String> {
    let versions = needed.split("Name: GLIBC_").skip(1).filter_map(|rest| {
        let version = rest.split_whitespace().next()?;
        let numbers =
            version.split('.').map(str::parse).collect::<std::result::Result<Vec<u32>, _>>();
        Some((numbers.ok()?, version))
    });
    versions.max().map(|(_, version)| version.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::docs::read;
    use crate::release::{Built, MACHINES};

    #[test]
    fn the_newest_glibc_is_asked_for() {
        let listed = "  0x0: Rev: 1  Flags: none  Index: 9  Cnt: 1  Name: GLIBC_2.9\n  Name: GLIBC_2.34 Flags\n\
                      Name: GLIBC_2.3.4  Name: GCC_3.0";
        assert_eq!(newest(listed).as_deref(), Some("2.34"));
        assert_eq!(newest("no version information"), None);
    }

    /// With this test in the place of each program: what is asked of the package is how it is laid out.
    #[test]
    fn a_package_has_what_its_hashes_and_scripts_say() {
        if !works(Command::new("dpkg-deb").arg("--version")) {
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
        let built = Built { machine, folder: programs };
        let content = Content { built: &built, share: &share, notices: "a crate: MIT\n" };
        let package = package(&content, scratch.path(), scratch.path()).unwrap();
        let installed = scratch.path().join("installed");
        let mut unpack = Command::new("dpkg-deb");
        unpack.arg("--raw-extract").arg(&package).arg(&installed);
        assert!(unpack.status().unwrap().success());
        let control = read(&installed.join("DEBIAN/control")).unwrap();
        assert!(control.contains(&format!("Architecture: {}\n", machine.debian)), "{control}");
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
