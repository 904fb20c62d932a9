"""What can go wrong."""

from __future__ import annotations

from typing import Optional


class Error(Exception):
    """Something failed. ``str`` has the message, and the hint on a line of its own."""

    kind: str
    """A stable word: ``usage``, ``prompt``, ``manifest``, ``artifact``, ``context``, ``graph``, ``runtime``,
    ``execute``, ``device_lost``, ``plugin``, ``panicked``, ``cancelled``, ``io``, ``internal`` or ``busy``."""
    message: str
    """What failed: the file, tensor or option, what was found and what was expected."""
    hint: Optional[str]
    """A likely fix."""
    code: Optional[int]
    """The number of a QNN library, where it failed."""

    def __init__(self, kind: str, message: str, hint: Optional[str] = None, code: Optional[int] = None) -> None:
        super().__init__(kind, message, hint, code)
        self.kind, self.message, self.hint, self.code = kind, message, hint, code

    def __str__(self) -> str:
        return self.message if self.hint is None else f"{self.message}\n  hint: {self.hint}"


class UsageError(Error, ValueError):
    """An option or a call makes no sense (kind ``usage``)."""


class PromptError(Error, ValueError):
    """A prompt cannot be used: empty, too long, with an image that is none (kind ``prompt``)."""


class BundleError(Error):
    """A bundle is damaged, or not for this machine (kinds ``manifest``, ``artifact``, ``context``, ``graph``)."""


class DeviceError(Error):
    """Libraries or device fail (kinds ``runtime``, ``execute``, ``device_lost``). After a lost device, the next call
    opens it again."""


class BusyError(Error):
    """The model is in use (kind ``busy``)."""


_CLASSES: dict[str, type[Error]] = {
    "usage": UsageError,
    "prompt": PromptError,
    **dict.fromkeys(("manifest", "artifact", "context", "graph"), BundleError),
    **dict.fromkeys(("runtime", "execute", "device_lost"), DeviceError),
    "busy": BusyError,
}


def make(kind: str, message: str, hint: Optional[str] = None, code: Optional[int] = None) -> Error:
    """The error of a kind."""
    return _CLASSES.get(kind, Error)(kind, message, hint, code)


def usage(message: str, hint: Optional[str] = None) -> UsageError:
    return UsageError("usage", message, hint)
