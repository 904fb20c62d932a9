"""Bundles of the repository's tiny models, forged once a run, and nothing of the user's."""

import json
import os
import shutil
from pathlib import Path

import pytest

import qhx

ROOT = Path(__file__).resolve().parents[3]
FIXTURES = ROOT / "tests" / "fixtures"

for name in [name for name in os.environ if name.startswith(("QHX_", "XDG_"))]:
    del os.environ[name]
os.environ["QHX_BACKEND"] = "cpu"


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory):
    """A folder without plugins and settings."""
    folder = tmp_path_factory.mktemp("home")
    os.environ["HOME"] = os.environ["QHX_CACHE_DIR"] = str(folder)
    return folder


def goldens(fixture, file="goldens.json"):
    return json.loads((FIXTURES / fixture / file).read_text(encoding="utf-8"))


def case(fixture, id):
    return next(case for case in goldens(fixture)["cases"] if case["id"] == id)


@pytest.fixture(scope="session")
def language(home):
    """A bundle that completes texts and chats."""
    return qhx.forge(FIXTURES / "llama3-tiny", home / "language", cpu_only=True)


@pytest.fixture(scope="session")
def encoder(home):
    """A bundle that embeds."""
    return qhx.forge(FIXTURES / "embed-mistral-tiny", home / "encoder", task="embed", max_ctx=180, cpu_only=True)


@pytest.fixture(scope="session")
def seeing(home):
    """A bundle that takes images."""
    more = ["--prefill", "16", "--recipe-option", "image-size=48"]
    return qhx.forge(FIXTURES / "qwen3vl-tiny", home / "seeing", max_ctx=200, cpu_only=True, arguments=more)


@pytest.fixture(scope="session")
def hearing(home):
    """A bundle that transcribes: a model without a chat template, whose manifest declares how."""
    checkpoint = home / "checkpoint"
    shutil.copytree(FIXTURES / "gemma4-tiny", checkpoint)
    config = json.loads((checkpoint / "tokenizer_config.json").read_text(encoding="utf-8"))
    del config["chat_template"]
    (checkpoint / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    more = ["--prefill", "24", "--recipe-option", "towers=audio", "--recipe-option", "audio-tokens=54"]
    return qhx.forge(checkpoint, home / "hearing", max_ctx=200, cpu_only=True, arguments=more)


@pytest.fixture(scope="session")
def calling(home, language):
    """A bundle whose chat template knows tools."""
    bundle = shutil.copytree(language, home / "calling")
    template = (
        "{% for tool in tools %}{{ tool.function.name }} {% endfor %}{# <tool_call> #}"
        "{% for message in messages %}{{ message.content }}{% endfor %}"
    )
    (bundle / "chat_template.jinja").write_text(template)
    return bundle


@pytest.fixture(scope="session")
def model(language):
    return qhx.Model(language)
