#!/usr/bin/env python3
"""Times int8 weights with one scale a row to f16 in qhx, numpy and torch, in one run.

    cargo build --release -p qhx-benches
    python benches/dequantize.py            # an environment with numpy and torch

The three take turns over the same shape; the report is the best rate of each in bytes read and written.
"""

import json
import pathlib
import subprocess
import time

import numpy
import torch

ROWS, COLUMNS, MATRICES = 4096, 448, 6
PROGRAM = pathlib.Path(__file__).resolve().parent.parent / "target/release/experts_kernel"


def rate(run, data):
    start = time.perf_counter()
    for part in data:
        run(*part)
    return len(data) * ROWS * COLUMNS * 3 / (time.perf_counter() - start) / 1e9


def main():
    rng = numpy.random.default_rng(3)
    arrays = []
    for _ in range(MATRICES):
        values = rng.integers(-127, 128, (ROWS, COLUMNS), dtype=numpy.int8)
        scales = rng.uniform(1e-5, 1e-2, (ROWS, 1)).astype(numpy.float32)
        arrays.append((values, scales, numpy.empty((ROWS, COLUMNS), numpy.float16)))
    tensors = [tuple(torch.from_numpy(a) for a in part) for part in arrays]
    ways = {
        "numpy, through f32": (lambda q, s, out: numpy.multiply(q, s, out=out, casting="unsafe"), arrays),
        "torch, through f32": (lambda q, s, out: out.copy_(q * s), tensors),
        "torch, in f16": (lambda q, s, out: torch.mul(q.half(), s.half(), out=out), tensors),
    }
    for threads in (1, 2):
        torch.set_num_threads(threads)
        best = {name: 0.0 for name in ways}
        qhx = 0.0
        for _ in range(3):
            found = json.loads(subprocess.run([PROGRAM, "--json"], check=True, capture_output=True, text=True).stdout)
            qhx = max(qhx, found[str(threads)]["kernel"])
            for _ in range(10):
                for name, (run, data) in ways.items():
                    best[name] = max(best[name], rate(run, data))
        print(f"{threads} threads: qhx {qhx:.2f} GB/s")
        for name, value in best.items():
            print(f"  {name}: {value:.2f} GB/s, qhx is {qhx / value:.1f} times as fast")


if __name__ == "__main__":
    main()
