"""LiteLLM by its providers."""

import json

import pytest
from test_openai import CITY, WEATHER, user

litellm = pytest.importorskip("litellm", reason="cargo xtask clients --full installs it")


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "lm_studio", "llamafile", "anthropic"])
def test_litellm_chats_streams_and_calls_tools(address, sky, provider):
    question, text = sky
    base = address if provider == "anthropic" else f"{address}/v1"
    settings = {"api_base": base, "api_key": "any", "temperature": 0, "max_tokens": 60}
    ask = {"model": f"{provider}/language", "messages": user(question), **settings}
    assert litellm.completion(**ask).choices[0].message.content == text
    chunks = litellm.completion(**ask, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text
    ask = {"model": f"{provider}/calling", "messages": user("Rain?"), **settings}
    more = {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    call = litellm.completion(**ask, **more).choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bonn"})
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    formed = litellm.completion(**ask, response_format=form).choices[0].message.content
    assert json.loads(formed) == {"city": "Bonn"}


@pytest.mark.parametrize("provider", ["ollama", "ollama_chat"])
def test_litellm_asks_as_an_ollama_client(address, provider):
    ask = {"model": f"{provider}/language", "messages": user("Hello"), "api_base": address, "max_tokens": 8}
    assert litellm.completion(**ask).usage.completion_tokens == 8


def test_litellm_asks_for_a_response(address, sky):
    question, text = sky
    ask = {"model": "openai/language", "input": question, "api_base": f"{address}/v1", "api_key": "any", "temperature": 0}
    assert litellm.responses(**ask).output[0].content[0].text == text
