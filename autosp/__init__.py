"""autosp: an ordinary PyTorch model, trained on very long sequences across many devices.

    model = autosp.parallelize(model, mesh)

Names load when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
import pathlib
from typing import Any

_HOMES = {"parallelize": "parallelizer", "backend": "dynamo_backend", "use_mesh": "mesh"}  # no name is also a module's

# Installed, the sister folders lie inside this one; run from a checkout's root, they stand beside it.
if not (pathlib.Path(__file__).parent / "passes").exists():
    __path__.append(str(pathlib.Path(__file__).parent.parent))

__all__ = ["backend", "errors", "parallelize", "use_mesh"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
