#!/usr/bin/env python3
"""What low-bit weights cost a tiny model, by transformers and numpy: writes FIXTURE/calibration.json again, for its
texts, target and number of tokens.

    python tests/oracle/calibration.py tests/fixtures/llama3-blocks

w8a16: blocks of 32 inputs, an f16 scale that maps the value of the largest magnitude to -128, and no smaller than
f16's normal numbers. w4a16: blocks of 32 with scale and offset; of the symmetric scale that maps it to -8, and of the
least-squares fits to integers of 27 scales and offsets, the pair of the least squared error. The head is int8 and the
table of the embeddings as it is, and so are, in w4a16 as a whole, v_proj and the down_proj of the first and the last
layer.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

F16_NORMAL = np.float32(2.0**-14)


def normal(scale):
    rounded = scale.astype(np.float16).astype(np.float32)
    return np.where(np.abs(scale) < F16_NORMAL, np.copysign(F16_NORMAL, scale), rounded)


def blocks(weight):
    return weight.numpy().astype(np.float32).reshape(-1, 32)


def largest(b):
    return np.take_along_axis(b, np.abs(b).argmax(1, keepdims=True), 1)


def int8(weight):
    b = blocks(weight)
    scale = normal(largest(b) / np.float32(-128))
    return torch.from_numpy((np.rint(b / scale).clip(-128, 127) * scale).reshape(weight.shape))


def int4(weight):
    b = blocks(weight)
    low, high = b.min(1, keepdims=True), b.max(1, keepdims=True)
    width = np.maximum(high - low, np.finfo(np.float32).tiny)

    def integers(scale, offset):
        return np.rint((b / scale - offset).clip(-8, 7))

    def reals(scale, offset):
        return (integers(scale, offset) + offset) * scale

    best = reals(normal(largest(b) / np.float32(-8)), np.float32(0))
    least = ((b - best) ** 2).sum(1, keepdims=True)
    for halves in range(24, 33):
        for side in range(3):
            scale = width * np.float32(2) / np.float32(halves)
            start = low + (width - np.float32(15) * scale) / np.float32(2) * np.float32(side)
            q = integers(scale, start / scale + np.float32(8)).astype(np.float64)
            wide = b.astype(np.float64)
            sums = [v.sum(1, keepdims=True) for v in (q, q * q, wide, wide * q)]
            with np.errstate(all="ignore"):
                scale = (32 * sums[3] - sums[0] * sums[2]) / (32 * sums[1] - sums[0] ** 2)
                offset = ((sums[2] - scale * sums[0]) / 32 / scale).astype(np.float16).astype(np.float32)
                found = reals(normal(scale.astype(np.float32)), offset)
                error = ((b - found) ** 2).sum(1, keepdims=True)
            better = np.isfinite(error) & (error < least)
            best, least = np.where(better, found, best), np.where(better, error, least)
    return torch.from_numpy(best.reshape(weight.shape).astype(np.float32))


class Bench:
    def __init__(self, folder, texts, tokens):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        tokenizer = AutoTokenizer.from_pretrained(folder)
        self.texts, left = [], tokens
        for text in texts:
            ids = tokenizer(text)["input_ids"][: left + 1]
            if len(ids) > 1:
                left -= len(ids) - 1
                self.texts.append(ids)
        # A tied head has a matrix of its own, in the form of which the table of the embeddings is, too.
        self.table = self.model.get_input_embeddings()
        self.rows = self.table.weight.detach().clone()
        head = torch.nn.Parameter(self.model.get_output_embeddings().weight.detach().clone())
        self.model.get_output_embeddings().weight = head
        modules = self.model.named_modules()
        self.linears = {name: one for name, one in modules if isinstance(one, torch.nn.Linear)}
        self.whole = {name: one.weight.detach().clone() for name, one in self.linears.items()}
        self.reference = None
        self.reference, self.perplexity, self.tokens = self.scores(), None, None
        self.perplexity = self.figures(self.reference)["perplexity"]
        self.tokens = sum(len(ids) - 1 for ids in self.texts)

    @torch.no_grad()
    def scores(self):
        found = []
        for ids in self.texts:
            logits = self.model(torch.tensor([ids[:-1]])).logits[0].double()
            found.append(torch.log_softmax(logits, -1))
        return found

    def figures(self, found):
        divergence, surprise = [], []
        for ids, expected, scores in zip(self.texts, self.reference, found):
            divergence.append((expected.exp() * (expected - scores)).sum(-1))
            surprise.append(-scores[torch.arange(len(ids) - 1), torch.tensor(ids[1:])])
        mean = lambda parts: float(torch.cat(parts).mean())
        return {"kl": mean(divergence), "perplexity": float(np.exp(mean(surprise)))}

    def measure(self, choose, alone=False):
        """`choose` names the form of a weight, if any. What is measured alone has the table of f16 weights."""
        form = None if alone else choose("lm_head")
        self.table.weight.data = form(self.rows) if form else self.rows
        for name, module in self.linears.items():
            form = choose(name)
            module.weight.data = form(self.whole[name]) if form else self.whole[name]
        return self.figures(self.scores())


def rounded(figures):
    return {"kl": float(f"{figures['kl']:.5g}"), "perplexity": float(f"{figures['perplexity']:.7g}")}


def main():
    path = pathlib.Path(sys.argv[1]) / "calibration.json"
    recorded = json.loads(path.read_text())
    bench = Bench(path.parent, recorded["texts"], recorded["tokens"])
    low = lambda name: int8 if name == "lm_head" else int4
    layer = lambda name: ".".join(name.split(".")[1:3]) if "layers." in name else "model.embed_tokens"
    kind = lambda name: name.rsplit(".", 1)[-1]
    alone = lambda of, part: bench.measure(lambda name: low(name) if of(name) == part else None, True)
    in_layers = [name for name in bench.linears if "layers." in name]
    ends = [f"model.layers.{n}.mlp.down_proj" for n in (0, bench.model.config.num_hidden_layers - 1)]
    mixed = lambda name: int8 if name.endswith(".v_proj") or name in ends else low(name)
    whole = bench.measure(mixed)
    layers = {part: alone(layer, part) for part in dict.fromkeys(map(layer, bench.linears))}
    groups = {part: alone(kind, part) for part in dict.fromkeys(map(kind, in_layers))}
    order = sorted((part for part in layers if "layers." in part), key=lambda part: -layers[part]["kl"])
    kept, chosen = [], whole
    while chosen["kl"] > recorded["target"] and len(kept) < len(order):
        kept = order[: len(kept) + 1]
        chosen = bench.measure(lambda name: int8 if layer(name) in kept else mixed(name))
    recorded.update(
        tokens=bench.tokens,
        perplexity=float(f"{bench.perplexity:.8g}"),
        precisions={"w8a16": rounded(bench.measure(lambda name: int8)), "w4a16": rounded(whole)},
        layers={part: rounded(figures) for part, figures in layers.items()},
        groups={part: rounded(figures) for part, figures in groups.items()},
        kept={part: "w8a16" for part in kept},
    )
    path.write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")
    print(json.dumps({key: recorded[key] for key in recorded if key != "texts"}, indent=1))


if __name__ == "__main__":
    main()
