"""Ollama's clients for Python and JavaScript."""

import json
import os
import subprocess
from pathlib import Path

import ollama
import pytest


@pytest.fixture(scope="module")
def client(address):
    return ollama.Client(host=address)


def greedy(question):
    return {"messages": [{"role": "user", "content": question}], "options": {"temperature": 0}}


def test_chats_are_answered_whole_and_in_parts(client, sky):
    question, text = sky
    answer = client.chat("language", **greedy(question))
    assert answer.message.content == text
    assert answer.done_reason == "stop" and answer.eval_count > 3 and answer.prompt_eval_count > 3
    parts = list(client.chat("language:latest", **greedy(question), stream=True))
    assert "".join(part.message.content for part in parts) == text
    assert [part.done for part in parts].count(True) == 1 and parts[-1].done


def test_texts_are_continued(client):
    prompt, options = "The capital of France is", {"temperature": 0, "num_predict": 8}
    whole = client.generate("language", prompt, raw=True, options=options)
    parts = client.generate("language", prompt, raw=True, options=options, stream=True)
    assert "".join(part.response for part in parts) == whole.response != ""
    assert whole.eval_count <= 8


def test_answers_are_of_a_schema(client, sky):
    schema = {"type": "object", "properties": {"city": {"enum": ["Bonn"]}}, "required": ["city"],
              "additionalProperties": False}
    answer = client.chat("language", **greedy(sky[0]), format=schema)
    assert json.loads(answer.message.content) == {"city": "Bonn"}


def test_tools_are_offered(client, sky):
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: Its name.
        """
        return city

    answer = client.chat("calling", **greedy(sky[0]), tools=[weather])
    assert answer.message.content or answer.message.tool_calls


def test_vectors_and_models(client):
    vectors = client.embed("encoder", ["SELECT 1", "def f(): pass"]).embeddings
    assert len(vectors) == 2 and abs(sum(value * value for value in vectors[0]) - 1) < 1e-4
    assert client.embeddings("encoder", "SELECT 1").embedding == pytest.approx(vectors[0], abs=1e-5)
    names = [model.model for model in client.list().models]
    assert names[:2] == ["language", "calling"]
    assert client.show("language").modelinfo["llama.context_length"] == 200
    assert "tools" in client.show("calling").capabilities
    assert "language" in [model.model for model in client.ps().models]
    assert client.pull("language").status == "success"
    with pytest.raises(ollama.ResponseError) as wrong:
        client.chat("nothing", messages=[{"role": "user", "content": "a"}])
    assert wrong.value.status_code == 404 and "nothing" in wrong.value.error


def test_the_client_of_javascript_goes_its_round(address, sky):
    question, text = sky
    environment = {**os.environ, "QHX_ADDRESS": address, "QHX_QUESTION": question, "QHX_ANSWER": text}
    script = Path(__file__).with_name("ollama.cjs")
    done = subprocess.run(["node", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
