"""Decoders in shapes that no fixture has: sizes, ropes, windows and switches are drawn from a seed, weights too.

    drawn_unseen.py SEED DIR [NAME…]     # DIR/NAME-SEED, for QHX_TEST_DRAWN

The names are those of `MODELS`. A folder is a checkpoint with the tokenizer of another model, and `logits.json` as in
`drawn.py`.
"""

import json
import pathlib
import random
import shutil
import sys

import numpy as np
import torch
import transformers
from safetensors.torch import save_file

from experts import draw_gpt_oss, write_gpt_oss

EVERY = 5
TOKENIZER = pathlib.Path(__file__).parent / "../fixtures/quantised/tokenizer.json"
SLIDES, SEES = "sliding_attention", "full_attention"


def attention(rng, fits=False):
    """Heads and hidden size. `fits`: the class computes the width of a head."""
    kv, group, dim = rng.choice([1, 2, 3]), rng.choice([1, 2, 3, 5]), rng.choice([6, 8, 10, 14, 18, 24])
    hidden = kv * group * dim if fits else rng.choice([20, 28, 36, 44, 52, 60])
    return kv * group, kv, dim, hidden


def sizes(rng, fits=False):
    heads, kv, dim, hidden = attention(rng, fits)
    return dict(
        hidden_size=hidden, intermediate_size=rng.choice([20, 36, 52, 76]), num_hidden_layers=rng.choice([1, 3, 5, 6]),
        num_attention_heads=heads, num_key_value_heads=kv, vocab_size=rng.choice([48, 53, 64]),
        max_position_embeddings=rng.choice([64, 96]), rms_norm_eps=rng.choice([1e-3, 1e-5, 1e-6]),
        tie_word_embeddings=rng.random() < 0.5, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ) | ({} if fits else {"head_dim": dim})


def rope(rng, kinds=("default", "linear", "llama3", "dynamic", "yarn")):
    kind = rng.choice(kinds)
    found = {"rope_type": kind, "rope_theta": rng.choice([300.0, 1e4, 5e5])}
    if kind != "default":
        found["factor"] = rng.choice([2.0, 3.5, 8.0])
    if kind in ("llama3", "yarn"):
        found["original_max_position_embeddings"] = rng.choice([12, 20, 32])
    if kind == "llama3":
        found |= {"low_freq_factor": rng.choice([0.5, 1.0]), "high_freq_factor": rng.choice([2.0, 4.0])}
    if kind == "yarn":
        found |= rng.choice([{}, {"attention_factor": 1.4}, {"mscale": 1.2, "mscale_all_dim": 0.6}, {"mscale": 0.7}])
        found |= rng.choice([{}, {"beta_fast": 5.0, "beta_slow": 0.5}, {"truncate": False}])
    return found


def kinds(rng, layers):
    return [rng.choice([SLIDES, SEES]) for _ in range(layers)]


def gemma(rng):
    return "Gemma", sizes(rng) | {"attention_bias": rng.random() < 0.5, "rope_parameters": rope(rng)}


def olmo3(rng):
    found = sizes(rng, rng.random() < 0.5)
    return "Olmo3", found | {
        "attention_bias": rng.random() < 0.5, "sliding_window": rng.choice([3, 16, 33]),
        "layer_types": rng.choice([None, kinds(rng, found["num_hidden_layers"])]),
        "rope_parameters": {SEES: rope(rng), SLIDES: rope(rng, ("default", "linear"))},
    }


def exaone4(rng):
    found = sizes(rng)
    layers = found["num_hidden_layers"]
    window = rng.choice([
        {"sliding_window": 5, "sliding_window_pattern": rng.choice([2, 3])},
        {"sliding_window": 18, "sliding_window_pattern": "LLLG", "layer_types": kinds(rng, layers)},
        {"sliding_window": None, "sliding_window_pattern": None, "layer_types": [SEES] * layers},
    ])
    return "Exaone4", found | window | {"rope_parameters": rope(rng)}


def ministral3(rng):
    turned = rope(rng) | {"llama_4_scaling_beta": rng.choice([0.0, 0.1, 0.7])}
    turned.setdefault("original_max_position_embeddings", 16)
    return "Ministral3", sizes(rng) | {"sliding_window": rng.choice([None, 6, 17]), "rope_parameters": turned}


