"""Models, and what they return."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Optional, TypedDict, Union, overload

import numpy as np

from . import _qhx
from ._errors import UsageError, usage
from ._media import Audio, Given, Image, forwarded, given

if TYPE_CHECKING:
    import numpy.typing as npt
    from typing_extensions import Self, Unpack

FinishReason = Literal["eos", "stop", "length", "cancelled"]


class Options(TypedDict, total=False):
    """What :meth:`Model.generate` and :meth:`Model.chat` take besides a prompt. What is left out, or ``None``, has its
    default: the most likely tokens, at most 1024 of them."""

    max_new_tokens: Optional[int]
    """Maximum number of tokens of the answer; 1024 by default."""
    temperature: Optional[float]
    """Divides the logits; 0, the default, takes the most likely token."""
    top_k: Optional[int]
    """Draws among this many of the most likely tokens; 0 for all."""
    top_p: Optional[float]
    """Draws among the most likely tokens whose probabilities sum to this."""
    min_p: Optional[float]
    """Draws among tokens at least this likely relative to the most likely one."""
    repetition_penalty: Optional[float]
    """Divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off."""
    presence_penalty: Optional[float]
    """Subtracted from the logits of tokens in the answer."""
    frequency_penalty: Optional[float]
    """Subtracted from the logits of tokens in the answer, once for each occurrence."""
    penalty_window: Optional[int]
    """Penalties see this many of the last tokens; 0 for all."""
    logit_bias: Optional[Mapping[int, float]]
    """Added to the logits of tokens, by their ids; -100 excludes a token."""
    seed: Optional[int]
    """Makes drawn answers repeatable, on every machine."""
    stop: Union[str, Sequence[str], None]
    """Texts that end the answer; none of them appears in it."""
    stop_tokens: Optional[Sequence[int]]
    """Tokens that end the answer, besides the model's own."""
    ignore_eos: Optional[bool]
    """Goes on behind the model's end-of-text tokens."""
    speculate: Union[int, Literal["auto", "off"], None]
    """Speculative decoding: ``"auto"``, or this many draft tokens a step. The answer stays the same."""
    cache_salt: Optional[str]
    """Goes on only from what answers with the same salt consumed, so that no other user's prompt can be guessed from
    times or :attr:`Generation.reused_tokens`. Those without one share theirs."""
    schema: Union[str, Mapping[str, Any], None]
    """The answer is JSON of this schema."""
    regex: Optional[str]
    """The answer is a text that the whole of this regular expression matches."""
    choice: Optional[Sequence[str]]
    """The answer is one of these texts."""
    lark: Optional[str]
    """The answer is a text of this grammar, in the Lark syntax of llguidance."""
    images: Optional[Sequence[Image]]
    """Images of the prompt, or of the last message: at ``<image>`` in its text, or before it. A path, a ``data:`` URL,
    the bytes of a file, an image of PIL, or an array of uint8 with shape (height, width, 3)."""
    audio: Optional[Sequence[Audio]]
    """Audio clips, at ``<audio>`` or before the text. A path, the bytes of a file, or (samples, rate): mono float32."""


_SAMPLING = {
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "penalty_window",
    "logit_bias",
    "seed",
}
_FORMS = {"schema", "regex", "choice", "lark"}
_PARTS = {"image", "audio", "video"}


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool in an answer."""

    name: str
    """The tool."""
    arguments: Any
    """Its arguments: a ``dict``, unless the model wrote something else."""


@dataclass(frozen=True)
class Generation:
    """An answer. ``str`` has its text."""

    text: str
    """The text, without special tokens and stop texts."""
    tokens: list[int]
    """Every token that was chosen, the ending one included."""
    prompt_tokens: int
    """Positions of the prompt: its tokens, and those of images and audio."""
    reused_tokens: int
    """Of these, those whose state was there already, from an earlier call."""
    finish_reason: FinishReason
    """``eos``: the model ended it; ``stop``: a stop text or token came, or the grammar was at its end; ``length``:
    there are ``max_new_tokens``, or the context is full; ``cancelled``."""
    stopped_at: Optional[str]
    """The text of ``stop`` that ended it, if one did."""
    tool_calls: list[ToolCall]
    """The calls in it, where :meth:`Model.chat` was given ``tools``."""
    prefill_seconds: float
    """Time in which the prompt was consumed."""
    decode_seconds: float
    """Time from the first token of the answer to its last."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Chunk:
    """What was said in a part of an audio clip."""

    start: float
    """Where it begins, in seconds."""
    end: float
    """Where it ends, in seconds."""
    text: str
    """Its words, before they are joined with those of its neighbours."""
    finish_reason: FinishReason
    """Why its text ended."""


