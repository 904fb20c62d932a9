#!/usr/bin/env python3
"""Tokens a second, time to open and memory of `qhx bench` on the CPU and of llama.cpp, on the same shapes, in one run.

    python3 -m venv llama && llama/bin/pip install gguf numpy llama-cpp-python==0.3.36
    cargo build --release -p qhx-cli --features builtin-ops
    llama/bin/python benches/llama_cpp_compare.py [--folder DIR] [--repeats 5] [--precision fp16]
        [--cpu-activations int16,int8] [--alone]

Both run a Llama of 336 million parameters with random weights (`benches/cpu_336m.json`): a prompt of 128 tokens, and
64 tokens one at a time. They take turns, each time in a process of its own, with two threads. pip compiles llama.cpp
for this machine. Its weights are f16 where qhx has fp16, q8_0 for w8a16 and q4_0 for w4a16; norms are f32. qhx takes a
turn with each of the activations; with --alone no other program does, and this needs nothing installed. A ratio is
that of the first column to this one.
"""

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CONFIG = ROOT / "benches/cpu_336m.json"
#: Tokens of the prompt, tokens that are generated, and the context.
PROMPT, TOKENS, CONTEXT = 128, 64, 512
PAIRS = {"fp16": "F16", "w8a16": "Q8_0", "w4a16": "Q4_0"}
#: The head has what the layers have, as in llama.cpp.
HEADS = {"fp16": "fp16", "w8a16": "w8", "w4a16": "w4"}


def write_gguf(path, kind):
    """The model with random weights, of which speed does not depend."""
    import gguf
    import numpy

    config = json.loads(CONFIG.read_text())
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, shared, width = (
        config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(hidden)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(shared)
    writer.add_rope_dimension_count(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kind = gguf.GGMLQuantizationType[kind]
    random = numpy.random.default_rng(1)

    def matrix(name, rows, columns):
        wide = random.standard_normal((rows, columns), numpy.float32) * columns**-0.5
        writer.add_tensor(name, gguf.quants.quantize(wide, kind), raw_dtype=kind)

    def norm(name):
        writer.add_tensor(name, numpy.ones(hidden, numpy.float32))

    # The head is the same matrix.
    matrix("token_embd.weight", config["vocab_size"], hidden)
    norm("output_norm.weight")
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight")
        matrix(block + "attn_q.weight", heads * width, hidden)
        matrix(block + "attn_k.weight", shared * width, hidden)
        matrix(block + "attn_v.weight", shared * width, hidden)
        matrix(block + "attn_output.weight", hidden, heads * width)
        norm(block + "ffn_norm.weight")
        matrix(block + "ffn_gate.weight", inner, hidden)
        matrix(block + "ffn_up.weight", inner, hidden)
        matrix(block + "ffn_down.weight", hidden, inner)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def run_llama(path, threads):
    """One run of llama.cpp, printed as JSON. Each test runs once before it counts, as with qhx."""
    import ctypes

    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p())
    llama.llama_backend_init()
    start = time.perf_counter()
    model = llama.llama_model_load_from_file(os.fsencode(path), llama.llama_model_default_params())
    options = llama.llama_context_default_params()
    options.n_ctx, options.n_batch, options.n_ubatch = CONTEXT, PROMPT, PROMPT
    options.n_threads = options.n_threads_batch = threads
    context = llama.llama_init_from_model(model, options)
    load = time.perf_counter() - start

    def decode(tokens):
        array = (llama.llama_token * len(tokens))(*tokens)
        if llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        # Logits are there when they are asked for.
        llama.llama_get_logits_ith(context, -1)

    def seconds(passes):
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        decode([1])
        start = time.perf_counter()
        for tokens in passes:
            decode(tokens)
        return time.perf_counter() - start

    tokens = [(7919 * i + 17) % 32000 for i in range(PROMPT)]
    tests = {"prompt": ([tokens[1:]], PROMPT - 1), "decode": ([[t] for t in tokens[:TOKENS]], TOKENS)}
    rates = {}
    for name, (passes, count) in tests.items():
        seconds(passes)
        rates[name] = count / seconds(passes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({**rates, "load": load, "memory": peak}))


def qhx(program, bundle, threads, activations):
    """One run of qhx."""
    arguments = ["--prompt", PROMPT, "--tokens", TOKENS, "--repeat", 1, "--json"]
    arguments += ["--backend", "cpu", "--threads", threads, "--cpu-activations", activations]
    report = output([program, "bench", bundle, *arguments])
    rates = {r["name"]: r["tokens_per_second"]["mean"] for r in report["results"]}
    return {
        "prompt": rates[f"pp{PROMPT}"],
        "decode": rates[f"tg{TOKENS}"],
        "load": report["load_ms"] / 1000,
        "memory": report["peak_memory_bytes"],
    }


def output(command):
    """What a command prints, as JSON."""
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", help="for the models, which stay there [default: none stays]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--precision", default="fp16,w8a16,w4a16")
    parser.add_argument("--cpu-activations", default="int16", help="int16, int8, or both with a comma")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--qhx", default=ROOT / "target/release/qhx", type=pathlib.Path)
    parser.add_argument("--llama", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.llama:
        return run_llama(options.llama, options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options.folder or temporary)
        for precision in options.precision.split(","):
            compare(folder, precision, options)


def compare(folder, precision, options):
    bundle, gguf = folder / precision, folder / f"{PAIRS[precision]}.gguf"
    if not options.alone and not gguf.exists():
        write_gguf(gguf, PAIRS[precision])
    if not bundle.exists():
        make = ["forge", "--synthetic", CONFIG, "--cpu-only", "--out", bundle, "--prefill", PROMPT]
        make += ["--max-ctx", CONTEXT, "--precision", precision, "--head", HEADS[precision]]
        subprocess.run([str(part) for part in [options.qhx, *make]], check=True, stdout=subprocess.DEVNULL)
    runs = {f"qhx {name}": [] for name in options.cpu_activations.split(",")}
    theirs = []
    for _ in range(options.repeats):
        for name, ours in runs.items():
            ours.append(qhx(options.qhx, bundle, options.threads, name.split()[1]))
        if not options.alone:
            this = [sys.executable, __file__, "--llama", gguf, "--threads", options.threads]
            theirs.append(output(this))
    if theirs:
        runs["llama.cpp"] = theirs
    weights = "" if options.alone else f", {PAIRS[precision]}: {gguf.stat().st_size / 1e6:.0f} MB"
    print(f"{precision}{weights}, n = {options.repeats}")
    for metric, unit, factor in [
        ("decode", "tokens/s", 1),
        ("prompt", "tokens/s", 1),
        ("load", "ms", 1e3),
        ("memory", "MB", 1e-6),
    ]:
        first, median = next(iter(runs)), statistics.median
        values = {name: [run[metric] * factor for run in all] for name, all in runs.items()}
        said = [
            f"{name} {median(v):.1f} ({min(v):.1f} to {max(v):.1f}),"
            f" ratio {median(values[first]) / median(v):.2f}"
            for name, v in values.items()
        ]
        print(f"  {metric}, {unit}: {'; '.join(said)}", flush=True)


if __name__ == "__main__":
    main()
