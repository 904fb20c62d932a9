"""Time a text takes in graphs of an encoder on the CPU: one graph of 128 positions for all, graphs of 32 and 128 with
one text each, and texts that share these graphs.

    python embed_texts.py QHX [ROUNDS] [OPTION…]

The encoder has six layers of width 384 and random weights, the texts have 5 to 120 tokens, most of them few. The ways
take turns. Options, such as --plugin FILE, are given to `qhx embed`. Where this Python has torch, an encoder of the same
shapes takes its turn, too: texts sorted by length, in batches of 16, f32, two threads.
"""

import json
import pathlib
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time

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


class Torch:
    """The same layers in PyTorch, with random weights, and what they take for texts of these lengths."""

    BATCH = 16

    def __init__(self, torch, lengths):
        torch.set_num_threads(2)
        self.torch, self.lengths = torch, sorted(lengths)
        width, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
        shapes = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
        matrix = lambda shape: torch.randn(shape) * shape[1] ** -0.5
        self.layers = [[matrix(shape) for shape in shapes] for _ in range(CONFIG["num_hidden_layers"])]
        self.table = torch.randn(CONFIG["vocab_size"], width)

    def embed(self, tokens, mask):
        torch, linear = self.torch, self.torch.nn.functional.linear
        heads = CONFIG["num_attention_heads"]
        x = self.table[tokens]
        split = lambda y: y.unflatten(-1, (heads, -1)).transpose(1, 2)
        norm = lambda x: torch.nn.functional.rms_norm(x, x.shape[-1:], eps=CONFIG["rms_norm_eps"])
        angles = torch.arange(x.shape[1])[:, None] * 1e4 ** -torch.arange(0, 1, 2 * heads / x.shape[2])
        cos, sin = angles.cos(), angles.sin()

        def rotated(x):
            a, b = x.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

        for q, k, v, o, gate, up, down in self.layers:
            y = norm(x)
            attended = torch.nn.functional.scaled_dot_product_attention(
                rotated(split(linear(y, q))), rotated(split(linear(y, k))), split(linear(y, v)), mask[:, None, None]
            )
            x = x + linear(attended.transpose(1, 2).flatten(2), o)
            y = norm(x)
            x = x + linear(torch.nn.functional.silu(linear(y, gate)) * linear(y, up), down)
        weights = mask[..., None].float()
        return torch.nn.functional.normalize((norm(x) * weights).sum(1) / weights.sum(1), dim=-1)

    def milliseconds(self):
        """Of a text, on average."""
        torch, start = self.torch, time.perf_counter()
        with torch.inference_mode():
            for first in range(0, len(self.lengths), self.BATCH):
                lengths = torch.tensor(self.lengths[first : first + self.BATCH])
                mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
                self.embed(torch.zeros(mask.shape, dtype=torch.long), mask)
        return (time.perf_counter() - start) * 1e3 / len(self.lengths)


def main():
    qhx, rounds, options = sys.argv[1], int((sys.argv + ["7"])[2]), sys.argv[3:]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "config.json").write_text(json.dumps(CONFIG))
        for name, shorter in (("one", "0"), ("two", "32")):
            run(qhx, "forge", "--synthetic", folder / "config.json", "--task", "embed", "--max-ctx", 128,
                "--prefill", shorter, "--cpu-only", "--out", folder / name)
        draw, lengths = random.Random(5), []
        with open(folder / "texts.jsonl", "w") as texts:
            for _ in range(TEXTS):
                length = 5 + int(115 * draw.random() ** 2)
                lengths.append(length)
                texts.write(json.dumps(" ".join(str(draw.randrange(8000)) for _ in range(length))) + "\n")
        ways = {"one graph": ("one", "--no-pack"), "buckets": ("two", "--no-pack"), "together": ("two",)}
        times = {way: [] for way in ways}
        try:
            import torch

            other = Torch(torch, lengths)
            other.milliseconds()
            times["torch"] = []
        except ImportError:
            other = None
        for _ in range(rounds):
            for way, (bundle, *pack) in ways.items():
                said = run(qhx, "embed", folder / bundle, "--backend", "cpu", *pack, *options, "--json",
                           "--input", folder / "texts.jsonl")
                times[way].append(float(re.search(r"([\d.]+) ms a text in graphs", said)[1]))
            if other:
                times["torch"].append(other.milliseconds())
    for way, taken in times.items():
        ratio = statistics.median(first / other for first, other in zip(times["one graph"], taken))
        print(f"{way:10}{statistics.median(taken):9.1f} ms a text; {ratio:.2f} x one graph, {len(taken)} rounds")


if __name__ == "__main__":
    main()
