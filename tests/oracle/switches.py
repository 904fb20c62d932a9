"""Tiny models with the switches in which Llama-like classes differ, drawn and not trained, and their logits by
`transformers`, in `../fixtures/switches`.

    python switches.py ../fixtures/switches        # needs torch, transformers==5.24.0 and gguf==0.19.0

Each folder is a checkpoint without a tokenizer; `NAME.gguf` beside it holds the same model as llama.cpp's converter
names and changes it (`conversion/{llama,phi,gemma,granite,olmo,exaone,mistral3}.py`), written by the `gguf` package. `logits.json` has
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
| `gemma` | norms before, one key head, `hidden_act` in the oldest spelling |
| `olmo3` | as `olmo2`, three of four layers slide and are not scaled, in the published spelling |
| `exaone4` | norms behind, norms of each head, sliding layers that turn and full ones that do not, llama3 rope |
| `exaone4-full` | the same without a window: all layers turn; tied head |
| `ministral3` | queries that grow with the position, yarn, tied head |
| `ernie4_5` | pairs beside each other, all biases, tied head |
| `hunyuan` | norms of heads behind rope, a base scaled by `alpha` |
| `mistral3` | as `ministral3`, beside a tower for images, FP8 with a scale for each weight, names as published |
"""

import json
import re
import shutil
import sys
from pathlib import Path

import gguf
import numpy as np
import safetensors.torch
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
    "gemma": ("Gemma", {
        "num_hidden_layers": 2, "max_position_embeddings": 64, "head_dim": 12, "num_attention_heads": 3,
        "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 700.0},
    }, [30]),
    "olmo3": ("Olmo3", {
        "num_hidden_layers": 5, "max_position_embeddings": 60, "rms_norm_eps": 1e-4, "sliding_window": 11,
        "num_attention_heads": 4, "num_key_value_heads": 4, "eos_token_id": 2,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn", "rope_theta": 500000.0, "factor": 3.0, "original_max_position_embeddings": 20,
                "beta_fast": 8.0, "beta_slow": 0.05, "attention_factor": 1.3,
                # Which the class does not look for within the object of a kind.
                "truncate": False,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
        },
    }, [10, 40]),
    "exaone4": ("Exaone4", {
        "num_hidden_layers": 5, "max_position_embeddings": 64, "head_dim": 10, "sliding_window": 7,
        "sliding_window_pattern": 4, "rms_norm_eps": 1e-4,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 600.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 3.0,
            "original_max_position_embeddings": 16,
        },
    }, [40]),
    "exaone4-full": ("Exaone4", {
        "num_hidden_layers": 2, "max_position_embeddings": 64, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 6, "sliding_window": None, "layer_types": ["full_attention"] * 2, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 600.0},
    }, [20]),
    "ernie4_5": ("Ernie4_5", {
        "num_hidden_layers": 2, "max_position_embeddings": 64, "head_dim": 12, "num_attention_heads": 6, "use_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 600.0},
    }, [30]),
    "hunyuan": ("HunYuanDenseV1", {
        "num_hidden_layers": 3, "max_position_embeddings": 64, "head_dim": 10, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 300.0, "alpha": 20.0, "factor": 1.0, "beta_fast": 32, "beta_slow": 1,
            "mscale": 1.0, "mscale_all_dim": 0.0,
        },
    }, [40]),
    "ministral3": ("Ministral3", {
        "num_hidden_layers": 3, "max_position_embeddings": 60, "head_dim": 12, "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 900.0, "factor": 5.0, "original_max_position_embeddings": 12,
            "beta_fast": 6.0, "beta_slow": 0.5, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4,
        },
    }, [10, 40]),
}
# Keys that published configurations spell in the older way: at top level, `rope_scaling` beside `rope_theta`.
OLD = {"phi3", "granite", "gemma2", "gemma", "olmo3", "exaone4", "ernie4_5", "hunyuan"}
# A tower of the least sizes, which no bundle has.
TOWER = {
    "model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 8, "patch_size": 4, "head_dim": 4,
}


def draw(model):
    """Weights that f16 holds, large enough for each part to be noticed."""
    generator = torch.Generator().manual_seed(17)
    with torch.no_grad():
        for name, p in model.named_parameters():
            normal = torch.randn(p.shape, generator=generator)
            if name.endswith("norm.weight"):
                base = 0.0 if model.config.model_type.startswith("gemma") else 1.0
                values = base + 0.3 * normal
            elif p.ndim == 1:
                values = 0.3 * normal
            else:
                values = 1.5 * normal / p.shape[1] ** 0.5
            p.copy_(values.half().float())


