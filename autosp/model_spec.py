"""What MODEL names on the command line: a factory in a file or a package, or a transformers model type."""

from __future__ import annotations

import dataclasses
import difflib
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
from torch._subclasses.fake_tensor import FakeTensorMode

from autosp.kernels.errors import AutospError
from autosp.reference import Inputs

DTYPES = {"float64": torch.float64, "float32": torch.float32}
REAL_DTYPES = DTYPES | {"bfloat16": torch.bfloat16, "float16": torch.float16}
CONFIG = "config.json"


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
        return made(self.name)


@dataclass(frozen=True)
class RealSpec:
    """A model of real size and one batch for it, as shapes alone: no weight and no token takes memory.

    name: a factory as for `ModelSpec`, whose inputs give the shapes; a directory with a transformers `config.json`; or a
    transformers model type, at the defaults of its configuration class. The last two become causal language models on
    `input_ids` and `labels`, [batch, seq_len]. dtype: of parameters and inputs that are floating-point numbers.

    A rotary model runs beyond its `max_position_embeddings`, with the frequencies its configuration gives. One that
    recomputes them from the positions of the batch (rope types "dynamic" and "longrope") branches on data, which capture
    refuses; a table of fewer positions than `seq_len` is a `BadModel`.
    """

    name: str
    seq_len: int = 8192
    batch: int = 1
    dtype: str = "bfloat16"

    @property
    def is_factory(self) -> bool:
        return ":" in self.name

    def __call__(self) -> tuple[nn.Module, Inputs]:
        """The module, in training mode, and inputs. Raises `BadModel` saying what is wrong with the name."""
        if self.dtype not in REAL_DTYPES:
            raise BadModel(f"dtype {self.dtype!r} is not one of {', '.join(REAL_DTYPES)}")
        dtype = REAL_DTYPES[self.dtype]
        if not self.is_factory:
            return self._language_model(dtype)
        module, inputs = self._made()
        _cast_weights(module, dtype)
        return module.train(), _cast(inputs, dtype)

    def _made(self) -> tuple[nn.Module, Inputs]:
        """What the factory gives, on fake tensors; a factory that reads its tensors' values needs real ones, and memory for them.

        Fake tensors say that they are on the CPU, so a module that makes tensors as it runs finds its own on the same
        device; of the meta device only its parameters and buffers would be.
        """
        try:
            with FakeTensorMode():
                return made(self.name)
        except BadModel:
            raise
        except Exception:
            return made(self.name)

    def _language_model(self, dtype: torch.dtype) -> tuple[nn.Module, Inputs]:
        from autosp import zoo

        config, auto = _config(self.name), zoo.library().AutoModelForCausalLM
        if type(config) not in auto._model_mapping:
            raise BadModel(
                f"{self.name}: {config.model_type} is no causal language model; name a factory that returns (module, inputs)"
            )
        config.get_text_config().use_cache = False
        spelling = zoo.FAMILY.get(config.model_type, {}).get("attn_implementation")
        with zoo.readable(), FakeTensorMode():
            try:
                module = auto.from_config(config, dtype=dtype, **({"attn_implementation": spelling} if spelling else {}))
            except Exception as error:
                raise BadModel(f"{self.name}: transformers does not build it: {error}") from error
            inputs = {name: torch.zeros(self.batch, self.seq_len, dtype=torch.long) for name in ("input_ids", "labels")}
        _refuse_short_table(self.name, module, config, self.seq_len)
        return module.train(), inputs


def _config(name: str) -> Any:
    """The configuration in a directory, or of a model type at its defaults."""
    from autosp import zoo

    path, library = Path(name), zoo.library()
    if path.name == CONFIG:
        path = path.parent
    if name in library.CONFIG_MAPPING and not (path / CONFIG).is_file():
        return library.CONFIG_MAPPING[name]()
    if not path.is_dir():
        near = difflib.get_close_matches(name, list(library.CONFIG_MAPPING.keys()), 3)
        raise BadModel(
            f"{name!r} is no directory and no model type of transformers {library.__version__}"
            f"{'; did you mean ' + ' or '.join(near) + '?' if near else ''}\n"
            f"fix: a model type such as llama, a directory with a {CONFIG}, or file.py:factory"
        )
    if not (path / CONFIG).is_file():
        raise BadModel(f"{path} has no {CONFIG}; fix: name the directory that has the model's transformers configuration")
    try:
        return library.AutoConfig.from_pretrained(path)
    except Exception as error:
        raise BadModel(f"{path / CONFIG} is no configuration that transformers reads: {error}") from error


def _refuse_short_table(name: str, module: Any, config: Any, seq_len: int) -> None:
    """A learned table of positions ends; rotary frequencies do not."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None) or seq_len
    words = module.get_input_embeddings()
    for where, inner in module.named_modules() if limit < seq_len else ():
        # (OPT's and BART's tables have two more rows than positions)
        if isinstance(inner, nn.Embedding) and inner is not words and 0 <= inner.num_embeddings - limit <= 2:
            raise BadModel(
                f"{name} has a table of {limit} positions ({where}), fewer than the {seq_len} of --seq-len; "
                f"fix: a directory whose {CONFIG} says max_position_embeddings: {seq_len}, or a shorter sequence"
            )


def _cast_weights(module: nn.Module, dtype: torch.dtype) -> None:
    """`module.to(dtype)`, which torch does not do with fake parameters; shared ones stay shared."""
    done: dict[torch.Tensor, torch.Tensor] = {}
    for inner in module.modules():
        for table in (inner._parameters, inner._buffers):
            for name, value in table.items():
                if value is None or not value.is_floating_point() or value.dtype == dtype:
                    continue
                if value not in done:
                    other = value.detach().to(dtype)
                    done[value] = nn.Parameter(other, value.requires_grad) if isinstance(value, nn.Parameter) else other
                table[name] = done[value]  # type: ignore[assignment]


def made(reference: str) -> tuple[nn.Module, Inputs]:
    """Module and inputs of a factory. Raises `BadModel` if it returns anything else."""
    found = load(reference)()
    if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[0], nn.Module)):
        raise BadModel(f"{reference} must return (module, inputs), it returned {_shape_of(found)}")
    module, inputs = found
    if not isinstance(inputs, Mapping | tuple):
        raise BadModel(f"{reference} must return inputs as a dict or a tuple, it returned {type(inputs).__name__}")
    return module, inputs


def load(reference: str) -> Callable[[], Any]:
    """The object named `file.py:name` or `package.module:name`. Raises `BadModel` saying what is missing."""
    where, _, name = reference.rpartition(":")
    module = _from_file(Path(where)) if where.endswith(".py") else _from_package(where)
    found = getattr(module, name, None)
    if not callable(found):
        raise BadModel(f"{where} has no function {name!r}; fix: name one that returns (module, inputs)")
    factory: Callable[[], Any] = found
    return factory


def _from_file(path: Path) -> Any:
    path = path.resolve()
    name = f"autosp_model_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise BadModel(f"no such file: {path}; fix: file.py:factory with the file's path from here")
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
        raise BadModel(
            f"cannot import {where}: {error}; fix: file.py:factory, or package.module:factory from where it is found"
        ) from error


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
