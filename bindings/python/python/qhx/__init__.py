"""Runs and makes QHexRT bundles: text, images, audio and vectors on the NPU, on its emulator and on the CPU.

    >>> import qhx
    >>> model = qhx.Model("qwen35/v81")
    >>> print(model.generate("The capital of France is", max_new_tokens=32))

``Model`` opens a bundle, ``forge`` makes one, and ``Error`` is what fails with a kind and a likely fix. Nothing is
printed, and no process is started but the program ``qhx`` by ``forge``.
"""

from ._errors import BundleError, BusyError, DeviceError, Error, PromptError, UsageError
from ._forge import forge, program
from ._media import Audio, Image
from ._model import Chunk, Generation, Model, Options, Stream, ToolCall, Transcript, Word
from ._qhx import __version__

__all__ = [
    "Audio",
    "BundleError",
    "BusyError",
    "Chunk",
    "DeviceError",
    "Error",
    "Generation",
    "Image",
    "Model",
    "Options",
    "PromptError",
    "Stream",
    "ToolCall",
    "Transcript",
    "UsageError",
    "Word",
    "__version__",
    "forge",
    "program",
]

for _name in __all__:
    if isinstance(_value := globals()[_name], type):
        _value.__module__ = "qhx"
