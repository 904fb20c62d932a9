//! The wheel of the Python package for a machine, around the programs of its archive.

use std::path::{Path, PathBuf};

use super::archive::Content;
use super::{Machine, elf};
use crate::aarch64;
use crate::cargo::Result;
use crate::kotlinc::at;
use crate::python;

/// The oldest glibc that wheels are marked for: what Rust's standard library needs.
const OLDEST: (u32, u32) = (2, 17);

/// Makes the wheel. It is marked for the newest glibc that the module or a program needs, and maturin refuses a module
/// that needs a newer one.
pub(super) fn wheel(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let built = content.built;
    let folder = scratch.join(format!("wheel-{}", built.machine.name));
    let programs = folder.join("programs");
    content.programs(&programs)?;
    let tools = python::tools()?;
    let make = |platform: &str, to: &Path| {
        let mut maturin = python::maturin(&tools, &programs)?;
        maturin.args(["--profile", &built.profile, "--strip", "--compatibility", platform]);
        maturin.env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", aarch64::LINKER);
        // Its own search for a cross compiler is for other systems than this.
        if !built.machine.is_here() {
            maturin.args(["--target", built.machine.target]);
        }
        python::made(&mut maturin, to)
    };
    // The module is linked first, as nothing says before what it needs.
    let first = make("linux", &folder.join("first"))?;
    let mut files = built.files();
    files.push(module(&first, &folder.join("module"))?);
    let (major, minor) = elf::glibc(&files)?.max(OLDEST);
    let wheel = make(&format!("manylinux_{major}_{minor}"), &folder.join("wheels"))?;
    let copy = out.join(wheel.file_name().unwrap_or_default());
    std::fs::copy(&wheel, &copy).map_err(at(&wheel))?;
    Ok(copy)
}

/// The module of a wheel, unpacked.
fn module(wheel: &Path, folder: &Path) -> Result<PathBuf> {
    let mut unzip = std::process::Command::new("python3");
    crate::cargo::run(unzip.args(["-m", "zipfile", "--extract"]).arg(wheel).arg(folder))?;
    Ok(folder.join("qhx/_qhx.abi3.so"))
}

/// Arguments of `pip download` for a machine that is not this one.
pub(super) fn platforms(machine: Machine) -> Vec<String> {
    if machine.is_here() {
        return Vec::new();
    }
    let arch = machine.target.split('-').next().unwrap_or_default();
    let glibc = (OLDEST.1..=36).rev().map(|minor| format!("manylinux_2_{minor}_{arch}"));
    let names = glibc.chain([format!("manylinux2014_{arch}"), format!("linux_{arch}")]);
    names.flat_map(|name| ["--platform".into(), name]).collect()
}
