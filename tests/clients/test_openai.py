"""The whole round of OpenAI's client."""

import base64
import json

import openai
import pytest
from conftest import FIXTURES

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "The weather", "parameters": CITY}}


def user(text):
    return [{"role": "user", "content": text}]


def test_models_are_listed(client):
    assert [model.id for model in client.models.list()] == ["language", "calling", "encoder", "seeing"]
    assert client.models.retrieve("encoder").id == "encoder"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("nothing")
    assert raised.value.code == "model_not_found"


def test_a_chat_is_answered(client, sky):
    question, text = sky
    answer = client.chat.completions.create(model="language", messages=user(question), temperature=0)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens >= 0


def test_a_chat_is_streamed(client, sky):
    question, text = sky
    options = {"include_usage": True}
    stream = client.chat.completions.create(
        model="language", messages=user(question), temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == text
    assert chunks[-1].usage.completion_tokens > 5
    assert len({chunk.id for chunk in chunks}) == 1


def test_the_helper_of_streams_collects_the_answer(client, sky):
    question, text = sky
    with client.chat.completions.stream(model="language", messages=user(question), temperature=0) as stream:
        answer = stream.get_final_completion()
    assert answer.choices[0].message.content == text


def test_logprobs_and_choices_come(client):
    answer = client.chat.completions.create(
        model="language", messages=user("Hello"), n=2, seed=1, max_tokens=4, logprobs=True, top_logprobs=3
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    for choice in answer.choices:
        assert len(choice.logprobs.content) == 4
        assert all(len(token.top_logprobs) == 3 for token in choice.logprobs.content)


def test_an_answer_is_of_a_schema(client):
    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": CITY, "strict": True}}
    answer = client.chat.completions.create(model="language", messages=user("Where?"), response_format=form)
    assert json.loads(answer.choices[0].message.content) == {"city": "Bonn"}


def test_a_tool_is_called(client):
    answer = client.chat.completions.create(
        model="calling",
        messages=user("Rain?"),
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=60,
    )
    assert answer.choices[0].finish_reason == "tool_calls"
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bonn"})
    result = {"role": "tool", "tool_call_id": call.id, "content": "Sun."}
    messages = [*user("Rain?"), answer.choices[0].message, result]
    again = client.chat.completions.create(model="calling", messages=messages, tools=[WEATHER], max_tokens=3)
    assert again.usage.prompt_tokens > answer.usage.prompt_tokens


def test_an_image_is_seen(client):
    boat = base64.b64encode((FIXTURES / "qwen3vl-tiny" / "images" / "boat.png").read_bytes()).decode()
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{boat}"}}
    content = [image, {"type": "text", "text": "Describe this image."}]
    answer = client.chat.completions.create(model="seeing", messages=user(content), temperature=0)
    assert answer.choices[0].message.content == "A red boat on a blue sea."


def test_a_text_is_completed(client):
    answer = client.completions.create(
        model="language", prompt="The capital of France is", temperature=0, stop=" A small", max_tokens=30
    )
    assert answer.choices[0].text == " Paris. The river Seine runs through it."
    scored = client.completions.create(
        model="language", prompt="The capital of France is", echo=True, logprobs=1, max_tokens=0
    )
    assert scored.choices[0].logprobs.token_logprobs[0] is None
    assert all(logprob <= 0 for logprob in scored.choices[0].logprobs.token_logprobs[1:])


def test_texts_are_embedded(client):
    # The client asks for base64 by itself.
    together = client.embeddings.create(model="encoder", input=["SELECT 1", "def f(): pass"])
    floats = client.embeddings.create(model="encoder", input="SELECT 1", encoding_format="float")
    assert together.data[0].embedding == pytest.approx(floats.data[0].embedding, abs=1e-7)
    short = client.embeddings.create(model="encoder", input="SELECT 1", dimensions=8)
    assert len(short.data[0].embedding) == 8


def test_a_response_is_made_and_streamed(client, sky):
    question, text = sky
    response = client.responses.create(model="language", input=question, temperature=0)
    assert response.output_text == text
    with client.responses.stream(model="language", input=question, temperature=0) as stream:
        events = [event.type for event in stream]
        assert stream.get_final_response().output_text == text
    assert events[0] == "response.created" and events[-1] == "response.completed"
    tool = {"type": "function", "name": "weather", "parameters": CITY, "strict": True}
    response = client.responses.create(model="calling", input="Rain?", tools=[tool], tool_choice="required")
    assert response.output[0].type == "function_call"
    assert json.loads(response.output[0].arguments) == {"city": "Bonn"}


def test_a_recording_is_transcribed(audio_client):
    whole = (FIXTURES / "whisper-tiny" / "long.wav").read_bytes()
    ask = {"model": "whisper", "file": ("long.wav", whole), "temperature": 0}
    heard = audio_client.audio.transcriptions.create(**ask, response_format="verbose_json")
    for segment in heard.segments:
        assert -1 < segment.avg_logprob < 0 and 0 <= segment.no_speech_prob < 1, segment
        assert segment.compression_ratio > 0 and segment.temperature >= 0, segment
    seeks = [segment.seek for segment in heard.segments]
    assert seeks == sorted(seeks) and seeks[-1] > 0
    *deltas, done = audio_client.audio.transcriptions.create(**ask, stream=True)
    assert (done.type, done.text) == ("transcript.text.done", heard.text)
    assert {delta.type for delta in deltas} == {"transcript.text.delta"} and len(deltas) > 1
    assert "".join(delta.delta for delta in deltas) == heard.text


def test_a_text_is_spoken_in_each_format(audio_client, tmp_path):
    ask = {"model": "kokoro", "voice": "alloy", "input": "Hello there."}
    begins = {"mp3": b"\xff", "opus": b"OggS", "flac": b"fLaC", "aac": b"\xff\xf1", "wav": b"RIFF"}
    for name, begin in begins.items():
        file = tmp_path / f"speech.{name}"
        with audio_client.audio.speech.with_streaming_response.create(**ask, response_format=name) as response:
            response.stream_to_file(file)
        assert file.read_bytes().startswith(begin), name
    # The client's own default.
    assert audio_client.audio.speech.create(**ask).content == (tmp_path / "speech.mp3").read_bytes()
    # A recording of a browser is heard, too.
    recorded = (FIXTURES / "media" / "recorded.webm").read_bytes()
    heard = audio_client.audio.transcriptions.create(model="whisper", file=("speech.webm", recorded))
    assert heard.usage.seconds == 1


@pytest.mark.parametrize(
    ("more", "error", "param"),
    [
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"model": "nothing"}, openai.NotFoundError, "model"),
        ({"messages": user("word " * 4000)}, openai.BadRequestError, None),
    ],
)
def test_errors_are_those_of_the_client(client, more, error, param):
    with pytest.raises(error) as raised:
        client.chat.completions.create(**{"model": "language", "messages": user("Hello"), **more})
    assert raised.value.param == param
    assert raised.value.request_id
