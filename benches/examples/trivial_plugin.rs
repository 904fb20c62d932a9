//! The trivial host-op as a plugin, for `plugin_overhead`.

#[path = "../src/trivial.rs"]
mod trivial;

qhx_op::export_plugin!();
