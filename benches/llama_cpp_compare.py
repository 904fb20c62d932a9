#!/usr/bin/env python3
"""Tokens a second, time to open and memory of `qhx bench` on the CPU and of llama.cpp, on the same shapes, in one run.

    python3 -m venv llama && llama/bin/pip install gguf numpy llama-cpp-python==0.3.36
    cargo build --release -p qhx-cli --features builtin-ops
    llama/bin/python benches/llama_cpp_compare.py [--folder DIR] [--repeats 5] [--shapes llama-336m,qwen2.5-0.5b]
        [--weights f16,q8_0,q4_0,q4_k] [--contexts 512,4096,16384] [--positions 64,3000]
        [--cpu auto+f16,int16+f32] [--alone]
    llama/bin/python benches/llama_cpp_compare.py --files SmolLM2.gguf,gemma-3-270m.gguf --weights f16,q8_0,q4_0,q4_k_m

Both run decoders of a model's shapes, as a Llama without biases and with random weights: a prompt up to each position
that the context has, and 32 tokens one at a time behind it. They take turns, each in a process of its own, with two
threads. With --files the models are those of GGUF files: their weights as f16, of which the forge and llama.cpp's
quantize make the others. pip compiles llama.cpp for this machine. q8_0, q4_0 and q4_k stand beside `w8a16` and
`w4a16`, of which q4_k is forged from llama.cpp's own file; norms are f32, and the head has what the layers have.
Prompts are consumed in the parts that both take by default. qhx takes a turn with each of `--cpu`, which is
`--cpu-activations` and `--cpu-caches`: int8+f16 is what llama.cpp computes with. Peak memory of a child begins with its
parent's: it counts where the models are there already (--folder). With --alone no other program takes one, and this needs nothing
installed. Ratios are those of each column to the last one; above 1 is in its favour. Written as tables in Markdown,
and with --json as lines.
"""

import argparse
import json
import os
import pathlib
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

import random_llama

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Any tokenizer does: prompts are given as tokens.
TOKENIZER = ROOT / "tests/fixtures/llama3-blocks"
#: Tokens of an answer, and of a prompt that llama.cpp takes at once: its default.
TOKENS, PART = 32, 512
#: What the weights are for the forge and for its head.
PRECISIONS = {"f16": "fp16", "q8_0": "w8a16", "q4_0": "w4a16", "q4_k": "w4a16", "q4_k_m": "w4a16"}
#: llama.cpp's numbers of the types of files.
FILE_TYPES = {"q8_0": 7, "q4_0": 2, "q4_k_m": 15}


def shape(hidden, inner, layers, heads, shared, width, vocab):
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "head_dim": width,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-05,
        "attention_bias": False,
        "mlp_bias": False,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "vocab_size": vocab,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }


#: Published shapes; every layer attends to all positions.
SHAPES = {
    "llama-336m": shape(1024, 3072, 24, 16, 8, 64, 32000),
    "qwen2.5-0.5b": shape(896, 4864, 24, 14, 2, 64, 151936),
    "gemma3-1b": shape(1152, 6912, 26, 4, 1, 256, 262144),
}


def run_llama(path, options):
    """One run of llama.cpp, printed as JSON. A short pass comes before what counts."""
    import ctypes

    import llama_cpp as llama

    quiet = llama.llama_log_callback(lambda *_: None)
    llama.llama_log_set(quiet, ctypes.c_void_p())
    llama.llama_backend_init()
    start = time.perf_counter()
    model = llama.llama_model_load_from_file(os.fsencode(path), llama.llama_model_default_params())
    settings = llama.llama_context_default_params()
    settings.n_ctx = options.context
    settings.n_threads = settings.n_threads_batch = options.threads
    context = llama.llama_init_from_model(model, settings)
    load = time.perf_counter() - start

    def decode(tokens):
        array = (llama.llama_token * len(tokens))(*tokens)
        if llama.llama_decode(context, llama.llama_batch_get_one(array, len(tokens))) != 0:
            raise RuntimeError("llama_decode failed")
        # Logits are there when they are asked for.
        llama.llama_get_logits_ith(context, -1)

    def seconds(tokens, at_once):
        start = time.perf_counter()
        for first in range(0, len(tokens), at_once):
            decode(tokens[first : first + at_once])
        return time.perf_counter() - start

    tokens = [(7919 * i + 17) % 32000 for i in range(options.context)]
    found = {"load": load}
    for position in options.place:
        if position < PART:
            seconds(tokens[:position], PART)
            llama.llama_memory_clear(llama.llama_get_memory(context), True)
        found[f"prompt {position}"] = position / seconds(tokens[:position], PART)
        found[f"decode {position}"] = TOKENS / seconds(tokens[:TOKENS], 1)
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps(found))


def run_qhx(bundle, positions, cpu, options):
    """One run of qhx: all of it once before it counts."""
    lengths = ",".join(str(position + TOKENS) for position in positions)
    arguments = ["--table", "--prompt", lengths, "--tokens", TOKENS, "--repeat", 1, "--json"]
    arguments += ["--backend", "cpu", "--threads", options.threads]
    activations, caches = cpu.split("+")
    arguments += ["--cpu-activations", activations, "--cpu-caches", caches]
    table = output([options.qhx, "bench", bundle, *arguments])
    found = {"load": table["load_ms"] / 1000, "memory": table["peak_memory_bytes"]}
    for position, row in zip(positions, table["rows"]):
        found[f"prompt {position}"] = row["prefill"]["tokens_per_second"]
        found[f"decode {position}"] = row["decode"]["tokens_per_second"]
    return found


def output(command):
    """What a command prints, as JSON."""
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout)


def words(text):
    return text.split(",")


