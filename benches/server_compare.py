#!/usr/bin/env python3
"""`qhx serve` and llama.cpp's server on the CPU, over the same GGUF file, in one run.

    python3 -m venv llama && llama/bin/pip install gguf numpy xllamacpp
    cargo build --release -p qhx-cli --features builtin-ops
    llama/bin/python benches/server_compare.py [--folder DIR] [--models tiny,336m] [--precision w8a16] [--json FILE]

Both models have random weights, of which speed does not depend: the shapes of `tests/fixtures/llama3-tiny`, and of
`benches/cpu_336m.json`. Both servers are up all the time, with `--threads` threads and `--parallel` requests at a time,
and take turns, after one request each that does not count.

- 1, 2, 8 and 64 clients, each of which sends its requests one after another, as streams: time to the first token,
  tokens a second of all together, and the 99th percentile of a request's time. No two prompts begin alike.
- Eight conversations that take turns: time to the first token of the second and of the last turn. The answers that are
  sent back are fixed texts, so that both servers see the same conversations.

Prints a table in Markdown, in which ratios are better for qhx above 1, and writes all numbers as JSON.
"""

import argparse
import concurrent.futures
import http.client
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

import random_llama

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENIZER = ROOT / "tests/fixtures/llama3-tiny"
CONFIGS = {"tiny": TOKENIZER / "config.json", "336m": ROOT / "benches/cpu_336m.json"}
KINDS = {"fp16": "F16", "w8a16": "Q8_0", "w4a16": "Q4_0"}
CONTEXT, PREFILL = 2048, 128
CONVERSATIONS = 8
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
WORDS = "the boat leaves at noon and comes back when the lamp on the north side of the bay is lit".split()


