"""Common parts of the scripts of recognisers that generate text from a clip, beside the clips of `parakeet.py`."""

import argparse
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

import goldens

# Least margin of what is recorded; what is computed before it is saved has a little more.
MARGIN = 0.1


def margin(logits):
    """Least distance of the best token from the next one."""
    best = logits.topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def write(out, seed, cases, tensors):
    """Writes goldens; true if the margins of all cases are wide enough."""
    least = min(case["min_margin"] for case in cases)
    goldens.dump(out / "goldens.json", {
        "schema": "qhx-goldens/1", "model": out.name, "transformers": transformers.__version__,
        "torch": torch.__version__.split("+")[0], "seed": seed, "min_margin": least, "cases": cases,
    })
    save_file(tensors, out / "goldens.safetensors", metadata={"format": "pt"})
    for file in out.iterdir():
        file.chmod(0o644)
    print(out.name, seed, cases, sum(file.stat().st_size for file in out.iterdir()))
    return least >= MARGIN


def main(doc, name, draw):
    """Draws checkpoints `draw(kind, out, fixtures, seed)` until one is true: the fixture, or one of other shapes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fixtures", type=Path)
    parser.add_argument("--unseen", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    kind = f"{name}-unseen" if args.unseen else f"{name}-tiny"
    out = args.unseen or args.fixtures / kind
    if not any(draw(kind, out, args.fixtures, seed) for seed in range(1, 400)):
        raise SystemExit(f"{kind}: no seed gives margins of {MARGIN}")
