"""Transcription sessions of OpenAI's client."""

import base64
import wave

import openai
import pytest
from conftest import FIXTURES

TRANSCRIPTION = "conversation.item.input_audio_transcription"


def samples(name, folder="whisper-tiny"):
    with wave.open(str(FIXTURES / folder / name)) as clip:
        return clip.readframes(clip.getnframes())


@pytest.fixture(scope="module")
def realtime(voices):
    return openai.OpenAI(base_url=f"{voices[0]}/v1", api_key="any", max_retries=0).realtime


def session(model, turns):
    audio = {
        "format": {"type": "audio/pcm", "rate": 16000},
        "transcription": {"model": model},
        "turn_detection": turns,
    }
    return {"type": "transcription", "audio": {"input": audio}}


def append(connection, audio):
    for start in range(0, len(audio), 3200):
        chunk = audio[start : start + 3200]
        connection.input_audio_buffer.append(audio=base64.b64encode(chunk).decode())


def until(connection, kind):
    events = []
    for event in connection:
        events.append(event)
        if event.type == kind:
            return events


@pytest.mark.parametrize(("model", "text"), [("whisper", "house house bread"), ("parakeet", "house bread")])
def test_committed_audio_is_transcribed(realtime, model, text):
    with realtime.connect(extra_query={"intent": "transcription"}) as connection:
        assert connection.recv().type == "session.created"
        connection.session.update(session=session(model, None))
        updated = connection.recv()
        assert updated.type == "session.updated"
        assert updated.session.audio.input.transcription.model == model
        append(connection, samples("two.wav"))
        connection.input_audio_buffer.commit()
        events = until(connection, f"{TRANSCRIPTION}.completed")
        assert [event.type for event in events[:2]] == ["input_audio_buffer.committed", "conversation.item.added"]
        assert events[1].item.role == "user"
        assert events[-1].transcript.endswith(text)
        assert events[-1].usage.seconds == pytest.approx(1.93)
        assert "".join(event.delta for event in events if event.type == f"{TRANSCRIPTION}.delta") == events[-1].transcript


def test_turns_are_found(realtime):
    turns = {"type": "server_vad", "threshold": 0.4, "silence_duration_ms": 2500}
    with realtime.connect(model="whisper") as connection:
        connection.session.update(session=session("whisper", turns))
        # Speech, where the other clips are chords.
        append(connection, bytes(32000) + samples("en-16k.wav", "espeak") + bytes(128000))
        events = until(connection, f"{TRANSCRIPTION}.completed")
    kinds = [event.type for event in events]
    assert kinds[2:5] == [f"input_audio_buffer.{name}" for name in ("speech_started", "speech_stopped", "committed")]
    assert 500 < events[2].audio_start_ms < 1500 and 5000 < events[3].audio_end_ms < 6200
    assert events[-1].transcript


def test_other_sessions_are_refused_by_name(realtime):
    with realtime.connect(model="whisper") as connection:
        connection.recv()
        connection.response.create()
        assert "response.create" in connection.recv().error.message
        connection.session.update(session={"type": "realtime", "instructions": "Be kind."})
        refused = connection.recv()
        assert (refused.type, refused.error.param) == ("error", "session.type")
