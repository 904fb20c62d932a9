//! Registers a host-op whose name is a path.

qhx_test_malformed_plugins::zeros!(Named, "../escape");

qhx_op::register_ops!(Named);
qhx_op::export_plugin!();
