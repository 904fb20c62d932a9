//! `docs/adding-a-family.md` as it stands: its commands, in an empty folder outside the repository,
//! with a `qhx` that was built before.

#![cfg(target_os = "linux")]
#![allow(clippy::panic, clippy::unwrap_used, reason = "a test that fails does so by panicking")]

use qhx_tests::outside::{self, Outside};

#[test]
fn the_steps_lead_from_an_empty_folder_to_generate() {
    let steps = outside::commands("adding-a-family.md", "Steps");
    let programs = outside::programs();
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
    assert_eq!(outside::hashes(&outside::programs()), before, "the programs changed");
}
