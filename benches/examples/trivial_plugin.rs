//! The trivial host-op as a plugin, for `overhead plugins`.

#[path = "../src/bin/overhead/trivial.rs"]
mod trivial;

qhx_op::export_plugin!();
