#!/usr/bin/env python3
"""Clients that ask `qhx serve` at the same time and are killed at random, for as long as is asked for.

    cargo build --release -p qhx-cli --features builtin-ops
    python3 benches/server_soak.py [--clients 64] [--requests 2000] [--kill 0.05] [--json FILE]
    python3 benches/server_soak.py --seconds 3600 --pause 5 --kill 0.005
    python3 benches/server_soak.py --all-routes --seconds 600 --pause 2 --data-limit 1024

Clients are processes of their own. Each asks one thing after another, of two tiny models (one with a recurrent state):
conversations of up to three turns and completions, greedy and with seeds, whole and as streams. With `--kill` a client
is killed as often within a second, wherever it is, and another one takes its place. Each answer is compared with what
the server says when nobody else asks. Once a minute the server's memory is printed. With `--all-routes` they ask all
routes, of OpenAI's, Anthropic's and Ollama's interfaces, of an encoder, a reranker, a transcriber and a voice, too; the
times of answers are reported by route. `--data-limit` is the limit of the server's data that the system sets.

Exits with 1 where an answer is wrong, a request fails, the server has work left once nobody asks, or its memory grows:
the greatest value of the last quarter of the run is beyond that of the second quarter by more than 2 % and 8 MiB.
"""

import argparse
import hashlib
import http.client
import json
import pathlib
import random
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
MODELS = {"language": "llama3-tiny", "recurrent": "qwen35-tied"}
#: Further models, with options of the forge, for all routes.
MORE = {
    "encoder": ("embed-mistral-tiny", ["--task", "embed", "--max-ctx", "180"]),
    "reranker": ("rerank-bert-tiny", []),
    "transcriber": ("whisper-tiny", []),
    "voice": ("kokoro-tiny", []),
}
FIXTURES = ROOT / "tests/fixtures"
#: Keys of answers that differ from one time to the next.
CHANGING = re.compile("id$|_ids?$|created|duration|usage|cached|sequence_number|modified|expires|size")
#: Things that are asked.
CASES = 96
QUESTIONS = ["What colour is the sky?", "And at night?", "Which bread is good with soup?", "How long do I boil an egg?"]
PROMPTS = ["The capital of France is", "Zürich lies on a long", "Honey keeps for", "A violin has four", "7"]


def request(number):
    """Route and body of a thing that is asked."""
    draw = random.Random(number)
    body = {"model": draw.choice(list(MODELS)), "max_tokens": draw.randint(1, 24), "stream": draw.random() < 0.5}
    body |= {"temperature": 0} if draw.random() < 0.7 else {"temperature": 0.8, "seed": number}
    if draw.random() < 0.3:
        return "/v1/completions", body | {"prompt": draw.choice(PROMPTS)}
    messages = []
    for _ in range(draw.randint(0, 2)):
        messages.append({"role": "user", "content": draw.choice(QUESTIONS)})
        messages.append({"role": "assistant", "content": draw.choice(PROMPTS)})
    messages.append({"role": "user", "content": draw.choice(QUESTIONS)})
    return "/v1/chat/completions", body | {"messages": messages}


def other_request(number):
    """The same, of any route: also a type of content."""
    draw = random.Random(number)
    question, prompt = draw.choice(QUESTIONS), draw.choice(PROMPTS)
    chat = {"model": draw.choice(list(MODELS)), "max_tokens": draw.randint(1, 24), "temperature": 0}
    chat |= {"stream": draw.random() < 0.5}
    messages = [{"role": "user", "content": question}]
    options = {"num_predict": draw.randint(1, 24), "temperature": 0}
    cases = [
        ("/v1/messages", chat | {"messages": messages, "system": "Be brief."}),
        ("/v1/messages/count_tokens", {"model": "language", "messages": messages}),
        ("/v1/responses", {"model": chat["model"], "input": question, "max_output_tokens": 12, "temperature": 0,
                           "stream": chat["stream"]}),
        ("/v1/embeddings", {"model": "encoder", "input": draw.sample(QUESTIONS + PROMPTS, 3)}),
        ("/v1/rerank", {"model": "reranker", "query": question, "documents": draw.sample(PROMPTS, 3)}),
        ("/v1/audio/speech", {"model": "voice", "input": draw.choice(["Hello there.", "The sky."]),
                              "response_format": draw.choice(["wav", "mp3", "opus", "flac", "pcm"])}),
        ("/tokenize", {"model": "language", "prompt": prompt}),
        ("/api/chat", {"model": chat["model"], "messages": messages, "options": options, "stream": chat["stream"]}),
        ("/api/generate", {"model": "language", "prompt": prompt, "raw": True, "options": options}),
        ("/api/embed", {"model": "encoder", "input": [question, prompt]}),
        ("/api/tags", None),
        ("/v1/models", None),
        ("/v1/audio/transcriptions", {"response_format": draw.choice(["json", "verbose_json", "srt"])}),
    ]
    route, body = draw.choice(cases)
    if not route.endswith("transcriptions"):
        return route, json.dumps(body).encode() if body else None, "application/json"
    file = (FIXTURES / "whisper-tiny" / "two.wav").read_bytes()
    parts = [b'name="file"; filename="two.wav"\r\ncontent-type: audio/wav\r\n\r\n' + file]
    parts += [f'name="{name}"\r\n\r\n{value}'.encode() for name, value in (body | {"model": "transcriber"}).items()]
    form = b"".join(b"--soak\r\ncontent-disposition: form-data; " + part + b"\r\n" for part in parts)
    return route, form + b"--soak--\r\n", "multipart/form-data; boundary=soak"


