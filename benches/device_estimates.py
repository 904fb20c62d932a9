#!/usr/bin/env python3
"""Estimates of the QNN compiler beside times that others measured on devices.

    cargo build --release -p qhx-cli --features builtin-ops
    python3 benches/device_estimates.py target/release/qhx [--chips v73,v81] [--only llama] [--keep DIR]

Published times are in benches/published/*.json, each with its source. A model is estimated with two and with three
layers: what the third one adds, times the layers that are left out, is added to two. So the first and the last layer,
which have int8 in w4a16, count once. Heads of decoders have an eighth of the vocabulary and count eight times. With
--keep the estimates stay in a folder, and a second run takes them from there, with --kept nothing else.
"""

import argparse
import collections
import hashlib
import json
import pathlib
import statistics
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "tests/configs"
#: Layers that are estimated, and the part of the vocabulary of decoders of text.
LAYERS, VOCAB = (2, 3), 8
#: Names of chips: for the forge, and as published.
CHIPS = {
    "v73": ("SM8550", "8 Gen 2"),
    "x-elite": ("SC8380XP", "X Elite"),
    "v75": ("SM8650", "8 Gen 3"),
    "v79": ("SM8750", "8 Elite"),
    "v81": ("SM8850", "8 Elite Gen 5"),
    "x2-elite": ("SC8480XP", "X2 Elite"),
}
#: A model: its published name, precision, what is estimated of it, configuration and changes to it, keys of its layers
#: (all of them where there are none), options of the forge, chips (all where there are none).
Model = collections.namedtuple("Model", "name precision part config changes layers options chips")
WHISPER_BASE = {
    "d_model": 512,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "decoder_ffn_dim": 2048,
    "encoder_layers": 6,
    "decoder_layers": 6,
}
LLAMA_3B = {
    "hidden_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 24,
    "head_dim": 128,
}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "head_dim": 128,
}
QWEN_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
WHISPER, TEXT = ("encoder_layers", "decoder_layers"), ("num_hidden_layers",)
TOKEN = ["--max-ctx", "4096", "--prefill", "0"]
PROMPT = ["--max-ctx", "4096", "--prefill", "128"]
NONE = ["--prefill", "0"]
QWEN35 = ["--max-ctx", "1024", "--prefill", "0", "--head", "fp16"]
MODELS = [
    Model("BERT base", "fp16", "encoder", "bert-base", {}, TEXT, ["--max-ctx", "384", *NONE], None),
    Model("BERT base", "w8a16", "encoder", "bert-base", {}, TEXT, ["--max-ctx", "384", *NONE], None),
    Model("ViT-B/16", "fp16", "encoder", "siglip2-base-patch16-224", {}, None, NONE, None),
    Model("Whisper base", "fp16", "speech", "whisper-small", WHISPER_BASE, WHISPER, NONE, None),
    Model("Whisper small", "fp16", "speech", "whisper-small", {}, WHISPER, NONE, None),
    Model("Whisper small", "w8a16", "speech", "whisper-small", {}, WHISPER, NONE, None),
    Model("Whisper large-v3-turbo", "fp16", "speech", "whisper-large-v3-turbo", {}, WHISPER, NONE, None),
    Model("Llama-3.2-1B", "w4a16", "token", "llama-3.2-1b", {}, TEXT, TOKEN, None),
    Model("Llama-3.2-3B", "w4a16", "token", "llama-3.2-1b", LLAMA_3B, TEXT, TOKEN, None),
    Model("Llama-3.1-8B", "w4a16", "token", "llama-3.2-1b", LLAMA_8B, TEXT, TOKEN, None),
    Model("Qwen3-4B", "w4a16", "token", "qwen3-1.7b", QWEN_4B, TEXT, TOKEN, None),
    Model("Qwen3.5-0.8B", "fp16", "token", "qwen3.5-0.8b", {}, None, QWEN35, ("v81",)),
    Model("Qwen3.5-0.8B", "w8a16", "token", "qwen3.5-0.8b", {}, None, QWEN35, ("v81",)),
    Model("Llama-3.2-1B", "w4a16", "prompt", "llama-3.2-1b", {}, TEXT, PROMPT, ("v79", "v81")),
]


def estimate(wanted, config, options):
    """What the command prints, from the folder where it is known; none where that is all there may be."""
    keep = wanted.keep
    key = hashlib.sha256(json.dumps([config, options], sort_keys=True).encode()).hexdigest()[:16]
    kept = keep / f"{key}.json" if keep else None
    if kept and kept.exists():
        return json.loads(kept.read_text())
    if wanted.kept:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "config.json"
        path.write_text(json.dumps(config))
        command = [wanted.qhx, "forge", "estimate", path, "--json", *options]
        text = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    if kept:
        keep.mkdir(parents=True, exist_ok=True)
        kept.write_text(text)
    return json.loads(text)


