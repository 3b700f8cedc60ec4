"""One line: `model = autosp.parallelize(model, mesh)`."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch.distributed.device_mesh import DeviceMesh

from . import fsdp
from .cost_model.errors import PlanningError
from .cost_model.plan import Plan
from .dynamo_backend import Backend
from .kernels.errors import AutospError
from .mesh import resolve
from .passes import associative, functions, recognise
from .passes.capture import CaptureError
from .passes.pipeline import Settings
from .planning import Planning, room
from .zero import ShardError, Zero3


def parallelize(
    target: Any = None,
    mesh: DeviceMesh | None = None,
    *,
    compiler: str = "inductor",
    strategy: str | None = None,
    outputs: str = "local",
    grad_sync: str = "autosp",
    seq_dim: int | Mapping[str, int] = 1,
    check_batch: bool = True,
    plan: Plan | str | Path | None = None,
    hardware: str | Path | None = None,
    memory: str | float = "auto",
    zero: int | None = None,
    tile: str | int = "auto",
) -> Any:
    """Make a model, a class of models or a function run sequence-parallel; call it exactly as before.

    Every rank of an `sp` group calls it with the same global batch. `.loss` and `.grad` are those of the single-device
    run. After the first call, `target.autosp_plan` says what was chosen and why.

    mesh: DeviceMesh with an axis `sp` and optionally `dp` before it; default: at the first call, that of
        `autosp.use_mesh`, else one axis over the default process group.
    compiler: "inductor", or "aot_eager" (no code generation: quick to start, slower to run).
    strategy: None to let autosp choose for each attention, or one for all that it can apply to: "all-to-all", "gather-kv",
        "ring" or "ring-a2a" (both hold the sequence in head-tail order), "balanced-ring", "halo"; for linear attention
        "all-scan", "log-step", "two-level", "gather-states", "all-to-all".
    outputs: "local" leaves outputs that carry the sequence as each rank's own part (the plan says which, and in which layout),
        "gather" returns them whole, in order, on every rank, "loss" returns scalars only: others are None, and logits need not
        exist.
    grad_sync: "autosp" sums parameter gradients over sp and averages them over dp; "external" leaves averaging over
        all ranks to the user's DDP, or to FSDP2 (`fully_shard`) around the whole model.
    seq_dim: hint where inputs carry the sequence: a dimension, or {argument name: dimension}.
    check_batch: compare the batch across ranks at every step (one small all-gather).
    plan: what `autosp plan` decided, or the file it wrote; the model must be the one it is for.
    hardware: the machine to plan for, by name or as a file of `autosp calibrate`; default: what it runs on.
    memory: what backward finds of each layer. "auto": whatever is fastest in the memory that a device has; bytes, or "40GB": in
        so much of it. For every layer alike, "none": everything, nothing is computed again; "attention": its input and its
        attention's output, so that backward repeats neither attention nor an exchange; "qkv": what attention read too, as it is
        before heads are exchanged, so that backward repeats no projection, but that exchange; "full": its input alone;
        "offload-qkv", "offload-attention" and "offload": these three, in the host's memory.
    zero: None, or 3: parameters become DTensors at once, of which each rank of the mesh (dp x sp) holds a part; they are gathered
        a layer at a time, forward and again backward, and gradients come in parts. Build the optimizer after this call. For
        modules only; MeshError without a process group, ShardError for a parameter that cannot be split, DisagreementError
        where ranks start from different weights, all at once.
    tile: which losses and feed-forward blocks are computed a tile of positions at a time, forward and backward, so that logits
        and inner activations never exist whole. "auto": losses of more than 2^27 logits on a rank, in tiles of so many, and the
        feed-forward blocks of those layers for which the plan says so, as memory asks; a number: all, in tiles of so many
        positions; "none": nothing.

    Raises, at the first call: CaptureError for a graph break, SequenceError for a sequence shorter than the ranks,
    MeshError for a mesh without an sp axis, PlanError for a plan of another model, HardwareError for an unknown machine,
    WrappingError for `fully_shard` around parts of the model; at
    any call DisagreementError when ranks disagree. StrategyError and AmountError at once for unknown options.
    """
    settings = Settings(strategy, outputs, seq_dim, compiler, grad_sync, zero, tile)
    planning = Planning(hardware, plan, *room(memory))
    if zero and not isinstance(target, torch.nn.Module):
        raise ShardError("zero=3 splits the parameters of one module; fix: autosp.parallelize(module, mesh, zero=3)")

    def new_backend() -> Backend:
        split = Zero3(target, world := resolve(mesh, grad_sync)) if zero else None
        return Backend(world.mesh if split else mesh, settings, check_batch, planning, split)

    if target is None:
        return lambda t: _wrap(t, new_backend)
    return _wrap(target, new_backend)


def _wrap(target: Any, new_backend: Callable[[], Backend]) -> Any:
    if isinstance(target, type) and issubclass(target, torch.nn.Module):
        return _wrap_class(target, new_backend)
    if isinstance(target, torch.nn.Module):
        runner = Runner(target._call_impl, new_backend())
        runner.backend.on_plan = functools.partial(_set_plan, target)
        # What `Module.compile()` sets: calling the module runs this instead, and nothing else about it changes
        # (its class, state_dict keys and pickle are the plain module's).
        target._compiled_call_impl = runner
        return target
    if callable(target):
        function = Runner(target, new_backend())
        functools.update_wrapper(function, target)
        function.backend.on_plan = functools.partial(_set_plan, function)
        return function
    raise AutospError(f"autosp.parallelize takes a module, a class of modules or a function, not {type(target).__name__}")


def _wrap_class(cls: Any, new_backend: Callable[[], Backend]) -> Any:
    """Instances run in parallel however they come to be: built, copied or loaded."""

    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.nn.Module.__call__(self, *args, **kwargs)
        if self._compiled_call_impl is None:
            _wrap(self, new_backend)
        return torch.nn.Module.__call__(self, *args, **kwargs)

    cls.__call__ = call  # type: ignore[method-assign]
    return cls


def _set_plan(target: Any, plan: Any) -> None:
    object.__setattr__(target, "autosp_plan", plan)


class Runner:
    """The compiled call, with errors that speak of the user's model instead of the compiler."""

    def __init__(self, function: Callable[..., Any], backend: Backend) -> None:
        self.backend, self._function = backend, function
        self._module: Any = getattr(function, "__self__", None)
        self._around: bool | None = None  # FSDP is around the module; None before the first call
        self._compiled = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._around != fsdp.is_around(self._module):
            self._prepare()
        if not self._around:
            return self._run(*args, **kwargs)
        with fsdp.forward_replaced(self._module, self._run):
            return self._function(*args, **kwargs)

    def _prepare(self) -> None:
        function, module = self._function, self._module
        if isinstance(module, torch.nn.Module):
            fsdp.refuse_inside(module)
        if around := fsdp.is_around(module):
            function = module.forward
            if self.backend.settings.grad_sync == "external":
                fsdp.refuse_part_of_the_ranks(module, self.backend.world().spread.world)
        recognise.install()
        recognise.prepare(function)
        self._compiled = torch.compile(function, backend=self.backend, fullgraph=True, dynamic=False)
        self._around = around

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        self.backend.answered = False
        try:
            with tracing():
                if self.backend.zero is None:
                    return self._compiled(*args, **kwargs)
                with self.backend.zero.standing_in():
                    return self.backend.zero.returned(self._compiled(*args, **kwargs))
        except Exception as e:
            if not self.backend.answered:  # it never came to the step: the model did not trace, or raised itself
                self.backend.announce_failure()
            if isinstance(e, torch._dynamo.exc.BackendCompilerFailed) and isinstance(
                e.inner_exception, AutospError | PlanningError
            ):
                raise e.inner_exception from None
            if isinstance(e, torch._dynamo.exc.Unsupported | torch._dynamo.exc.UserError):
                raise CaptureError(_explain(e)) from None
            raise


