//! Exports a plugin root, and registers nothing.

qhx_op::export_plugin!();
