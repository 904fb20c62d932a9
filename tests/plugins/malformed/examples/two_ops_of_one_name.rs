//! Registers two host-ops of one name.

qhx_test_malformed_plugins::zeros!(First, "test_twice");
qhx_test_malformed_plugins::zeros!(Second, "test_twice");

qhx_op::register_ops!(First, Second);
qhx_op::export_plugin!();