# Each sequence length is a graph of its own; DDP around the model must not split that graph at its buckets; Python floats
# are constants of the graph, since as inputs they make Dynamo compile everything twice.
_DYNAMO = {"recompile_limit": 64, "optimize_ddp": False, "specialize_float": True}


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Dynamo's settings while a model is called: in force when it traces, no effect when it has."""
    with torch._dynamo.config.patch({**_DYNAMO, _IGNORED: _quiet()}), associative.kept(), functions.marked():
        yield


# torch 2.11 and 2.12 know the setting by its older name.
_IGNORED = "ignore_logging_functions" if hasattr(torch._dynamo.config, "ignore_logging_functions") else "ignore_logger_methods"


class _Functions(str):
    """Functions that JSON writes as a word: torch 2.11 writes this setting to a log, and reports an error if it cannot."""

    functions: frozenset[Callable[..., Any]] = frozenset()

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions


def _quiet() -> _Functions:
    """Logging calls that models make in forward, which would break the graph."""
    quiet = set(getattr(torch._dynamo.config, _IGNORED))
    quiet |= {getattr(logging.Logger, name) for name in ("debug", "info", "warning", "error")}
    for name in ("warning_once", "warning_advice", "info_once"):
        method = getattr(logging.Logger, name, None)  # transformers adds these to the standard logger
        if method is not None:
            quiet.add(method)
    found = _Functions("functions that log")
    found.functions = frozenset(quiet)
    return found


def _explain(error: Exception) -> str:
    return (
        f"the model does not trace into one graph, so it cannot run sequence-parallel as a whole.\n{error}\n"
        "Fix: rewrite the line above so that it does not depend on values, or parallelize the part of the model that traces."
    )
