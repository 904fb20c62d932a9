"""Text: completions, conversations, streams, structured output, and what is refused."""

import json

import numpy as np
import pytest
from conftest import case, goldens

import qhx

FRANCE = case("llama3-tiny", "france")
# As long as the answer that is compared.
AS_LONG = {"max_new_tokens": len(FRANCE["output_ids"])}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}},
                "required": ["days"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_completion_is_that_of_transformers(model):
    answer = model.generate(FRANCE["prompt"], **AS_LONG)
    assert (answer.text, answer.tokens) == (FRANCE["text"], FRANCE["output_ids"])
    assert (answer.prompt_tokens, answer.finish_reason) == (len(FRANCE["prompt_ids"]), FRANCE["finish"])
    assert str(answer) == answer.text and answer.decode_seconds > 0
    tokens = model.generate(np.array(FRANCE["prompt_ids"]), max_new_tokens=4)
    assert tokens.tokens == FRANCE["output_ids"][:4] and tokens.finish_reason == "length"
    # All but the last token of the prompt is there already.
    assert tokens.reused_tokens == len(FRANCE["prompt_ids"]) - 1


def test_a_stream_gives_the_same_text_in_pieces(model):
    with model.generate(FRANCE["prompt"], stream=True, **AS_LONG) as stream:
        pieces = list(stream)
    assert "".join(pieces) == FRANCE["text"] and len(pieces) > 10
    assert stream.result.tokens == FRANCE["output_ids"]
    assert list(stream) == []


def test_conversations_go_on_from_their_state(model):
    chat = goldens("llama3-tiny")["chat"][0]
    messages = [{"role": "system", "content": chat["system"]}] if chat["system"] else []
    for number, turn in enumerate(chat["turns"]):
        messages.append({"role": "user", "content": turn["user"]})
        answer = model.chat(messages)
        assert answer.text == turn["text"]
        assert answer.prompt_tokens == len(turn["prompt_ids"])
        assert (answer.reused_tokens > 20) == (number > 0)
        messages.append({"role": "assistant", "content": answer.text})


def test_a_last_message_of_the_assistant_is_continued(model):
    turn = goldens("llama3-tiny")["chat"][0]["turns"][0]
    begin = "By day the sky is blue"
    messages = [{"role": "user", "content": turn["user"]}, {"role": "assistant", "content": begin}]
    assert begin + model.chat(messages).text == turn["text"]


def test_options_of_sampling_are_honoured(model):
    drawn = [model.generate("The", temperature=2, seed=seed, max_new_tokens=20).text for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    text = FRANCE["text"]
    assert model.generate(FRANCE["prompt"], stop=" river").text == text[: text.index(" river")]
    assert model.generate(FRANCE["prompt"], stop=["nowhere", "Seine"]).finish_reason == "stop"
    last = FRANCE["output_ids"][5]
    assert len(model.generate(FRANCE["prompt"], stop_tokens=[last]).tokens) <= 6
    first = FRANCE["output_ids"][0]
    assert model.generate(FRANCE["prompt"], logit_bias={first: -100}, max_new_tokens=1).tokens != [first]
    assert model.generate(FRANCE["prompt"], speculate="auto", temperature=None, **AS_LONG).text == text


def test_the_stop_text_that_ended_an_answer_is_named(model):
    ended = model.generate(FRANCE["prompt"], stop=["nowhere", " river"])
    assert (ended.finish_reason, ended.stopped_at) == ("stop", " river")
    stream = model.generate(FRANCE["prompt"], stop=" river", stream=True)
    assert "".join(stream) == ended.text and stream.result.stopped_at == " river"
    assert model.generate(FRANCE["prompt"], stop="nowhere", **AS_LONG).stopped_at is None
    by_token = model.generate(FRANCE["prompt"], stop_tokens=FRANCE["output_ids"][5:6])
    assert (by_token.finish_reason, by_token.stopped_at) == ("stop", None)


def test_another_salt_goes_on_from_no_state(model):
    def reused(salt):
        message = {"role": "user", "content": "What colour is the sky?"}
        answers = [
            model.generate(FRANCE["prompt"], cache_salt=salt, max_new_tokens=1),
            model.generate(FRANCE["prompt"], cache_salt=salt, max_new_tokens=1),
            model.chat([message], cache_salt=salt, max_new_tokens=1),
            model.chat([message], cache_salt=salt, max_new_tokens=1),
        ]
        return [answer.reused_tokens > 1 for answer in answers]

    assert [reused(salt) for salt in ("one", "two", None)] == [[False, True, False, True]] * 3


def test_answers_are_held_to_their_form(model):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "maximum": 150}},
        "required": ["name", "age"],
        "additionalProperties": False,
        # An untrained model writes long runs of blanks.
        "x-guidance": {"whitespace_flexible": False},
    }
    schema["properties"]["age"]["minimum"] = 0
    for given in (schema, json.dumps(schema)):
        answer = json.loads(model.generate("Who?", schema=given, max_new_tokens=100).text)
        assert isinstance(answer["name"], str) and 0 <= answer["age"] <= 150
    assert model.chat([{"role": "user", "content": "Where?"}], choice=["Oslo", "Rome"]).text in ("Oslo", "Rome")
    month = model.generate("When?", regex="[0-9]{4}-[0-9]{2}")
    assert len(month.text) == 7 and month.finish_reason == "eos"
    assert len(model.generate("When?", lark='start: /[0-9]{4}/ "-" /[0-9]{2}/').text) == 7