def ernie4_5(rng):
    return "Ernie4_5", sizes(rng) | {"use_bias": rng.random() < 0.5, "rope_parameters": rope(rng)}


def hunyuan(rng):
    turned = rope(rng)
    if turned["rope_type"] == "dynamic" and rng.random() < 0.5:
        turned |= {"alpha": 7.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 0.0}
    return "HunYuanDenseV1", sizes(rng) | {"attention_bias": rng.random() < 0.5, "rope_parameters": turned}


def gpt_oss(rng):
    found = sizes(rng)
    return "GptOss", found | {
        "attention_bias": rng.random() < 0.5, "sliding_window": rng.choice([4, 15]), "num_local_experts": rng.choice([3, 6]),
        "num_experts_per_tok": rng.choice([1, 2, 3]), "swiglu_limit": rng.choice([0.8, 7.0]), "swiglu_alpha": rng.choice([1.0, 1.702]),
        "layer_types": rng.choice([None, kinds(rng, found["num_hidden_layers"])]), "rope_parameters": rope(rng, ("default", "yarn", "linear")),
    }


def gpt_oss_mxfp4(rng):
    kind, found = gpt_oss(rng)
    # Blocks have 32 inputs.
    return kind, found | {
        "hidden_size": rng.choice([32, 64, 96]), "intermediate_size": rng.choice([32, 64, 160]), "rope_parameters": rope(rng, ("yarn",)),
    }


def cosmos3(rng):
    text = sizes(rng)
    text["hidden_size"] = text["num_attention_heads"] * rng.choice([4, 6])
    half = text["head_dim"] // 2
    height = rng.randint(0, half // 2)
    text |= {
        "attention_bias": rng.random() < 0.5,
        "rope_parameters": {"rope_type": "default", "rope_theta": rng.choice([500.0, 1e5]), "mrope_section": [half - height, height, 0]},
    }
    vision = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, patch_size=4, num_patches=16)
    return "Cosmos3Edge", dict(text_config=text, vision_config=vision, projector_hidden_size=20)


def gemma3n(rng):
    found = sizes(rng)
    # Layers with keys of both kinds stand before those that share them.
    own, shared = rng.choice([2, 3, 5]), rng.choice([0, 1, 2, 4])
    layers = own + shared
    found |= {
        "num_hidden_layers": layers, "num_kv_shared_layers": shared, "hidden_size": found["num_attention_heads"] * rng.choice([6, 10]),
        "layer_types": [SLIDES, SEES] + kinds(rng, layers - 2), "vocab_size_per_layer_input": 48, "vocab_size": rng.choice([48, 61]),
        "hidden_size_per_layer_input": rng.choice([4, 10, 20]), "sliding_window": rng.choice([3, 12]), "laurel_rank": rng.choice([2, 9]),
        "altup_num_inputs": rng.choice([2, 3, 5]), "altup_correct_scale": rng.random() < 0.5, "final_logit_softcapping": rng.choice([5.0, 30.0]),
        "activation_sparsity_pattern": [rng.choice([0.0, 0.4, 0.95]) for _ in range(layers)],
        "rope_parameters": {SEES: rope(rng, ("default",)), SLIDES: rope(rng, ("default",))},
    }
    return "Gemma3n", found


MODELS = {
    make.__name__: make
    for make in (gemma, olmo3, exaone4, ministral3, ernie4_5, hunyuan, gpt_oss, gpt_oss_mxfp4, cosmos3, gemma3n)
}


