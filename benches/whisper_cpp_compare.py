#!/usr/bin/env python3
"""Whisper on the CPU: what qhx and whisper.cpp take for 30 s of audio and for a token, of the same weights, in one run.

    python3 -m venv whisper && whisper/bin/pip install numpy && whisper/bin/pip install --no-binary pywhispercpp pywhispercpp
    cargo build --release -p qhx-cli --features builtin-ops
    whisper/bin/python benches/whisper_cpp_compare.py [--config tests/configs/whisper-small.json] [--repeats 5]

The weights are random, of the shapes of the configuration, and f16 in both. Each turn is a process of its own, with two
threads: qhx transcribes 30 s of noise with `--trace`, of which the executions of its graphs are taken, and whisper.cpp
is called through its C functions, which pip compiles for this machine (`--no-binary`). The encoder is one execution;
tokens are decoded one at a time, 60 of them, and the first four do not count. The real-time factor is that of 30 s with
100 tokens.
"""

import argparse
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import struct
import subprocess
import sys
import sysconfig
import tempfile
import time
import wave

import numpy

ROOT = pathlib.Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests/fixtures/whisper-tiny"
#: Seconds of a window, samples a second, decoded tokens, those that do not count, and those of the real-time factor.
SECONDS, RATE, TOKENS, WARM, TYPICAL = 30, 16000, 60, 4, 100
#: Width of the convolutions.
CONV = 3


def tensors(config):
    """Names in the checkpoint and in whisper.cpp's file, and shapes."""
    width, inner = config["d_model"], config["encoder_ffn_dim"]
    mels, frames, length = config["num_mel_bins"], config["max_source_positions"], config["max_target_positions"]

    def linear(ours, theirs, rows, columns, bias=True):
        yield f"{ours}.weight", f"{theirs}.weight", (rows, columns)
        if bias:
            yield f"{ours}.bias", f"{theirs}.bias", (rows,)

    def norm(ours, theirs):
        yield f"{ours}.weight", f"{theirs}.weight", (width,)
        yield f"{ours}.bias", f"{theirs}.bias", (width,)

    def attention(ours, theirs):
        for short, long in ("q", "query"), ("k", "key"), ("v", "value"), ("out", "out"):
            yield from linear(f"{ours}.{short}_proj", f"{theirs}.{long}", width, width, short != "k")

    def side(name, layers):
        for layer in range(layers):
            ours, theirs = f"model.{name}.layers.{layer}", f"{name}.blocks.{layer}"
            yield from attention(f"{ours}.self_attn", f"{theirs}.attn")
            yield from norm(f"{ours}.self_attn_layer_norm", f"{theirs}.attn_ln")
            if name == "decoder":
                yield from attention(f"{ours}.encoder_attn", f"{theirs}.cross_attn")
                yield from norm(f"{ours}.encoder_attn_layer_norm", f"{theirs}.cross_attn_ln")
            yield from linear(f"{ours}.fc1", f"{theirs}.mlp.0", inner, width)
            yield from linear(f"{ours}.fc2", f"{theirs}.mlp.2", width, inner)
            yield from norm(f"{ours}.final_layer_norm", f"{theirs}.mlp_ln")

    for index, columns in (1, mels), (2, width):
        name = f"encoder.conv{index}"
        yield f"model.{name}.weight", f"{name}.weight", (width, columns, CONV)
        yield f"model.{name}.bias", f"{name}.bias", (width, 1)
    yield "model.encoder.embed_positions.weight", "encoder.positional_embedding", (frames, width)
    yield from side("encoder", config["encoder_layers"])
    yield from norm("model.encoder.layer_norm", "encoder.ln_post")
    yield "model.decoder.embed_tokens.weight", "decoder.token_embedding.weight", (config["vocab_size"], width)
    yield "model.decoder.embed_positions.weight", "decoder.positional_embedding", (length, width)
    yield from side("decoder", config["decoder_layers"])
    yield from norm("model.decoder.layer_norm", "decoder.ln")


