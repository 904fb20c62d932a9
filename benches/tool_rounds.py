#!/usr/bin/env python3
"""An agent's conversation of many rounds of a tool over `qhx serve`: tokens prefilled, time to the first token.

    cargo build --release -p qhx-cli --features builtin-ops
    python3 benches/tool_rounds.py [--model CHECKPOINT] [--rounds 200] [--program target/release/qhx]

The model (of the fixtures, one with a recurrent state) is forged with a context of 32,768 tokens and a chat template in
the manner of Qwen3.5's, or that of `--template`. In each round it has to call a tool, and the client sends the whole
conversation again with the result behind it, as agents do. Every third answer comes back changed, as one does whose
reasoning the template leaves out. A round is timed until the first event of its stream that says something. Printed are
the prompt's tokens, those that were prefilled, and the time, and at last the median of the last ten rounds over
that of ten around the twentieth.

Exits with 1 where a round prefills more than came since the round before, its answer included, and 64 tokens.
"""

import argparse
import http.client
import json
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCHEMA = {
    "type": "object",
    "properties": {"path": {"type": "string", "maxLength": 12}, "line": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["path", "line"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "read", "description": "Reads a line", "parameters": SCHEMA}}]


#: Calls in elements; reasoning is kept behind the last question only, as thoughts of earlier questions are left out.
TEMPLATE = """{%- if tools %}{{- '<|im_start|>system\\nTools:' }}{% for tool in tools %}{{- '\\n' + tool | tojson }}{% endfor %}
{{- '\\nCall as <tool_call>\\n<function=name>\\n<parameter=name>\\nvalue\\n</parameter>\\n</function>\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.last %}{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + value | string + '\\n</parameter>\\n' }}{% endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}
"""


def ask(host, messages):
    """A round: its message, its usage and the seconds until it says something."""
    body = {"messages": messages, "tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "temperature": 0.8, "seed": len(messages)}
    body |= {"max_tokens": 200}
    connection = http.client.HTTPConnection(host, timeout=600)
    begun, first = time.perf_counter(), None
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"{response.status}: {response.read().decode()}")
    message, usage = {"role": "assistant", "content": "", "tool_calls": []}, None
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["tool_calls"] += delta.get("tool_calls") or []
            if first is None and (delta.get("content") or delta.get("tool_calls")):
                first = time.perf_counter() - begun
    connection.close()
    return message, usage, first


def prefill(host, messages):
    """Seconds until the first token of an answer of one token, which goes on from what is there."""
    body = {"messages": messages, "tools": TOOLS, "temperature": 0, "max_tokens": 1}
    connection = http.client.HTTPConnection(host, timeout=600)
    begun = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
    usage = json.loads(connection.getresponse().read())["usage"]
    return time.perf_counter() - begun, usage


def rounds(host, count):
    """Asks for n rounds."""
    messages = [{"role": "user", "content": "Which bread is good with soup? Read the notes."}]
    seconds, wrong, before = [], 0, 0
    for number in range(1, count + 1):
        first, usage = prefill(host, messages)
        prompt, cached = usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]
        seconds.append(first)
        new = prompt - cached
        # All that is not in the prompt before may be new.
        wrong += number > 1 and new > prompt - before + 64
        before = prompt
        message, _, _ = ask(host, messages)
        if number % 20 == 0 or number <= 2:
            print(f"round {number:4}: prompt {prompt:6}, prefilled {new:5}, {first * 1e3:7.1f} ms", flush=True)
        for at, call in enumerate(message["tool_calls"]):
            call["id"] = f"call_{number}_{at}"
            call.pop("index", None)
            if number % 3 == 0:
                call["function"]["arguments"] = json.dumps({"path": "notes", "line": number % 100})
        if not message["tool_calls"]:
            sys.exit(f"round {number}: no call: {message}")
        messages.append(message)
        text = " ".join(f"Line {number}: honey keeps for {number + at} years." for at in range(3))
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in message["tool_calls"]]
    return seconds, wrong


def main():
    """Forges, serves, asks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "tests/fixtures/qwen35-tied")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--max-ctx", type=int, default=32768)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "target/release/qhx")
    parser.add_argument("--template", type=pathlib.Path, help="a chat template in the place of its own")
    parser.add_argument("--option", action="append", default=[], help="a further option of `qhx forge`")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        out, checkpoint = pathlib.Path(folder) / "model", pathlib.Path(folder) / "checkpoint"
        shutil.copytree(asked.model, checkpoint)
        config = json.loads((checkpoint / "config.json").read_text())
        config.get("text_config", config)["max_position_embeddings"] = asked.max_ctx
        (checkpoint / "config.json").write_text(json.dumps(config))
        template = asked.template.read_text() if asked.template else TEMPLATE
        (checkpoint / "chat_template.jinja").write_text(template)
        forge = [asked.program, "forge", checkpoint, "--out", out, "--cpu-only", "--max-ctx", str(asked.max_ctx)]
        subprocess.run(forge + asked.option, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        serve = [asked.program, "serve", out, "--port", "0", "--backend", "cpu"]
        server = subprocess.Popen(serve, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            host = server.stdout.readline().strip().removeprefix("http://")
            seconds, wrong = rounds(host, asked.rounds)
        finally:
            server.terminate()
            server.wait()
    last, early = statistics.median(seconds[-10:]), statistics.median(seconds[15:25])
    print(f"time to the first token, rounds {asked.rounds - 9} to {asked.rounds} over 16 to 25: {last / early:.2f}")
    if wrong:
        sys.exit(f"{wrong} rounds prefilled more than had come")


if __name__ == "__main__":
    main()
