"""Requests that coding agents, Home Assistant and Open WebUI send: recorded/.

Texts are shortened and ids are made up; every field, item type and schema is as it was sent.
"""

import json
from pathlib import Path

import httpx
import pytest
from anthropic.types import RawMessageStreamEvent
from conftest import TEMPLATE
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

EVENTS = {
    "/v1/chat/completions": TypeAdapter(ChatCompletionChunk),
    "/v1/messages": TypeAdapter(RawMessageStreamEvent),
    "/v1/responses": TypeAdapter(ResponseStreamEvent),
}
EMPTY = {"type": "object", "properties": {}, "additionalProperties": False}
LIMITS = {"/v1/responses": "max_output_tokens"}
RECORDED = Path(__file__).with_name("recorded")
NAMES = sorted(path.stem for path in RECORDED.glob("*.json"))


@pytest.fixture(scope="module")
def address(qhx, forged, long):
    """Serves a tiny model whose context holds what agents send."""
    agent = forged("recorded", long, "--max-ctx", "2048", "--no-golden")
    (agent / "chat_template.jinja").write_text(TEMPLATE)
    server = qhx("serve", f"agent={agent}", "--port", "0", "--backend", "cpu")
    yield server.stdout.readline().strip()
    server.terminate()
    assert server.wait(60) == 0


def ask(address, route, request):
    """The events of a stream, or the whole answer, as the maker's client reads them."""
    answer = httpx.post(address + route, json=request, timeout=120)
    assert answer.status_code == 200, answer.text
    if not request["stream"]:
        return [ChatCompletion.model_validate(answer.json())]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    return [EVENTS[route].validate_json(line) for line in lines if line != "[DONE]"]


def called(events):
    """Names of the tools that were called."""
    for event in events:
        match event.to_dict():
            case {"choices": [{"delta": {"tool_calls": calls}}]}:
                yield from (call["function"]["name"] for call in calls)
            case {"choices": [{"message": {"tool_calls": calls}}]}:
                yield from (call["function"]["name"] for call in calls)
            case {"type": "response.output_item.done", "item": {"type": "function_call", "name": name}}:
                yield name
            case {"type": "content_block_start", "content_block": {"type": "tool_use", "name": name}}:
                yield name


def ends(route, events):
    last = events[-1].to_dict()
    match route:
        case "/v1/chat/completions":
            reasons = [choice["finish_reason"] for event in events for choice in event.to_dict()["choices"]]
            return reasons[-1] in ("stop", "length", "tool_calls")
        case "/v1/messages":
            return last["type"] == "message_stop"
        case "/v1/responses":
            return last["type"] in ("response.completed", "response.incomplete")


def read(name):
    recorded = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return recorded["route"], recorded["request"]


def tools(request):
    return [tool.get("name") or tool.get("function", {}).get("name") for tool in request.get("tools", [])]


def choosing(route, request, name, limit):
    """The request with the choice of one tool."""
    choice = {
        "/v1/chat/completions": {"type": "function", "function": {"name": name}},
        "/v1/messages": {"type": "tool", "name": name, "disable_parallel_tool_use": True},
        "/v1/responses": {"type": "function", "name": name},
    }[route]
    parallel = {} if route == "/v1/messages" else {"parallel_tool_calls": False}
    return {**request, **parallel, LIMITS.get(route, "max_tokens"): limit, "tool_choice": choice, "temperature": 0}


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_request_is_answered(address, name):
    route, request = read(name)
    assert ends(route, ask(address, route, {**request, LIMITS.get(route, "max_tokens"): 8}))


# The others have the same tools.
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("claude-code", "codex-resumed", "codex-schema")])
def test_each_function_of_a_recorded_request_can_be_chosen(address, name):
    route, request = read(name)
    functions = [tool for tool in request.get("tools", []) if tool.get("type", "function") == "function"]
    for tool in tools({"tools": functions}):
        assert ends(route, ask(address, route, choosing(route, request, tool, 4))), tool


@pytest.mark.parametrize(
    ("name", "tool"),
    [
        ("claude-code", "ListAgents"),
        ("claude-code-schema", "StructuredOutput"),
        ("cline", "read_files"),
        ("codex-tool-result", "get_goal"),
        ("continue", "Exit"),
        ("home-assistant", "GetLiveContext"),
        ("opencode", "todowrite"),
    ],
)
def test_a_call_comes_in_the_form_of_the_interface(address, name, tool):
    route, request = read(name)
    for offered in request["tools"]:
        function = offered.get("function", offered)
        if function.get("name") == tool:
            # The tiny model would not end a text.
            function["input_schema" if route == "/v1/messages" else "parameters"] = EMPTY
    assert list(called(ask(address, route, choosing(route, request, tool, 100)))) == [tool]
