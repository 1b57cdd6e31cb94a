"""The file of a checkpoint: written in one piece, and read only if it is what was written."""

from __future__ import annotations

import os
import pickle
import re
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import torch
from pyro.distributions import constraints

FORMAT = "pyro_mcvae checkpoint"


VERSION = 1


# By name: which class each part is of (``kinds``), their states (``parts``), the parameter store's
# (``store``), the names in it of modules that number themselves (``names``), what each rank has for
# itself (``ranks``: its generators and parts), and what the user adds (``extra``).
Content: TypeAlias = dict[str, Any]
_KEYS = {"format", "version", "kinds", "parts", "store", "names", "ranks", "extra"}


def write_content(path: Path, content: Content) -> None:
    """Write a file, in the place of an older one at once."""
    # Beside it, since only within one file system a file takes another's place at once.
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    # True checksums, whatever PyTorch has been told.
    get, set_ = (getattr(torch.serialization, f"{n}_crc32_options", None) for n in ("get", "set"))
    computes = get() if get else True
    try:
        if set_:
            set_(True)
        with partial.open("xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
        if set_:
            set_(computes)


def read_content(path: Path, weights_only: bool) -> Content:
    """
    What a file holds.

    :raises ValueError: for a file that is damaged, or no checkpoint of this version.
    """
    _check_bits(path)
    try:
        with torch.serialization.safe_globals(_constraints()):
            content = torch.load(path, map_location="cpu", weights_only=weights_only)
    except FileNotFoundError:
        raise
    except pickle.UnpicklingError as error:
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is truncated, or no checkpoint: {error}") from error
        culprit = re.search(r"(?:GLOBAL|class|type) ([\w.]*\w)", str(error))
        raise ValueError(
            f"{path} holds more than tensors and plain values"
            f"{f' ({culprit[1]})' if culprit else ''}: pass weights_only=False if you trust it"
        ) from error
    except Exception as error:
        raise ValueError(f"{path} is truncated, or no checkpoint: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        keys = f" of {sorted(map(str, content))[:5]}" if isinstance(content, dict) else ""
        kind = type(content).__name__
        raise ValueError(f"{path} was not written by save_checkpoint: it is a {kind}{keys}")
    if content["version"] != VERSION:
        raise ValueError(
            f"{path} has version {content['version']} of the checkpoint format, and this package "
            f"reads version {VERSION}"
        )
    if content.keys() != _KEYS:
        raise ValueError(f"{path} is damaged: it has only {sorted(map(str, content))}")
    return content


def _check_bits(path: Path) -> None:
    """
    Compare the file with its checksums, which PyTorch writes and does not read.

    :raises ValueError: naming the record that differs.
    """
    if not zipfile.is_zipfile(path):
        return  # loading says why not
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
    except Exception as error:  # a flipped bit can ask for anything: a password, a compression
        raise ValueError(f"{path} is damaged: {error}") from error
    if damaged is not None:
        raise ValueError(f"{path} is damaged: its record '{damaged}' is not what was written")


def _constraints() -> list[Callable[..., object] | tuple[Callable[..., object], str]]:
    """Constraints are the only objects in a parameter store that are not tensors."""
    modules = torch.distributions.constraints, constraints
    classes = {c for m in modules for c in vars(m).values() if isinstance(c, type)}
    return [c for c in classes if issubclass(c, torch.distributions.constraints.Constraint)]