def numbers(text):
    return [int(number) for number in words(text)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", help="for the models, which stay there [default: none stays]")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shapes", type=words, default=["llama-336m"], help=", ".join(SHAPES))
    parser.add_argument("--files", type=words, default=[], help="GGUF files, instead of shapes")
    parser.add_argument("--weights", type=words, default=list(PRECISIONS)[:4], help=", ".join(PRECISIONS))
    parser.add_argument("--contexts", type=numbers, default=[512])
    parser.add_argument("--positions", type=numbers, default=[64, 3000])
    parser.add_argument("--cpu", type=words, default=["auto+f16"], help="[default: auto+f16]")
    parser.add_argument("--alone", action="store_true", help="without llama.cpp")
    parser.add_argument("--json", action="store_true", help="all figures, a line for each table")
    parser.add_argument("--qhx", default=ROOT / "target/release/qhx", type=pathlib.Path)
    parser.add_argument("--llama", help=argparse.SUPPRESS)
    parser.add_argument("--context", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--place", type=numbers, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.llama:
        return run_llama(options.llama, options)
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options.folder or temporary)
        for name in options.files or options.shapes:
            for weights in options.weights:
                for context in options.contexts:
                    compare(folder, name, weights, context, options)


def made(folder, name, weights, context, options):
    """The model for both, made where it is not there yet."""
    if options.files:
        return made_of_file(folder, pathlib.Path(name), weights, context, options)
    config = SHAPES[name]
    bundle, gguf = folder / f"{name}-{weights}-{context}", folder / f"{name}-{weights}.gguf"
    if not gguf.exists() and (weights == "q4_k" or not options.alone):
        no_vocab = lambda writer: writer.add_tokenizer_model("no_vocab")
        random_llama.write(gguf, config, weights, config["max_position_embeddings"], no_vocab)
    if not bundle.exists():
        source = folder / f"{name}-config"
        source.mkdir(exist_ok=True)
        (source / "config.json").write_text(json.dumps(config))
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TOKENIZER / file, source / file)
        of = [gguf, "--tokenizer", source] if weights == "q4_k" else ["--synthetic", source / "config.json"]
        precision = PRECISIONS[weights]
        make = ["forge", *of, "--cpu-only", "--out", bundle]
        make += ["--max-ctx", context, "--precision", precision, "--head", precision]
        run = subprocess.run([str(part) for part in [options.qhx, *make]], capture_output=True, text=True)
        if run.returncode:
            sys.exit(run.stderr)
    return bundle, gguf


def made_of_file(folder, file, weights, context, options):
    """The bundle and the file of a GGUF file's weights."""
    import llama_cpp
    import quality

    wide, gguf = folder / f"{file.stem}-f16.gguf", folder / f"{file.stem}-{weights}.gguf"
    if not wide.exists():
        quality.widened(file, wide, grid=True)
    if not gguf.exists():
        settings = llama_cpp.llama_model_quantize_default_params()
        settings.ftype = FILE_TYPES[weights]
        if llama_cpp.llama_model_quantize(os.fsencode(wide), os.fsencode(gguf), settings):
            sys.exit(f"llama.cpp cannot quantize {wide} to {weights}")
    precision = PRECISIONS[weights]
    bundle = folder / f"{file.stem}-{precision}-{context}"
    if not bundle.exists():
        make = [options.qhx, "forge", wide, "--cpu-only", "--out", bundle, "--max-ctx", context]
        make += ["--precision", precision]
        run = subprocess.run([str(part) for part in make], capture_output=True, text=True)
        if run.returncode:
            sys.exit(run.stderr)
    return bundle, gguf


def forget(place):
    """Takes files out of memory, where what was written lately lies in larger pieces than what is read: a map of such
    a file has more of it in memory than was touched."""
    for path in [place, *place.rglob("*")]:
        if path.is_file() and hasattr(os, "posix_fadvise"):
            with path.open("rb+") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def compare(folder, name, weights, context, options):
    bundle, gguf = made(folder, name, weights, context, options)
    forget(bundle)
    forget(gguf)
    positions = [position for position in options.positions if position + TOKENS <= context]
    runs = {f"qhx {name}": [] for name in options.cpu}
    if not options.alone:
        runs["llama.cpp"] = []
    for _ in range(options.repeats):
        for program, found in runs.items():
            if program != "llama.cpp":
                found.append(run_qhx(bundle, positions, program.split()[1], options))
                continue
            this = [sys.executable, __file__, "--llama", gguf, "--threads", options.threads, "--context", context]
            found.append(output([*this, "--place", ",".join(map(str, positions))]))
    if options.json:
        print(json.dumps({"shapes": name, "weights": weights, "context": context, "runs": runs}), flush=True)
        return
    print(f"\n| {pathlib.Path(name).stem}, {weights}, {context} | " + " | ".join(runs) + " | ratios |")
    print("|---" * (len(runs) + 2) + "|")
    rates = [(f"{kind} {position}", 1, "tokens/s") for kind in ("decode", "prompt") for position in positions]
    median, last = statistics.median, list(runs)[-1]
    for metric, factor, unit in [*rates, ("load", 1e3, "ms"), ("memory", 1e-6, "MB")]:
        values = {name: [run[metric] * factor for run in all] for name, all in runs.items()}
        cells = [f"{median(v):.1f} ({min(v):.1f} to {max(v):.1f})" for v in values.values()]
        ratios = [median(v) / median(values[last]) for n, v in values.items() if n != last]
        # Less is better of what is no rate.
        ratios = [f"{ratio if unit == 'tokens/s' else 1 / ratio:.2f}" for ratio in ratios]
        print(f"| {metric}, {unit} | {' | '.join(cells)} | {', '.join(ratios)} |", flush=True)


if __name__ == "__main__":
    main()
