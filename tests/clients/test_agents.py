"""Coding agents as they are released, each asked one question without a terminal."""

import json
import os
import subprocess
from pathlib import Path

import pytest

PACKAGES = Path(os.environ["QHX_NODE_MODULES"])

if not (PACKAGES / "@openai/codex").exists():
    pytest.skip("cargo xtask clients --full installs them", allow_module_level=True)

# Agents send some 10,000 tokens. The tiny model reads the question only, which it finds among them.
TEMPLATE = """
{%- if tools %}{# <tool_call> #}{% endif %}{{ bos_token }}
{%- for message in messages if message.role == "user" and QUESTION in message.content | string %}
{{- "<|start_header_id|>user<|end_header_id|>\\n\\n" + QUESTION + "<|eot_id|>" }}
{%- endfor %}{{- "<|start_header_id|>assistant<|end_header_id|>\\n\\n" }}"""


@pytest.fixture(scope="module")
def address(qhx, forged, long, sky):
    agent = forged("agent", long, "--max-ctx", "200", "--no-golden")
    (agent / "chat_template.jinja").write_text(TEMPLATE.replace("QUESTION", json.dumps(sky[0])))
    server = qhx("serve", agent, "--port", "0", "--backend", "cpu")
    yield server.stdout.readline().strip()
    server.terminate()
    assert server.wait(60) == 0


@pytest.fixture
def run(tmp_path):
    """Runs a program of a package in a folder of its own, and gives what it printed."""

    def run(command, *arguments, **environment):
        command = [next(iter(PACKAGES.glob(word)), word) for word in command.split()]
        home = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
        done = subprocess.run(
            [*command, *arguments],
            env={**home, **environment},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


def test_codex_asks(address, run, tmp_path, sky):
    provider = {"name": "qhx", "base_url": f"{address}/v1", "wire_api": "responses"}
    lines = [f"{name} = {json.dumps(value)}" for name, value in provider.items()]
    settings = ["model = \"agent\"", "model_provider = \"qhx\"", "[model_providers.qhx]", *lines]
    (tmp_path / "config.toml").write_text("\n".join(settings))
    printed = run(".bin/codex", "exec", "--json", "--skip-git-repo-check", sky[0], CODEX_HOME=str(tmp_path))
    items = [event["item"] for event in map(json.loads, printed.splitlines()) if event["type"] == "item.completed"]
    assert items[-1]["text"] == sky[1]


def test_claude_code_asks(address, run, sky):
    settings = {"ANTHROPIC_BASE_URL": address, "ANTHROPIC_API_KEY": "any", "ANTHROPIC_MODEL": "agent"}
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "60"}
    command = "node @anthropic-ai/claude-code/cli-wrapper.cjs"
    printed = run(command, "-p", sky[0], "--output-format", "json", **settings, **quiet)
    result = json.loads(printed)
    assert result["result"] == sky[1]


def test_opencode_asks(address, run, tmp_path, sky):
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "options": {"baseURL": f"{address}/v1"},
        "models": {"agent": {"limit": {"context": 8192, "output": 60}}},
    }
    settings = {"model": "qhx/agent", "autoupdate": False, "provider": {"qhx": provider}}
    (tmp_path / "opencode.json").write_text(json.dumps(settings))
    printed = run("opencode-linux-*/bin/opencode", "run", "--format", "json", sky[0])
    texts = [event["part"]["text"] for event in map(json.loads, printed.splitlines()) if event["type"] == "text"]
    assert texts == [sky[1]]


def test_continue_asks(address, run, tmp_path, sky):
    model = {"name": "qhx", "provider": "openai", "model": "agent", "apiBase": f"{address}/v1", "apiKey": "any"}
    (tmp_path / "config.yaml").write_text(
        json.dumps({"name": "qhx", "version": "1.0.0", "schema": "v1", "models": [{**model, "roles": ["chat"]}]})
    )
    assert run("node .bin/cn", "--config", str(tmp_path / "config.yaml"), "-p", sky[0]).strip() == sky[1]


def test_cline_asks(address, run, tmp_path, sky):
    settings = ["--data-dir", str(tmp_path / "data")]
    run(".bin/cline", "auth", "openai-compatible", "-k", "any", "-m", "agent", "-b", f"{address}/v1", *settings)
    printed = run(".bin/cline", *settings, "--json", sky[0])
    results = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert results[-1]["text"] == sky[1]
