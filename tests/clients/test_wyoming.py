"""Home Assistant's voice protocol, by its own package."""

import asyncio
import wave
from urllib.parse import urlparse

import pytest
from conftest import FIXTURES
from wyoming.asr import Transcribe, Transcript
from wyoming.audio import AudioChunk, AudioStart, AudioStop, wav_to_chunks
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.info import Describe, Info
from wyoming.ping import Ping, Pong
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped, SynthesizeVoice


@pytest.fixture
def ask(voices):
    """Sends events, and returns those that come up to the first of some kind."""
    address = urlparse(voices[1])

    async def round(events, last):
        found = []
        async with AsyncTcpClient(address.hostname, address.port) as client:
            for event in events:
                await client.write_event(event.event())
            while not found or not last(found[-1].type):
                event = await asyncio.wait_for(client.read_event(), 60)
                assert event is not None, found
                found.append(event)
        return found

    return lambda events, last: asyncio.run(round(events, last))


def clip(name):
    with wave.open(str(FIXTURES / "whisper-tiny" / name)) as file:
        return list(wav_to_chunks(file, 1024, start_event=True, stop_event=True))


def audio(events):
    assert AudioStart.is_type(events[0].type) and AudioStop.is_type(events[-1].type)
    chunks = [AudioChunk.from_event(event) for event in events[1:-1]]
    return b"".join(chunk.audio for chunk in chunks)


def test_what_is_served_is_described(ask):
    (event,) = ask([Describe()], Info.is_type)
    info = Info.from_event(event)
    assert [model.name for model in info.asr[0].models] == ["whisper", "parakeet"]
    assert "de" in info.asr[0].models[0].languages and info.asr[0].models[1].languages == ["en"]
    assert [voice.name for voice in info.tts[0].voices] == ["af_one", "bm_two"]
    assert info.tts[0].supports_synthesize_streaming
    (pong,) = ask([Ping("a")], Pong.is_type)
    assert Pong.from_event(pong).text == "a"


@pytest.mark.parametrize(("model", "text"), [("whisper", "house house bread"), ("parakeet", "house bread")])
def test_audio_is_transcribed(ask, model, text):
    (event,) = ask([Transcribe(name=model, language="en"), *clip("two.wav")], Transcript.is_type)
    assert Transcript.from_event(event).text.endswith(text)


def test_a_text_is_spoken(ask):
    voice = SynthesizeVoice(name="bm_two")
    whole = audio(ask([Synthesize("Hello there.", voice)], AudioStop.is_type))
    assert len(whole) > 10_000
    pieces = [SynthesizeStart(voice), SynthesizeChunk("Hello th"), SynthesizeChunk("ere. "), SynthesizeStop()]
    events = ask(pieces, SynthesizeStopped.is_type)
    assert audio(events[:-1]) == whole
    (error,) = ask([Synthesize("Hello", SynthesizeVoice(name="zoe"))], Error.is_type)
    assert "bm_two" in Error.from_event(error).text
