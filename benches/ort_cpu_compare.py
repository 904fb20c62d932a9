#!/usr/bin/env python3
"""Times the ONNX graphs of a bundle on the CPU: `qhx bench` and ONNX Runtime, in one run.

    python3 -m venv ort && ort/bin/pip install onnxruntime onnx numpy
    cargo build --release -p qhx-cli --features builtin-ops
    ort/bin/python benches/ort_cpu_compare.py BUNDLE [BUNDLE …] [--repeats 5] [--threads 2]

Both execute the same files with as many threads. They take turns, each time in a process of its own. ONNX Runtime gets
zeros, which take it as long as other numbers. The report has, for each graph, the medians and their ratio (above 1: qhx
is faster), and the most memory of both.

`qhx bench` executes the graphs of texts. With --graphs NAME[,NAME …], which may be any, an example of the CPU backend
executes them with zeros as often as ONNX Runtime does, and the report has the least times:

    cargo build --release -p qhx-cpu --example graph
"""

import argparse
import json
import pathlib
import resource
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
#: Passes whose mean is one figure, as many as fit in the time.
SECONDS, MOST = 2.0, 50


def run_ort(folder, names, threads):
    """One run of ONNX Runtime, printed as JSON: milliseconds of each graph."""
    import numpy
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    types = {"tensor(float)": numpy.float32, "tensor(int32)": numpy.int32}
    sessions = {}
    start = time.perf_counter()
    for name in names:
        path = folder / "onnx" / f"{name}.onnx"
        sessions[name] = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    load = time.perf_counter() - start
    graphs, least = {}, {}
    for name, session in sessions.items():
        inputs = {i.name: numpy.zeros(i.shape, types[i.type]) for i in session.get_inputs()}
        for _ in range(2):
            session.run(None, inputs)
        times = []
        while len(times) < MOST and sum(times) < SECONDS:
            start = time.perf_counter()
            session.run(None, inputs)
            times.append(time.perf_counter() - start)
        graphs[name], least[name] = statistics.mean(times) * 1e3, min(times) * 1e3
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"graphs": graphs, "least": least, "load": load * 1e3, "memory": peak}))


def output(command):
    """What a command prints, as JSON."""
    run = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if run.returncode:
        sys.exit(run.stderr)
    return json.loads(run.stdout)


def compare_graphs(bundle, options):
    """Least times of any graphs of a bundle."""
    print(f"{bundle}, n = {options.repeats}, least")
    for name in options.graphs.split(","):
        ours, theirs = [], []
        command = [options.graph, bundle / "onnx" / f"{name}.onnx", SECONDS, options.threads]
        this = [sys.executable, __file__, bundle, "--ort", name, "--threads", options.threads]
        for _ in range(options.repeats):
            ours.append(output(command)["least_ms"])
            theirs.append(output(this)["least"][name])
        mine, others = min(ours), min(theirs)
        print(f"  {name}: qhx {mine:.2f} ms, ONNX Runtime {others:.2f} ms, ratio {others / mine:.2f}")


def compare(bundle, options):
    command = [options.qhx, "bench", bundle, "--backend", "cpu", "--threads", options.threads]
    command += ["--repeat", 1, "--json", "--prompt", options.prompt, "--tokens", 32]
    ours, theirs = [], []
    for _ in range(options.repeats):
        report = output(command)
        ours.append({
            "graphs": {g["graph"]: g["mean_ms"] for g in report["graphs"]},
            "load": report["load_ms"],
            "memory": report["peak_memory_bytes"],
        })
        names = ",".join(ours[-1]["graphs"])
        this = [sys.executable, __file__, bundle, "--ort", names, "--threads", options.threads]
        theirs.append(output(this))
    print(f"{bundle}, n = {options.repeats}")

    def line(name, unit, of):
        mine, others = (statistics.median(map(of, runs)) for runs in (ours, theirs))
        print(f"  {name}: qhx {mine:.2f} {unit}, ONNX Runtime {others:.2f} {unit}, ratio {others / mine:.2f}")

    for name in ours[0]["graphs"]:
        line(name, "ms", lambda run, name=name: run["graphs"][name])
    line("load", "ms", lambda run: run["load"])
    line("memory", "MB", lambda run: run["memory"] / 1e6)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("bundles", nargs="+", type=pathlib.Path, metavar="BUNDLE")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", default="128", help="lengths of prompts, as of qhx bench")
    parser.add_argument("--qhx", default=ROOT / "target/release/qhx", type=pathlib.Path)
    parser.add_argument("--graphs", help="names of graphs of any context")
    parser.add_argument("--graph", default=ROOT / "target/release/examples/graph", type=pathlib.Path)
    parser.add_argument("--ort", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.ort:
        return run_ort(options.bundles[0], options.ort.split(","), options.threads)
    for bundle in options.bundles:
        (compare_graphs if options.graphs else compare)(bundle, options)


if __name__ == "__main__":
    main()
