//! The Qwen3-VL host-op as a dynamic plugin.

qhx_op::export_plugin!(qhx_ops_qwen3vl);