def graphs(wanted, model, chip):
    """Times of each graph in microseconds, with all layers and the whole vocabulary, by key."""
    config = json.loads((CONFIGS / f"{model.config}.json").read_text()) | model.changes
    options = ["--target", chip, "--precision", model.precision, *model.options]
    whole = model.layers is None
    text = not whole and model.part in ("token", "prompt")
    if text:
        config |= {"vocab_size": config["vocab_size"] // VOCAB, "bos_token_id": 1, "eos_token_id": 2}
    found = []
    for count in [None] if whole else LAYERS:
        smaller = config if whole else config | {key: count for key in model.layers}
        if "encoder_layers" in smaller:
            smaller["num_hidden_layers"] = smaller["encoder_layers"]
        estimated = estimate(wanted, smaller, options)
        if not estimated:
            return None
        found.append({graph["graph"]: times(graph) for graph in estimated["graphs"]})
    first, last = found[0], found[-1]
    all_graphs = {}
    for name, few in first.items():
        layers = config.get(model.layers[0] if name == "encoder" else model.layers[-1]) if model.layers else LAYERS[0]
        rest = 0 if whole or name == "lmhead" else layers - LAYERS[0]
        scale = VOCAB if text and name == "lmhead" else 1
        all_graphs[name] = {
            key: (few.get(key, 0) + rest * (last[name].get(key, 0) - few.get(key, 0))) * scale
            for key in few.keys() | last[name].keys()
        }
        # Which unit is the busiest differs between the two depths: the gain is that of the deeper one.
        gain = last[name]["measured_memory_us"] / last[name]["us"]
        all_graphs[name]["measured_memory_us"] = all_graphs[name]["us"] * gain
    return all_graphs


def times(graph):
    """Figures of a graph that add up over graphs."""
    found = {key: graph[key] for key in ("us", "max_us", "measured_memory_us")}
    found |= {f"class {one['class']}": one["wall_us"] for one in graph["classes"]}
    found |= {f"unit {one['unit']}": one["us"] for one in graph["units"]}
    return found | {f"alone {one['unit']}": one["alone_us"] for one in graph["units"]}


def total(parts):
    """Sums of several graphs."""
    sums = collections.Counter()
    for part in parts:
        sums.update(part)
    return dict(sums)


#: Parts of a model that are published, with the graphs that are estimated for them.
PARTS = {
    "encoder": [("encoder", ["enc", "image", "vision", "encoder"])],
    "speech": [("encoder", ["encoder"]), ("decoder and head", ["decode", "lmhead"])],
    "token": [("token", ["decode", "lmhead"])],
    "prompt": [("prompt of 128", ["prefill128"])],
}
#: What schedules go to, in words.
CLASSES = {
    "matmul": "products",
    "weights": "weights",
    "dequantize": "dequantizing",
    "softmax": "softmax",
    "norm": "norms",
    "elementwise": "other vector work",
    "layout": "layout",
    "transfers": "activations in and out",
    "spill": "spill",
    "scheduling": "starting",
    "idle": "idle",
}
#: Models whose ratios give a factor for the others.
FITTED = {"BERT base", "Whisper base", "Llama-3.2-1B", "Llama-3.1-8B"}


def published():
    """Milliseconds by model, precision, chip and part, the least where there are several."""
    found = {}
    for path in sorted((ROOT / "benches/published").glob("*.json")):
        for table in json.loads(path.read_text()):
            key = (table["model"], table["precision"], table["chip"])
            times = [(part["part"], part["ms"]) for part in table.get("parts", [])]
            for row in table.get("rows", []):
                if "decode" in row:
                    times.append(("token", 1000 / row["decode"]["tokens_per_second"]))
                if row.get("prefill", {}).get("tokens") == 128:
                    times.append(("prompt of 128", 128e3 / row["prefill"]["tokens_per_second"]))
            for part, ms in times:
                found[key, part] = min(ms, found.get((key, part), ms))
    return found


#: Width, layers and vocabulary of Whisper's decoders.
WHISPERS = {
    "Whisper base": (512, 6, 51865),
    "Whisper small": (768, 12, 51865),
    "Whisper large-v3-turbo": (1280, 4, 51866),
}


def decoder_bytes(width, layers, vocab):
    """What a token of an exported Whisper decoder reads: fp16 weights, the head, caches of 1500 and 199 positions."""
    return 2 * (layers * 14 * width**2 + vocab * width + layers * 2 * (1500 + 199) * width)


def memory(chips):
    """Rate of the memory and time of an op on each chip, from published decoders: two give them, the third tells."""
    found = {}
    for table in json.loads((ROOT / "benches/published/ai_hub.json").read_text()):
        for part in table["parts"]:
            if part["part"] == "decoder and head" and table["precision"] == "fp16":
                size = decoder_bytes(*WHISPERS[table["model"]])
                found[table["chip"], table["model"]] = (part["ms"], part["ops"], size)
    print("\n| chip | memory, GB/s | µs an op | Whisper base by these, ms | measured |")
    print("|---" * 5 + "|")
    for chip in chips:
        soc, name = CHIPS[chip]
        (a, n, x), (b, m, y), (c, k, z) = (
            found[soc, model] for model in ("Whisper small", "Whisper large-v3-turbo", "Whisper base")
        )
        # a = n op + x inverse, b = m op + y inverse.
        op = (a * y - b * x) / (n * y - m * x)
        inverse = (a - n * op) / x
        print(f"| {name} | {1e-6 / inverse:.0f} | {op * 1e3:.1f} | {k * op + z * inverse:.2f} | {c:.2f} |")


def largest(sums):
    """The three classes of a schedule that take the most of it."""
    classes = [(sums.get(f"class {key}", 0) / sums["us"], name) for key, name in CLASSES.items()]
    return ", ".join(f"{name} {share:.0%}".replace("%", " %") for share, name in sorted(classes, reverse=True)[:3])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=pathlib.Path)
    parser.add_argument("--chips", default=",".join(CHIPS))
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--keep", type=pathlib.Path, help="folder for the estimates")
    parser.add_argument("--kept", action="store_true", help="take only what is in that folder")
    wanted = parser.parse_args()
    measured, ratios = published(), []
    print("| model, part | chip | measured, ms | estimate, ms | ratio | at the published rate | the estimate's time |")
    print("|---" * 7 + "|")
    for model in MODELS:
        if not any(part in f"{model.name} {model.precision} {model.part}" for part in wanted.only.split(",")):
            continue
        for chip in wanted.chips.split(","):
            if model.chips and chip not in model.chips:
                continue
            soc, name = CHIPS[chip]
            parts = [(part, kinds) for part, kinds in PARTS[model.part]
                     if ((model.name, model.precision, soc), part) in measured]
            found = graphs(wanted, model, chip) if parts else None
            for part, kinds in parts if found else []:
                ms = measured[(model.name, model.precision, soc), part]
                sums = total(one for graph, one in found.items() if graph in kinds)
                least, most, memory_ms = (sums[key] / 1000 for key in ("us", "max_us", "measured_memory_us"))
                cells = [f"{model.name} {model.precision}, {part}", name, f"{ms:.1f}"]
                cells += [f"{least:.1f}" if most == least else f"{least:.1f} to {most:.1f}"]
                cells += [f"{least / ms:.2f}", f"{memory_ms:.1f}"]
                print("| " + " | ".join([*cells, largest(sums)]) + " |", flush=True)
                ratios.append((model.name, kind(part, model.precision), least / ms, memory_ms / ms))
    summary(ratios)
    memory(wanted.chips.split(","))


