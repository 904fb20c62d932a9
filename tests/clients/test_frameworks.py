"""Frameworks for agents, and tools that an MCP server has."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Literal

import agents
import openai
import pytest
from agents.mcp import MCPServerStdio
from openai.types import Reasoning
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

HERE = Path(__file__).parent


class City(BaseModel):
    city: Literal["Bonn"]


@pytest.fixture(params=["chat", "responses"])
def model(address, request):
    """The model that calls tools, by either interface, for OpenAI's SDK of agents."""
    client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
    kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[request.param]
    agents.set_tracing_disabled(True)
    return kind(model="calling", openai_client=client)


def test_openai_agents_call_the_tools_of_an_mcp_server(model):
    # The choice is reset behind the first call, so that the answer is a text.
    settings = agents.ModelSettings(
        temperature=0, max_tokens=60, tool_choice="required", parallel_tool_calls=False, reasoning=Reasoning(effort="low")
    )

    async def run():
        async with MCPServerStdio({"command": sys.executable, "args": [str(HERE / "weather_mcp.py")]}) as server:
            agent = agents.Agent("Weather", model=model, model_settings=settings, mcp_servers=[server])
            whole = await agents.Runner.run(agent, "Rain?", max_turns=3)
            streamed = agents.Runner.run_streamed(agent, "Rain?", max_turns=3)
            async for _ in streamed.stream_events():
                pass
            return whole, streamed

    for result in asyncio.run(run()):
        call, output = result.new_items[:2]
        assert (call.raw_item.name, json.loads(call.raw_item.arguments)) == ("weather", {"city": "Bonn"})
        assert "Sun in Bonn." in json.dumps(output.output)
        assert isinstance(result.final_output, str)


def test_openai_agents_answer_in_a_form(model):
    agent = agents.Agent("Where", model=model, output_type=City)
    assert agents.Runner.run_sync(agent, "Where?").final_output == City(city="Bonn")


@pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])
def test_pydantic_ai_calls_tools_and_answers_in_a_form(address, kind):
    # Its forms are tools, which it requires.
    model = kind("calling", provider=OpenAIProvider(base_url=f"{address}/v1", api_key="any"))
    agent = Agent(model, output_type=City, model_settings={"temperature": 0, "max_tokens": 60})
    result = agent.run_sync("Where?")
    assert result.output == City(city="Bonn")
    assert result.usage.output_tokens > 3
    with agent.run_stream_sync("Where?") as stream:
        assert stream.get_output() == City(city="Bonn")


def test_vercels_ai_sdk_goes_its_round(address, sky):
    question, text = sky
    environment = {**os.environ, "QHX_ADDRESS": address, "QHX_QUESTION": question, "QHX_ANSWER": text}
    done = subprocess.run(["node", HERE / "ai.mjs"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
