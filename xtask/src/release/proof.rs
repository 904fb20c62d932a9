//! Installs each package in a bare system, where the demo and a server have to give the demo's answer.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::{Machine, VERSION, wheel};
use crate::cargo::{self, Result, works};
use crate::kotlinc::at;
use crate::{aarch64, python};

/// The release of Debian that packages are installed in.
const SUITE: &str = "bookworm";

/// The emulator, which needs no library of the system that it runs programs of.
const STATIC_EMULATOR: &str = "qemu-aarch64-static";

const PROMPT: &str = "The capital of France is";

/// Enters a system of AArch64: see the script.
pub(super) const ENTER: &str = "packaging/enter.sh";

/// A copy of a bare system, removed when it is dropped.
#[derive(Debug)]
pub(super) struct Root {
    machine: Machine,
    folder: tempfile::TempDir,
}

impl Root {
    /// A bare system of a machine: what `debootstrap --variant=minbase` makes, with Python's `venv`. It is made once,
    /// among the tools.
    ///
    /// # Errors
    /// `debootstrap` or the emulator is not there, or fails, or this is not root: for people.
    pub(super) fn of(machine: Machine) -> Result<Self> {
        let (made, roots) = (Self::made(machine)?, Self::roots());
        let folder = tempfile::tempdir_in(&roots).map_err(at(&roots))?;
        let mut copy = Command::new("cp");
        copy.args(["-a", "--reflink=auto"]).arg(made.join(".")).arg(folder.path());
        cargo::run(&mut copy)?;
        Ok(Self { machine, folder })
    }

    fn roots() -> PathBuf {
        cargo::tools_folder().join("roots")
    }

    /// The folder of the bare system of a machine, which is made where it is not there.
    pub(super) fn made(machine: Machine) -> Result<PathBuf> {
        if !works(Command::new("debootstrap").arg("--version")) {
            return Err(
                "debootstrap is not installed: apt-get install debootstrap, or --no-proof".into()
            );
        }
        if !machine.is_here() && !works(Command::new(STATIC_EMULATOR).arg("--version")) {
            return Err(format!(
                "{STATIC_EMULATOR} is not installed: apt-get install qemu-user-static, or --no-proof"
            ));
        }
        let roots = Self::roots();
        let made = roots.join(format!("{SUITE}-{}", machine.name));
        if made.is_dir() {
            return Ok(made);
        }
        std::fs::create_dir_all(&roots).map_err(at(&roots))?;
        let making = tempfile::tempdir_in(&roots).map_err(at(&roots))?;
        let mut make = Command::new("debootstrap");
        make.args(["--variant=minbase", "--include=python3-venv", "--arch", machine.name]);
        make.args((!machine.is_here()).then_some("--foreign")).arg(SUITE).arg(making.path());
        // It would otherwise make /proc a link in some containers, and devices in a user namespace.
        cargo::run(make.env("container", "lxc"))?;
        if !machine.is_here() {
            let mut configure = Command::new(qhx_paths::workspace().join(ENTER));
            configure.arg(making.path()).args(["/debootstrap/debootstrap", "--second-stage"]);
            cargo::run(configure.env("container", "lxc"))?;
        }
        // Of a temporary folder, which nobody but root may enter.
        cargo::run(Command::new("chmod").arg("755").arg(making.path()))?;
        let done = making.keep();
        std::fs::rename(&done, &made).map_err(at(&done))?;
        Ok(made)
    }

    fn path(&self, within: &str) -> PathBuf {
        self.folder.path().join(within.trim_start_matches('/'))
    }

    /// A command within the system, with nothing of this environment. It is the process that is started, whatever
    /// stands before it, so that signals reach it.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("env");
        command.args([
            "--ignore-environment",
            "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "LANG=C.UTF-8",
            "DEBIAN_FRONTEND=noninteractive",
            "HOME=/root",
        ]);
        if self.machine.is_here() {
            let enter = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" \"$@\"";
            command.args(["unshare", "--mount", "sh", "-c", enter]);
        } else {
            command.arg(qhx_paths::workspace().join(ENTER));
        }
        command.arg(self.folder.path()).arg(program);
        command
    }

    /// Has the demo and a server give the same answer, by the program at a path. Returns what the demo's bundle is
    /// called within the system.
    fn demo(&self, qhx: &str) -> Result<String> {
        let command = self.command(qhx);
        let mut demo = Command::new(qhx_paths::workspace().join("packaging/demo.sh"));
        demo.env("ROOT", self.folder.path());
        let bundle = cargo::output(demo.arg(command.get_program()).args(command.get_args()))?;
        Ok(bundle.trim_end().to_owned())
    }
}

/// Fails unless an answer has the capital of France in it.
fn expect_paris(who: &str, answer: &str) -> Result<()> {
    let why = || format!("{who}: found {answer:?}, expected the capital of France");
    answer.contains("Paris").then_some(()).ok_or_else(why)
}

/// Unpacks the archive of the programs over `/usr/local`, where the demo runs. Returns the demo's bundle.
pub(super) fn archive(root: &Root, archive: &Path) -> Result<String> {
    unpack(root, archive)?;
    root.demo("/usr/local/bin/qhx")
}

fn unpack(root: &Root, archive: &Path) -> Result<()> {
    let local = root.path("usr/local");
    let mut tar = Command::new("tar");
    tar.args(["--extract", "--strip-components=1", "--file"]).arg(archive);
    cargo::run(tar.arg("--directory").arg(local))
}