@dataclass(frozen=True)
class Word:
    """A word of an audio clip."""

    start: float
    """Where it begins, in seconds."""
    end: float
    """Where it ends, in seconds."""
    text: str


@dataclass(frozen=True)
class Transcript:
    """What was said in an audio clip. ``str`` has its text."""

    text: str
    """All words."""
    seconds: float
    """Length of the audio."""
    chunks: list[Chunk]
    """Its parts, which overlap, in order."""
    words: list[Word]
    """The words with their times, where ``word_times`` is given."""
    cancelled: bool
    """It was cancelled, and ends with the last chunk."""

    def __str__(self) -> str:
        return self.text


class Stream(Iterator[str]):
    """An answer under way, from :meth:`Model.generate` or :meth:`Model.chat` with ``stream=True``: an iterator of its
    pieces.

    Nothing is executed between two pieces. The answer ends where it is when the stream is closed, left as a context
    or dropped. Until then the model refuses everything else (:class:`BusyError`).
    """

    def __init__(self, native: _qhx.Stream) -> None:
        self._native = native

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        piece = self._native.next()
        if piece is None:
            raise StopIteration
        return piece

    @property
    def result(self) -> Optional[Generation]:
        """The whole answer, as far as it came: ``None`` before the end."""
        result = self._native.result()
        return None if result is None else _generation(result)

    def close(self) -> None:
        """Ends the answer where it is, within one execution of a graph."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Model:
    """An open bundle: it generates, embeds or transcribes, with one state.

    A model does one thing at a time. Calls of several threads wait for each other; while a stream is open, all are
    refused. The interpreter's lock is released while something runs, and Ctrl-C ends it within one execution of a
    graph. What was consumed stays: the next prompt that begins alike goes on from there.

    Args:
        bundle: The folder of a bundle, a manifest, or a folder with bundles of several architectures.
        backend: ``"auto"`` (the NPU where there is one and the bundle is made for it, otherwise the CPU), ``"cpu"`` or
            ``"qnn"``. ``QHX_BACKEND`` otherwise.
        device_arch: Architecture of the device, such as ``"v81"``, where that of the library is not to be taken.
        htp: Path of libQnnHtp, ``system`` that of libQnnSystem; the installed ones by default.
        plugins: Folders that are searched for plugins before the others.
        threads: Threads of the CPU; one a core by default.
        decode_on: What consumes the tokens of answers where the NPU consumes prompts: ``"cpu"``, ``"npu"``, or
            ``"auto"``, which measures both when the bundle is opened for the first time. By default one backend
            consumes both.
        cpu_activations: Type that the CPU rounds activations to in matmuls with int8 and 4-bit weights; ``"int8"`` is
            faster and less exact than ``"int16"``. By default, ``"auto"``, int8 with 4-bit weights and int16 with int8.
        cpu_caches: Type that the CPU stores caches of keys and values as; ``"f16"``, the default, takes half the memory
            of ``"f32"``.

    Raises:
        Error: The bundle is damaged, nothing here can execute it, or an option makes no sense.
    """

    def __init__(
        self,
        bundle: Union[str, os.PathLike[str]],
        *,
        backend: Optional[Literal["auto", "cpu", "qnn"]] = None,
        device_arch: Optional[str] = None,
        htp: Union[str, os.PathLike[str], None] = None,
        system: Union[str, os.PathLike[str], None] = None,
        plugins: Sequence[Union[str, os.PathLike[str]]] = (),
        threads: Optional[int] = None,
        decode_on: Optional[Literal["auto", "cpu", "npu"]] = None,
        cpu_activations: Optional[Literal["auto", "int16", "int8"]] = None,
        cpu_caches: Optional[Literal["f16", "f32"]] = None,
    ) -> None:
        options = {
            "backend": backend,
            "device_arch": device_arch,
            "htp": None if htp is None else os.fspath(htp),
            "system": None if system is None else os.fspath(system),
            "plugins": [os.fspath(folder) for folder in plugins],
            "threads": threads,
            "decode_on": decode_on,
            "cpu_activations": cpu_activations,
            "cpu_caches": cpu_caches,
        }
        self._native = _qhx.open(bundle, _dumps(options))
        about = json.loads(self._native.about)
        self.name: str = about["name"]
        """The model's name."""
        self.manifest: str = about["manifest"]
        """The manifest's path."""
        self.host_op: str = about["host_op"]
        """What makes the model's steps."""
        self.modalities: list[str] = about["modalities"]
        """What prompts may hold: ``text``, ``image``, ``audio``, ``video``."""
        self.backend: str = about["backend"]
        """What executes the graphs."""
        self.backend_reason: str = about["backend_reason"]
        """Why that was taken."""
        self.decoder: Optional[str] = about["decoder"]
        """What consumes the tokens of answers, with ``decode_on``."""
        self.decoder_reason: Optional[str] = about["decoder_reason"]
        """Why that was taken."""
        self.max_ctx: int = about["max_ctx"]
        """Positions that the context holds."""
        self.embedding_dim: int = about["embedding_dim"]
        """Values of a vector of :meth:`embed`; 0 where the model does not embed."""
        self.can_chat: bool = about["can_chat"]
        """Whether the model has a chat template."""

    @overload
    def generate(
        self, prompt: Union[str, Sequence[int]], *, stream: Literal[False] = False, **options: Unpack[Options]
    ) -> Generation: ...

    @overload
    def generate(
        self, prompt: Union[str, Sequence[int]], *, stream: Literal[True], **options: Unpack[Options]
    ) -> Stream: ...

    def generate(
        self, prompt: Union[str, Sequence[int]], *, stream: bool = False, **options: Unpack[Options]
    ) -> Union[Generation, Stream]:
        """Completes a text, or tokens, as it is; see :class:`Options`. With ``stream``, piece by piece."""
        text = isinstance(prompt, str)
        asks = {"text": prompt} if text else {"tokens": list(prompt)}
        return self._ask(asks, [], stream, dict(options))

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        tool_choice: Literal["auto", "required"] = "auto",
        thinking: Optional[bool] = None,
        template_arguments: Optional[Mapping[str, Any]] = None,
        stream: Literal[False] = False,
        **options: Unpack[Options],
    ) -> Generation: ...

    @overload
    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        tool_choice: Literal["auto", "required"] = "auto",
        thinking: Optional[bool] = None,
        template_arguments: Optional[Mapping[str, Any]] = None,
        stream: Literal[True],
        **options: Unpack[Options],
    ) -> Stream: ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Optional[Sequence[Mapping[str, Any]]] = None,
        tool_choice: Literal["auto", "required"] = "auto",
        thinking: Optional[bool] = None,
        template_arguments: Optional[Mapping[str, Any]] = None,
        stream: bool = False,
        **options: Unpack[Options],
    ) -> Union[Generation, Stream]:
        """Answers a conversation, rendered with the model's chat template. Where the last message is the assistant's, the
        model goes on with it, and the answer is what is added.

        Args:
            messages: ``{"role": …, "content": …}`` each. The content is a text, or a list of parts: ``{"type": "text",
                "text": …}``, ``{"type": "image", "image": …}``, and in the same way ``audio`` and ``video``;
                ``{"type": "image_url", "image_url": {"url": "data:…"}}`` and ``{"type": "input_audio", "input_audio":
                {"data": base64, "format": …}}`` are those of OpenAI's clients, and open no file.
            tools: The tools that the model may call, as servers take them: ``{"type": "function", "function": …}``.
                The calls of an answer are :attr:`Generation.tool_calls`.
            tool_choice: ``"required"``: the answer is calls, and nothing else.
            thinking: Whether the model thinks first, where its template knows that.
            template_arguments: Further variables of the template.
        """
        if tool_choice not in ("auto", "required"):
            raise usage(f"option tool_choice: {tool_choice!r}, expected auto or required")
        media: list[Given] = []
        more: dict[str, Any] = {"thinking": thinking, "template_arguments": template_arguments, "tools": tools}
        if tools is not None and tool_choice == "required":
            if _FORMS & options.keys():
                raise usage("options tool_choice and schema, regex, choice or lark are given, expected one of them")
            more["must_call"] = True
        turns = [_turn(index, message, media) for index, message in enumerate(messages)]
        return self._ask({"messages": turns}, media, stream, {**options, **more})

    def _ask(
        self, prompt: dict[str, Any], media: list[Given], stream: bool, options: dict[str, Any]
    ) -> Union[Generation, Stream]:
        asked: dict[str, Any] = {"prompt": prompt}
        known = Options.__annotations__.keys() | {"thinking", "template_arguments", "tools", "must_call"}
        sampling, forms, first = {}, {}, len(media)
        for name, value in options.items():
            if name not in known:
                raise TypeError(f"unexpected option {name!r}")
            if value is None:
                continue
            if name in _SAMPLING:
                sampling[name] = value
            elif name in _FORMS:
                forms[name] = value
            elif name == "images":
                media += [given("image", image, f"images[{index}]") for index, image in enumerate(_several(name, value))]
            elif name == "audio":
                media += [given("audio", clip, f"audio[{index}]") for index, clip in enumerate(_several(name, value))]
            elif name == "stop" and isinstance(value, str):
                asked[name] = [value]
            else:
                asked[name] = value
        if len(forms) > 1:
            raise usage(f"options {' and '.join(sorted(forms))} are given, expected one of them")
        if forms:
            asked["form"] = forms
        if sampling:
            asked["sampling"] = sampling
        asked["beside"] = list(range(first, len(media)))
        if stream:
            return Stream(self._native.stream(_dumps(asked), media))
        return _generation(self._native.generate(_dumps(asked), media))

    def embed(
        self, texts: Sequence[str], *, role: Literal["document", "query"] = "document", truncate: bool = False
    ) -> npt.NDArray[np.float32]:
        """The vectors of texts, as the rows of an array of float32 with shape (texts, dim).

        Args:
            texts: They stand behind the bundle's prefix for their role. Short ones share executions of a graph.
            role: What the texts are: searched for with (``"query"``), or found.
            truncate: Whether a text that is too long is cut instead of refused.
        """
        if isinstance(texts, str):
            raise usage("texts is a text, expected a list of texts", "embed([text])")
        values, dim = self._native.embed(list(texts), role, truncate)
        return np.frombuffer(values, dtype=np.float32).reshape(-1, dim)

    def transcribe(
        self,
        audio: Audio,
        *,
        max_new_tokens: Optional[int] = None,
        word_times: bool = False,
        vad: Union[bool, Mapping[str, float]] = False,
    ) -> Transcript:
        """The words of an audio clip of any length: a path, the bytes of a file (WAV, FLAC, MP3, AAC, M4A, Ogg, WebM),
        or (samples, rate) with mono float32. ``max_new_tokens`` is the maximum of each of its chunks. With ``word_times``
        the transcript has :attr:`Transcript.words`; a model that does not find them is refused. With ``vad`` the model is
        given speech alone: ``True``, or some of the rules ``threshold``, ``neg_threshold``, ``min_speech_ms``,
        ``min_silence_ms`` and ``pad_ms``. Times stay those of the clip."""
        rules = None if vad is False else json.dumps({} if vad is True else dict(vad))
        said = json.loads(self._native.transcribe(given("audio", audio, "audio"), max_new_tokens, word_times, rules))
        parts = {"chunks": [Chunk(**chunk) for chunk in said["chunks"]], "words": [Word(**word) for word in said["words"]]}
        return Transcript(**{**said, **parts})

    @property
    def busy(self) -> bool:
        """True while something runs, or a stream is open."""
        return self._native.busy()

    def cancel(self) -> bool:
        """Ends what runs, within one execution of a graph, from any thread: its answer has the finish reason
        ``cancelled``, and embedding raises an error of that kind. False where nothing runs."""
        return self._native.cancel()

    def close(self) -> None:
        """Ends what runs, and frees the model; it can do nothing any more."""
        self._native.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<qhx.Model {self.name!r} on {self.backend}>"


