//! The sample application for Android, as far as it can be built without Android's SDK.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::android;
use crate::cargo::{self, Result, works};
use crate::files::{read, write};
use crate::kotlinc::{self, Tools, at, compile};

/// Package of the application.
const PACKAGE: &str = "dev.qhx.example";
/// Android's own resources, of Debian's package `android-framework-res`.
const FRAMEWORK: &str = "/usr/share/android-framework-res/framework-res.apk";
/// The version of Android that the application is built for.
const TARGET_API: u32 = 35;

/// Folder of the application's project.
pub(crate) fn folder() -> PathBuf {
    qhx_paths::workspace().join("examples/android")
}

/// The parts of the application that know nothing of Android, which tests run.
pub(crate) fn plain_sources() -> [PathBuf; 2] {
    let sources = folder().join("app/src/main/kotlin/dev/qhx/example");
    ["Conversation.kt", "Samples.kt"].map(|name| sources.join(name))
}

/// `cargo xtask android-app`.
pub(crate) fn run() -> Result<()> {
    if let Some(why) = missing() {
        return Err(why);
    }
    let tools = kotlinc::tools()?;
    let out = cargo::target_folder()?.join("kotlin");
    android::lay_out(&tools, &out, None)?;
    let laid = build(&tools, &out)?;
    for file in files(&laid)? {
        let size = std::fs::metadata(laid.join(&file)).map_err(at(&laid))?.len();
        eprintln!("{size:>9} {}", Path::new("android-app").join(&file).display());
    }
    eprintln!("{}", laid.display());
    Ok(())
}

/// Reason why the resources cannot be compiled here.
pub(crate) fn missing() -> Option<String> {
    let there = works(Command::new("aapt").arg("version")) && Path::new(FRAMEWORK).is_file();
    let how = "no aapt is installed: apt-get install aapt android-framework-res";
    (!there).then(|| how.to_owned())
}

/// Builds the application into a folder beside the library's classes, which is returned: compiled resources and
/// manifest as a package, and classes that no tool here turns into Android's own form.
pub(crate) fn build(tools: &Tools, out: &Path) -> Result<PathBuf> {
    let folder = out.join("android-app");
    let _ = std::fs::remove_dir_all(&folder);
    let (generated, stubs) = (folder.join("gen"), folder.join("stubs"));
    for folder in [&generated, &stubs] {
        std::fs::create_dir_all(folder).map_err(at(folder))?;
    }
    let manifest = folder.join("AndroidManifest.xml");
    write(&manifest, &merged()?)?;
    let main = self::folder().join("app/src/main");
    let mut resources = Command::new("aapt");
    resources.args(["package", "-f", "-m", "-I", FRAMEWORK, "-J"]).arg(&generated);
    resources.arg("-M").arg(&manifest).arg("-S").arg(main.join("res"));
    resources.arg("-F").arg(folder.join("resources.apk"));
    cargo::run(&mut resources)?;
    let ids = folder.join("ids");
    let java = |sources: &Path, to: &Path| -> Result<()> {
        let mut java = Command::new("javac");
        cargo::run(java.args(["-nowarn", "-d"]).arg(to).args(java_files(sources)?))
    };
    java(&self::folder().join("stubs"), &stubs)?;
    java(&generated, &ids)?;
    let classes = [out.join("classes.jar"), stubs.clone(), ids];
    compile(tools, &[main.join("kotlin")], &classes, &[], &folder.join("app.jar"))?;
    // No part of the application: Android has its own.
    std::fs::remove_dir_all(&stubs).map_err(at(&stubs))?;
    Ok(folder)
}

/// The manifest with what Gradle adds: package, versions, and that of the library.
fn merged() -> Result<String> {
    let text = read(&folder().join("app/src/main/AndroidManifest.xml"))?;
    let library = read(&qhx_paths::workspace().join("bindings/kotlin/aar/AndroidManifest.xml"))?;
    let part = |start: &str, end: &str| {
        let from = library.find(start)?;
        let to = library.get(from..)?.find(end)? + from + end.len();
        library.get(from..to)
    };
    let native = part("<uses-native-library", "/>")
        .ok_or("the library's manifest names no native library")?;
    let api = android::API;
    let text = text.replacen("<manifest ", &format!("<manifest package=\"{PACKAGE}\" "), 1);
    let versions = format!(
        "<uses-sdk android:minSdkVersion=\"{api}\" android:targetSdkVersion=\"{TARGET_API}\" />\n\n    <application"
    );
    let text = text.replacen("<application", &versions, 1);
    // Debian's aapt is older than the element, and leaves out what it does not know.
    Ok(text.replacen("    </application>", &format!("        {native}\n    </application>"), 1))
}

fn java_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let files =
        files(folder)?.into_iter().filter(|file| file.extension().is_some_and(|e| e == "java"));
    Ok(files.map(|file| folder.join(file)).collect())
}

/// Files below a folder, by their paths in it.
fn files(folder: &Path) -> Result<Vec<PathBuf>> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(&next).map_err(at(&next))? {
            let path = entry.map_err(at(&next))?.path();
            if path.is_dir() {
                folders.push(path);
            } else {
                found.push(path.strip_prefix(folder).map_err(|e| e.to_string())?.to_owned());
            }
        }
    }
    found.sort();
    Ok(found)
}
