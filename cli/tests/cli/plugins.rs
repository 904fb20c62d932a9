//! `qhx plugins`: installing and what it says.

use std::path::PathBuf;

use crate::run::{Program, folder};

/// One of the project's plugins, which lie beside the program.
fn plugin() -> PathBuf {
    let name = format!(
        "{}qhx_ops_qwen35_plugin{}",
        std::env::consts::DLL_PREFIX,
        std::env::consts::DLL_SUFFIX
    );
    qhx_paths::program("qhx").with_file_name(name)
}

#[test]
fn an_op_that_another_plugin_has_too_is_said_to_come_from_one() {
    let folder = folder();
    let dir = folder.path();
    let install = |name: &str| {
        let name = format!("{name}{}", std::env::consts::DLL_SUFFIX);
        // The first run builds the plugin.
        let program = Program::qhx(dir);
        std::fs::copy(plugin(), dir.join(&name)).expect("copied");
        program.args(["plugins", "install", &name]).run().ok()
    };
    install("mm");
    // Installed plugins are searched by name.
    let later = install("zz");
    let still = "note: host-op qwen3_5_generate still comes from ";
    let line = later.stderr.lines().find(|line| line.starts_with(still)).expect("a note");
    assert!(line.contains("mm.") && !line.contains("zz."), "{line}");
    let earlier = install("aa");
    let note = "note: host-op qwen3_5_generate comes from this plugin now, and no longer from ";
    let line = earlier.stderr.lines().find(|line| line.starts_with(note)).expect("a note");
    assert!(line.contains("mm."), "{line}");
    let list = qhx!(dir, "plugins", "list").run().ok();
    let used = list.stdout.lines().find(|line| line.contains("qwen3_5_generate")).expect("a line");
    assert!(used.starts_with("ok: ") && used.contains("aa."), "{list:?}");
}
