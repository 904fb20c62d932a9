//! Archives: programs with their manual pages and completions, and the C library.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Built, Machine, System, VERSION, epoch};
use crate::aarch64;
use crate::cargo::{self, Result};
use crate::files::{copy, write};
use crate::python::PROGRAMS;

/// Path below `share` where each shell looks for completions.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "bash-completion/completions/qhx"),
    ("fish", "fish/vendor_completions.d/qhx.fish"),
    ("zsh", "zsh/site-functions/_qhx"),
];

/// Contents of the packages of a machine.
pub(super) struct Content<'a> {
    pub built: &'a Built,
    /// Manual pages and completions.
    pub share: &'a Path,
    /// Licences of what is linked in.
    pub notices: &'a str,
}

/// Has the program write manual pages and completions into `share`.
pub(super) fn share(built: &Built, share: &Path) -> Result<()> {
    cargo::output(built.command("qhx").arg("man").arg(share.join("man/man1")))?;
    for (shell, file) in COMPLETIONS {
        let script = cargo::output(built.command("qhx").args(["completions", shell]))?;
        write(&share.join(file), &script)?;
    }
    Ok(())
}

impl Content<'_> {
    /// Lays the programs out in `prefix`: `bin` and `share`.
    pub(super) fn lay_out(&self, prefix: &Path) -> Result<()> {
        self.programs(&prefix.join("bin"))?;
        cargo::run(Command::new("cp").arg("-r").arg(self.share).arg(prefix))
    }

    /// Copies the programs into a folder, without what only debuggers read.
    pub(super) fn programs(&self, folder: &Path) -> Result<()> {
        for program in PROGRAMS {
            let program = self.built.machine.program(program);
            let to = folder.join(&program);
            copy(&self.built.folder.join(program), &to)?;
            strip(self.built.machine, &to, &["--strip-all", "--remove-section=.comment"])?;
        }
        Ok(())
    }

    /// Copies licences, notices, the first page and the changes into a folder.
    pub(super) fn pages(&self, folder: &Path) -> Result<()> {
        self.licences(folder)?;
        for page in ["README.md", "CHANGELOG.md"] {
            copy(&qhx_paths::workspace().join(page), &folder.join(page))?;
        }
        Ok(())
    }

    /// Licences and notices, for archives.
    fn licences(&self, folder: &Path) -> Result<()> {
        for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
            copy(&qhx_paths::workspace().join(name), &folder.join(name))?;
        }
        write(&folder.join("NOTICES.txt"), self.notices)
    }
}

/// Removes what only debuggers read.
fn strip(machine: Machine, file: &Path, arguments: &[&str]) -> Result<()> {
    let mut strip = match machine.system {
        System::Linux if machine.is_here() => Command::new("strip"),
        System::Linux => Command::new(aarch64::STRIP),
        // The toolchain's own tool knows the files of all systems.
        System::Windows | System::Android => {
            let lib = cargo::output(Command::new("rustc").args(["--print", "target-libdir"]))?;
            let lib = Path::new(lib.trim_end());
            let mut strip = Command::new(lib.with_file_name("bin").join("rust-objcopy"));
            // The folder of its library: that of the compiler.
            let shared = lib.ancestors().nth(3).unwrap_or(lib);
            strip.env("LD_LIBRARY_PATH", shared);
            strip
        }
    };
    cargo::run(strip.args(arguments).arg(file))
}

/// The archive of the programs.
pub(super) fn program(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let name = format!("qhx-{VERSION}-{}", content.built.machine.target);
    let folder = scratch.join(&name);
    content.lay_out(&folder)?;
    content.pages(&folder)?;
    pack(&folder, &name, out)
}

/// The archive of the C library, as CMake and pkg-config find it.
pub(super) fn library(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let name = format!("qhexrt-{VERSION}-{}", content.built.machine.target);
    let folder = scratch.join(&name);
    let source = qhx_paths::workspace();
    for (from, to, name) in [
        ("bindings/c/include", "include", "qhexrt_c.h"),
        ("bindings/c/include/qhexrt", "include/qhexrt", "qhexrt_c.h"),
        ("bindings/c/package", "lib/pkgconfig", "qhexrt.pc"),
        ("bindings/c/package", "lib/cmake/qhexrt", "qhexrtConfig.cmake"),
        ("bindings/c/package", "lib/cmake/qhexrt", "qhexrtConfigVersion.cmake"),
        ("examples/c", "examples", "chat.c"),
    ] {
        copy(&source.join(from).join(name), &folder.join(to).join(name))?;
    }
    copy(&source.join("docs/c-abi.md"), &folder.join("README.md"))?;
    content.licences(&folder)?;
    let (shared, archive) = (folder.join("lib/libqhexrt.so.1"), folder.join("lib/libqhexrt.a"));
    copy(&content.built.folder.join("libqhexrt.so"), &shared)?;
    copy(&content.built.folder.join("libqhexrt.a"), &archive)?;
    let link = folder.join("lib/libqhexrt.so");
    cargo::run(Command::new("ln").args(["-s", "libqhexrt.so.1"]).arg(link))?;
    strip(content.built.machine, &shared, &["--strip-unneeded"])?;
    strip(content.built.machine, &archive, &["--strip-debug"])?;
    pack(&folder, &name, out)
}

/// Packs a folder into `out` as a zip with the folder in it: the same bytes whenever the content is the same.
pub(super) fn zip(folder: &Path, out: &Path) -> Result<PathBuf> {
    let own = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let zip = out.join(format!("{own}.zip"));
    let parent = folder.parent().unwrap_or(folder);
    // Python's archiver sorts the names of files.
    let mut times = Command::new("sh");
    times.args(["-c", "chmod -R u=rwX,go=rX \"$0\" && find \"$0\" -exec touch -d \"@$1\" {} +"]);
    cargo::run(times.arg(&own).arg(epoch()?).current_dir(parent))?;
    let mut pack = Command::new("python3");
    pack.args(["-m", "zipfile", "--create"]).arg(&zip).arg(&own);
    cargo::run(pack.env("TZ", "UTC").current_dir(parent))?;
    Ok(zip)
}

/// Packs a folder into `out`, under a name within the archive: the same bytes whenever the content is the same.
pub(crate) fn pack(folder: &Path, name: &str, out: &Path) -> Result<PathBuf> {
    let archive = out.join(format!("{name}.tar.gz"));
    let (parent, own) = (folder.parent(), folder.file_name().unwrap_or_default());
    let mut tar = Command::new("tar");
    tar.args(["--create", "--sort=name", "--owner=0", "--group=0", "--numeric-owner"]);
    tar.args(["--mode=go=rX,u+rw,a-s", "--use-compress-program=gzip -6n"]);
    tar.arg(format!("--mtime=@{}", epoch()?));
    tar.arg(format!("--transform=flags=r;s,^{},{name},", own.to_string_lossy()));
    tar.arg("--file").arg(&archive).arg("--directory").arg(parent.unwrap_or(folder)).arg(own);
    cargo::run(&mut tar)?;
    Ok(archive)
}
