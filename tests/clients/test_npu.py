"""A server over Qualcomm's libraries: QHX_QNN_HTP and QHX_QNN_SYSTEM name them."""

import os

import openai
import pytest
from conftest import FIXTURES

LIBRARIES = [("--htp", os.environ.get("QHX_QNN_HTP")), ("--qnn-system", os.environ.get("QHX_QNN_SYSTEM"))]
NAMED = [word for option in LIBRARIES for word in option]


@pytest.mark.skipif(None in NAMED, reason="QHX_QNN_HTP and QHX_QNN_SYSTEM are not set")
def test_the_npu_answers_as_the_reference(qhx, home, sky):
    question, text = sky
    out = home / "npu"
    shape = ["--target", "v81", "--for-emulator", "--max-ctx", "128", "--prefill", "16"]
    forging = qhx("forge", FIXTURES / "llama3-tiny", "--out", out, "--name", "npu", *shape, *NAMED)
    forging.communicate()
    assert forging.returncode == 0
    server = qhx("serve", out, "--port", "0", "--backend", "qnn", *NAMED)
    try:
        address = server.stdout.readline().strip()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        ask = {"model": "npu", "messages": [{"role": "user", "content": question}], "temperature": 0}
        answer = client.chat.completions.create(**ask)
        assert answer.choices[0].message.content == text
        chunks = client.chat.completions.create(**ask, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
        assert client.models.retrieve("npu").backend.startswith("qnn")
    finally:
        server.terminate()
        assert server.wait(60) == 0