def lasting(value):
    """An answer without what differs from one time to the next."""
    if isinstance(value, dict):
        return {key: lasting(inner) for key, inner in value.items() if not CHANGING.search(key)}
    return [lasting(inner) for inner in value] if isinstance(value, list) else value


def ask_other(host, number):
    """What a route of all answers: the hash of what lasts."""
    route, body, kind = other_request(number)
    connection = http.client.HTTPConnection(host, timeout=600)
    connection.request("POST" if body else "GET", route, body, {"content-type": kind})
    response = connection.getresponse()
    answer, kind = response.read(), response.getheader("content-type").split(";")[0]
    connection.close()
    if response.status != 200:
        return f"{response.status} {answer.decode()[:200]!r}"
    lines = answer.splitlines()
    if kind == "text/event-stream":
        values = [json.loads(line[6:]) for line in lines if line.startswith(b"data: {")]
    elif kind in ("application/json", "application/x-ndjson"):
        values = [json.loads(line) for line in (lines if kind.endswith("ndjson") else [answer])]
    else:
        return hashlib.sha256(answer).hexdigest()
    if route in ("/v1/models", "/api/tags"):
        # What is loaded changes.
        values = [[model.get("id") or model["name"] for key in ("data", "models") for model in values[0].get(key, [])]]
    return hashlib.sha256(json.dumps(lasting(values), sort_keys=True).encode()).hexdigest()


def text_of(choice):
    """Of a whole answer or of a chunk: its text, and why it ended."""
    said = choice.get("message") or choice.get("delta") or choice
    parts = [said.get("reasoning_content"), said.get("content"), said.get("text"), choice.get("finish_reason")]
    return "".join(part or "" for part in parts)


