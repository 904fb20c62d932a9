//! Installs each package in a bare system, where the demo and a server have to give the demo's answer.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use super::{Machine, VERSION};
use crate::cargo::{self, Result, works};
use crate::kotlinc::at;
use crate::{aarch64, python};

/// The release of Debian that packages are installed in.
const SUITE: &str = "bookworm";

const PROMPT: &str = "The capital of France is";

/// A copy of a bare system, removed when it is dropped.
#[derive(Debug)]
pub(super) struct Root {
    machine: Machine,
    folder: tempfile::TempDir,
    /// For processes of another machine.
    starter: Option<PathBuf>,
}

impl Root {
    /// A bare system of a machine: what `debootstrap --variant=minbase` makes, with Python's `venv`. It is made once,
    /// among the tools. That of another machine is unpacked and not configured, as its own programs would do that.
    ///
    /// # Errors
    /// `debootstrap` is not there, or fails, or this is not root: for people.
    pub(super) fn of(machine: Machine) -> Result<Self> {
        if !works(Command::new("debootstrap").arg("--version")) {
            return Err(
                "debootstrap is not installed: apt-get install debootstrap, or --no-proof".into()
            );
        }
        let roots = cargo::tools_folder().join("roots");
        let made = roots.join(format!("{SUITE}-{}", machine.debian));
        if !made.is_dir() {
            std::fs::create_dir_all(&roots).map_err(at(&roots))?;
            let making = tempfile::tempdir_in(&roots).map_err(at(&roots))?;
            let mut make = Command::new("debootstrap");
            make.args(["--variant=minbase", "--arch", machine.debian]);
            match machine.is_here() {
                true => make.arg("--include=python3-venv"),
                false => make.arg("--foreign"),
            };
            cargo::run(make.arg(SUITE).arg(making.path()))?;
            let done = making.keep();
            std::fs::rename(&done, &made).map_err(at(&done))?;
        }
        let folder = tempfile::tempdir_in(&roots).map_err(at(&roots))?;
        cargo::run(
            Command::new("cp")
                .args(["-a", "--reflink=auto"])
                .arg(made.join("."))
                .arg(folder.path()),
        )?;
        let starter = (!machine.is_here()).then(aarch64::starter).transpose()?;
        Ok(Self { machine, folder, starter })
    }

    fn path(&self, within: &str) -> PathBuf {
        self.folder.path().join(within.trim_start_matches('/'))
    }

    /// A command within the system, with nothing of this environment. It is the process that is started, whatever
    /// stands before it, so that signals reach it. Programs of another machine are emulated, and see this machine's
    /// files where the system has none.
    fn command(&self, program: &str) -> Command {
        let mut command = Command::new("env");
        command.arg("--ignore-environment");
        let path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
        let variables = [
            format!("PATH={path}"),
            "LANG=C.UTF-8".into(),
            "DEBIAN_FRONTEND=noninteractive".into(),
        ];
        command.args(variables);
        if self.machine.is_here() {
            let enter = "mount -t proc proc \"$0/proc\" && exec chroot \"$0\" \"$@\"";
            command.args(["HOME=/root", "unshare", "--mount", "sh", "-c", enter]);
            command.arg(self.folder.path()).arg(program);
        } else {
            command.arg(format!("HOME={}", self.path("root").display()));
            if let Some(starter) = &self.starter {
                let settings = aarch64::emulate(self.folder.path(), starter);
                command.args(settings.map(|(name, value)| format!("{name}={value}")));
            }
            command.arg(aarch64::EMULATOR).arg(self.path(program));
        }
        command
    }

    /// Copies a file into the system, where it has the path that is returned.
    fn receive(&self, file: &Path) -> Result<String> {
        let within = format!("/root/{}", file.file_name().unwrap_or_default().to_string_lossy());
        std::fs::copy(file, self.path(&within)).map_err(at(file))?;
        Ok(within)
    }

