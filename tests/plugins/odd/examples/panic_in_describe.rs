//! Panics when it is asked what it is.

fn name() -> &'static str {
    assert!(std::hint::black_box(false), "describe goes wrong");
    "never"
}

qhx_test_odd_plugins::zeros!(Shy, name());

qhx_op::register_ops!(Shy);
qhx_op::export_plugin!();
