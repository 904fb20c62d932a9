//! The archive of the Kotlin library for Android, and its POM.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cargo::{self, Result, cargo};
use crate::files::{copy, read, write};
use crate::kotlinc::{self, Tools, at};

/// Phones with a Hexagon NPU.
pub(crate) const TARGET: &str = "aarch64-linux-android";

/// The first version of Android whose applications the library is for: see the manifest.
pub(crate) const API: u32 = 26;

/// The version of Qualcomm's libraries that apps get: that which `qhx forge` compiles with.
const QAIRT: &str = "2.51.0";

/// `cargo xtask aar`: for others, with the native part where an NDK is there.
pub(crate) fn run() -> Result<()> {
    let tools = kotlinc::tools()?;
    let out = cargo::target_folder()?.join("kotlin");
    let native = native("release");
    let native = native.inspect_err(|why| eprintln!("without jni/arm64-v8a/libqhxjni.so: {why}"));
    eprintln!("{}", lay_out(&tools, &out, native.ok().as_deref())?.display());
    Ok(())
}

/// Missing requirement of programs for phones, with how to get it.
pub(crate) fn missing() -> Option<String> {
    if let Err(why) = linker() {
        return Some(why);
    }
    let there = cargo::has_target(TARGET);
    (!there).then(|| format!("the target is not installed: rustup target add {TARGET}"))
}

/// Has a command of cargo link with the NDK.
///
/// # Errors
/// The NDK is not there: for people.
pub(crate) fn link(build: &mut Command) -> Result<&mut Command> {
    Ok(build.env("CARGO_TARGET_AARCH64_LINUX_ANDROID_LINKER", linker()?))
}

/// Builds the native part for phones.
///
/// # Errors
/// The NDK or the target is not there, or the build fails: for people.
pub(crate) fn native(profile: &str) -> Result<PathBuf> {
    if let Some(why) = missing() {
        return Err(why);
    }
    let mut build = cargo(&["build", "--profile", profile]);
    build.args(["--package", "qhx-jni", "--target", TARGET]);
    cargo::run(link(&mut build)?)?;
    let folder = if profile == "dev" { "debug" } else { profile };
    Ok(cargo::target_folder()?.join(TARGET).join(folder).join("libqhxjni.so"))
}

/// The NDK's compiler for phones, which links.
fn linker() -> Result<PathBuf> {
    let names = ["ANDROID_NDK_HOME", "ANDROID_NDK_ROOT", "ANDROID_NDK"];
    let ndk =
        names.iter().find_map(|name| std::env::var_os(name).filter(|value| !value.is_empty()));
    let ndk = PathBuf::from(ndk.ok_or("no NDK: set ANDROID_NDK_HOME to its folder")?);
    let hosts = ndk.join("toolchains/llvm/prebuilt");
    for host in std::fs::read_dir(&hosts).map_err(at(&hosts))? {
        let clang = format!("bin/{TARGET}{API}-clang{}", if cfg!(windows) { ".cmd" } else { "" });
        let clang = host.map_err(at(&hosts))?.path().join(clang);
        if clang.is_file() {
            return Ok(clang);
        }
    }
    Err(format!("{}: no clang for {TARGET}, API {API}: is it an NDK?", hosts.display()))
}

/// Compiles the library into `out`, and lays out and packs the archive in a folder of its own there, which is returned.
pub(crate) fn lay_out(tools: &Tools, out: &Path, native: Option<&Path>) -> Result<PathBuf> {
    let folder = out.join("aar");
    let content = folder.join("content");
    // What another version left would be packed, too.
    let _ = std::fs::remove_dir_all(&folder);
    copy(&kotlinc::library(tools, out)?, &content.join("classes.jar"))?;
    if let Some(library) = native {
        copy(library, &content.join("jni/arm64-v8a/libqhxjni.so"))?;
    }
    let source = qhx_paths::workspace().join("bindings/kotlin/aar");
    for name in ["AndroidManifest.xml", "proguard.txt"] {
        copy(&source.join(name), &content.join(name))?;
    }
    // Its resources, of which it has none.
    write(&content.join("R.txt"), "")?;
    let version = env!("CARGO_PKG_VERSION");
    let archive = folder.join(format!("qhx-{version}.aar"));
    let mut pack = Command::new("jar");
    pack.args(["--create", "--no-manifest", "--file"]).arg(archive);
    cargo::run(pack.arg("-C").arg(&content).arg("."))?;
    let pom = read(&source.join("pom.xml"))?
        .replace("@VERSION@", version)
        .replace("@KOTLIN@", kotlinc::COMPILER)
        .replace("@COROUTINES@", kotlinc::COROUTINES)
        .replace("@QAIRT@", QAIRT);
    write(&folder.join(format!("qhx-{version}.pom")), &pom)?;
    Ok(folder)
}
