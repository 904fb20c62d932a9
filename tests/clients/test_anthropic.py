"""The whole round of Anthropic's client."""

import base64

import anthropic
import pytest
from conftest import FIXTURES
from test_openai import CITY, user

WEATHER = {"name": "weather", "description": "The weather", "input_schema": CITY}


def test_a_message_is_answered_and_counted(claude, sky):
    question, text = sky
    message = claude.messages.create(model="language", max_tokens=60, messages=user(question), temperature=0)
    assert (message.content[0].text, message.stop_reason) == (text, "end_turn")
    count = claude.messages.count_tokens(model="language", messages=user(question))
    assert count.input_tokens == message.usage.input_tokens + message.usage.cache_read_input_tokens


def test_a_message_is_streamed(claude, sky):
    question, text = sky
    with claude.messages.stream(model="language", max_tokens=60, messages=user(question), temperature=0) as stream:
        assert "".join(stream.text_stream) == text
        message = stream.get_final_message()
    assert message.content[0].text == text
    assert message.usage.output_tokens > 5


def test_a_tool_is_used(claude):
    more = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}, "max_tokens": 60, "temperature": 0}
    message = claude.messages.create(model="calling", messages=user("Rain?"), **more)
    assert message.stop_reason == "tool_use"
    use = message.content[0]
    assert (use.name, use.input) == ("weather", {"city": "Bonn"})
    with claude.messages.stream(model="calling", messages=user("Rain?"), **more) as stream:
        assert stream.get_final_message().content[0].input == {"city": "Bonn"}
    result = {"type": "tool_result", "tool_use_id": use.id, "content": "Sun."}
    messages = [*user("Rain?"), {"role": "assistant", "content": message.content}, *user([result])]
    again = claude.messages.create(model="calling", max_tokens=3, messages=messages, tools=[WEATHER])
    assert again.usage.output_tokens <= 3


def test_an_image_is_seen(claude):
    boat = base64.b64encode((FIXTURES / "qwen3vl-tiny" / "images" / "boat.png").read_bytes()).decode()
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": boat}}
    content = [image, {"type": "text", "text": "Describe this image."}]
    message = claude.messages.create(model="seeing", max_tokens=40, messages=user(content), temperature=0)
    assert message.content[0].text == "A red boat on a blue sea."


def test_errors_are_those_of_the_client(claude):
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(model="nothing", max_tokens=1, messages=user("Hello"))
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        claude.messages.create(model="language", max_tokens=1, messages=user("Hello"), temperature=7)