def old_spelling(path):
    value = json.loads(path.read_text())
    rope = value.pop("rope_parameters")
    rope = rope.get("full_attention", rope)
    if value["model_type"] == "gemma":
        value |= {"hidden_act": "gelu", "hidden_activation": None}
    for key in ["rope_theta", "partial_rotary_factor"]:
        if key in rope:
            value[key] = rope.pop(key)
    if rope["rope_type"] != "default":
        # The name of the type is as old as the class.
        rope["rope_type" if value["model_type"] in ("olmo3", "exaone4") else "type"] = rope.pop("rope_type")
        value["rope_scaling"] = rope
    value["torch_dtype"] = value.pop("dtype")
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def permuted(weight, heads):
    """`LlamaModel.permute` of the converter."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def llama3_factors(rope, dim):
    """`generate_extra_tensors` of the converter."""
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    turns = rope["original_max_position_embeddings"] * rope["rope_theta"] ** (-np.arange(0, dim, 2) / dim) / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 / ((1 - smooth) / rope["factor"] + smooth)).astype(np.float32)


def to_fp8(tensors):
    """Linear layers in FP8 with one scale, and those of inputs, as published; and what they are then."""
    stored, exact = {}, {}
    for name, p in tensors.items():
        stored[name] = exact[name] = p.half()
        if re.search(r"layers\..*_proj\.weight", name):
            scale = (p.abs().max() / 448).bfloat16()
            stored[name] = (p / scale.float()).to(torch.float8_e4m3fn)
            exact[name] = stored[name].float() * scale.float()
            stored[name.replace("weight", "weight_scale_inv")] = scale
            stored[name.replace("weight", "activation_scale")] = torch.tensor(0.02).bfloat16()
    return stored, {name: p.float() for name, p in exact.items()}


def logits_of(model, ctx):
    """A run: a text as long as the context, and the logits behind some of its tokens."""
    fresh = type(model)(model.config).float().eval()
    fresh.load_state_dict(model.state_dict())
    ids = torch.from_numpy(np.random.default_rng(ctx).integers(3, VOCAB, (1, ctx)))
    with torch.no_grad():
        logits = fresh(ids, use_cache=False).logits[0]
    at = list(range(EVERY - 1, ctx, EVERY))
    return {"ids": ids[0].tolist(), "at": at, "logits": [[round(x, 6) for x in logits[i].tolist()] for i in at]}


def multimodal(out, found):
    """`mistral3`: the decoder of `ministral3` with other weights, beside a tower."""
    text = {**SIZES, **MODELS["ministral3"][1], "num_hidden_layers": 2, "model_type": "ministral3"}
    config = transformers.Mistral3Config(text_config=text, vision_config=TOWER, tie_word_embeddings=True)
    config.text_config._attn_implementation = "eager"
    model = transformers.Mistral3ForConditionalGeneration(config).float().eval()
    draw(model)
    tensors = {tensor: p.detach().clone() for tensor, p in model.named_parameters() if tensor != "lm_head.weight"}
    text = {name: p for name, p in tensors.items() if "language_model" in name}
    stored, exact = to_fp8(text)
    model.load_state_dict(exact, strict=False)
    found["mistral3"] = [logits_of(model, 40)]
    stored |= {name: p.half() for name, p in tensors.items() if name not in text}
    stored = {re.sub(r"^model\.(language_model\.|vision|multi)", published_name, name): p for name, p in stored.items()}
    (out / "mistral3").mkdir()
    safetensors.torch.save_file(stored, out / "mistral3" / "model.safetensors", metadata={"format": "pt"})
    value = json.loads(config.to_json_string()) | {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "float16",
        "quantization_config": {
            "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
    }
    (out / "mistral3" / "config.json").write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")


def published_name(match):
    return "language_model.model." if match[1].startswith("language") else match[1]


def write_gguf(path, name, config, tensors):
    kind = {"olmo3": "olmo2", "exaone4-full": "exaone4", "ministral3": "mistral3", "hunyuan": "hunyuan-dense"}.get(name, name)
    writer = gguf.GGUFWriter(path, kind)
    layers, heads, groups = config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads
    dim = getattr(config, "head_dim", None) or HIDDEN // heads
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
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
    # `HunYuanModel.set_gguf_parameters`.
    writer.add_rope_freq_base(rope["rope_theta"] * rope.get("alpha", 1) ** (dim / (dim - 2)))
    if name in ("gemma2", "gemma", "exaone4", "exaone4-full", "ministral3", "ernie4_5", "hunyuan"):
        writer.add_key_length(dim)
        writer.add_value_length(dim)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name in ("gemma2", "phi3", "olmo3", "exaone4"):
        writer.add_sliding_window(config.sliding_window)
    if name in ("olmo3", "exaone4"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if name == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(rope, dim))
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
        for key, add in [("attention_factor", writer.add_rope_scaling_yarn_attn_factor),
                         ("beta_fast", writer.add_rope_scaling_yarn_beta_fast),
                         ("beta_slow", writer.add_rope_scaling_yarn_beta_slow)]:
            if rope.get(key) is not None:
                add(rope[key])
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
        if name in ("smollm3", "granite", "ministral3") and re.search(r"\.[qk]_proj\.", tensor):
            values = permuted(values, heads if ".q_proj" in tensor else groups)
        if name in ("gemma", "gemma2") and tensor.endswith("norm.weight"):
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
        config = getattr(transformers, f"{kind}Config")(**(SIZES | settings))
        config._attn_implementation = "eager"
        model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
        draw(model)
        tensors = {tensor: p.detach().clone() for tensor, p in model.named_parameters()}
        runs = [logits_of(model, ctx) for ctx in contexts]
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
    multimodal(out, found)
    (out / "logits.json").write_text(json.dumps(found, separators=(",", ":")) + "\n")
    for file in out.rglob("*"):
        file.chmod(0o755 if file.is_dir() else 0o644)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
