//! `docs/adding-a-family.md` as it stands: its commands, in an empty folder outside the repository,
//! with a `qhx` that was built before.

#![cfg(target_os = "linux")]

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::Path;

use qhx_tests::outside::{self, Outside};
use qhx_tests::plugin_files::{self, workspace};

#[test]
fn the_steps_lead_from_an_empty_folder_to_generate() {
    let steps = outside::commands("adding-a-family.md", "Steps");
    let programs = plugin_files::programs();
    let before = outside::hashes(&programs);
    let place = Outside::new(&programs[0]);
    let printed = place.run(&steps);

    let using = |what: &str| {
        let index = steps.iter().position(|step| step.commands.contains(what));
        index.unwrap_or_else(|| panic!("no step has {what:?}"))
    };
    let tested = &printed[using("cargo test")];
    let own = "test tokens_reach_the_graph_and_the_state_comes_back ... ok";
    assert!(tested.contains(own), "{tested}");
    assert_eq!(printed[using("--plugin target")], "bcdab\n");
    let installed = &printed[using("plugins install")];
    assert!(installed.contains("my_generate") && installed.contains("ok"), "{installed}");
    assert!(installed.ends_with("bcdab\n"), "without --plugin: {installed}");

    let (success, text) = place.qhx(&["plugins", "verify"]);
    assert!(success && text.contains("libmy_op.so"), "{text}");

    // What the workflow of the template has the action do.
    let verify = |backend: &str| {
        let verify = ["verify", "my-op/bundle", "my-op/tests/suite.json", "--backend", backend];
        let (success, text) = place.qhx(&verify);
        assert!(success && text.contains("passed: 2 of 2 cases passed"), "{backend}: {text}");
    };
    verify("cpu");
    if qhx_tests::tiny::qnn_tier().is_some() {
        let (success, text) = place.qhx(&["prepare", "my-op/bundle", "--target", "v81"]);
        assert!(success, "{text}");
        verify("qnn");
    }
    assert_eq!(outside::hashes(&plugin_files::programs()), before, "the programs changed");
}

#[test]
fn the_templates_bundle_is_what_its_generator_writes() {
    let folder = tempfile::tempdir().unwrap();
    qhx_tests::letters::write(folder.path(), |_| {}).unwrap();
    let committed = workspace().join("examples/plugin-template/bundle");
    let files = |folder: &Path| -> BTreeMap<OsString, Vec<u8>> {
        let entries = fs::read_dir(folder).unwrap().map(Result::unwrap);
        entries.map(|entry| (entry.file_name(), fs::read(entry.path()).unwrap())).collect()
    };
    let (written, committed) = (files(folder.path()), files(&committed));
    assert!(written.keys().eq(committed.keys()), "{:?}", written.keys());
    for (name, bytes) in &written {
        assert!(
            *bytes == committed[name],
            "{} is out of date: cargo run -p qhx-tests --bin template_bundle",
            name.display()
        );
    }
}

/// The tables of the pages name tests as `file::test`; each is there.
#[test]
fn every_test_that_the_page_on_plugins_names_exists() {
    let page = fs::read_to_string(workspace().join("docs/plugins.md")).unwrap();
    let rows = page.split_once("## Plugins that misbehave").unwrap().1;
    let rows: Vec<_> = rows.lines().filter(|l| l.starts_with("| ")).skip(1).collect();
    assert!(rows.len() > 20, "{} rows", rows.len());
    for row in rows {
        let test = row.rsplit('`').nth(1).unwrap_or_default();
        let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("no test in {row}"));
        let name = name.rsplit("::").next().unwrap_or(name);
        // A module of the one program, or a program of its own.
        let source = ["tests/tests/all", "tests/tests"]
            .map(|folder| workspace().join(folder).join(file).with_extension("rs"))
            .iter()
            .find_map(|source| fs::read_to_string(source).ok());
        let source = source.unwrap_or_else(|| panic!("no file {file:?}: {row}"));
        assert!(
            source.contains(&format!("#[test]\nfn {name}("))
                || source.contains(&format!("#[test]\n    fn {name}(")),
            "{row}"
        );
    }
}