/// Unpacks the C library, compiles a program with each of its libraries, found by pkg-config, and asks the demo's
/// bundle with both.
pub(super) fn library(root: &Root, archive: &Path, bundle: &str) -> Result<()> {
    if !works(Command::new("pkg-config").arg("--version")) {
        return Err("pkg-config is not installed: apt-get install pkg-config, or --no-proof".into());
    }
    unpack(root, archive)?;
    let source = qhx_paths::workspace().join("bindings/c/tests/package/ask.c");
    let lib = root.path("usr/local/lib");
    for (name, more) in [("ask-shared", None), ("ask-static", Some("--static"))] {
        if more.is_some() {
            // The linker takes a shared library where both are there.
            std::fs::remove_file(lib.join("libqhexrt.so")).map_err(at(&lib))?;
        }
        let mut flags = Command::new("pkg-config");
        flags.args(["--cflags", "--libs"]).args(more).arg("qhexrt");
        flags.env("PKG_CONFIG_PATH", lib.join("pkgconfig"));
        let flags = cargo::output(&mut flags)?;
        let program = root.path("usr/local/bin").join(name);
        let compiler = if root.machine.is_here() { "cc" } else { aarch64::LINKER };
        let mut compile = Command::new(compiler);
        compile.arg(&source).arg("-o").arg(&program).arg("-Wl,-rpath,$ORIGIN/../lib");
        cargo::run(compile.args(flags.split_whitespace()))?;
        let mut ask = root.command(&format!("/usr/local/bin/{name}"));
        expect_paris(name, &cargo::output(ask.arg(bundle).arg(PROMPT))?)?;
    }
    Ok(())
}

/// Installs the package, runs the demo and checks the service, then removes all of it.
pub(super) fn package(root: &Root, package: &Path) -> Result<()> {
    // Programs of the archives would be found first, and what is left is looked for below.
    let _ = std::fs::remove_dir_all(root.path("usr/local"));
    std::fs::copy(package, root.path("root/qhx.deb")).map_err(at(package))?;
    cargo::run(root.command("dpkg").args(["--install", "/root/qhx.deb"]))?;
    root.demo("/usr/bin/qhx")?;
    if works(Command::new("systemd-analyze").arg("--version")) {
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", "--recursive-errors=no"]);
        verify.arg(format!("--root={}", root.folder.path().display()));
        cargo::run(verify.arg("/lib/systemd/system/qhx.service"))?;
    }
    cargo::run(root.command("dpkg").args(["--purge", "qhx"]))?;
    let left = ["usr", "etc", "lib/systemd", "var/cache"].map(|folder| root.path(folder));
    let mut find = Command::new("find");
    let left = cargo::output(find.args(left).args(["-name", "*qhx*"]))?;
    if left.is_empty() { Ok(()) } else { Err(format!("dpkg --purge qhx left\n{left}")) }
}

/// Installs the wheel in an environment of its own, without a network, and runs the demo with the program and a
/// generation with the module.
pub(super) fn wheel(root: &Root, wheel: &Path) -> Result<()> {
    let folder = root.path("root/wheels");
    let tools = python::tools()?;
    let version = "import sys; print('%d.%d' % sys.version_info[:2])";
    let version = cargo::output(root.command("python3").args(["-c", version]))?;
    let mut download = python::pip(&tools);
    download.args(["download", "--quiet", "--only-binary=:all:", "--python-version"]);
    download.arg(version.trim()).arg("--dest").arg(&folder).args(wheel::platforms(root.machine));
    cargo::run(download.arg(wheel))?;
    cargo::run(root.command("python3").args(["-m", "venv", "/opt/qhx"]))?;
    let mut install = root.command("/opt/qhx/bin/pip");
    install.args(["install", "--quiet", "--no-index", "--find-links", "/root/wheels"]);
    cargo::run(install.arg(format!("qhx=={VERSION}")))?;
    let bundle = root.demo("/opt/qhx/bin/qhx")?;
    let ask = format!(
        "import qhx; print(qhx.Model({bundle:?}, backend='cpu').generate({PROMPT:?}, max_new_tokens=12))"
    );
    let answer = cargo::output(root.command("/opt/qhx/bin/python").args(["-c", &ask]))?;
    expect_paris("qhx.Model", &answer)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The place where cargo-binstall looks for the programs of an archive: `[package.metadata.binstall]`.
    #[test]
    fn binstall_looks_where_the_archive_has_the_programs() {
        let metadata = cargo::metadata(&["--no-deps", "--offline"]).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let cli = packages.iter().find(|package| package["name"] == "qhx-cli").unwrap();
        let binstall = &cli["metadata"]["binstall"];
        let windows = |machine: &str| (format!("qhx-{VERSION}-{machine}"), ".zip", "zip", ".exe");
        let expected = [
            (
                "x86_64-unknown-linux-gnu",
                (format!("qhx-{VERSION}-x86_64-unknown-linux-gnu"), ".tar.gz", "tgz", ""),
            ),
            ("x86_64-pc-windows-msvc", windows("windows-x64")),
            ("aarch64-pc-windows-msvc", windows("windows-arm64")),
        ];
        for (target, (name, suffix, format, ending)) in expected {
            let overrides = &binstall["overrides"][target];
            let value = |key: &str| overrides[key].as_str().or(binstall[key].as_str()).unwrap();
            let filled = |template: &str| {
                let known = [
                    ("version", VERSION),
                    ("target", target),
                    ("bin", "qhx"),
                    ("archive-suffix", suffix),
                    ("binary-ext", ending),
                ];
                known.into_iter().fold(template.to_owned(), |text, (name, value)| {
                    text.replace(&format!("{{ {name} }}"), value)
                })
            };
            let url = filled(value("pkg-url"));
            assert!(url.ends_with(&format!("/{name}{suffix}")), "{url}");
            let folder = if ending.is_empty() { "bin/" } else { "" };
            assert_eq!(filled(value("bin-dir")), format!("{name}/{folder}qhx{ending}"));
            assert_eq!(value("pkg-fmt"), format);
        }
    }
}
