//! The Kotlin compiler, and the classes of the library.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, works};

/// The compiler; its package has coroutines beside it.
pub(crate) const COMPILER: &str = "2.4.20";

/// The version of coroutines that it has.
pub(crate) const COROUTINES: &str = "1.8.0";

/// The classes of the first virtual machine that has the language's default methods; Android has them, too.
const JVM_TARGET: &str = "1.8";

pub(crate) fn folder() -> PathBuf {
    qhx_paths::workspace().join("bindings/kotlin")
}

/// An error of a file.
pub(crate) fn at(path: &Path) -> impl Fn(std::io::Error) -> String {
    move |e| format!("{}: {e}", path.display())
}

/// The compiler's folder, and what starts the virtual machine.
#[derive(Debug)]
pub(crate) struct Tools {
    lib: PathBuf,
}

impl Tools {
    pub(crate) fn jar(&self, name: &str) -> PathBuf {
        self.lib.join(format!("{name}.jar"))
    }

    /// Libraries that programs of Kotlin need.
    pub(crate) fn libraries(&self) -> [PathBuf; 2] {
        ["kotlin-stdlib", "kotlinx-coroutines-core-jvm"].map(|name| self.jar(name))
    }
}

/// A Java virtual machine that begins quickly.
pub(crate) fn java() -> Command {
    let mut java = Command::new("java");
    java.args(["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]);
    java
}

/// The tools, which are installed where they are not there.
///
/// # Errors
/// A part is not there and cannot be installed: for people.
pub(crate) fn tools() -> Result<Tools> {
    // Java's own archiver is in the development kit only.
    if !works(Command::new("java").arg("-version")) || !works(Command::new("jar").arg("--version"))
    {
        return Err("no JDK is installed: apt-get install default-jdk-headless".into());
    }
    let folder = cargo::tools_folder().join(format!("kotlin-{COMPILER}"));
    let tools = Tools { lib: folder.join("node_modules/kotlin-compiler/lib") };
    if !tools.jar("kotlin-compiler").is_file() {
        cargo::npm(&folder, &[format!("kotlin-compiler@{COMPILER}").as_str()])?;
    }
    Ok(tools)
}

/// Paths in one argument.
pub(crate) fn joined<'a>(paths: impl IntoIterator<Item = &'a PathBuf>) -> Result<OsString> {
    std::env::join_paths(paths).map_err(|e| e.to_string())
}

/// Compiles `sources` over `classes` into an archive.
pub(crate) fn compile(
    tools: &Tools,
    sources: &[PathBuf],
    classes: &[PathBuf],
    more: &[OsString],
    out: &Path,
) -> Result<()> {
    let compiler = [tools.jar("kotlin-compiler"), tools.jar("kotlin-stdlib")];
    let home = tools.lib.parent().unwrap_or(&tools.lib);
    let mut compile = java();
    compile.arg("-cp").arg(joined(&compiler)?);
    compile.arg("org.jetbrains.kotlin.cli.jvm.K2JVMCompiler");
    compile.args(["-no-reflect", "-no-stdlib", "-Werror", "-jvm-target", JVM_TARGET]);
    compile.arg("-kotlin-home").arg(home).args(more).arg("-d").arg(out);
    compile.arg("-cp").arg(joined(tools.libraries().iter().chain(classes))?).args(sources);
    cargo::run(&mut compile)
}

/// Compiles the library.
pub(crate) fn library(tools: &Tools, out: &Path) -> Result<PathBuf> {
    let classes = out.join("classes.jar");
    let more = ["-Xexplicit-api=strict", "-module-name", "qhx"].map(OsString::from);
    compile(tools, &[folder().join("src")], &[], &more, &classes)?;
    Ok(classes)
}
