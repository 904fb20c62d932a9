//! Zips of the programs for Windows. The host-ops are linked in, so that there is no plugin beside them.

use std::path::{Path, PathBuf};
use std::process::Command;

use object::LittleEndian as LE;
use object::pe::{IMAGE_FILE_MACHINE_AMD64, IMAGE_FILE_MACHINE_ARM64};
use object::read::pe::PeFile64;

use super::archive::{self, Content};
use super::{Machine, NOT_STARTED, VERSION};
use crate::cargo::{self, Result, cargo as own_cargo};
use crate::kotlinc::at;
use crate::python::{self, PROGRAMS};
use crate::windows;

/// Laptops with a Hexagon NPU, with the C library that is part of Windows. What links for the target of Microsoft's
/// own compiler needs its libraries, which no package registry has.
pub(super) const ARM: &str = "aarch64-pc-windows-gnullvm";

/// The linker for it, with the import libraries of Windows, and what has cargo use it.
const ZIG: [(&str, &str); 2] =
    [("ziglang==0.17.1", "python-zig"), ("cargo-zigbuild==0.24.1", "cargo-zigbuild")];

/// Libraries of every Windows 10 and 11, also on ARM. Names that begin with `api-ms-win-` are parts of them.
const OF_WINDOWS: [&str; 15] = [
    "advapi32.dll",
    "bcrypt.dll",
    "bcryptprimitives.dll",
    "combase.dll",
    "crypt32.dll",
    "dbghelp.dll",
    "kernel32.dll",
    "msvcrt.dll",
    "ntdll.dll",
    "ole32.dll",
    "psapi.dll",
    "shell32.dll",
    "ucrtbase.dll",
    "userenv.dll",
    "ws2_32.dll",
];

/// Missing requirement of the programs, with how to get it.
pub(super) fn missing(machine: Machine) -> Option<String> {
    if !cargo::has_target(machine.target) {
        return Some(format!("the target is not installed: rustup target add {}", machine.target));
    }
    if machine.target == ARM {
        return ZIG.iter().find_map(|(package, name)| python::program(package, name).err());
    }
    windows::no_compiler()
}

/// The command of cargo that builds programs.
pub(super) fn cargo(machine: Machine) -> Result<Command> {
    if machine.target != ARM {
        return Ok(own_cargo(&["build"]));
    }
    let [_, zigbuild] = ZIG.map(|(package, name)| python::program(package, name));
    let zigbuild = zigbuild?;
    let mut build = Command::new(&zigbuild);
    build.arg("zigbuild").current_dir(qhx_paths::workspace());
    // It asks the first Python on the search path for the linker.
    let mut path = vec![zigbuild.parent().unwrap_or(&zigbuild).to_owned()];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    build.env("PATH", std::env::join_paths(path).map_err(|e| e.to_string())?);
    Ok(build)
}

/// The zip of the programs.
pub(super) fn program(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let folder = scratch.join(format!("qhx-{VERSION}-{}", content.built.machine.name));
    content.programs(&folder)?;
    content.pages(&folder)?;
    archive::zip(&folder, out)
}

/// Proves a zip as far as this machine can, and returns how far that is: the headers of the programs are checked, and
/// those for x86-64 run under Wine.
pub(super) fn started(machine: Machine, zip: &Path, prove: bool) -> Result<String> {
    if !prove {
        return Ok(NOT_STARTED.into());
    }
    let folder = tempfile::tempdir().map_err(at(zip))?;
    let mut unzip = Command::new("python3");
    cargo::run(unzip.args(["-m", "zipfile", "--extract"]).arg(zip).arg(folder.path()))?;
    let programs = folder.path().join(zip.file_stem().unwrap_or_default());
    let mut libraries = 0;
    for program in PROGRAMS {
        let imports = imports(&programs.join(machine.program(program)), machine)?;
        libraries = libraries.max(imports.len());
    }
    let headers = format!("headers checked: {libraries} libraries, all of Windows");
    if machine.target == ARM {
        return Ok(format!("{headers}; never started, as nothing here starts such programs"));
    }
    match windows::package(&programs) {
        Ok(()) => Ok(format!("{headers}; unpacked, ran demo and server under Wine")),
        Err(why) if windows::missing().is_some() => Ok(format!("{headers}; not started: {why}")),
        Err(why) => Err(why),
    }
}

/// The libraries that a program for a machine imports, in small letters.
///
/// # Errors
/// It is for another machine, or needs a library that Windows does not have.
fn imports(file: &Path, machine: Machine) -> Result<Vec<String>> {
    let data = std::fs::read(file).map_err(at(file))?;
    let wrong = |why: String| format!("{}: {why}", file.display());
    let broken = |e: object::Error| wrong(e.to_string());
    let program = PeFile64::parse(&*data).map_err(broken)?;
    let arm = machine.target == ARM;
    let expected = if arm { IMAGE_FILE_MACHINE_ARM64 } else { IMAGE_FILE_MACHINE_AMD64 };
    let found = program.nt_headers().file_header.machine.get(LE);
    if found != expected {
        return Err(wrong(format!("for machine {found:#x}, expected {expected:#x}")));
    }
    let mut libraries = std::collections::BTreeSet::new();
    if let Some(table) = program.import_table().map_err(broken)? {
        let mut descriptors = table.descriptors().map_err(broken)?;
        while let Some(descriptor) = descriptors.next().map_err(broken)? {
            let name = table.name(descriptor.name.get(LE)).map_err(broken)?;
            libraries.insert(String::from_utf8_lossy(name).to_lowercase());
        }
    }
    let known = |name: &str| name.starts_with("api-ms-win-") || OF_WINDOWS.contains(&name);
    match libraries.iter().find(|name| !known(name)) {
        Some(name) => Err(wrong(format!("needs {name}, which Windows does not have"))),
        None => Ok(libraries.into_iter().collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::files::write;
    use crate::release::MACHINES;

    /// A program of MinGW, which needs a library that is not of Windows if it has one.
    #[test]
    fn a_program_for_windows_needs_windows_alone() {
        let required = std::env::var("QHX_REQUIRE_TIERS").is_ok_and(|value| value == "1");
        if windows::no_compiler().is_some() && !required {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        write(&folder.path().join("other.c"), "int other(void) { return 1; }\n").unwrap();
        write(&folder.path().join("alone.c"), "int main(void) { return 0; }\n").unwrap();
        let source = "int other(void);\nint main(void) { return other(); }\n";
        write(&folder.path().join("needs.c"), source).unwrap();
        for arguments in [
            &["-shared", "other.c", "-o", "other.dll"][..],
            &["alone.c", "-o", "alone.exe"],
            &["needs.c", "other.dll", "-o", "needs.exe"],
        ] {
            let mut compile = Command::new(windows::GCC);
            assert!(compile.args(arguments).current_dir(&folder).status().unwrap().success());
        }
        let machine = |name| MACHINES.into_iter().find(|machine| machine.name == name).unwrap();
        let (x64, arm64) = (machine("windows-x64"), machine("windows-arm64"));
        let file = |name| folder.path().join(name);
        let libraries = imports(&file("alone.exe"), x64).unwrap();
        assert!(libraries.contains(&"kernel32.dll".to_owned()), "{libraries:?}");
        let why = imports(&file("needs.exe"), x64).unwrap_err();
        assert!(why.ends_with("needs.exe: needs other.dll, which Windows does not have"), "{why}");
        let why = imports(&file("alone.exe"), arm64).unwrap_err();
        assert!(why.ends_with("for machine 0x8664, expected 0xaa64"), "{why}");
        assert!(imports(&file("alone.c"), x64).is_err());
    }
}
