#!/usr/bin/env python3
"""What low-bit weights cost real models: qhx beside llama.cpp, of the same f16 weights and texts, in one run.

    python3 -m venv llama && llama/bin/pip install gguf numpy llama-cpp-python==0.3.36
    cargo build --release -p qhx-cli --features builtin-ops
    llama/bin/python benches/quality.py FILE.gguf... [--texts benches/quality.jsonl]

Each file is made a file of f16 weights first, which `qhx forge` and llama.cpp's quantize both read. Where a file holds
quantized weights, each is moved by a random part of a step of its block: on its own grid a format would lose nothing.
--grid leaves the weights there. Of each precision the table has the mean Kullback-Leibler divergence of next-token
predictions from f16 weights, in nats, each program's from its own f16, the share of positions with the same likeliest
token, the perplexity, and the bytes of the weights. The texts are others than those that `qhx forge` weighs inputs
with. Written as a table in Markdown.
"""

import argparse
import json
import pathlib
import subprocess
import tempfile

import gguf
import numpy as np
from gguf import quants

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Tokens of a text that are compared.
TOKENS = 256
FLOATS = [gguf.GGMLQuantizationType[name] for name in ("F32", "F16", "BF16")]
PEERS = {"Q8_0": 7, "Q4_K_M": 15, "Q4_0": 2}
PRECISIONS = ["w8a16", "w4a16"]


def moved(values, random):
    """Values of blocks of 32, each moved by up to half a step of its block: the least difference of two."""
    blocks = values.reshape(-1, 32)
    steps = np.diff(np.sort(blocks, axis=1), axis=1)
    steps[steps <= 1e-3 * np.abs(blocks).max(axis=1, keepdims=True)] = np.inf
    step = steps.min(axis=1, keepdims=True)
    step[~np.isfinite(step)] = 0
    return (blocks + (random.random(blocks.shape, np.float32) - 0.5) * step).reshape(values.shape)


def widened(source, target, grid):
    """Writes a copy of a GGUF file with f16 weights."""
    random = np.random.default_rng(1)
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    for key, field in reader.fields.items():
        if key.startswith("GGUF.") or key in ("general.architecture", "general.quantization_version"):
            continue
        kind, value = field.types[0], field.contents()
        part = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(key, 1 if key == "general.file_type" else value, kind, sub_type=part)
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        wide = tensor.tensor_type == gguf.GGMLQuantizationType.F32
        if not grid and tensor.tensor_type not in FLOATS:
            values = moved(values, random)
        writer.add_tensor(tensor.name, values.astype(np.float32 if wide else np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def predictions(path, texts):
    """Logarithms of probabilities of all next tokens, and the tokens, of each text."""
    import llama_cpp

    model = llama_cpp.Llama(str(path), n_ctx=1024, logits_all=True, verbose=False)
    found = []
    for text in texts:
        tokens = model.tokenize(text.encode(), add_bos=True, special=True)[: TOKENS + 1]
        model.reset()
        model.eval(tokens[:-1])
        scores = np.array(model.scores[: len(tokens) - 1], dtype=np.float64)
        scores -= scores.max(-1, keepdims=True)
        scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
        found.append((scores, tokens[1:]))
    return found


def compared(reference, found):
    """Mean divergence of each text, agreement and perplexity."""
    kinds, same, surprise = [], [], []
    for (expected, tokens), (scores, _) in zip(reference, found):
        kinds.append(float((np.exp(expected) * (expected - scores)).sum(-1).mean()))
        same.extend(expected.argmax(-1) == scores.argmax(-1))
        surprise.extend(-scores[np.arange(len(tokens)), tokens])
    return kinds, float(np.mean(same)), float(np.exp(np.mean(surprise)))


def peers(wide, texts, folder):
    """A row of each precision of llama.cpp."""
    import llama_cpp

    quiet = llama_cpp.llama_log_callback(lambda *_: None)
    llama_cpp.llama_log_set(quiet, None)
    reference = predictions(wide, texts)
    for name, kind in PEERS.items():
        path = folder / f"{name}.gguf"
        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = kind
        if llama_cpp.llama_model_quantize(str(wide).encode(), str(path).encode(), options):
            raise SystemExit(f"llama.cpp cannot quantize {wide} to {name}")
        size = sum(tensor.n_bytes for tensor in gguf.GGUFReader(path).tensors)
        yield f"llama.cpp {name}", *compared(reference, predictions(path, texts)), int(size)


def bundles(qhx, wide, texts, folder):
    """A row of each precision of qhx."""
    for precision in PRECISIONS:
        out = folder / precision
        command = [qhx, "forge", wide, "--cpu-only", "--precision", precision, "--no-golden", "--json"]
        command += [f"--receipt={texts}", "--out", out]
        report = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
        receipt = report["receipt"]
        kinds = [text["kl"] for text in receipt["texts"]]
        same = np.mean([text["agreement"] for text in receipt["texts"]])
        surprise = np.mean([np.log(text["perplexity"]) for text in receipt["texts"]])
        yield f"qhx {precision}", kinds, float(same), float(np.exp(surprise)), receipt["weight_bytes"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    parser.add_argument("--texts", type=pathlib.Path, default=ROOT / "benches/quality.jsonl")
    parser.add_argument("--qhx", type=pathlib.Path, default=ROOT / "target/release/qhx")
    parser.add_argument("--grid", action="store_true", help="weights as the file holds them")
    parser.add_argument("--only", choices=["qhx", "llama.cpp"], help="rows of one program alone")
    options = parser.parse_args()
    lines = [json.loads(line) for line in options.texts.read_text().splitlines() if line.strip()]
    kinds = [line["kind"] for line in lines]
    print(f"| model | weights | KL | {' | '.join(kinds)} | same token | perplexity | MB |")
    print("|---|---|---|" + "---|" * (len(kinds) + 3))
    for file in options.files:
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            wide = folder / f"{file.stem}-f16.gguf"
            widened(file, wide, options.grid)
            rows = []
            if options.only != "llama.cpp":
                rows += bundles(options.qhx, wide, options.texts, folder)
            if options.only != "qhx":
                rows += peers(wide, [line["text"] for line in lines], folder)
            for name, each, same, perplexity, size in rows:
                cells = [file.stem, name, *(f"{kl:.4f}" for kl in [float(np.mean(each)), *each])]
                cells += [f"{100 * same:.1f} %", f"{perplexity:.2f}", f"{size / 1e6:.1f}"]
                print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