    /// Runs the demo with the program at a path, then serves its bundle, asks it over HTTP, and ends it. Returns what
    /// the demo's bundle is called within the system.
    fn demo(&self, qhx: &str) -> Result<String> {
        let demo = cargo::output(self.command(qhx).args(["demo", "--backend", "cpu", "--json"]))?;
        let demo: serde_json::Value =
            serde_json::from_str(&demo).map_err(|e| format!("qhx demo --json: {e}: {demo}"))?;
        let sentence = demo["text"].as_str().unwrap_or_default();
        if !sentence.contains("Paris") {
            return Err(format!("qhx demo: found {sentence:?}, expected the capital of France"));
        }
        let bundles = self.path("root/.cache/qhx/demo");
        let found = std::fs::read_dir(&bundles).map_err(at(&bundles))?;
        let found = found.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
        let name = found.into_iter().find(|name| name.ends_with("-cpu"));
        let name = name.ok_or_else(|| format!("{}: no bundle of the demo", bundles.display()))?;
        let bundle = format!("root/.cache/qhx/demo/{name}");
        let bundle = if self.machine.is_here() {
            format!("/{bundle}")
        } else {
            self.path(&bundle).display().to_string()
        };
        let mut served = Served::start(self.command(qhx).args([
            "serve",
            "--port",
            "0",
            "--backend",
            "cpu",
            &bundle,
        ]))?;
        let body = serde_json::json!({"prompt": PROMPT, "max_tokens": 23, "temperature": 0});
        let mut curl = Command::new("curl");
        curl.args([
            "--silent",
            "--show-error",
            "--fail-with-body",
            "--header",
            "content-type: application/json",
        ]);
        curl.arg("--data").arg(body.to_string()).arg(format!("{}/v1/completions", served.address));
        let answer = cargo::output(&mut curl)?;
        let answer: serde_json::Value =
            serde_json::from_str(&answer).map_err(|e| format!("qhx serve: {e}: {answer}"))?;
        if answer["choices"][0]["text"] != demo["text"] {
            return Err(format!("qhx serve: found {answer}, expected {sentence:?}"));
        }
        served.stop()?;
        Ok(bundle)
    }
}

/// A server that runs; killed when it is dropped.
struct Served {
    process: Child,
    address: String,
}

impl Served {
    fn start(command: &mut Command) -> Result<Self> {
        let process = command.stdout(Stdio::piped()).spawn();
        let mut process = process.map_err(|e| format!("qhx serve: {e}"))?;
        let mut address = String::new();
        if let Some(stdout) = process.stdout.take() {
            BufReader::new(stdout)
                .read_line(&mut address)
                .map_err(|e| format!("qhx serve: {e}"))?;
        }
        let served = Self { process, address: address.trim().to_owned() };
        if served.address.is_empty() {
            Err("qhx serve: it printed no address".into())
        } else {
            Ok(served)
        }
    }

    /// Asks it to end, as systemd does.
    fn stop(&mut self) -> Result<()> {
        let id = self.process.id().to_string();
        cargo::run(Command::new("kill").args(["-TERM", &id]))?;
        match self.process.wait() {
            Ok(status) if status.success() => Ok(()),
            Ok(status) => Err(format!("qhx serve: {status} on SIGTERM")),
            Err(e) => Err(format!("qhx serve: {e}")),
        }
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // It has ended already where nothing failed.
        let _ = (self.process.kill(), self.process.wait());
    }
}

/// Unpacks the archive of the programs over `/usr/local`, where the demo runs. Returns the demo's bundle.
pub(super) fn archive(root: &Root, archive: &Path) -> Result<String> {
    unpack(root, archive)?;
    root.demo("/usr/local/bin/qhx")
}

