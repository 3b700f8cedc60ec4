"""What MODEL names on the command line: a factory in a file or a package, or a transformers model type."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autosp.kernels.errors import AutospError
from autosp.reference import Inputs

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True)
class ModelSpec:
    """A model and its inputs, by name: picklable, and built alike on every rank.

    `seq_len` and `batch` apply to transformers model types; `dtype` None is the most exact one the family takes.
    """

    name: str
    seq_len: int = 96
    batch: int = 2
    dtype: str | None = None
    seed: int = 0

    @property
    def is_factory(self) -> bool:
        return ":" in self.name

    def __call__(self, batch_index: int = 0) -> tuple[nn.Module, Inputs]:
        """Module and inputs. The weights depend on the seed alone, the inputs also on `batch_index`.

        A factory that draws its inputs from a generator of its own gives every data-parallel group the same batch.
        """
        if not self.is_factory:
            from autosp import zoo

            dtype = DTYPES[self.dtype] if self.dtype else None
            return zoo.build(self.name, self.seq_len, self.batch, dtype, self.seed, self.seed + batch_index)
        module, inputs = self._made(self.seed)
        if batch_index:
            inputs = self._made(self.seed + batch_index)[1]
        dtype = DTYPES[self.dtype or "float64"]
        return module.to(dtype), _cast(inputs, dtype)

    def _made(self, seed: int) -> tuple[nn.Module, Inputs]:
        _seed_everything(seed)
        made = load(self.name)()
        if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module)):
            raise BadModel(f"{self.name} must return (module, inputs), it returned {_shape_of(made)}")
        module, inputs = made
        if not isinstance(inputs, Mapping | tuple):
            raise BadModel(f"{self.name} must return inputs as a dict or a tuple, it returned {type(inputs).__name__}")
        return module, inputs


def load(reference: str) -> Callable[[], Any]:
    """The object named `file.py:name` or `package.module:name`. Raises `BadModel` saying what is missing."""
    where, _, name = reference.rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found = getattr(module, name, None)
    if not callable(found):
        raise BadModel(f"{where} has no function {name!r}")
    factory: Callable[[], Any] = found
    return factory


def _from_file(path: Path) -> Any:
    path = path.resolve()
    name = f"autosp_model_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise BadModel(f"no such file: {path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look a module up by its name
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def _from_package(where: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        raise BadModel(f"cannot import {where}: {error}") from error


def _seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)


def _cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Floating-point tensors to `dtype`, everything else as it is."""

    def one(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    if isinstance(inputs, Mapping):
        return {name: one(x) for name, x in inputs.items()}
    return tuple(one(x) for x in inputs)


def _shape_of(made: Any) -> str:
    if isinstance(made, tuple):
        return "(" + ", ".join(type(x).__name__ for x in made) + ")"
    return type(made).__name__


def run_check(spec: ModelSpec, shape: dict[str, int], options: dict[str, Any], timeout: float) -> Any:
    """Check `spec` on a mesh of `shape`, gloo ranks of this machine: a `Report` whatever happens, within `timeout` seconds."""
    from autosp.check import Report, check_or_refuse
    from autosp.launch import RankFailed, run_ranks

    ranks = 1
    for size in shape.values():
        ranks *= size
    try:
        report = run_ranks(check_or_refuse, shape, spec, options, timeout=timeout)[0]
    except RankFailed as error:
        report = Report("refused", reason=str(error), ranks=ranks, mesh=",".join(f"{n}={s}" for n, s in shape.items()))
    return report if spec.is_factory else dataclasses.replace(report, seq_len=spec.seq_len)


class BadModel(AutospError):
    """MODEL does not name a factory that returns (module, inputs)."""
