//! The archive of the programs for Android: for Termux, and to be copied with adb.

use std::path::{Path, PathBuf};

use super::archive::{self, Content};
use super::{VERSION, elf};
use crate::cargo::Result;

/// Libraries that every Android has.
const OF_ANDROID: [&str; 4] = ["libc.so", "libdl.so", "liblog.so", "libm.so"];

/// The archive of the programs.
pub(super) fn program(content: &Content<'_>, scratch: &Path, out: &Path) -> Result<PathBuf> {
    let name = format!("qhx-{VERSION}-{}", content.built.machine.target);
    let folder = scratch.join(&name);
    content.programs(&folder.join("bin"))?;
    content.pages(&folder)?;
    archive::pack(&folder, &name, out)
}

/// Checks the programs' headers, and returns that nothing more was tried.
pub(super) fn started(content: &Content<'_>) -> Result<String> {
    let mut count = 0;
    for file in content.built.files() {
        count = count.max(check(&file)?);
    }
    Ok(format!(
        "headers checked: {count} libraries, all of Android; never started, as nothing here starts \
         such programs"
    ))
}

/// Counts the libraries that a program needs.
///
/// # Errors
/// It is not for AArch64, or needs a library that is not known.
fn check(file: &Path) -> Result<usize> {
    let (machine, libraries) = elf::needs(file)?;
    if machine != "AArch64" {
        return Err(format!("{}: for {machine}, expected AArch64", file.display()));
    }
    match libraries.iter().find(|library| !OF_ANDROID.contains(&library.as_str())) {
        Some(library) => {
            Err(format!("{}: needs {library}, which Android does not have", file.display()))
        }
        None => Ok(libraries.len()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aarch64;
    use crate::cargo::works;
    use std::process::Command;

    #[test]
    fn a_program_for_another_system_is_refused() {
        let required = std::env::var("QHX_REQUIRE_TIERS").is_ok_and(|value| value == "1");
        if !works(Command::new(aarch64::LINKER).arg("--version")) && !required {
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        let (source, program) = (folder.path().join("main.c"), folder.path().join("main"));
        std::fs::write(&source, "int main(void) { return 0; }\n").unwrap();
        for (compiler, expected) in [
            (aarch64::LINKER, "main: needs libc.so.6, which Android does not have"),
            ("cc", ", expected AArch64"),
        ] {
            let mut compile = Command::new(compiler);
            assert!(compile.arg(&source).arg("-o").arg(&program).status().unwrap().success());
            let why = check(&program).unwrap_err();
            assert!(why.ends_with(expected), "{why}");
        }
    }
}