def add_tokenizer(writer, vocab):
    """The tokens of the tiny model, behind which words of no text follow."""
    import gguf

    document = json.loads((TOKENIZER / "tokenizer.json").read_text())
    tokens = {id: token for token, id in document["model"]["vocab"].items()}
    special = {added["id"] for added in document["added_tokens"]}
    tokens.update({added["id"]: added["content"] for added in document["added_tokens"]})
    kinds = [gguf.TokenType.CONTROL if id in special else gguf.TokenType.NORMAL for id in range(vocab)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list([tokens.get(id, f"Ġw{id}") for id in range(vocab)])
    writer.add_token_types(kinds)
    gguf.SpecialVocab(TOKENIZER, load_merges=True).add_to_gguf(writer)
    writer.add_chat_template(TEMPLATE)


def serve_llama(path, options):
    """llama.cpp's server, until standard input ends."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx = CONTEXT * options.parallel
    params.n_parallel = options.parallel
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.n_gpu_layers = 0
    params.chat_template = TEMPLATE
    params.use_jinja = True
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


class Server:
    """A server in a process of its own."""

    def __init__(self, name, command, log):
        self.name = name
        command = [str(part) for part in command]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )
        for line in self.process.stdout:
            if line.startswith("http://"):
                self.host = line.strip().removeprefix("http://").rstrip("/")
                break
        else:
            sys.exit(f"{name} did not start: see {log.name}")

    def stop(self):
        self.process.terminate()
        self.process.wait(60)

    def ask(self, messages, max_tokens):
        """Streams an answer. Seconds to its first token and to its end, and its tokens."""
        body = {
            "model": "model",
            "messages": messages,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        connection = http.client.HTTPConnection(self.host, timeout=600)
        start = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            sys.exit(f"{self.name}: {response.status} {response.read().decode()}")
        first, usage = None, None
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            usage = chunk.get("usage") or usage
            if first is None and any(c["delta"].get("content") for c in chunk["choices"]):
                first = time.perf_counter() - start
        connection.close()
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        end = time.perf_counter() - start
        return {
            "first": end if first is None else first,
            "total": end,
            "tokens": usage["completion_tokens"],
            "prompt": usage["prompt_tokens"],
            "cached": cached,
        }


def text(number, words):
    """A text that begins unlike any other."""
    return f"{number} " + " ".join(WORDS[(number * 7 + at) % len(WORDS)] for at in range(words))


def load(server, clients, options, seed):
    """Clients that ask at the same time."""

    def client(index):
        numbers = [seed + index * options.requests + at for at in range(options.requests)]
        return [server.ask([{"role": "user", "content": text(n, 40)}], options.tokens) for n in numbers]

    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = [answer for of_client in pool.map(client, range(clients)) for answer in of_client]
    took = time.perf_counter() - start
    times = sorted(answer["total"] for answer in answers)
    return {
        "first": statistics.median(answer["first"] for answer in answers),
        "rate": sum(answer["tokens"] for answer in answers) / took,
        "p99": times[min(len(times) - 1, int(len(times) * 0.99))],
        "requests": len(answers),
    }


class Talks:
    """Conversations of one server."""

    def __init__(self, seed):
        self.all = [[] for _ in range(CONVERSATIONS)]
        self.seed = seed

    def turn(self, server, turn, options):
        """A turn of each, one after another."""
        firsts, cached = [], []
        for index, messages in enumerate(self.all):
            messages.append({"role": "user", "content": text(self.seed + 100 * index + turn, 12)})
            answer = server.ask(messages, options.answer)
            messages.append({"role": "assistant", "content": text(turn, 8)})
            firsts.append(answer["first"])
            cached.append(answer["cached"] / answer["prompt"])
        return {"first": statistics.median(firsts), "cached": statistics.median(cached)}


def compare(name, folder, options):
    kind = KINDS[options.precision]
    gguf, bundle = folder / f"{name}-{kind}.gguf", folder / f"{name}-{options.precision}"
    if not gguf.exists():
        config = json.loads(CONFIGS[name].read_text())
        add = lambda writer: add_tokenizer(writer, config["vocab_size"])
        random_llama.write(gguf, config, kind, CONTEXT, add)
    if not bundle.exists():
        make = [options.qhx, "forge", gguf, "--cpu-only", "--out", bundle, "--name", "model", "--prefill", PREFILL]
        make += ["--max-ctx", CONTEXT, "--precision", options.precision, "--head", options.precision]
        subprocess.run([str(part) for part in make], check=True, stdout=subprocess.DEVNULL)
    ours = [options.qhx, "serve", bundle, "--port", 0, "--backend", "cpu", "--threads", options.threads]
    ours += ["--parallel", options.parallel, "--queue", 256]
    theirs = [sys.executable, __file__, "--llama", gguf, "--threads", options.threads, "--parallel", options.parallel]
    with open(folder / "qhx.log", "w") as log, open(folder / "llama.log", "w") as other:
        servers = [Server("qhx", ours, log), Server("llama.cpp", theirs, other)]
        try:
            return measure(servers, options)
        finally:
            for server in servers:
                server.stop()


def measure(servers, options):
    for server in servers:
        server.ask([{"role": "user", "content": text(0, 40)}], options.tokens)
    rows, seed = [], 1000
    for clients in options.clients:
        runs = {server.name: [] for server in servers}
        for _ in range(options.repeats):
            for server in servers:
                runs[server.name].append(load(server, clients, options, seed))
                seed += clients * options.requests
        for key, unit in [("first", "ms"), ("rate", "tokens/s"), ("p99", "ms")]:
            values = {who: statistics.median(run[key] for run in all) for who, all in runs.items()}
            rows.append({"clients": clients, "what": key, "unit": unit, **values})
    talks = {server.name: [] for server in servers}
    for repeat in range(options.repeats):
        both = [(server, Talks(10_000_000 + 10_000 * repeat)) for server in servers]
        turns = {server.name: {} for server in servers}
        for turn in range(1, options.turns + 1):
            for server, own in both:
                turns[server.name][turn] = own.turn(server, turn, options)
        for who, found in turns.items():
            talks[who].append(found)
    for turn in (2, options.turns):
        values = {who: statistics.median(run[turn]["first"] for run in all) for who, all in talks.items()}
        cached = {f"{who} cached": statistics.median(r[turn]["cached"] for r in all) for who, all in talks.items()}
        rows.append({"turn": turn, "what": "first", "unit": "ms", **values, **cached})
    return rows


def table(name, options, rows):
    print(f"\n{name}, {options.precision}, {options.threads} threads, {options.parallel} at a time\n")
    print("| | qhx | llama.cpp | ratio |\n|---|---|---|---|")
    names = {"first": "first token", "rate": "throughput", "p99": "99th percentile of a request"}
    for row in rows:
        ours, theirs = row["qhx"], row["llama.cpp"]
        ratio = ours / theirs if row["what"] == "rate" else theirs / ours
        factor = 1 if row["unit"] == "tokens/s" else 1000
        if "turn" in row:
            what = f"turn {row['turn']} of {CONVERSATIONS} conversations, {names[row['what']]}"
        else:
            what = f"{row['clients']} client{'s' if row['clients'] > 1 else ''}, {names[row['what']]}"
        print(f"| {what}, {row['unit']} | {ours * factor:.1f} | {theirs * factor:.1f} | {ratio:.2f} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--folder", help="for the models, which stay there [default: none stays]")
    parser.add_argument("--models", default="tiny,336m")
    parser.add_argument("--precision", default="w8a16", choices=KINDS)
    parser.add_argument("--clients", default="1,2,8,64", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--requests", type=int, default=2, help="of each client")
    parser.add_argument("--tokens", type=int, default=32, help="of each answer")
    parser.add_argument("--turns", type=int, default=20, help="of each conversation")
    parser.add_argument("--answer", type=int, default=4, help="tokens of each turn's answer")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=8)
    parser.add_argument("--qhx", default=ROOT / "target/release/qhx", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="where to write all numbers")
    parser.add_argument("--llama", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.llama:
        return serve_llama(options.llama, options)
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for name in options.models.split(","):
            found[name] = compare(name, folder, options)
            table(name, options, found[name])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
