//! Needs of programs and libraries for Linux and Android, as their headers state them.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result};

/// The newest glibc that one of these files needs: major and minor version.
///
/// # Errors
/// `readelf` fails, or no file names a version of glibc.
pub(super) fn glibc(files: &[PathBuf]) -> Result<(u32, u32)> {
    let text = cargo::output(Command::new("readelf").arg("-VW").args(files))?;
    let version = |word: &str| {
        let (major, minor) = word.strip_prefix("GLIBC_")?.split_once('.')?;
        // 2.2.5 is of the time before the third number was given up.
        let minor = minor.split('.').next().unwrap_or(minor);
        Some((major.parse().ok()?, minor.parse().ok()?))
    };
    let newest = text.split_whitespace().filter_map(version).max();
    newest.ok_or_else(|| "readelf names no version of glibc: is this a program?".into())
}

/// The machine that a file is for, in the words of `readelf`, and the shared libraries that it needs.
///
/// # Errors
/// `readelf` fails, or the file is not in the form of ELF.
pub(super) fn needs(file: &Path) -> Result<(String, Vec<String>)> {
    let text = cargo::output(Command::new("readelf").args(["-hdW"]).arg(file))?;
    let machine = text.lines().find_map(|line| line.trim().strip_prefix("Machine:"));
    let machine = machine.ok_or_else(|| format!("{}: no ELF header", file.display()))?;
    let library = |line: &str| {
        let (_, name) = line.split_once("(NEEDED)")?;
        Some(name.split_once('[')?.1.trim_end_matches(']').to_owned())
    };
    Ok((machine.trim().to_owned(), text.lines().filter_map(library).collect()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_os = "linux")]
    fn a_program_states_its_machine_libraries_and_glibc() {
        let program = std::env::current_exe().unwrap();
        let (machine, libraries) = needs(&program).unwrap();
        assert!(
            machine.to_lowercase().replace('-', "_").contains(std::env::consts::ARCH),
            "{machine}"
        );
        assert!(libraries.iter().any(|library| library == "libc.so.6"), "{libraries:?}");
        assert!(glibc(&[program]).unwrap() >= (2, 17));
        assert!(needs(&qhx_paths::workspace().join("README.md")).is_err());
    }
}
