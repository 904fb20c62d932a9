"""Images, audio and vectors, in all forms that they are taken in."""

import base64
import io
import json
import shutil
import wave

import numpy as np
import PIL.Image
import pytest
from conftest import FIXTURES, goldens

import qhx

BOAT = FIXTURES / "qwen3vl-tiny" / "images" / "boat.png"
NOON = FIXTURES / "gemma4-tiny" / "noon.wav"


@pytest.fixture(scope="module")
def eyes(seeing):
    return qhx.Model(seeing)


@pytest.fixture(scope="module")
def ears(hearing):
    return qhx.Model(hearing)


@pytest.fixture(scope="module")
def embedder(encoder):
    return qhx.Model(encoder)


def pixels():
    return np.asarray(PIL.Image.open(BOAT).convert("RGB"))


def samples():
    with wave.open(str(NOON)) as file:
        return np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32768, file.getframerate()


FORMS = {
    "path": lambda: BOAT,
    "text": lambda: str(BOAT),
    "bytes": lambda: BOAT.read_bytes(),
    "url": lambda: "data:image/png;base64," + base64.b64encode(BOAT.read_bytes()).decode(),
    "pil": lambda: PIL.Image.open(BOAT),
    "pil with alpha": lambda: PIL.Image.open(BOAT).convert("RGBA"),
    "array": pixels,
    "array in other order": lambda: np.asfortranarray(pixels()),
    "mirrored twice": lambda: pixels()[:, ::-1].copy()[:, ::-1],
}


@pytest.mark.parametrize("form", FORMS)
def test_an_image_is_seen_in_each_form(eyes, form):
    assert "image" in eyes.modalities
    image = FORMS[form]()
    answer = eyes.chat([{"role": "user", "content": "Describe this image."}], images=[image])
    assert answer.text == "A red boat on a blue sea."
    if form == "url":
        part = {"type": "image_url", "image_url": {"url": image}}
    else:
        part = {"type": "image", "image": image}
    content = [part, {"type": "text", "text": "Describe this image."}]
    assert eyes.chat([{"role": "user", "content": content}]).text == answer.text


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (np.zeros((4, 4, 3), np.float32), "an array of float32 with shape (4, 4, 3), expected uint8"),
        (np.zeros((3, 4, 4), np.uint8), "with shape (3, 4, 4), expected uint8 with (height, width, 3)"),
        (np.zeros((4, 4), np.uint8), "with shape (4, 4)"),
        (np.zeros((0, 4, 3), np.uint8), "images[0]"),
        (b"GIF", "images[0]"),
        (b"", "empty"),
        ("nowhere.png", "nowhere.png"),
        (7, "images[0]: int, expected a path"),
        (NOON, "noon.wav"),
    ],
)
def test_what_is_no_image_is_refused(eyes, image, words):
    with pytest.raises(qhx.Error) as raised:
        eyes.generate("What is this?", images=[image])
    assert words in raised.value.message, raised.value


@pytest.mark.parametrize("url", [str(BOAT), f"file://{BOAT}", "https://example.org/boat.png", "", None, 7])
def test_a_forwarded_message_opens_no_file(eyes, url):
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    with pytest.raises(qhx.UsageError, match="image_url.url: expected a data: URL"):
        eyes.chat([{"role": "user", "content": content}])


@pytest.mark.parametrize(
    ("audio", "words"),
    [
        ({"data": str(NOON)}, "input_audio.data: not base64"),
        ({"url": str(NOON)}, "input_audio.data: NoneType, expected base64"),
        ({"data": base64.b64encode(b"RIFF").decode(), "format": "wav"}, "input_audio.data"),
    ],
)
def test_forwarded_audio_opens_no_file(ears, audio, words):
    with pytest.raises(qhx.Error) as raised:
        ears.chat([{"role": "user", "content": [{"type": "input_audio", "input_audio": audio}]}])
    assert words in raised.value.message, raised.value


