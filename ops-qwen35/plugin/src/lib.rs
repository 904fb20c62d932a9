//! The Qwen3.5 host-ops as a dynamic plugin
