"""autosp: an ordinary PyTorch model, trained on very long sequences across many devices.

    model = autosp.parallelize(model, mesh)

Names load when they are first used, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOMES = {"parallelize": "parallelize", "backend": "backend", "use_mesh": "mesh"}
__all__ = ["backend", "errors", "parallelize", "use_mesh"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
        globals()[name] = value  # importing a module of the same name has put the module here
        return value
    if name == "errors":
        return importlib.import_module(".errors", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