def test_calls_of_tools_come_back(calling):
    with qhx.Model(calling) as model:
        asked = [{"role": "user", "content": "Name a city."}]
        answer = model.chat(asked, tools=TOOLS, tool_choice="required", max_new_tokens=100)
        assert answer.tool_calls[0].name == "weather" and 1 <= answer.tool_calls[0].arguments["days"] <= 9
        assert model.chat(asked, tools=TOOLS, max_new_tokens=4).tool_calls == []


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": "a " * 2000}, "prompt", "the context of llama3-tiny holds"),
        ({"prompt": "\ud800"}, "usage", "the options"),
        ({"temperature": -1}, "usage", "option temperature: expected 0 (greedy) or"),
        ({"temperature": float("nan")}, "usage", "not JSON compliant"),
        ({"temperature": "warm"}, "usage", "expected f32"),
        ({"top_k": -1}, "usage", "expected usize"),
        ({"max_new_tokens": -1}, "usage", "expected usize"),
        ({"seed": {1}}, "usage", "set, which is no value of JSON"),
        ({"speculate": 1000}, "usage", "option speculate: 1000"),
        ({"cache_salt": ""}, "usage", "the cache salt is empty"),
        ({"cache_salt": 7}, "usage", "expected a string"),
        ({"schema": "{"}, "usage", "the JSON schema is no JSON"),
        ({"schema": {"type": "integer", "minimum": 2, "maximum": 1}}, "usage", "no value is of it"),
        ({"schema": {"enum": ["x" * (5 << 20)]}}, "usage", "bytes, expected at most"),
        ({"schema": {}, "regex": "a"}, "usage", "options regex and schema are given"),
        ({"regex": "["}, "usage", "the regular expression"),
        ({"choice": []}, "usage", "the choices: there are none"),
        ({"images": ["boat.png"]}, "prompt", "does not take the modality image"),
        ({"images": "boat.png"}, "usage", "option images: expected a list"),
    ],
)
def test_what_makes_no_sense_is_refused(model, options, kind, words):
    for stream in (False, True):
        with pytest.raises(qhx.Error) as raised:
            model.generate(**{"prompt": "Hi", **options}, stream=stream)
        assert raised.value.kind == kind and words in raised.value.message, raised.value
        assert isinstance(raised.value, ValueError)
    assert model.generate(FRANCE["prompt"], max_new_tokens=1).tokens == FRANCE["output_ids"][:1]


def test_what_is_no_option_is_a_type_error(model):
    with pytest.raises(TypeError, match="unexpected option 'max_tokens'"):
        model.generate("Hi", max_tokens=4)


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], ""),
        (["Hi"], "messages[0]: str; expected role and content"),
        ([{"role": "user"}], "messages[0]: role; expected role and content"),
        ([{"role": "user", "content": "", "tool_calls": []}], "messages[0]: role, content, tool_calls"),
        ([{"role": "user", "content": 7}], "the options"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0]: expected"),
        ([{"role": "user", "content": [{"type": "image", "image": 7}]}], "messages[0].content[0].image: int, expected"),
    ],
)
def test_messages_of_another_shape_are_refused(model, messages, words):
    with pytest.raises(qhx.Error) as raised:
        model.chat(messages)
    assert words in raised.value.message, raised.value


def test_tools_are_told_where_the_template_knows_none(model):
    with pytest.raises(qhx.Error, match="the context of llama3-tiny holds"):
        # So small a context does not hold what is told.
        model.chat([{"role": "user", "content": "Hi"}], tools=TOOLS)
    with pytest.raises(qhx.UsageError, match="tool_choice and schema"):
        model.chat([{"role": "user", "content": "Hi"}], tools=TOOLS, tool_choice="required", schema={})
