"""Time a text takes in graphs of an encoder on the CPU: one graph of 128 positions for all, graphs of 32 and 128 with
one text each, and texts that share these graphs.

    python embed_texts.py QHX [ROUNDS] [OPTION…]

The encoder has six layers of width 384 and random weights, the texts have 5 to 120 tokens, most of them few. The ways
take turns. Options, such as --plugin FILE, are given to `qhx embed`.
"""

import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile

TEXTS = 60
CONFIG = {
    "architectures": ["MistralBiDirectionalModel"],
    "model_type": "mistralbidirectional",
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "vocab_size": 8000,
    "tie_word_embeddings": False,
}


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return done.stderr


def main():
    qhx, rounds, options = sys.argv[1], int((sys.argv + ["7"])[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name, shorter in (("one", "0"), ("two", "32")):
            run(qhx, "forge", "--synthetic", folder / "config.json", "--task", "embed", "--max-ctx", 128,
                "--prefill", shorter, "--cpu-only", "--out", folder / name)
        draw = random.Random(5)
        with open(folder / "texts.jsonl", "w") as texts:
            for _ in range(TEXTS):
                length = 5 + int(115 * draw.random() ** 2)
                texts.write(json.dumps(" ".join(str(draw.randrange(8000)) for _ in range(length))) + "\n")
        ways = {"one graph": ("one", "--no-pack"), "buckets": ("two", "--no-pack"), "together": ("two",)}
        times = {way: [] for way in ways}
        for _ in range(rounds):
            for way, (bundle, *pack) in ways.items():
                said = run(qhx, "embed", folder / bundle, "--backend", "cpu", *pack, *options, "--json",
                           "--input", folder / "texts.jsonl")
                times[way].append(float(re.search(r"([\d.]+) ms a text in graphs", said)[1]))
    for way, taken in times.items():
        ratio = statistics.median(first / other for first, other in zip(times["one graph"], taken))
        print(f"{way:10}{statistics.median(taken):9.1f} ms a text; {ratio:.2f} x one graph, {len(taken)} rounds")


if __name__ == "__main__":
    main()
