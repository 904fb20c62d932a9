"""Programs and frameworks that are built on the clients."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel):
    city: Literal["Bonn", "Lima"]


def test_langchain_chats_streams_and_embeds(address, sky):
    question, text = sky
    chat = ChatOpenAI(base_url=f"{address}/v1", api_key="any", model="language", temperature=0, max_retries=0)
    assert chat.invoke([HumanMessage(question)]).content == text
    assert "".join(chunk.content for chunk in chat.stream(question)) == text
    formed = chat.with_structured_output(City, method="json_schema")
    assert formed.invoke("Where?").city in ("Bonn", "Lima")
    vectors = OpenAIEmbeddings(
        base_url=f"{address}/v1", api_key="any", model="encoder", check_embedding_ctx_length=False, max_retries=0
    )
    first, second = vectors.embed_documents(["SELECT 1", "def f(): pass"])
    assert len(first) == len(second) and first != second


def test_the_program_llm_asks(address, sky, tmp_path):
    question, text = sky
    models = [{"model_id": "qhx", "model_name": "language", "api_base": f"{address}/v1"}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "OPENAI_API_KEY": "any"}
    program = Path(sys.executable).with_name("llm")
    for streaming in ([], ["--no-stream"]):
        command = [program, "prompt", "-m", "qhx", "-o", "temperature", "0", "--no-log", *streaming, question]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        assert done.stdout.strip() == text, done.stderr