fn unpack(root: &Root, archive: &Path) -> Result<()> {
    // A system whose packages are not configured has no such folder.
    let local = root.path("usr/local");
    std::fs::create_dir_all(&local).map_err(at(&local))?;
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
        let answer = cargo::output(ask.arg(bundle).arg(PROMPT))?;
        if !answer.contains("Paris") {
            return Err(format!("{name}: found {answer:?}, expected the capital of France"));
        }
    }
    Ok(())
}

/// Installs the package, runs the demo and checks the service, then removes all of it. That of another machine is
/// unpacked only.
pub(super) fn package(root: &Root, package: &Path) -> Result<()> {
    // Programs of the archives would be found first, and what is left is looked for below.
    let _ = std::fs::remove_dir_all(root.path("usr/local"));
    if !root.machine.is_here() {
        // As dpkg does, and `dpkg-deb --extract` does not, this leaves `/lib` a link.
        let extract = "dpkg-deb --fsys-tarfile \"$0\" \
                       | tar --extract --keep-directory-symlink --directory \"$1\"";
        let mut sh = Command::new("sh");
        cargo::run(sh.args(["-c", extract]).arg(package).arg(root.folder.path()))?;
        root.demo("/usr/bin/qhx")?;
        return Ok(());
    }
    let within = root.receive(package)?;
    cargo::run(root.command("dpkg").args(["--install", &within]))?;
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
    let version = cargo::output(
        root.command("python3").args(["-c", "import sys; print('%d.%d' % sys.version_info[:2])"]),
    )?;
    let mut download = python::pip(&tools);
    download.args([
        "download",
        "--quiet",
        "--only-binary=:all:",
        "--python-version",
        version.trim(),
        "--dest",
    ]);
    cargo::run(download.arg(&folder).arg(wheel))?;
    cargo::run(root.command("python3").args(["-m", "venv", "/opt/qhx"]))?;
    let mut install = root.command("/opt/qhx/bin/pip");
    install.args(["install", "--quiet", "--no-index", "--find-links", "/root/wheels"]);
    cargo::run(install.arg(format!("qhx=={VERSION}")))?;
    let bundle = root.demo("/opt/qhx/bin/qhx")?;
    let ask = format!(
        "import qhx; print(qhx.Model({bundle:?}, backend='cpu').generate({PROMPT:?}, max_new_tokens=12))"
    );
    let answer = cargo::output(root.command("/opt/qhx/bin/python").args(["-c", &ask]))?;
    if answer.contains("Paris") {
        Ok(())
    } else {
        Err(format!("qhx.Model: found {answer:?}, expected the capital of France"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cargo::cargo;

    /// The place where cargo-binstall looks for the programs of an archive: `[package.metadata.binstall]`.
    #[test]
    fn binstall_looks_where_the_archive_has_the_programs() {
        let metadata = cargo::output(&mut cargo(&[
            "metadata",
            "--no-deps",
            "--offline",
            "--format-version",
            "1",
        ]));
        let metadata: serde_json::Value = serde_json::from_str(&metadata.unwrap()).unwrap();
        let packages = metadata["packages"].as_array().unwrap();
        let cli = packages.iter().find(|package| package["name"] == "qhx-cli").unwrap();
        let binstall = &cli["metadata"]["binstall"];
        let filled = |template: &str| {
            let target = super::super::MACHINES[0].target;
            let text = template.replace("{ version }", VERSION).replace("{ target }", target);
            text.replace("{ bin }", "qhx")
                .replace("{ archive-suffix }", ".tar.gz")
                .replace("{ binary-ext }", "")
        };
        let name = format!("qhx-{VERSION}-x86_64-unknown-linux-gnu");
        let url = filled(binstall["pkg-url"].as_str().unwrap());
        assert!(url.ends_with(&format!("/{name}.tar.gz")), "{url}");
        assert_eq!(filled(binstall["bin-dir"].as_str().unwrap()), format!("{name}/bin/qhx"));
        assert_eq!(binstall["pkg-fmt"], "tgz");
    }
}
