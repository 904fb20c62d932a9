"""A server over the repository's tiny models, and the clients that people use."""

import json
import os
import shutil
import subprocess
from pathlib import Path

import anthropic
import openai
import pytest

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures"

# What a call of a tool looks like, a template says by its text.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
)


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="session")
def qhx(home):
    """Runs the program without the user's settings."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("QHX_", "XDG_"))}
    environment = {**kept, "HOME": str(home), "QHX_CACHE_DIR": str(home)}
    program = os.environ["QHX_PROGRAM"]

    def start(*arguments):
        return subprocess.Popen([program, *map(str, arguments)], env=environment, stdout=subprocess.PIPE, text=True)

    return start


@pytest.fixture(scope="session")
def forged(qhx, home):
    def forge(name, checkpoint, *more):
        out = home / name
        if out.exists():
            return out
        forging = qhx("forge", checkpoint, "--out", out, "--name", name, "--cpu-only", *more)
        forging.communicate()
        assert forging.returncode == 0
        return out

    return forge


@pytest.fixture(scope="session")
def long(home):
    """A tiny checkpoint with a long context, which is greedy where a request does not say otherwise."""
    checkpoint = home / "long"
    shutil.copytree(FIXTURES / "llama3-tiny", checkpoint)
    config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    (checkpoint / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4096}))
    generation = json.loads((checkpoint / "generation_config.json").read_text(encoding="utf-8"))
    (checkpoint / "generation_config.json").write_text(json.dumps({**generation, "do_sample": True, "top_k": 1}))
    return checkpoint


@pytest.fixture(scope="session")
def bundles(forged):
    language = forged("language", FIXTURES / "llama3-tiny", "--max-ctx", "200")
    calling = forged("calling", FIXTURES / "llama3-tiny", "--max-ctx", "200")
    (calling / "chat_template.jinja").write_text(TEMPLATE)
    return [
        language,
        calling,
        forged("encoder", FIXTURES / "embed-mistral-tiny", "--task", "embed", "--max-ctx", "180"),
        forged("seeing", FIXTURES / "qwen3vl-tiny", "--max-ctx", "200", "--recipe-option", "image-size=48"),
    ]


@pytest.fixture(scope="session")
def address(qhx, bundles):
    yield from serve(qhx, bundles)


@pytest.fixture
def unlisted_address(qhx, bundles, tmp_path):
    """A server whose index lists nothing, so that a drawn name pulls no model from the network."""
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"format": 1, "date": "2026-11-30", "models": []}))
    yield from serve(qhx, bundles, "--index", index)


@pytest.fixture
def exact_address(qhx, forged):
    """A server whose caches are f32, as those of transformers."""
    language = forged("language", FIXTURES / "llama3-tiny", "--max-ctx", "200")
    yield from serve(qhx, [language], "--cpu-caches", "f32")


def serve(qhx, bundles, *options):
    server = qhx("serve", *bundles, "--port", "0", "--backend", "cpu", *options)
    yield server.stdout.readline().strip()
    server.terminate()
    assert server.wait(60) == 0, "a server that is asked to stop ends well"


@pytest.fixture(scope="session")
def voices(qhx, forged):
    """A server of models that transcribe and speak: its address, and that of the Wyoming protocol."""
    bundles = [
        forged("whisper", FIXTURES / "whisper-tiny"),
        forged("parakeet", FIXTURES / "parakeet-ctc-tiny", "--recipe-option", "windows=1,2"),
        forged("kokoro", FIXTURES / "kokoro-tiny"),
    ]
    server = qhx("serve", *bundles, "--port", "0", "--wyoming", "0", "--backend", "cpu")
    yield server.stdout.readline().strip(), server.stdout.readline().strip()
    server.terminate()
    assert server.wait(60) == 0, "a server that is asked to stop ends well"


@pytest.fixture(scope="session")
def audio_client(voices):
    """Of the same server."""
    return openai.OpenAI(base_url=f"{voices[0]}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="session")
def client(address):
    return openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="session")
def claude(address):
    return anthropic.Anthropic(base_url=address, api_key="any", max_retries=0)


@pytest.fixture(scope="session")
def sky():
    goldens = json.loads((FIXTURES / "llama3-tiny" / "goldens.json").read_text(encoding="utf-8"))
    turn = next(chat for chat in goldens["chat"] if chat["id"] == "sky")["turns"][0]
    return turn["user"], turn["text"]
