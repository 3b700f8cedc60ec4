"""What an operator runs beside its tensors: a custom operator takes strings, not callables, so it finds programs by name."""

from __future__ import annotations

import contextlib
import hashlib
from typing import Generic, TypeVar

import torch

P = TypeVar("P")
Autocast = tuple[str, torch.dtype]  # device type, and what is computed in


class Programs(Generic[P]):
    """Programs by the hash of what they do: equal ones share a name."""

    def __init__(self) -> None:
        self._by_name: dict[str, P] = {}

    def add(self, program: P, *key: object) -> str:
        """The name of a program; `key` says all that it does."""
        name = hashlib.sha256(repr(key).encode()).hexdigest()[:24]
        self._by_name[name] = program
        return name

    def __getitem__(self, name: str) -> P:
        return self._by_name[name]

    def __len__(self) -> int:
        return len(self._by_name)


def under(autocast: Autocast | None) -> contextlib.AbstractContextManager[object]:
    """The autocast state under which a model was compiled; a compiled graph runs outside it."""
    return contextlib.nullcontext() if autocast is None else torch.autocast(autocast[0], dtype=autocast[1])


__all__ = ["Autocast", "Programs", "under"]
