//! The host-op plugin interface of qhx and the op author's kit