def ask(host, number):
    """What the server says: its hash. Beyond the first cases any route is asked."""
    if number >= CASES:
        return ask_other(host, number)
    route, body = request(number)
    connection = http.client.HTTPConnection(host, timeout=600)
    connection.request("POST", route, json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    connection.close()
    if response.status != 200:
        return f"{response.status} {answer.decode()[:200]!r}"
    if body["stream"]:
        if not answer.rstrip().endswith(b"data: [DONE]"):
            return f"a stream without an end: {answer[-200:]!r}"
        chunks = [json.loads(line[6:]) for line in answer.splitlines() if line.startswith(b"data: {")]
    else:
        chunks = [json.loads(answer)]
    if any("error" in chunk for chunk in chunks):
        return f"{chunks[-1]}"
    text = "".join(text_of(choice) for chunk in chunks for choice in chunk["choices"])
    return hashlib.sha256(text.encode()).hexdigest()


def client(host, seed, pause, cases):
    """A client: prints a line for each answer, until it is killed. It waits for `pause` seconds in the mean."""
    draw = random.Random(seed)
    while True:
        time.sleep(2 * pause * draw.random())
        number = draw.randrange(cases)
        begun = time.perf_counter()
        answer = ask(host, number)
        print(number, f"{time.perf_counter() - begun:.3f}", answer, flush=True)


class Soak:
    """The run: what was answered, and what was wrong."""

    def __init__(self, host, options):
        self.host, self.options = host, options
        self.lock = threading.Lock()
        self.answers, self.wrong, self.killed, self.started = 0, [], 0, 0
        self.over = threading.Event()
        self.clients = [None] * options.clients
        self.times = {}
        self.expected = [ask(host, number) for number in range(CASES * (2 if options.all_routes else 1))]
        failed = [answer for answer in self.expected if len(answer) != 64]
        if failed:
            sys.exit(f"a request fails when nobody else asks: {failed[0]}")

    def run_client(self, index):
        """Keeps a client going, with another one where it was killed."""
        while not self.over.is_set():
            with self.lock:
                self.started += 1
                command = [sys.executable, __file__, "--client", self.host, str(self.started), str(self.options.pause)]
                command.append(str(len(self.expected)))
                process = self.clients[index] = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            for line in process.stdout:
                if line.endswith("\n"):
                    self.note(*line.split(" ", 2))
            process.wait()

    def note(self, number, seconds, answer):
        number = int(number)
        asked = request(number) if number < CASES else other_request(number)[:2]
        with self.lock:
            self.answers += 1
            self.times.setdefault(asked[0], []).append(float(seconds))
            if answer.strip() != self.expected[number]:
                self.wrong.append(f"{asked}: {answer.strip()}")
            wanted = self.options.requests
            if self.wrong or (wanted and not self.options.seconds and self.answers >= wanted):
                self.over.set()

    def kill(self, index):
        with self.lock:
            process = self.clients[index]
            if process and process.poll() is None:
                process.kill()
                self.killed += 1


def memory(process):
    """Resident bytes."""
    pages = pathlib.Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * 4096


def metric(host, name):
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", "/metrics")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])


def soak(server, host, options):
    run = Soak(host, options)
    threads = [threading.Thread(target=run.run_client, args=(index,)) for index in range(options.clients)]
    for thread in threads:
        thread.start()
    start, minute, samples, draw = time.monotonic(), 0, [], random.Random(1)
    try:
        while not run.over.wait(1):
            took = time.monotonic() - start
            samples.append(memory(server))
            if took // 60 > minute:
                minute = int(took // 60)
                print(f"minute {minute}: {run.answers} answers, {samples[-1] / 2**20:.1f} MiB", flush=True)
            for index in range(options.clients):
                if draw.random() < options.kill:
                    run.kill(index)
            if options.seconds and took >= options.seconds:
                break
            if server.poll() is not None:
                run.wrong.append(f"the server ended with {server.returncode}")
                break
    finally:
        run.over.set()
        for index in range(options.clients):
            run.kill(index)
        for thread in threads:
            thread.join()
    return report(run, host, samples, time.monotonic() - start)


def report(run, host, samples, seconds):
    wrong = list(run.wrong)
    # What was killed stops within a graph execution.
    time.sleep(2)
    for name in ("qhx_requests_running", "qhx_requests_waiting"):
        left = metric(host, name)
        if left:
            wrong.append(f"{name} is {left} when nobody asks")
    quarter = len(samples) // 4
    growth = 0
    if quarter:
        before, after = max(samples[quarter : 2 * quarter]), max(samples[3 * quarter :])
        growth = after - before
        if growth > 8 * 2**20 and growth > 0.02 * before:
            wrong.append(f"memory grew by {growth / 2**20:.1f} MiB from {before / 2**20:.1f} MiB")
    found = {
        "clients": run.options.clients,
        "answers": run.answers,
        "wrong": wrong,
        "killed": run.killed,
        "seconds": round(seconds, 1),
        "memory": samples[-1] if samples else 0,
        "growth": growth,
    }
    for route, times in sorted(run.times.items()):
        times.sort()
        middle, late = times[len(times) // 2], times[min(len(times) - 1, len(times) * 99 // 100)]
        found.setdefault("routes", {})[route] = {"answers": len(times), "p50": middle, "p99": late}
        print(f"{route:28} {len(times):6} answers, p50 {middle:.3f} s, p99 {late:.3f} s")
    if run.options.json:
        run.options.json.write_text(json.dumps(found, indent=1) + "\n")
    print(
        f"{run.options.clients} clients, {run.answers} answers, {len(wrong)} wrong, {run.killed} clients killed, "
        f"{seconds:.0f} s, {found['memory'] / 2**20:.1f} MiB, growth {growth / 2**20:.1f} MiB"
    )
    for one in wrong[:10]:
        print(one, file=sys.stderr)
    return 1 if wrong else 0


def main():
    if sys.argv[1:2] == ["--client"]:
        return client(sys.argv[2], sys.argv[3], float(sys.argv[4]), int(sys.argv[5]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--requests", type=int, default=2000, help="answers after which it ends")
    parser.add_argument("--seconds", type=float, help="time after which it ends, whatever the number of answers")
    parser.add_argument("--kill", type=float, default=0.05, help="how often a client is killed within a second")
    parser.add_argument("--pause", type=float, default=0, help="mean seconds between the requests of a client")
    parser.add_argument("--all-routes", action="store_true")
    parser.add_argument("--data-limit", type=int, help="MiB")
    parser.add_argument("--parallel", type=int, default=4)
    parser.add_argument("--state-memory", type=int, default=32, help="MiB")
    parser.add_argument("--qhx", default=ROOT / "target/release/qhx", type=pathlib.Path)
    parser.add_argument("--json", type=pathlib.Path, help="where to write the numbers")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        models = {name: (fixture, ["--max-ctx", "200"]) for name, fixture in MODELS.items()}
        models |= MORE if options.all_routes else {}
        for name, (fixture, more) in models.items():
            make = [options.qhx, "forge", FIXTURES / fixture, "--out", folder / name, "--name", name]
            make += ["--cpu-only", *more]
            subprocess.run([str(part) for part in make], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        serve = [options.qhx, "serve", *(folder / name for name in models), "--port", 0, "--backend", "cpu"]
        serve += ["--parallel", options.parallel, "--queue", 256, "--state-memory", options.state_memory]
        with open(folder / "log", "w") as log:
            limit = (options.data_limit or 0) << 20
            bound = (lambda: resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))) if limit else None
            serve = [str(part) for part in serve]
            server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=log, text=True, preexec_fn=bound)
            try:
                host = server.stdout.readline().strip().removeprefix("http://")
                code = soak(server, host, options)
            finally:
                server.terminate()
                ended = server.wait(60)
        if ended:
            print(f"the server ended with {ended}: {(folder / 'log').read_text()[-500:]}", file=sys.stderr)
        return code or int(ended != 0)


if __name__ == "__main__":
    sys.exit(main())
