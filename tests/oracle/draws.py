"""Random valid configurations of the families of LLAMA.md."""

import random

FAMILIES = ("mistral", "llama3", "qwen2", "qwen3", "embed")
STYLE = {"mistral": "mistral", "llama3": "llama3", "qwen2": "qwen", "qwen3": "qwen", "embed": "mistral"}


def draw(family, seed):
    rng = random.Random(f"{family} {seed}")
    style = STYLE[family]
    heads_fit = family in ("llama3", "qwen2")
    while True:
        kv, group = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 3, 4, 5, 6])
        heads, dim = kv * group, rng.choice([8, 10, 12, 14, 16, 18, 20, 22, 24, 32])
        hidden = heads * dim if heads_fit or rng.random() < 0.3 else rng.choice([72, 84, 88, 92, 100, 104, 116, 124])
        if 72 <= hidden <= 132 and 64 <= heads * dim <= 200 and not (heads_fit and hidden % heads):
            break
    size = rng.randint(455, 500) if style == "mistral" else rng.randint(405, 480)
    dtype = rng.choice(["bfloat16", "float16", "float32"])
    positions = rng.choice([320, 352, 384])
    rope = {"rope_type": "default", "rope_theta": rng.choice([10000.0, 50000.0, 500000.0, 1000000.0])}
    model = {
        "vocab_size": size + rng.choice([0, 0, 5, 11]),
        "hidden_size": hidden,
        "intermediate_size": rng.choice([116, 140, 172, 204]),
        "num_hidden_layers": rng.randint(3, 6),
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "rms_norm_eps": rng.choice([1e-5, 1e-6]),
        "max_position_embeddings": positions,
        "tie_word_embeddings": family != "embed" and rng.random() < 0.5,
    }
    if family != "qwen2":
        model["head_dim"] = dim
    if family == "llama3":
        rope |= {
            "rope_type": "llama3", "factor": rng.choice([4.0, 8.0, 32.0]), "low_freq_factor": 1.0,
            "high_freq_factor": rng.choice([2.0, 4.0]), "original_max_position_embeddings": rng.choice([64, 96, 128]),
        }
    if family in ("mistral", "embed"):
        model["sliding_window"] = rng.choice([None, 4096]) if family == "mistral" else None
    if family == "llama3":
        model |= {"attention_bias": rng.random() < 0.25, "mlp_bias": rng.random() < 0.25}
    if family == "qwen3":
        model["attention_bias"] = rng.random() < 0.25
    model["rope_parameters"] = rope
    spec = {
        "name": f"{family}-unseen-{seed}",
        "style": style,
        "tokenizer_size": size,
        "dtype": dtype,
        "keep_f32": [],
        "max_shard_size": rng.choice(["10MB", "400KB"]),
        "config_keys": rng.choice(["old", "new"]),
        "model": model,
    }
    if style == "qwen":
        spec["split"] = "qwen2"
    if family == "embed":
        spec |= {
            "max_seq": rng.choice([184, 200, 216]),
            "pooling": rng.choice(["mean", "mean", "last", "cls"]),
            "query_prefix": rng.choice(["Instruct: find the code.\nQuery: ", "query: ", ""]),
            "doc_prefix": rng.choice(["", "", "passage: "]),
        }
    return spec
