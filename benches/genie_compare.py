#!/usr/bin/env python3
"""Tokens a second of `qhx generate` and of Genie, on one tiny model, one library and one machine, in one run.

    python3 -m venv ort && ort/bin/pip install onnxruntime onnx numpy safetensors onnxruntime-qnn==2.7.0
    cargo build --release -p qhx-cli -p qhx-ops-llama-plugin
    ort/bin/python benches/genie_compare.py [--tokens 48] [--repeats 5]

Both decode `tests/fixtures/mistral-tiny` one token at a time, prompt included, with a context of 128,
greedily, on the HTP emulator, and both must give the tokens of the reference. The graphs are as alike
as the two contracts let them be. Genie's takes a token id and gives logits from one graph (embedding
and head inside), and its KV cache is 8 bits wide, with a conversion on the way in and out; qhx gathers
the embedding on the host, its cache is f16, and the graph is the one that `qhx forge` makes.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import numpy
import onnx
import onnxruntime
import onnxruntime_qnn
from onnx import TensorProto, helper, numpy_helper
from safetensors import numpy as safetensors

ROOT = pathlib.Path(__file__).resolve().parent.parent
TINY = ROOT / "tests/fixtures/mistral-tiny"
CONTEXT = 128
#: Scores of hidden positions, and the step of a 16-bit mask that reaches from there to 0.
HIDDEN = 100.0
#: Stands before the result among what the library prints.
MARK = "result: "


class Model:
    """The tiny model as an ONNX graph for one token: Genie's contract, or the same with a float cache."""

    def __init__(self, scales=None):
        self.config = json.loads((TINY / "config.json").read_text())
        self.weights = safetensors.load_file(TINY / "model.safetensors")
        self.scales = scales
        self.nodes, self.constants, self.inputs, self.outputs = [], {}, [], []
        self.build()

    def op(self, kind, *inputs, outputs=1, **attributes):
        names = [f"t{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, name=names[0], **attributes))
        return names[0] if outputs == 1 else names

    def constant(self, array):
        array = numpy.ascontiguousarray(array)
        key = (str(array.dtype), array.shape, array.tobytes())
        if key not in self.constants:
            name = f"c{len(self.constants)}"
            self.constants[key] = numpy_helper.from_array(array, name)
        return self.constants[key].name

    def shape(self, *sizes):
        return self.constant(numpy.array(sizes, numpy.int64))

    def weight(self, name):
        return self.constant(self.weights[name].astype(numpy.float32))

    def linear(self, x, name):
        return self.op("MatMul", x, self.constant(self.weights[name].astype(numpy.float32).T))

    def norm(self, x, name):
        square = self.op("Mul", x, x)
        mean = self.op("ReduceMean", square, self.shape(-1), keepdims=1)
        eps = self.constant(numpy.float32(self.config["rms_norm_eps"]))
        root = self.op("Sqrt", self.op("Add", mean, eps))
        return self.op("Mul", self.op("Div", x, root), self.weight(name))

    def input(self, name, kind, shape, scale=None, zero=None):
        """An input, and its value as floats where it is quantised."""
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        if scale is None:
            return name
        return self.op("DequantizeLinear", name, self.constant(numpy.float32(scale)), self.constant(zero))

    def output(self, value, name, kind, shape, scale=None, zero=None):
        if scale is None:
            self.nodes.append(helper.make_node("Identity", [value], [name], name=name))
        else:
            step = self.constant(numpy.float32(scale))
            inputs = [value, step, self.constant(zero)]
            self.nodes.append(helper.make_node("QuantizeLinear", inputs, [name], name=name))
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))

    def cache(self, name, shape, new, new_shape):
        if self.scales is None:
            self.output(new, f"{name}_out", TensorProto.FLOAT, new_shape)
            return self.input(f"{name}_in", TensorProto.FLOAT, shape)
        scale, zero = self.scales[name], numpy.uint8(128)
        self.output(new, f"{name}_out", TensorProto.UINT8, new_shape, scale, zero)
        return self.input(f"{name}_in", TensorProto.UINT8, shape, scale, zero)

    def rope(self, x, heads, half):
        """Rotates halves of rows of `[1, heads, 1, 2 half]`."""
        a, b = self.op("Split", x, self.shape(half, half), outputs=2, axis=3)
        first = self.op("Sub", self.op("Mul", a, self.cos), self.op("Mul", b, self.sin))
        second = self.op("Add", self.op("Mul", b, self.cos), self.op("Mul", a, self.sin))
        return self.op("Concat", first, second, axis=3)

    def build(self):
        c = self.config
        heads, kv = c["num_attention_heads"], c["num_key_value_heads"]
        size = c["hidden_size"] // heads
        past, group = CONTEXT - 1, heads // kv
        ids = self.input("input_ids", TensorProto.INT32, [1, 1])
        if self.scales is None:
            mask = self.input("attention_mask", TensorProto.FLOAT, [1, 1, 1, CONTEXT])
        else:
            step, zero = HIDDEN / 65535, numpy.uint16(65535)
            mask = self.input("attention_mask", TensorProto.UINT16, [1, 1, 1, CONTEXT], step, zero)
        self.cos = self.input("position_ids_cos", TensorProto.FLOAT, [1, 1, 1, size // 2])
        self.sin = self.input("position_ids_sin", TensorProto.FLOAT, [1, 1, 1, size // 2])
        x = self.op("Gather", self.weight("model.embed_tokens.weight"), ids, axis=0)
        for layer in range(c["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            h = self.norm(x, f"{name}.input_layernorm.weight")
            rows = {}
            for part, count in (("q", heads), ("k", kv), ("v", kv)):
                row = self.linear(h, f"{name}.self_attn.{part}_proj.weight")
                row = self.op("Reshape", row, self.shape(1, 1, count, size))
                rows[part] = self.op("Transpose", row, perm=[0, 2, 1, 3])
            q = self.rope(rows["q"], heads, size // 2)
            k = self.op("Transpose", self.rope(rows["k"], kv, size // 2), perm=[0, 1, 3, 2])
            old_k = self.cache(f"past_key_{layer}", [1, kv, size, past], k, [1, kv, size, 1])
            old_v = self.cache(f"past_value_{layer}", [1, kv, past, size], rows["v"], [1, kv, 1, size])
            keys = self.op("Concat", old_k, k, axis=3)
            values = self.op("Concat", old_v, rows["v"], axis=2)
            # The heads of a group are the rows that one key head is multiplied with.
            q = self.op("Reshape", q, self.shape(1, kv, group, size))
            scores = self.op("Mul", self.op("MatMul", q, keys), self.constant(numpy.float32(size**-0.5)))
            weights = self.op("Softmax", self.op("Add", scores, mask), axis=-1)
            y = self.op("Reshape", self.op("MatMul", weights, values), self.shape(1, 1, heads * size))
            x = self.op("Add", x, self.linear(y, f"{name}.self_attn.o_proj.weight"))
            h = self.norm(x, f"{name}.post_attention_layernorm.weight")
            gate = self.linear(h, f"{name}.mlp.gate_proj.weight")
            gate = self.op("Mul", gate, self.op("Sigmoid", gate))
            h = self.op("Mul", gate, self.linear(h, f"{name}.mlp.up_proj.weight"))
            x = self.op("Add", x, self.linear(h, f"{name}.mlp.down_proj.weight"))
        logits = self.linear(self.norm(x, "model.norm.weight"), "lm_head.weight")
        self.output(logits, "logits", TensorProto.FLOAT, [1, 1, c["vocab_size"]])

    def proto(self):
        graph = helper.make_graph(
            self.nodes, "ar1_cl128", self.inputs, self.outputs, list(self.constants.values())
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)])
        model.ir_version = 10
        return model


def reference(prompt, tokens):
    """Greedy tokens in f32 on the CPU, and the range of every cache."""
    model = Model()
    session = onnxruntime.InferenceSession(model.proto().SerializeToString(), providers=["CPUExecutionProvider"])
    shapes = {i.name: i.shape for i in session.get_inputs()}
    feed = {name: numpy.zeros(shape, numpy.float32) for name, shape in shapes.items()}
    feed["attention_mask"][:] = -HIDDEN
    feed["attention_mask"][..., -1] = 0
    half = shapes["position_ids_cos"][-1]
    speed = model.config["rope_theta"] ** (-numpy.arange(half) / half)
    ranges = {}
    ids, made = list(prompt), []
    for position in range(len(prompt) + tokens - 1):
        feed["input_ids"] = numpy.array([[ids[position]]], numpy.int32)
        feed["position_ids_cos"][:] = numpy.cos(position * speed)
        feed["position_ids_sin"][:] = numpy.sin(position * speed)
        found = dict(zip((o.name for o in session.get_outputs()), session.run(None, feed)))
        for name, value in found.items():
            if name == "logits":
                continue
            cache = feed[name.replace("_out", "_in")]
            at = numpy.s_[..., position] if "key" in name else numpy.s_[:, :, position]
            cache[at] = value[..., 0] if "key" in name else value[:, :, 0]
            key = name.removesuffix("_out")
            ranges[key] = max(ranges.get(key, 0.0), float(numpy.abs(value).max()))
        feed["attention_mask"][..., position] = 0
        if position + 1 >= len(prompt):
            made.append(int(found["logits"].argmax()))
            ids.append(made[-1])
    return made, {name: top / 127 for name, top in ranges.items()}


def libraries():
    folder = pathlib.Path(onnxruntime_qnn.__file__).parent
    provider = next(p for p in folder.rglob("*.so") if "providers_qnn" in p.name)
    return {name: next(folder.rglob(f"{name}.so")) for name in ("libQnnHtp", "libQnnSystem", "libGenie")}, provider


def compile_for_genie(model, found, provider, folder):
    """Context binary of the graph, made by ONNX Runtime's QNN provider."""
    onnxruntime.register_execution_provider_library("QNN", str(provider))
    devices = [d for d in onnxruntime.get_ep_devices() if "QNN" in d.ep_name.upper()]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_session_config_entry("ep.context_enable", "1")
    options.add_session_config_entry("ep.context_embed_mode", "0")
    options.add_session_config_entry("ep.context_file_path", str(folder / "genie_ctx.onnx"))
    options.add_provider_for_devices(
        devices[:1],
        {"backend_path": str(found["libQnnHtp"]), "enable_htp_fp16_precision": "1", "offload_graph_io_quantization": "0",
         "soc_model": "87", "htp_arch": "81"},
    )
    path = folder / "genie.onnx"
    onnx.save(model.proto(), path)
    onnxruntime.InferenceSession(str(path), options)
    return next(folder.glob("*.bin"))


def genie_config(model, binary, tokens):
    c = model.config
    size = c["hidden_size"] // c["num_attention_heads"]
    return {"dialog": {
        "version": 1, "type": "basic", "max-num-tokens": tokens,
        "context": {"version": 1, "size": CONTEXT, "n-vocab": c["vocab_size"], "bos-token": -1, "eos-token": -1},
        "sampler": {"version": 1, "seed": 1, "temp": 1.0, "top-k": 1, "top-p": 1.0, "greedy": True},
        "tokenizer": {"version": 1, "path": str(TINY / "tokenizer.json")},
        "engine": {"version": 1, "n-threads": 1,
                   "backend": {"version": 1, "type": "QnnHtp", "QnnHtp": {
                       "version": 1, "spill-fill-bufsize": 0, "mmap-budget": 0, "use-mmap": False,
                       "cpu-mask": "0x3", "poll": False, "kv-dim": size, "pos-id-dim": size // 2,
                       "rope-theta": int(c["rope_theta"]), "allow-async-init": False}},
                   "model": {"version": 1, "type": "binary",
                             "binary": {"version": 1, "ctx-bins": [str(binary)]}}}}}


def run_genie(library, config, prompt):
    """Prints one line of JSON. In a process of its own: Genie finds its libraries by LD_LIBRARY_PATH."""
    genie = ctypes.CDLL(library)
    callback_type = ctypes.CFUNCTYPE(
        None, ctypes.POINTER(ctypes.c_uint32), ctypes.c_uint32, ctypes.c_int, ctypes.c_void_p
    )
    made, times = [], []

    def take(tokens, count, _code, _user):
        for i in range(count):
            made.append(tokens[i])
            times.append(time.perf_counter())

    def check(name, status):
        if status != 0:
            raise RuntimeError(f"{name}: {status}")

    callback = callback_type(take)
    handle, dialog = ctypes.c_void_p(), ctypes.c_void_p()
    text = pathlib.Path(config).read_bytes()
    check("GenieDialogConfig_createFromJson", genie.GenieDialogConfig_createFromJson(text, ctypes.byref(handle)))
    check("GenieDialog_create", genie.GenieDialog_create(handle, ctypes.byref(dialog)))
    ids = (ctypes.c_uint32 * len(prompt))(*prompt)
    check("GenieDialog_tokenQuery", genie.GenieDialog_tokenQuery(dialog, ids, len(prompt), 0, callback, None))
    rate = (len(made) - 1) / (times[-1] - times[0])
    print(MARK + json.dumps({"tokens": made, "rate": rate}), file=sys.stderr, flush=True)


def genie(found, config, prompt):
    command = [sys.executable, __file__, "--genie", str(found["libGenie"]), str(config), json.dumps(prompt)]
    environment = dict(os.environ, LD_LIBRARY_PATH=str(found["libGenie"].parent))
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    rows = [line for line in done.stderr.splitlines() if line.startswith(MARK)]
    if not rows or done.returncode != 0:
        raise RuntimeError(f"Genie ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    return json.loads(rows[0].removeprefix(MARK))


def libraries_of(found):
    return ["--htp", found["libQnnHtp"], "--qnn-system", found["libQnnSystem"]]


def forge(program, found, folder):
    """The tiny model as `qhx forge` makes it, without prefill graphs: Genie's side has none either."""
    bundle = folder / "bundle"
    command = [program, "forge", TINY, "--out", bundle, "--max-ctx", str(CONTEXT - 1), "--prefill", "0", "--target", "v81"]
    subprocess.run([*command, *libraries_of(found)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    return bundle


def qhx(program, bundle, found, prompt, tokens):
    command = [program, "generate", bundle, ",".join(map(str, prompt)), "--ids", "--json", "--ignore-eos", "--max-new",
               str(tokens), "--backend", "qnn", *libraries_of(found)]
    out = subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    answer = json.loads(out)
    return {"tokens": answer["tokens"], "rate": answer["timings"]["decode_tok_s"]}


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, default=48)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--qhx", default=ROOT / "target/release/qhx")
    arguments = arguments.parse_args()
    found, provider = libraries()
    case = json.loads((TINY / "goldens.json").read_text())["cases"][0]
    prompt = case["prompt_ids"]
    expected, scales = reference(prompt, arguments.tokens)
    golden = case["output_ids"][: arguments.tokens]
    assert expected[: len(golden)] == golden, "the reference in this program is not that of the goldens"
    rates = {"qhx": [], "Genie": []}
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        model = Model(scales)
        binary = compile_for_genie(model, found, provider, folder)
        config = folder / "genie.json"
        config.write_text(json.dumps(genie_config(model, binary, arguments.tokens)))
        bundle = forge(arguments.qhx, found, folder)
        # In turns, so that whatever else the machine does meets both.
        for _ in range(arguments.repeats):
            for name, row in (
                ("qhx", qhx(arguments.qhx, bundle, found, prompt, arguments.tokens)),
                ("Genie", genie(found, config, prompt)),
            ):
                rates[name].append(row["rate"])
                same = row["tokens"][: len(golden)] == golden
                assert same, f"{name}: {row['tokens']}, expected {golden}"
    for name, found in rates.items():
        low, high = min(found), max(found)
        print(f"{name:6} {statistics.median(found):7.1f} tokens/s (median of {len(found)}, {low:.1f} to {high:.1f})")
    print(f"both give the {len(golden)} tokens of the goldens")
    print(f"ratio qhx / Genie: {statistics.median(rates['qhx']) / statistics.median(rates['Genie']):.3f}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--genie"]:
        run_genie(sys.argv[2], sys.argv[3], json.loads(sys.argv[4]))
    else:
        main()
