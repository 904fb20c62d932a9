#!/usr/bin/env python3
"""Tokens a second of the CPU backend at several contexts and from several forms of weights, of one program or of two in turns.

    python3 -m venv venv && venv/bin/pip install numpy gguf
    cargo build --release -p qhx-cli --features builtin-ops
    venv/bin/python benches/cpu_contexts.py target/release/qhx [OTHER/qhx] [--repeats 3] [--folder DIR]

The model has 118 million random weights (`benches/cpu_117m.json`). It is forged once, by the first program: with 4-bit
weights at contexts of 512, 4096 and 16384, and at 512 from GGUF's Q8_0 and Q4_1 and from AWQ in groups of 128. A turn is
`qhx bench` of each program, a process of its own: a prompt of 128 tokens, and 32 tokens one at a time, from the first
position on. Shown are the median and the best of all turns.
"""

import argparse
import json
import pathlib
import shutil
import statistics
import struct
import subprocess
import tempfile

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = ROOT / "benches/cpu_117m.json"
#: Any tokenizer does: prompts are given as tokens.
TOKENIZER = ROOT / "tests/fixtures/llama3-blocks"
PROMPT, TOKENS = 128, 32
RANDOM = numpy.random.default_rng(1)


def matrices(config):
    """Names in the checkpoint and in GGUF, and shapes, of all matrices."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    width = config["head_dim"]
    query, shared = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    yield "model.embed_tokens", "token_embd", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, short, shape in (
            ("self_attn.q_proj", "attn_q", (query, hidden)),
            ("self_attn.k_proj", "attn_k", (shared, hidden)),
            ("self_attn.v_proj", "attn_v", (shared, hidden)),
            ("self_attn.o_proj", "attn_output", (hidden, query)),
            ("mlp.gate_proj", "ffn_gate", (inner, hidden)),
            ("mlp.up_proj", "ffn_up", (inner, hidden)),
            ("mlp.down_proj", "ffn_down", (hidden, inner)),
        ):
            yield f"model.layers.{layer}.{name}", f"blk.{layer}.{short}", shape


def norms(config):
    yield "model.norm", "output_norm"
    for layer in range(config["num_hidden_layers"]):
        yield f"model.layers.{layer}.input_layernorm", f"blk.{layer}.attn_norm"
        yield f"model.layers.{layer}.post_attention_layernorm", f"blk.{layer}.ffn_norm"


def wide(shape):
    return RANDOM.standard_normal(shape, numpy.float32) * shape[1] ** -0.5


def write_gguf(path, config, kind):
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    kind = gguf.GGMLQuantizationType[kind]
    for _, name, shape in matrices(config):
        if name == "token_embd":
            writer.add_tensor(f"{name}.weight", wide(shape).astype(numpy.float16))
            continue
        values = gguf.quants.quantize(wide(shape), kind)
        writer.add_tensor(f"{name}.weight", values, raw_dtype=kind)
    for _, name in norms(config):
        writer.add_tensor(f"{name}.weight", numpy.ones(config["hidden_size"], numpy.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_awq(folder, config, group=128):
    """Integers, zero points and scales as AutoAWQ stores them, all of them random."""
    tensors = {}
    for name, _, (outputs, inputs) in matrices(config):
        if name == "model.embed_tokens":
            tensors[f"{name}.weight"] = ("F16", wide((outputs, inputs)).astype(numpy.float16))
            continue
        words = lambda rows: RANDOM.integers(0, 2**32, (rows, outputs // 8), numpy.uint32)
        scales = numpy.full((inputs // group, outputs), inputs**-0.5 / 4, numpy.float16)
        tensors[f"{name}.qweight"] = ("I32", words(inputs))
        tensors[f"{name}.qzeros"] = ("I32", words(inputs // group))
        tensors[f"{name}.scales"] = ("F16", scales)
    for name, _ in norms(config):
        tensors[f"{name}.weight"] = ("F16", numpy.ones(config["hidden_size"], numpy.float16))
    header, at = {}, 0
    for name, (dtype, values) in tensors.items():
        header[name] = {"dtype": dtype, "shape": values.shape, "data_offsets": [at, at + values.nbytes]}
        at += values.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values.tobytes())
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}
    config = {**config, "quantization_config": said}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / name)


def checkpoint(folder, config, form):
    """Writes the model in the form, and answers with what the forge is given."""
    source = folder / f"source-{form}"
    source.mkdir()
    if form == "AWQ":
        write_awq(source, config)
        return [source]
    (source / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, source / name)
    path = source / "model.gguf"
    write_gguf(path, config, form)
    return [path, "--tokenizer", source]


def forge(qhx, folder, config, label, form, context):
    out = folder / f"{form}-{context}"
    if not out.exists():
        source = ["--synthetic", CONFIG] if form == "w4a16" else checkpoint(folder, config, form)
        # 8-bit weights are of 8 bits whatever is asked for, and so are the 4 bits of others.
        command = [qhx, "forge", *source, "--out", out, "--cpu-only", "--precision", "w4a16"]
        command += ["--max-ctx", context, "--prefill", PROMPT]
        subprocess.run([str(word) for word in command], check=True, capture_output=True)
    return label, out


def rates(qhx, bundle):
    """Tokens a second of prompt and decode."""
    command = [qhx, "bench", bundle, "--backend", "cpu", "--prompt", PROMPT, "--tokens", TOKENS]
    command += ["--repeat", 1, "--threads", 2, "--json"]
    done = subprocess.run([str(word) for word in command], check=True, capture_output=True, text=True)
    tests = {test["name"]: test for test in json.loads(done.stdout)["results"]}
    return [tests[kind]["tokens_per_second"]["mean"] for kind in (f"tg{TOKENS}", f"pp{PROMPT}")]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs="+", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", type=pathlib.Path)
    args = parser.parse_args()
    config = json.loads(CONFIG.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.folder or pathlib.Path(temporary)
        folder.mkdir(exist_ok=True)
        rows = [("w4a16", "w4a16", n) for n in (512, 4096, 16384)]
        rows += [(form, form, 512) for form in ("Q8_0", "Q4_1", "AWQ")]
        qhx = args.programs[0]
        bundles = [(*forge(qhx, folder, config, *row), row[2]) for row in rows]
        print("| weights | context | " + " | ".join(f"{p}: decode | prompt" for p in args.programs) + " |")
        for label, bundle, context in bundles:
            found = {program: [] for program in args.programs}
            for _ in range(args.repeats):
                for program in args.programs:
                    found[program].append(rates(program, bundle))
            cells = []
            for turns in found.values():
                for values in zip(*turns):
                    cells.append(f"{statistics.median(values):.1f} (best {max(values):.1f})")
            print(f"| {label} | {context} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