def _generation(text: str) -> Generation:
    answer = json.loads(text)
    return Generation(**{**answer, "tool_calls": [ToolCall(**call) for call in answer["tool_calls"]]})


def _several(name: str, value: Any) -> Sequence[Any]:
    # An array, or a text, would be taken apart.
    if isinstance(value, (list, tuple)) and not (name == "audio" and len(value) == 2 and isinstance(value[1], int)):
        return value
    raise usage(f"option {name}: expected a list", f"{name}=[…], also for one")


def _turn(index: int, message: Mapping[str, Any], media: list[Given]) -> dict[str, Any]:
    name = f"messages[{index}]"
    if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
        keys = ", ".join(map(str, message)) if isinstance(message, Mapping) else type(message).__name__
        raise usage(
            f"{name}: {keys}; expected role and content",
            "calls of tools stand in the text of the answer, and results in the content of a message of the role tool",
        )
    content = message["content"]
    if isinstance(content, (list, tuple)):
        content = [_part(f"{name}.content[{at}]", part, media) for at, part in enumerate(content)]
    return {"role": message["role"], "content": content}


def _part(name: str, part: Any, media: list[Given]) -> Union[str, int]:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "text" and isinstance(text := part.get("text"), str):
        return text
    if kind in _PARTS and kind in part:
        media.append(given(kind, part[kind], f"{name}.{kind}"))
    elif kind in ("image_url", "input_audio") and isinstance(part.get(kind), Mapping):
        media.append(forwarded(kind, part[kind], f"{name}.{kind}"))
    else:
        raise usage(
            f'{name}: expected {{"type": "text", "text": …}}, image, audio or video in the same way, or image_url or '
            "input_audio as OpenAI's clients send them"
        )
    return len(media) - 1


def _dumps(value: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, Sequence):
            return list(value)
        raise usage(f"{value!r:.80}: {type(value).__name__}, which is no value of JSON")

    try:
        return json.dumps(value, default=plain, allow_nan=False)
    except UsageError:
        raise
    except (ValueError, RecursionError) as error:
        raise usage(f"the options: {error}") from None
