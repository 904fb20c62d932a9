"""A published chat model (SmolLM2-135M-Instruct), in the folder that QHX_REAL names."""

import json
import os
from pathlib import Path

import openai
import pytest
from conftest import FIXTURES

REAL = os.environ.get("QHX_REAL")


@pytest.mark.skipif(REAL is None, reason="QHX_REAL is not set")
def test_a_published_model_chats_as_the_reference(qhx, forged):
    goldens = json.loads((FIXTURES / "real" / "smollm2.json").read_text(encoding="utf-8"))
    turns = next(chat for chat in goldens["chats"] if chat["id"] == "capital")["turns"]
    checkpoint = Path(REAL) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    bundle = forged("smollm2", checkpoint, "--precision", "w4a16", "--max-ctx", "512")
    server = qhx("serve", bundle, "--port", "0", "--backend", "cpu")
    try:
        address = server.stdout.readline().strip()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        messages = []
        for turn in turns:
            messages.append({"role": "user", "content": turn["user"]})
            ask = {"model": "smollm2", "messages": messages, "temperature": 0, "max_tokens": 48}
            answer = client.chat.completions.create(**ask)
            assert answer.choices[0].message.content == turn["text"]
            assert answer.usage.prompt_tokens == len(turn["answer"]["prompt_ids"])
            assert answer.usage.completion_tokens == len(turn["answer"]["output_ids"])
            messages.append({"role": "assistant", "content": turn["text"]})
        asked = messages[:-1]
        chunks = list(client.chat.completions.create(**{**ask, "messages": asked}, stream=True))
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == turns[-1]["text"]
        assert chunks[-1].choices[0].finish_reason == answer.choices[0].finish_reason
    finally:
        server.terminate()
        assert server.wait(60) == 0
