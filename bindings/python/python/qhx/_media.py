"""Images, audio and videos of a request, as the native part takes them."""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional, Union

import numpy as np

from ._errors import usage

if TYPE_CHECKING:
    import numpy.typing as npt
    import PIL.Image

    Image = Union[str, os.PathLike[str], bytes, bytearray, PIL.Image.Image, npt.NDArray[np.uint8]]
    Audio = Union[str, os.PathLike[str], bytes, bytearray, tuple[npt.NDArray[np.float32], int]]
else:
    Image = Audio = Any

# Kind, name or path, content, and two numbers: see bindings/shared/src/media.rs.
Given = tuple[str, str, Optional[bytes], tuple[int, int]]


def given(kind: str, value: Any, name: str) -> Given:
    """A medium of a request; ``name`` is what errors call it."""
    if isinstance(value, (str, os.PathLike)):
        return kind, os.fsdecode(value), None, (0, 0)
    if isinstance(value, (bytes, bytearray, memoryview)):
        return kind, name, bytes(value), (0, 0)
    if kind == "image":
        pil = sys.modules.get("PIL.Image")
        if pil is not None and isinstance(value, pil.Image):
            return _pil(value, name)
        if isinstance(value, np.ndarray):
            return _pixels(value, name)
        expected = "a path, the bytes of a file, an image of PIL, or an array of uint8"
    elif kind == "audio":
        if isinstance(value, tuple) and len(value) == 2:
            return _samples(*value, name)
        expected = "a path, the bytes of a file, or (samples, rate)"
    else:
        expected = "a path, or the bytes of a file"
    raise usage(f"{name}: {type(value).__name__}, expected {expected}")


def forwarded(kind: str, value: Mapping[str, Any], name: str) -> Given:
    """A medium as OpenAI's clients send it. Whoever wrote it names no file of this machine."""
    if kind == "image_url":
        url = value.get("url")
        if isinstance(url, str) and url[:5].lower() == "data:":
            return given("image", url, name)
        raise usage(
            f"{name}.url: expected a data: URL; addresses and files are not read for a message",
            'a file of this machine: {"type": "image", "image": path}',
        )
    data = value.get("data")
    if not isinstance(data, str):
        raise usage(f"{name}.data: {type(data).__name__}, expected base64 of an audio file")
    try:
        return given("audio", base64.b64decode(data, validate=True), f"{name}.data")
    except ValueError as error:
        raise usage(f"{name}.data: not base64: {error}") from None


def _pil(image: Any, name: str) -> Given:
    if image.mode == "RGB":
        return "pixels", name, image.tobytes(), image.size
    # What becomes of transparency is the model's to say, as for files.
    file = io.BytesIO()
    lossless = image.mode in ("1", "L", "LA", "P", "RGBA", "I;16")
    (image if lossless else image.convert("RGB")).save(file, "PNG", compress_level=1)
    return "image", name, file.getvalue(), (0, 0)


def _pixels(array: Any, name: str) -> Given:
    if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3:
        raise usage(
            f"{name}: an array of {array.dtype} with shape {array.shape}, expected uint8 with (height, width, 3)",
            "values of 0 to 1: (array * 255).astype('uint8'); channels first: array.transpose(1, 2, 0)",
        )
    height, width, _ = array.shape
    # A copy in the order of rows, whatever the strides are.
    return "pixels", name, array.tobytes(), (width, height)


def _samples(samples: Any, rate: Any, name: str) -> Given:
    found = type(samples).__name__
    if isinstance(samples, np.ndarray):
        found = f"an array of {samples.dtype} with shape {samples.shape}"
        if samples.dtype == np.float32 and samples.ndim == 1:
            # A number of numpy is one, too.
            rate = int(rate)
            if not 0 < rate < 1 << 32:
                raise usage(f"{name}: {rate} samples a second, expected more than 0")
            return "samples", name, samples.astype("<f4").tobytes(), (rate, 0)
    raise usage(
        f"{name}: {found}, expected float32 of one dimension, in −1 to 1",
        "16-bit integers: samples.astype('float32') / 32768; channels: samples.mean(axis=1)",
    )
