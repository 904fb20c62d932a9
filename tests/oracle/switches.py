"""Tiny models with the switches in which Llama-like classes differ, drawn and not trained, and their logits by
`transformers`, in `../fixtures/switches`.

    python switches.py ../fixtures/switches        # needs torch, transformers==5.24.0 and gguf==0.19.0

Each folder is a checkpoint without a tokenizer; `NAME.gguf` beside it holds the same model as llama.cpp's converter
names and changes it (`conversion/{llama,phi,gemma,granite,olmo}.py`), written by the `gguf` package. `logits.json` has
for each model the contexts that a bundle is made for, with a text of as many tokens and the logits in f32 behind some
of them. One forward pass takes the whole text, so that rope types that depend on the length of the sequence are those
of a sequence as long as the context.

| folder | switches |
|---|---|
| `phi3` | fused projections, partial rotary, longrope (short and long), sliding window in all layers |
| `smollm3` | NoPE layers, yarn (mscale, no truncation), biases, own `layer_types` with a window |
| `granite` | multipliers, dynamic rope, tied head |
| `olmo2` | norms behind, norms over all heads, yarn (truncation, inferred attention factor) |
| `gemma2` | soft caps, every other layer slides, norms on both sides, linear rope |
"""

import json
import re
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

HIDDEN, INTER, VOCAB, EVERY = 32, 32, 48, 5
SIZES = {
    "hidden_size": HIDDEN, "intermediate_size": INTER, "vocab_size": VOCAB, "num_attention_heads": 4,
    "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}
# Class, configuration, contexts.
MODELS = {
    "phi3": ("Phi3", {
        "num_hidden_layers": 2, "max_position_embeddings": 96, "original_max_position_embeddings": 24,
        "sliding_window": 10, "rms_norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1000.0, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 2.0], "long_factor": [1.5, 3.0, 7.0],
        },
    }, [24, 40]),
    "smollm3": ("SmolLM3", {
        "num_hidden_layers": 4, "max_position_embeddings": 64, "no_rope_layer_interval": 2, "attention_bias": True,
        "mlp_bias": True, "use_sliding_window": True, "sliding_window": 9, "tie_word_embeddings": False,
        "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16,
            "beta_fast": 4.0, "beta_slow": 0.5, "mscale": 1.5, "mscale_all_dim": 0.5, "truncate": False,
        },
    }, [40]),
    "granite": ("Granite", {
        "num_hidden_layers": 2, "max_position_embeddings": 16, "embedding_multiplier": 6.0, "attention_multiplier": 0.2,
        "residual_multiplier": 0.4, "logits_scaling": 2.5, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 800.0, "factor": 4.0},
    }, [16, 40]),
    "olmo2": ("Olmo2", {
        "num_hidden_layers": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 3.0, "original_max_position_embeddings": 20,
        },
    }, [40]),
    "gemma2": ("Gemma2", {
        "num_hidden_layers": 3, "max_position_embeddings": 64, "head_dim": 16, "query_pre_attn_scalar": 9,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "sliding_window": 8,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 900.0, "factor": 2.0},
    }, [40]),
}
# Keys that published configurations spell in the older way: at top level, `rope_scaling` beside `rope_theta`.
OLD = {"phi3", "granite", "gemma2"}


def draw(model):
    """Weights that f16 holds, large enough for each part to be noticed."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                base = 0.0 if model.config.model_type == "gemma2" else 1.0
                values = base + 0.3 * normal
            elif p.ndim == 1:
                values = 0.3 * normal
            else:
                values = 1.5 * normal / p.shape[1] ** 0.5
            p.copy_(values.half().float())


def old_spelling(path):
    value = json.loads(path.read_text())
    rope = value.pop("rope_parameters")
    for key in ["rope_theta", "partial_rotary_factor"]:
        if key in rope:
            value[key] = rope.pop(key)
    rope["type"] = rope.pop("rope_type")
    value["rope_scaling"] = rope
    value["torch_dtype"] = value.pop("dtype")
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def permuted(weight, heads):
    """`LlamaModel.permute` of the converter."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, name, config, tensors):
    kind = {"phi3": "phi3", "smollm3": "smollm3", "granite": "granite", "olmo2": "olmo2", "gemma2": "gemma2"}[name]
    writer = gguf.GGUFWriter(path, kind)
    layers, heads, groups = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or HIDDEN // heads
    rope = config.rope_parameters
    rotary = int(dim * rope.get("partial_rotary_factor", 1.0))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(INTER)
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(VOCAB)
    writer.add_rope_dimension_count(rotary)
    writer.add_rope_freq_base(rope["rope_theta"])
    if name == "gemma2":
        writer.add_key_length(dim)
        writer.add_value_length(dim)
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name in ("gemma2", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        scale = config.max_position_embeddings / config.original_max_position_embeddings
        writer.add_rope_scaling_attn_factors((1 + np.log(scale) / np.log(config.original_max_position_embeddings)) ** 0.5)
        for length in ("long", "short"):
            writer.add_tensor(f"rope_factors_{length}.weight", np.array(rope[f"{length}_factor"], np.float32))
    number = {arch: id for id, arch in gguf.MODEL_ARCH_NAMES.items()}[kind]
    table = gguf.get_tensor_name_map(number, layers)
    for tensor, values in tensors.items():
        if tensor == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = values.numpy()
        if name in ("smollm3", "granite") and re.search(r"\.[qk]_proj\.", tensor):
            values = permuted(values, heads if ".q_proj" in tensor else groups)
        if name == "gemma2" and tensor.endswith("norm.weight"):
            values = values + 1
        theirs = table.get_name(tensor, try_suffixes=(".weight", ".bias"))
        assert theirs, tensor
        writer.add_tensor(theirs, values.astype(np.float32 if values.ndim == 1 else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(out):
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    found = {}
    for name, (kind, settings, contexts) in MODELS.items():
        config = getattr(transformers, f"{kind}Config")(**SIZES, **settings)
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
        draw(model)
        tensors = {tensor: p.detach().clone() for tensor, p in model.named_parameters()}
        runs = []
        for ctx in contexts:
            fresh = type(model)(model.config).float().eval()
            fresh.load_state_dict(model.state_dict())
            ids = torch.from_numpy(np.random.default_rng(ctx).integers(3, VOCAB, (1, ctx)))
            with torch.no_grad():
                logits = fresh(ids, use_cache=False).logits[0]
            at = list(range(EVERY - 1, ctx, EVERY))
            runs.append({"ids": ids[0].tolist(), "at": at, "logits": [[round(x, 6) for x in logits[i].tolist()] for i in at]})
        found[name] = runs
        stored = type(model)(config)
        stored.load_state_dict(model.state_dict())
        stored = stored.half()
        stored.save_pretrained(out / name)
        (out / name / "generation_config.json").unlink(missing_ok=True)
        path = out / name / "config.json"
        # Gemma multiplies embeddings by a number that has the type of the model.
        path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float32"}, indent=1, sort_keys=True) + "\n")
        if name in OLD:
            old_spelling(path)
        write_gguf(out / f"{name}.gguf", name, config, tensors)
        spread = max(abs(x) for run in runs for row in run["logits"] for x in row)
        print(f"{name}: {sum(p.numel() for p in model.parameters())} parameters, largest logit {spread:.2f}")
    (out / "logits.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for file in out.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
