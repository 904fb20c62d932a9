//! The Gemma 4 host-op as a dynamic plugin.

qhx_op::export_plugin!(qhx_ops_gemma4);
