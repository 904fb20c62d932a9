//! A recogniser from outside, `examples/ctc`: an op that answers by itself, tested as anybody would.

use qhx_tests::outside;

#[test]
fn a_recogniser_from_outside_answers() {
    let printed = outside::test_example("ctc");
    for test in ["repetitions_and_blanks_are_left_out", "what_is_no_clip_or_no_model_is_refused"] {
        assert!(printed.contains(&format!("test {test} ... ok")), "{printed}");
    }
}