def values(name, shape, random):
    """Weights that keep what is computed of them at the size of one."""
    if name.endswith("bias"):
        return numpy.zeros(shape, numpy.float16)
    if len(shape) == 1:
        return numpy.ones(shape, numpy.float16)
    drawn = random.standard_normal(shape, numpy.float32)
    return (drawn * numpy.prod(shape[1:]) ** -0.5).astype(numpy.float16)


def write_models(config, folder):
    """The checkpoint, with the tokenizer of the tests' tiny model, and whisper.cpp's file."""
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    for name in "tokenizer.json", "generation_config.json", "preprocessor_config.json":
        shutil.copy(FIXTURE / name, checkpoint)
    ours = json.loads((FIXTURE / "config.json").read_text())
    special = ("bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id")
    kept = {key: value for key, value in ours.items() if key in special}
    (checkpoint / "config.json").write_text(json.dumps(config | kept))
    processor = json.loads((FIXTURE / "preprocessor_config.json").read_text())
    mels = config["num_mel_bins"]
    processor |= {"feature_size": mels, "chunk_length": SECONDS, "n_samples": SECONDS * RATE, "nb_max_frames": SECONDS * 100}
    (checkpoint / "preprocessor_config.json").write_text(json.dumps(processor))
    # So many tokens are asked for in a window, and no rule may end it before.
    rules = json.loads((FIXTURE / "generation_config.json").read_text())
    rules |= {"max_length": config["max_target_positions"]}
    (checkpoint / "generation_config.json").write_text(json.dumps(rules))

    entries, offset, listed = {}, 0, list(tensors(config))
    for name, _, shape in listed:
        size = 2 * int(numpy.prod(shape))
        # whisper.cpp has the biases of convolutions as columns.
        flat = shape[:1] if shape[-1] == 1 else shape
        entries[name] = {"dtype": "F16", "shape": list(flat), "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps(entries).encode()
    random = numpy.random.default_rng(1)
    with open(checkpoint / "model.safetensors", "wb") as safe, open(folder / "ggml.bin", "wb") as ggml:
        safe.write(struct.pack("<Q", len(header)) + header)
        layers = (config["encoder_attention_heads"], config["encoder_layers"], config["max_target_positions"])
        ggml.write(struct.pack("<12i", 0x67676D6C, config["vocab_size"], config["max_source_positions"],
            config["d_model"], *layers, config["d_model"], config["decoder_attention_heads"],
            config["decoder_layers"], mels, 1))  # fmt: skip
        ggml.write(struct.pack("<2i", mels, 201) + numpy.full((mels, 201), 0.005, numpy.float32).tobytes())
        # Words are of no account here; special tokens have names of their own.
        ggml.write(struct.pack("<i", 50257))
        for token in range(50257):
            word = str(token).encode()
            ggml.write(struct.pack("<i", len(word)) + word)
        for ours, theirs, shape in listed:
            made = values(ours, shape, random)
            safe.write(made.tobytes())
            wide = len(shape) == 1 or shape[-1] == 1 or "positional" in theirs
            made = made.astype(numpy.float32) if wide else made
            name = theirs.encode()
            ggml.write(struct.pack("<3i", len(shape), len(name), 0 if wide else 1))
            ggml.write(struct.pack(f"<{len(shape)}i", *reversed(shape)) + name + made.tobytes())


def run_whisper(path, threads):
    """One run of whisper.cpp, printed as JSON: ms of the encoder and of each token."""
    # Its libraries name each other by names that the loader does not find by itself.
    folder = pathlib.Path(sysconfig.get_path("platlib"))
    for name in "libggml-base", "libggml-cpu", "libggml", "libwhisper":
        file = next(iter(sorted(folder.rglob(f"{name}.so.*")) or sorted(folder.rglob(f"{name}.so"))), None)
        if file is None:
            sys.exit(f"no {name} in {folder}: install pywhispercpp with --no-binary")
        whisper = ctypes.CDLL(str(file), mode=ctypes.RTLD_GLOBAL)
    whisper.whisper_init_from_file.restype = ctypes.c_void_p
    whisper.whisper_get_logits.restype = ctypes.c_void_p
    context = ctypes.c_void_p(whisper.whisper_init_from_file(os.fsencode(path)))
    noise = numpy.random.default_rng(2).standard_normal(SECONDS * RATE).astype(numpy.float32) * 0.1
    samples = noise.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    check(whisper.whisper_pcm_to_mel(context, samples, len(noise), threads))
    encoders = []
    for _ in range(2):
        start = time.perf_counter()
        check(whisper.whisper_encode(context, 0, threads))
        encoders.append(time.perf_counter() - start)
    prompt = (ctypes.c_int * 4)(50258, 50259, 50359, 50364)
    check(whisper.whisper_decode(context, prompt, 4, 0, threads))
    tokens = []
    for index in range(TOKENS):
        token = (ctypes.c_int * 1)((7919 * index + 17) % 50000)
        start = time.perf_counter()
        check(whisper.whisper_decode(context, token, 1, 4 + index, threads))
        whisper.whisper_get_logits(context)
        tokens.append(time.perf_counter() - start)
    print(json.dumps({"encoder": encoders[-1] * 1e3, "token": statistics.median(tokens[WARM:]) * 1e3}))


def check(code):
    if code != 0:
        sys.exit(f"whisper.cpp failed with {code}")


def run_qhx(qhx, bundle, clip, threads, folder):
    """The same of one run of qhx."""
    trace = folder / "trace.json"
    # Two windows, of which the first one maps weights; the second one's figures count.
    command = [qhx, "transcribe", bundle, clip, clip, "--language", "en", "--temperature", "0", "--max-new", TOKENS,
        "--times", "none", "--backend", "cpu", "--threads", threads, "--trace", trace, "--json"]  # fmt: skip
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    found = json.loads(trace.read_text())
    spans = lambda name: [e["dur"] / 1e3 for e in found if e["name"] == name and e["ph"] == "X"]
    decode, head = spans("graph decode"), spans("graph lmhead")
    if len(decode) < TOKENS:
        sys.exit(f"only {len(decode)} tokens were decoded: take another seed")
    return {"encoder": spans("graph encoder")[-1], "token": statistics.median(decode) + statistics.median(head)}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "tests/configs/whisper-small.json")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--qhx", type=pathlib.Path, default=ROOT / "target/release/qhx")
    parser.add_argument("--folder", type=pathlib.Path, help="for the models, which stay there [default: none stays]")
    parser.add_argument("--whisper", help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    if wanted.whisper:
        return run_whisper(wanted.whisper, wanted.threads)
    config = json.loads(wanted.config.read_text())
    with tempfile.TemporaryDirectory() as temporary:
        folder = wanted.folder or pathlib.Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if not (folder / "ggml.bin").exists():
            write_models(config, folder)
        bundle, clip = folder / "bundle", folder / "noise.wav"
        if not bundle.exists():
            make = [wanted.qhx, "forge", folder / "checkpoint", "--name", "model", "--cpu-only", "--out", bundle]
            subprocess.run(make, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        noise = numpy.random.default_rng(2).standard_normal(SECONDS * RATE) * 3000
        with wave.open(str(clip), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(RATE)
            file.writeframes(noise.astype("<i2").tobytes())
        ours, theirs = [], []
        for _ in range(wanted.repeats):
            ours.append(run_qhx(wanted.qhx, bundle, clip, wanted.threads, folder))
            command = [sys.executable, __file__, "--whisper", folder / "ggml.bin", "--threads", wanted.threads]
            done = subprocess.run([str(part) for part in command], check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            theirs.append(json.loads(done.stdout.splitlines()[-1]))
    for runs in ours, theirs:
        for run in runs:
            run["factor"] = SECONDS * 1e3 / (run["encoder"] + TYPICAL * run["token"])
    print(f"{wanted.config.stem}, n = {wanted.repeats}")
    print("| | qhx | whisper.cpp | ratio |\n|---|---|---|---|")
    for key, name in ("encoder", "30 s, ms"), ("token", "a token, ms"), ("factor", "times real time"):
        values = [[run[key] for run in runs] for runs in (ours, theirs)]
        middle = [statistics.median(found) for found in values]
        ratio = middle[0] / middle[1] if key == "factor" else middle[1] / middle[0]
        cells = [f"{m:.1f} ({min(v):.1f} to {max(v):.1f})" for m, v in zip(middle, values)]
        print(f"| {name} | {cells[0]} | {cells[1]} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