@torch.no_grad()
def draw(model, kind, seed):
    """Weights that f16 holds, large enough for each part to be noticed."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        normal = torch.randn(p.shape, generator=generator)
        last = name.split(".")[-2]
        if name.endswith("norm.weight") or name.endswith("correct_output_scale"):
            values = (0.0 if kind == "Gemma" else 1.0) + 0.3 * normal
        elif p.ndim == 1 or "bias" in name or "sinks" in name:
            values = 0.3 * normal
        elif "experts" in name:
            # On the grid of int8 with a scale for each output.
            values = 1.5 * normal / p.shape[1] ** 0.5
            scale = values.abs().amax(1, keepdim=True) / 127
            p.copy_((values / scale).round() * scale)
            continue
        else:
            # Routers of Gemma 3n divide by the width, and would leave streams as they are.
            factor = {"modality_router": p.shape[-1] ** 0.5, "prediction_coefs": 0.3, "correction_coefs": 0.3}.get(last, 1.0)
            values = 1.5 * factor * normal / p.shape[-1] ** 0.5
        p.copy_(values.half().float())


def old_spelling(value, rng):
    """The keys that configurations had before transformers 5."""
    text = value.get("text_config", value)
    turned = text.pop("rope_parameters")
    if SEES in turned:
        if turned[SLIDES]["rope_type"] != "default":
            text["rope_parameters"] = turned
            return
        local = turned[SLIDES]["rope_theta"]
        turned = turned[SEES]
        if text["model_type"] == "gemma3n_text":
            text["rope_local_base_freq"] = local
        elif local != turned["rope_theta"]:
            text["rope_parameters"] = {SEES: turned, SLIDES: {"rope_type": "default", "rope_theta": local}}
            return
    text["rope_theta"] = turned.pop("rope_theta")
    text["rope_scaling"] = None if turned["rope_type"] == "default" and len(turned) == 1 else turned
    value["torch_dtype"] = value.pop("dtype")


def produce(name, seed, out):
    rng = random.Random(f"{name} {seed}")
    kind, settings = MODELS[name](rng)
    text = {"Gemma3n": "Gemma3nTextConfig"}.get(kind, f"{kind}Config")
    config = getattr(transformers, text)(**settings)
    config._attn_implementation = "eager"
    build = getattr(transformers, "Cosmos3EdgeForConditionalGeneration" if kind == "Cosmos3Edge" else f"{kind}ForCausalLM")
    model = build(config).float().eval()
    if name == "gpt_oss_mxfp4":
        torch.manual_seed(seed)
        parts = draw_gpt_oss(model, True)
    else:
        draw(model, kind, seed)
    contexts = rng.sample([9, 24, 40, 57], 2)
    runs = []
    for ctx in contexts:
        # Ropes that depend on the length keep what they saw.
        fresh = build(config).float().eval()
        fresh.load_state_dict(model.state_dict())
        size = config.get_text_config().vocab_size
        ids = torch.from_numpy(np.random.default_rng(ctx).integers(24, size, (1, ctx)))
        with torch.no_grad():
            logits = fresh(input_ids=ids, use_cache=False).logits[0]
        at = list(range(EVERY - 1, ctx, EVERY))
        runs.append({"ids": ids[0].tolist(), "at": at, "logits": [[round(x, 6) for x in logits[i].tolist()] for i in at]})
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    if name == "gpt_oss_mxfp4":
        write_gpt_oss(model, parts, out)
    else:
        (model if name == "gpt_oss" else model.half()).save_pretrained(out)
    (out / "generation_config.json").unlink(missing_ok=True)
    path = out / "config.json"
    value = json.loads(path.read_text())
    if name not in ("gemma3n", "gpt_oss_mxfp4"):
        # Gemma multiplies embeddings by a number that has the type of the model.
        value["dtype"] = "float32"
    # What the class makes of no `rope_scaling` is another rope.
    if rng.random() < 0.5 and not name.startswith("gpt_oss"):
        old_spelling(value, rng)
    if name == "gemma3n":
        tensors = {key: p for key, p in transformers.modeling_utils.load_state_dict(out / "model.safetensors").items()}
        rename = {key: key.replace("model.", "model.language_model.", 1) for key in tensors}
        save_file({rename[key]: p.contiguous() for key, p in tensors.items()}, out / "model.safetensors", metadata={"format": "pt"})
        value = {
            "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "text_config": value,
            "dtype": value.pop("dtype", None) or value.pop("torch_dtype"), "audio_token_id": 57, "image_token_id": 56,
        }
    path.write_text(json.dumps(value, indent=1, sort_keys=True) + "\n")
    shutil.copyfile(TOKENIZER, out / "tokenizer.json")
    (out / "logits.json").write_text(json.dumps(runs, separators=(",", ":")) + "\n")
    largest = max(abs(x) for run in runs for row in run["logits"] for x in row)
    print(f"{out.name}: {json.dumps(settings)}, contexts {contexts}, largest logit {largest:.1f}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    seed, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
    for name in sys.argv[3:] or MODELS:
        produce(name, seed, folder / f"{name}-{seed}")