def kind(part, precision):
    """What a figure is counted with."""
    if part == "encoder":
        return f"encoders, {precision}"
    return f"{'prompts' if part.startswith('prompt') else 'tokens'}, {precision}"


def summary(ratios):
    """Median errors, as they are and with a factor that some models give for the others."""
    error = lambda values, by: statistics.median(abs(value / by - 1) for value in values)
    heads = ["", "figures", "ratio: median (all)", "median error", "factor of some models"]
    heads += ["error of the others by it (without)"]
    print("\n" + "|".join(["", *(f" {head} " for head in heads), ""]))
    print("|---" * 6 + "|")
    for what in sorted({row[1] for row in ratios}):
        its = [(name, ratio) for name, row_kind, ratio, _ in ratios if row_kind == what]
        fit = [ratio for name, ratio in its if name in FITTED]
        rest = [ratio for name, ratio in its if name not in FITTED]
        values = [ratio for _, ratio in its]
        cells = [what, len(its), f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"]
        cells += [f"{error(values, 1):.0%}".replace("%", " %")]
        if fit and rest:
            factor, names = statistics.median(fit), ", ".join(sorted(FITTED & {name for name, _ in its}))
            cells += [f"{factor:.2f}: {names}", f"{error(rest, factor):.0%} ({error(rest, 1):.0%})".replace("%", " %")]
        else:
            cells += ["", ""]
        print("| " + " | ".join(map(str, cells)) + " |")
    if ratios:
        errors = [statistics.median(abs(row[index] - 1) for row in ratios) for index in (2, 3)]
        errors = [f"{error:.0%}".replace("%", " %") for error in errors]
        print(f"\nAll {len(ratios)} figures: median error {errors[0]}, at the published rates {errors[1]}.")


if __name__ == "__main__":
    main()
