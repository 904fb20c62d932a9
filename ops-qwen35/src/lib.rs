//! Host-op for the Qwen3.5 hybrid family (gated delta rule and softmax attention)
