"""A published chat model (SmolLM2-135M-Instruct), in the folder that QHX_REAL names."""

import json
import os
from pathlib import Path

import jsonschema_rs
import openai
import pytest
from conftest import FIXTURES

REAL = os.environ.get("QHX_REAL")

TOWNS = ["Bonn", "Oslo", "Lima", "Kyoto", "Accra", "Quito", "Hanoi", "Leeds", "Turin", "Perth"]
SONGS = ["Blue in Green", "Yesterday", "La Mer", "Imagine", "Hallelujah", "Summertime", "Jolene", "Volare"]
#: A text that ends: without a bound one of 100 questions has the model write a title of 400 tokens.
TEXT = {"type": "string", "maxLength": 40}
#: A tool by its name: its arguments, those that must come, and questions.
TOOLS = {
    "weather": (
        {"city": TEXT, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
        ["city", "days"],
        [f"What will the weather be in {town} in the next {2 + at % 5} days?" for at, town in enumerate(TOWNS * 2)],
    ),
    "timer": (
        {"minutes": {"type": "number", "exclusiveMinimum": 0, "maximum": 600}, "label": TEXT | {"type": ["string", "null"]}},
        ["minutes"],
        [f"Set a timer of {minutes} minutes for the {food}." for minutes in (3, 8, 12, 25, 40)
         for food in ("eggs", "rice", "bread", "tea")],
    ),
    "mail": (
        {"to": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 3},
         "subject": {"type": "string", "maxLength": 60}, "urgent": {"type": "boolean"}},
        ["to", "subject"],
        [f"Write to anna@example.com and {town.lower()}@example.com that we meet in {town}." for town in TOWNS * 2],
    ),
    "convert": (
        {"amount": {"type": "number"}, "from": {"enum": ["EUR", "USD", "JPY"]}, "to": {"enum": ["EUR", "USD", "JPY"]}},
        ["amount", "from", "to"],
        [f"How much is {amount} {a} in {b}?" for amount in (5, 12.5, 100, 2500, 7)
         for a, b in (("EUR", "USD"), ("USD", "JPY"), ("JPY", "EUR"), ("EUR", "JPY"))],
    ),
    "play": (
        {"song": TEXT, "options": {"type": "object", "additionalProperties": False, "properties": {
            "volume": {"type": "integer", "minimum": 0, "maximum": 100}, "loop": {"type": "boolean"}}}},
        ["song"],
        [f"Play {song}{how}." for song in SONGS for how in ("", " quietly", " again and again")][:20],
    ),
}
#: Questions of each tool.
EACH = 20 if os.environ.get("QHX_FULL") == "1" else 1


@pytest.mark.skipif(REAL is None, reason="QHX_REAL is not set")
def test_a_published_model_chats_as_the_reference(qhx, forged):
    goldens = json.loads((FIXTURES / "real" / "smollm2.json").read_text(encoding="utf-8"))
    turns = next(chat for chat in goldens["chats"] if chat["id"] == "capital")["turns"]
    checkpoint = Path(REAL) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    bundle = forged("smollm2", checkpoint, "--precision", "w4a16", "--max-ctx", "2048")
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


@pytest.mark.skipif(REAL is None, reason="QHX_REAL is not set")
def test_a_published_model_calls_tools_as_their_schemas_say(qhx, forged):
    """Its template knows no tools: the conversation describes them."""
    checkpoint = Path(REAL) / "SmolLM2-135M-Instruct.Q4_1.gguf"
    bundle = forged("smollm2", checkpoint, "--precision", "w4a16", "--max-ctx", "2048")
    schemas = {
        name: {"type": "object", "properties": arguments, "required": must, "additionalProperties": False}
        for name, (arguments, must, _) in TOOLS.items()
    }
    tools = [{"type": "function", "function": {"name": name, "description": f"{name.capitalize()} for the user",
                                               "parameters": schema, "strict": True}}
             for name, schema in schemas.items()]
    server = qhx("serve", bundle, "--port", "0", "--backend", "cpu")
    try:
        address = server.stdout.readline().strip()
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="any", max_retries=0)
        asked, meant = 0, 0
        for name, (_, _, questions) in TOOLS.items():
            for question in questions[:EACH]:
                message = client.chat.completions.create(
                    model="smollm2", messages=[{"role": "user", "content": question}], tools=tools,
                    tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=400,
                ).choices[0].message
                assert not message.content and len(message.tool_calls) == 1, (question, message)
                call = message.tool_calls[0].function
                jsonschema_rs.validate(schemas[call.name], json.loads(call.arguments))
                asked, meant = asked + 1, meant + (call.name == name)
        assert asked == EACH * len(TOOLS)
        print(f"{asked} questions, {meant} of them with the tool that was meant")
    finally:
        server.terminate()
        assert server.wait(60) == 0
