//! A backend from outside, `examples/backend`: a crate that knows `qhx-exec` alone, tested as anybody would.

use qhx_tests::outside;

#[test]
fn a_backend_from_outside_executes_a_graph() {
    let printed = outside::test_example("backend");
    for test in ["a_graph_doubles_in_memory_of_the_backend", "what_does_not_fit_is_refused"] {
        assert!(printed.contains(&format!("test {test} ... ok")), "{printed}");
    }
}
