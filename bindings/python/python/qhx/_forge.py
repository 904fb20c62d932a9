"""Making bundles: the program ``qhx forge``, which lies in the wheel."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Optional, Union

from ._errors import Error, make


def program() -> Path:
    """The program ``qhx`` of this package."""
    name = "qhx.exe" if os.name == "nt" else "qhx"
    try:
        files = importlib.metadata.files("qhx") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == name and (found := Path(str(file.locate()))).is_file():
            return found.resolve()
    if on_path := shutil.which("qhx"):
        return Path(on_path)
    raise make("io", "the program qhx is not there", "install the package again: pip install --force-reinstall qhx")


def forge(
    checkpoint: Union[str, os.PathLike[str]],
    out: Union[str, os.PathLike[str]],
    *,
    target: Union[str, Sequence[str], None] = None,
    precision: Optional[str] = None,
    task: Optional[str] = None,
    max_ctx: Optional[int] = None,
    shards: Optional[int] = None,
    cpu_only: bool = False,
    portable: bool = False,
    overwrite: bool = False,
    arguments: Sequence[str] = (),
    progress: bool = False,
) -> Path:
    """Makes a bundle of a checkpoint, and returns its folder, ``out``.

    It runs the program ``qhx forge`` of this package. Compiling for the NPU takes gigabytes, uses Qualcomm's compiler,
    which may end the process that calls it, and goes on from what is finished when it is run again: that has no place
    in an interpreter. Ctrl-C ends it.

    Args:
        checkpoint: The folder of a Hugging Face checkpoint, or a GGUF file.
        out: Folder of the bundle.
        target: What it is compiled for: an architecture such as ``"v81"``, a chip, ``"this"``, or several.
        precision: Precision of the decoder's weights, such as ``"w8a16"``.
        task: ``"generate"`` or ``"embed"``.
        max_ctx: Positions of the context.
        shards: Number of contexts that the layers are spread over.
        cpu_only: Makes no context binaries, ``portable`` leaves them to ``qhx prepare`` on the device.
        overwrite: Replaces a bundle that is there already.
        arguments: Further arguments of ``qhx forge``, see ``qhx forge --help``.
        progress: Shows progress and notes on standard error.

    Raises:
        Error: As ``qhx forge`` fails. Of the kind ``internal`` where a check that was asked for found something.
    """
    command = [str(program()), "forge", os.fspath(checkpoint), "--out", os.fspath(out), "--json"]
    targets = [target] if isinstance(target, str) else list(target or ())
    options = {"target": ",".join(targets) or None, "precision": precision, "task": task, "max-ctx": max_ctx}
    for name, value in {**options, "shards": shards}.items():
        if value is not None:
            command += [f"--{name}", str(value)]
    flags = {"cpu-only": cpu_only, "portable": portable, "overwrite": overwrite}
    command += [f"--{name}" for name, value in flags.items() if value]
    command += arguments
    stderr = None if progress else subprocess.PIPE
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=stderr, encoding="utf-8", errors="replace"
    )
    try:
        output, said = process.communicate()
    except BaseException:
        # As Ctrl-C: it ends what it does, and leaves what is finished for another run.
        process.terminate()
        process.wait()
        raise
    if process.returncode != 0:
        raise _failure(output, said or "", process.returncode)
    return Path(out)


def _failure(output: str, said: str, code: int) -> Error:
    lines = output.splitlines()
    try:
        error = json.loads(lines[-1])["error"]
        return make(error["kind"], error["message"], error["hint"], error["code"])
    except (IndexError, KeyError, TypeError, ValueError):
        notes = said.strip().splitlines()
        return make("internal", notes[-1] if notes else f"qhx forge ended with code {code}")
