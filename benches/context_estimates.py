#!/usr/bin/env python3
"""What a token costs at several contexts, as the QNN compiler estimates it: no measurement.

    cargo build --release -p qhx-cli --features builtin-ops
    python3 benches/context_estimates.py target/release/qhx [--targets v73,v79,v81] [--precision w4a16] [--json FILE]

Estimated are graphs of two layers and of a head for an eighth of the vocabulary. All layers of these models are alike,
so a token takes the decode graph times half the layers, and the head eight times. Tokens a second are a range: devices
may need 1.8 times as long where weights are dequantized. "Bytes" are those that the schedule reads and writes, beside
the weights' own.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONTEXTS = [512, 1024, 2048, 4096]
#: Parts of a model that are estimated.
LAYERS, VOCAB = 2, 8
#: Qwen3-4B has the layers of Qwen3-1.7B in another size.
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
MODELS = {"Llama-3.2-1B": ("llama-3.2-1b", {}), "Qwen3-4B": ("qwen3-1.7b", QWEN3_4B)}
SUMS = ("us", "max_us", "weight_bytes", "dma_read_bytes", "dma_write_bytes")


def estimates(qhx, config, folder, options):
    """The objects that the command prints, one for each target."""
    path = pathlib.Path(folder) / "config.json"
    path.write_text(json.dumps(config))
    command = [qhx, "forge", "estimate", path, "--prefill", "0", "--json", *options]
    text = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout
    decoder, found = json.JSONDecoder(), []
    while text := text.lstrip():
        one, end = decoder.raw_decode(text)
        found.append(one)
        text = text[end:]
    return found


def token(graphs, layers, positions):
    """Sums of the graphs of a token at some positions, for all layers and the whole vocabulary."""
    of_step = [graph for graph in graphs if graph["positions"] in (None, positions)]
    times = lambda graph: VOCAB if graph["positions"] is None else layers / LAYERS
    return {key: sum(graph[key] * times(graph) for graph in of_step) for key in SUMS}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("qhx", type=pathlib.Path)
    parser.add_argument("--targets", default="v73,v79,v81")
    parser.add_argument("--precision", default="w4a16")
    parser.add_argument("--json", type=pathlib.Path, help="a file for all figures")
    wanted = parser.parse_args()
    *small, whole = CONTEXTS
    options = ["--target", wanted.targets, "--precision", wanted.precision, "--max-ctx", str(whole)]
    options += ["--contexts", ",".join(map(str, small))]
    everything = []
    print("| model | target | context | ms a token | tokens a second | bytes, MB | times the weights |")
    print("|---" * 7 + "|")
    for model, (name, changes) in MODELS.items():
        config = json.loads((ROOT / f"tests/configs/{name}.json").read_text()) | changes
        layers, vocab = config["num_hidden_layers"], config["vocab_size"]
        ids = {"bos_token_id": 1, "eos_token_id": 2}
        config |= {"num_hidden_layers": LAYERS, "vocab_size": vocab // VOCAB, **ids}
        with tempfile.TemporaryDirectory() as folder:
            found = estimates(wanted.qhx, config, folder, options)
        for one in found:
            for positions in CONTEXTS:
                sums = token(one["graphs"], layers, positions)
                moved = sums["dma_read_bytes"] + sums["dma_write_bytes"]
                least, most = sums["us"] / 1000, sums["max_us"] / 1000
                cells = [model, one["target"], positions, f"{least:.1f} to {most:.1f}"]
                cells += [f"{1000 / most:.0f} to {1000 / least:.0f}", f"{moved / 1e6:.0f}"]
                cells += [f"{moved / sums['weight_bytes']:.3f}"]
                print("| " + " | ".join(map(str, cells)) + " |", flush=True)
                everything.append({"model": model, "target": one["target"], "positions": positions, **sums})
    if wanted.json:
        wanted.json.write_text(json.dumps(everything, indent=1) + "\n")


if __name__ == "__main__":
    main()
