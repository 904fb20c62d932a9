//! The speech host-ops as a dynamic plugin.

qhx_op::export_plugin!(qhx_ops_speech);
