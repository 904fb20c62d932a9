#!/usr/bin/env python3
"""Times one QNN context under qhx and under ONNX Runtime's QNN provider, in one run.

    python3 -m venv ort && ort/bin/pip install onnxruntime onnx numpy onnxruntime-qnn==2.7.0
    cargo build --release -p qhx-benches
    ort/bin/python benches/ort_overhead.py CONTEXT.bin [--rounds 100] [--repeats 5]

Both execute the same graph of the same context binary with bound buffers on the same library. The
two take turns; the report is the ratio of the medians. ONNX Runtime reaches the context through an
EPContext node, which is how it runs context binaries.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile
import time

import numpy
import onnx
import onnxruntime
import onnxruntime_qnn
from onnx import TensorProto, helper

TYPES = {"f16": (TensorProto.FLOAT16, numpy.float16), "f32": (TensorProto.FLOAT, numpy.float32)}
ROOT = pathlib.Path(__file__).resolve().parent.parent


def libraries():
    folder = pathlib.Path(onnxruntime_qnn.__file__).parent
    found = {name: next(folder.rglob(name)) for name in ("libQnnHtp.so", "libQnnSystem.so")}
    provider = next(p for p in folder.rglob("*.so") if "providers_qnn" in p.name)
    return found["libQnnHtp.so"], found["libQnnSystem.so"], provider


def qhx(htp, system, context, rounds):
    program = ROOT / "target/release/graph_execute"
    out = subprocess.run(
        [program, htp, system, context, str(rounds)], check=True, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True,
    ).stdout
    return json.loads(out)


def session(graph, context, htp, provider, folder):
    def value(tensor):
        return helper.make_tensor_value_info(tensor["name"], TYPES[tensor["dtype"]][0], tensor["shape"])

    link = pathlib.Path(folder) / "context.bin"
    link.write_bytes(pathlib.Path(context).read_bytes())
    node = helper.make_node(
        "EPContext", [t["name"] for t in graph["inputs"]], [t["name"] for t in graph["outputs"]],
        name=graph["name"], domain="com.microsoft", embed_mode=0, main_context=1,
        ep_cache_context=link.name, source="Qnn", partition_name=graph["name"],
    )
    model = helper.make_model(
        helper.make_graph([node], "context", [value(t) for t in graph["inputs"]],
                          [value(t) for t in graph["outputs"]]),
        opset_imports=[helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)],
    )
    model.ir_version = 10
    path = pathlib.Path(folder) / "context.onnx"
    onnx.save(model, path)
    onnxruntime.register_execution_provider_library("QNN", str(provider))
    devices = [d for d in onnxruntime.get_ep_devices() if "QNN" in d.ep_name.upper()]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    options.add_provider_for_devices(devices[:1], {"backend_path": str(htp)})
    return onnxruntime.InferenceSession(str(path), options)


def bind(session, graph):
    binding = session.io_binding()
    kept = []
    for tensors, put in ((graph["inputs"], binding.bind_input), (graph["outputs"], binding.bind_output)):
        for tensor in tensors:
            array = numpy.zeros(tensor["shape"], TYPES[tensor["dtype"]][1])
            kept.append(array)
            put(tensor["name"], "cpu", 0, array.dtype, array.shape, array.ctypes.data)
    return binding, kept


def main():
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("context")
    arguments.add_argument("--rounds", type=int, default=100)
    arguments.add_argument("--repeats", type=int, default=5)
    arguments = arguments.parse_args()
    htp, system, provider = libraries()
    graph = qhx(htp, system, arguments.context, 1)["graph"]
    ours, theirs = [], []
    with tempfile.TemporaryDirectory() as folder:
        runtime = session(graph, arguments.context, htp, provider, folder)
        binding, kept = bind(runtime, graph)
        for _ in range(3):
            runtime.run_with_iobinding(binding)
        for _ in range(arguments.repeats):
            for _ in range(arguments.rounds):
                start = time.perf_counter()
                runtime.run_with_iobinding(binding)
                theirs.append((time.perf_counter() - start) * 1e6)
            ours += qhx(htp, system, arguments.context, arguments.rounds)["microseconds"]
        del kept
    a, b = statistics.median(ours), statistics.median(theirs)
    print(f"graph {graph['name']}: {len(graph['inputs'])} inputs, {len(graph['outputs'])} outputs")
    print(f"qhx          {a:10.1f} µs (median of {len(ours)})")
    print(f"ONNX Runtime {b:10.1f} µs (median of {len(theirs)})")
    print(f"ratio qhx / ONNX Runtime: {a / b:.3f}")


if __name__ == "__main__":
    main()
