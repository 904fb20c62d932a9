//! Output of the runner for tests whose tier is not there.

use std::process::Command;

use qhx_tiers::tier;

#[tier(by_hand = "QHX_TEST_NEVER_SET")]
fn without_its_variable() {
    unreachable!("the test is ignored");
}

#[tier(by_hand = "PATH")]
fn with_its_variable() {}

#[test]
fn a_tier_that_is_not_there_is_ignored_with_its_reason() {
    let this = std::env::current_exe().expect("the test has a path");
    let output = Command::new(this).arg("its_variable").output().expect("it runs");
    let text = String::from_utf8_lossy(&output.stdout);
    for line in [
        "test without_its_variable ... ignored, by hand: QHX_TEST_NEVER_SET is not set",
        "test with_its_variable ... ok",
    ] {
        assert!(text.lines().any(|found| found == line), "{text}");
    }
}
