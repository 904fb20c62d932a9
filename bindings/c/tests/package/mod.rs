//! The package as other projects find it: by CMake's `find_package` and by pkg-config.

use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use qhx_tiers::tier;

use super::{Given, TOKENS, folder, language, library, ok};

/// A folder as the package is installed, with these libraries.
fn installed(folder: PathBuf, libraries: &[&str]) -> PathBuf {
    let source = super::folder();
    let [headers, pkgconfig, cmake] =
        ["include/qhexrt", "lib/pkgconfig", "lib/cmake/qhexrt"].map(|part| folder.join(part));
    for folder in [&headers, &pkgconfig, &cmake] {
        std::fs::create_dir_all(folder).unwrap();
    }
    let copy = |from: &str, to: &Path| {
        let from = source.join(from);
        std::fs::copy(&from, to.join(from.file_name().unwrap())).unwrap();
    };
    copy("include/qhexrt_c.h", &folder.join("include"));
    copy("include/qhexrt/qhexrt_c.h", &headers);
    copy("package/qhexrt.pc", &pkgconfig);
    copy("package/qhexrtConfig.cmake", &cmake);
    copy("package/qhexrtConfigVersion.cmake", &cmake);
    for name in libraries {
        symlink(library(name), folder.join("lib").join(name)).unwrap();
    }
    if libraries.contains(&"libqhexrt.so") {
        symlink("libqhexrt.so", folder.join("lib/libqhexrt.so.1")).unwrap();
    }
    folder
}

/// Checks that a program built with the package generates the expected text.
fn generates(given: &Given, program: &mut Command) {
    program.env("HOME", given.folder.path()).env("QHX_BACKEND", "cpu");
    program.env_remove("QHX_PLUGIN_PATH").arg(&given.language).arg(&given.prompt);
    assert_eq!(String::from_utf8(ok(program).stdout).unwrap(), given.expected);
}

#[tier(cmake)]
fn cmake_finds_the_package() {
    let given = language(None, TOKENS);
    let prefix = installed(given.path("installed"), &["libqhexrt.so", "libqhexrt.a"]);
    let build = given.path("build");
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(folder().join("tests/package")).arg("-B").arg(&build);
    ok(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())));
    ok(Command::new("cmake").arg("--build").arg(&build));
    for (version, found) in
        [("1", true), ("1.0", true), ("1.1", true), ("1.99", false), ("2.0", false)]
    {
        let mut again = Command::new("cmake");
        again.arg("-S").arg(folder().join("tests/package")).arg("-B").arg(given.path("versions"));
        again.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display()));
        let output = again.arg(format!("-DVERSION={version}")).output().unwrap();
        assert_eq!(output.status.success(), found, "{version}: {output:?}");
    }
    for program in ["ask-qhexrt", "ask-static"] {
        generates(&given, &mut Command::new(build.join(program)));
    }
    let needed = |program: &str| {
        let dynamic = ok(Command::new("readelf").arg("-d").arg(build.join(program))).stdout;
        String::from_utf8(dynamic).unwrap().contains("[libqhexrt.so.1]")
    };
    assert!(needed("ask-qhexrt") && !needed("ask-static"));
}

#[tier(cmake)]
fn cmake_says_where_no_library_is() {
    let out = tempfile::tempdir().unwrap();
    let prefix = installed(out.path().join("installed"), &[]);
    let mut configure = Command::new("cmake");
    configure.arg("-S").arg(folder().join("tests/package")).arg("-B").arg(out.path().join("build"));
    let output = configure.arg(format!("-DCMAKE_PREFIX_PATH={}", prefix.display())).output();
    let output = output.unwrap();
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && stderr.contains("no libqhexrt in"), "{stderr}");
}

#[tier(cmake)]
fn pkg_config_finds_the_package() {
    let given = language(None, TOKENS);
    for (name, file, more) in
        [("shared", "libqhexrt.so", &[][..]), ("static", "libqhexrt.a", &["--static"])]
    {
        // The linker takes a shared library where both are there.
        let prefix = installed(given.path(name), &[file]);
        let mut flags = Command::new("pkg-config");
        flags.args(["--cflags", "--libs"]).args(more).arg("qhexrt");
        let flags = ok(flags.env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"))).stdout;
        let flags = String::from_utf8(flags).unwrap();
        let program = given.path(&format!("ask-{name}"));
        let mut compile = Command::new("cc");
        compile.arg(folder().join("tests/package/ask.c")).arg("-o").arg(&program);
        ok(compile.args(flags.split_whitespace()));
        generates(&given, Command::new(program).env("LD_LIBRARY_PATH", prefix.join("lib")));
    }
}
