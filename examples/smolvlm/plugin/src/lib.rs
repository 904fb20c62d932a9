//! The SmolVLM host-op as a dynamic plugin.

qhx_op::register_ops!(smolvlm_op::Generate);
qhx_op::export_plugin!();