def test_forwarded_audio_is_heard(hearing, tmp_path):
    bundle = shutil.copytree(hearing, tmp_path / "chatting")
    shutil.copy(FIXTURES / "gemma4-tiny" / "tokenizer_config.json", bundle)
    manifest = json.loads((bundle / "checkpoint.json").read_text(encoding="utf-8"))
    del manifest["chat"]
    (bundle / "checkpoint.json").write_text(json.dumps(manifest), encoding="utf-8")
    ears = qhx.Model(bundle)
    ask = {"type": "text", "text": "Transcribe."}
    data = base64.b64encode(NOON.read_bytes()).decode()
    sent = [{"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}, ask]
    own = [{"type": "audio", "audio": NOON}, ask]
    first, second = (ears.chat([{"role": "user", "content": parts}], max_new_tokens=4) for parts in (sent, own))
    assert first.tokens == second.tokens and first.prompt_tokens == second.prompt_tokens


def test_placeholders_and_images_are_as_many(eyes):
    with pytest.raises(qhx.PromptError, match="placeholders <image> in the text: 2, files of image: 1"):
        eyes.generate("<image> and <image>", images=[BOAT])


def test_speech_becomes_text_in_each_form(ears):
    voice, rate = samples()
    clips = [NOON, NOON.read_bytes(), (voice, rate), (np.stack([voice, voice])[0][::1], np.int64(rate))]
    for clip in clips:
        heard = ears.transcribe(clip)
        assert str(heard) == "the boat leaves at noon" and not heard.cancelled
        assert heard.seconds == pytest.approx(len(voice) / rate, abs=0.01)
        assert [chunk.finish_reason for chunk in heard.chunks] == ["eos"]
    twice = ears.transcribe((np.repeat(voice, 2), 2 * rate))
    assert twice.text == "the boat leaves at noon"


def test_silence_is_left_out_and_times_stay(ears):
    voice, rate = samples()
    silence = np.zeros(3 * rate, np.float32)
    heard = ears.transcribe((np.concatenate([silence, voice, silence]), rate), vad={"pad_ms": 500})
    assert heard.seconds == pytest.approx(6 + len(voice) / rate, abs=0.01)
    [chunk] = heard.chunks
    assert 2.4 < chunk.start < 3.5 and chunk.end < 3.6 + len(voice) / rate
    nothing = ears.transcribe((silence, rate), vad=True)
    assert (nothing.text, nothing.chunks) == ("", [])
    with pytest.raises(qhx.UsageError, match="option vad: .*unknown field"):
        ears.transcribe(NOON, vad={"pad": 1})


def test_words_have_their_times(home, ears):
    bundle = qhx.forge(FIXTURES / "whisper-tiny", home / "listening", cpu_only=True)
    case = goldens("whisper-tiny", "words.json")["cases"][0]
    with qhx.Model(bundle, backend="cpu") as model:
        clip = FIXTURES / "whisper-tiny" / case["clip"]
        heard = model.transcribe(clip, word_times=True)
        assert [[word.text, word.start, word.end] for word in heard.words] == [
            [text, pytest.approx(start, abs=0.001), pytest.approx(end, abs=0.001)] for text, start, end in case["words"]
        ]
        assert heard.chunks and model.transcribe(clip).words == []
    with pytest.raises(qhx.UsageError, match="times of words: the model gives no times"):
        ears.transcribe(NOON, word_times=True)


@pytest.mark.parametrize(
    ("clip", "words"),
    [
        ((np.zeros(9), 16000), "audio: an array of float64 with shape (9,), expected float32"),
        ((np.zeros((9, 2), np.float32), 16000), "with shape (9, 2), expected float32 of one dimension"),
        ((np.zeros(9, np.float32), 0), "audio: 0 samples a second"),
        ((np.zeros(0, np.float32), 16000), "audio: 0 samples at 16000 a second"),
        (([0.0], 16000), "audio: list, expected float32"),
        (np.zeros(9, np.float32), "audio: ndarray, expected a path, the bytes of a file, or (samples, rate)"),
        (b"RIFF", "audio"),
    ],
)
def test_what_is_no_audio_is_refused(ears, clip, words):
    with pytest.raises(qhx.Error) as raised:
        ears.transcribe(clip)
    assert words in raised.value.message, raised.value


def test_a_model_that_does_not_transcribe_says_so(model):
    with pytest.raises(qhx.UsageError, match="params.transcription is missing"):
        model.transcribe(NOON)


def test_vectors_are_those_of_sentence_transformers(embedder):
    said = goldens("embed-mistral-tiny", "goldens_embed.json")
    texts = {role: [text["text"] for text in said["texts"] if text["role"] == role] for role in ("query", "document")}
    queries = embedder.embed(texts["query"], role="query", truncate=True)
    documents = embedder.embed(texts["document"], truncate=True)
    assert documents.dtype == np.float32 and documents.shape == (len(texts["document"]), embedder.embedding_dim)
    assert documents.flags.writeable and np.allclose(np.linalg.norm(documents, axis=1), 1, atol=1e-3)
    assert embedder.embed([]).shape == (0, embedder.embedding_dim)
    ids = [text["id"] for text in said["texts"] if text["role"] == "document"]
    for query, row in zip(queries, said["ranking"]):
        cosines = documents[[ids.index(id) for id in row["documents"]]] @ query
        assert np.allclose(cosines, row["cosines"], atol=1e-3), row["query"]


def test_texts_that_cannot_be_embedded_are_named(embedder, model):
    with pytest.raises(qhx.PromptError, match="text 1: ") as raised:
        embedder.embed(["short", "long " * 100])
    assert "truncate" in raised.value.hint
    with pytest.raises(qhx.UsageError, match="expected a list of texts"):
        embedder.embed("one")
    with pytest.raises(qhx.UsageError, match="option role: expected query or document"):
        embedder.embed(["one"], role="both")
    with pytest.raises(TypeError):
        embedder.embed([b"one"])
    with pytest.raises(qhx.UsageError, match="does not embed"):
        model.embed(["one"])
    with pytest.raises(qhx.UsageError, match="does not .*generate"):
        embedder.generate("one")


def test_pil_files_keep_what_they_show():
    # Modes that are no PNG are made RGB.
    from qhx._media import given

    file = io.BytesIO()
    PIL.Image.open(BOAT).convert("RGB").convert("CMYK").save(file, "TIFF")
    kind, _, content, _ = given("image", PIL.Image.open(file), "image")
    assert kind == "image" and content.startswith(b"\x89PNG")
