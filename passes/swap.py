"""Known functions of libraries get a second self, which is what Dynamo traces.

A row names a function and its translator (`translators`). `install` puts a wrapper in its place wherever a loaded module
holds the very function: it calls the function, and the translator only while Dynamo traces. The translator declines what it does
not know, and the function itself is traced.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import translators, translators_fla, translators_spelled

Function = Callable[..., Any]

# transformers declares these under a public name, and calls another library's function of that name where it is installed.
HUB: dict[str, Function] = {
    "chunk_gated_delta_rule": translators.gated_delta_rule,
    "fused_recurrent_gated_delta_rule": translators.gated_delta_rule,
    "chunk_kda": translators.gated_delta_rule,
    "fused_recurrent_kda": translators.gated_delta_rule,
    "mamba_chunk_scan_combined": translators.mamba_chunk_scan,
    "selective_scan_fn": translators.selective_scan,
    "mamba_split_conv1d_scan_combined": translators.shortcut,
    "mamba_inner_fn": translators.shortcut,
    "causal_conv1d_fn": translators.causal_conv1d,
}

# Functions and methods that stand in a model: module, and name within it.
SPELLED: dict[tuple[str, str], Function] = {
    ("transformers.models.minimax.modeling_minimax", "MiniMaxLightningAttention.forward"): translators_spelled.lightning,
    ("transformers.models.recurrent_gemma.modeling_recurrent_gemma", "RecurrentGemmaRglru.forward"): translators_spelled.rg_lru,
    ("transformers.models.rwkv.modeling_rwkv", "rwkv_linear_attention"): translators_spelled.rwkv4,
    ("transformers.models.xlstm.modeling_xlstm", "xLSTMBackend.forward"): translators_spelled.mlstm,
}


def install() -> None:
    """Swap what is loaded. Safe to call again."""
    found: dict[int, Function] = {}
    for function, make in _known():
        if id(function) not in found:
            found[id(function)] = make()
    for (name, path), translate in SPELLED.items():
        owner: Any = sys.modules.get(name)
        *classes, attribute = path.split(".")
        for inner in classes:
            owner = getattr(owner, inner, None)
        spelled = getattr(owner, attribute, None)
        if isinstance(spelled, types.FunctionType) and not hasattr(spelled, "_autosp"):
            setattr(owner, attribute, wrap(spelled, translate))
    if not found:
        return
    for module in list(sys.modules.values()):
        if not isinstance(module, types.ModuleType):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in found:
                setattr(module, name, found[id(value)])


def _known() -> Iterator[tuple[Function, Callable[[], Function]]]:
    """Functions of loaded libraries, and how to make the wrapper of each."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformers.models.") and ".modeling_" in name:
            for value in list(vars(module).values()):
                declared = _declared(value)
                if declared is not None and declared["func_name"] in HUB:
                    if declared["func_name"] == "causal_conv1d_fn" and not _calls_a_kernel(declared):
                        continue  # one convolution already
                    yield value, functools.partial(_wrap_declared, value, declared)
    for path, translate in translators_fla.FUNCTIONS.items():
        package, _, name = path.rpartition(".")
        function = getattr(sys.modules.get(package), name, None)
        if function is not None and not hasattr(function, "_autosp"):
            yield function, functools.partial(wrap, function, translate)


def _declared(value: object) -> dict[str, Any] | None:
    """What transformers' decorator closes over, if `value` is a function it has made."""
    if not isinstance(value, types.FunctionType) or value.__globals__.get("__name__") != "transformers.integrations.hub_kernels":
        return None
    names = value.__code__.co_freevars
    if not {"func_name", "implementation", "torch_function", "applicable_params"} <= set(names):
        return None
    return {name: cell.cell_contents for name, cell in zip(names, value.__closure__ or (), strict=True)}


def _wrap_declared(function: Function, declared: dict[str, Any]) -> Function:
    """Arguments that the implementation does not take are dropped, as the declaration does; a kernel gives its input's type.

    Libraries name the arguments that must be given differently, but in one order.
    """
    implementation = declared["implementation"]
    kernel, translate = _calls_a_kernel(declared), HUB[declared["func_name"]]
    accepted = frozenset(declared["applicable_params"])
    required = tuple(p.name for p in inspect.signature(implementation).parameters.values() if p.default is p.empty)
    required = tuple(name for name in required if name in accepted and name != "kwargs")

    def translated(**options: Any) -> Any:
        tensors = [options.pop(name) for name in required]
        made = translate(*tensors, **{name: x for name, x in options.items() if name in accepted})
        if not kernel or made is NotImplemented or made is None:
            return made
        kind = tensors[0].dtype
        return (made[0].to(kind), *made[1:]) if isinstance(made, tuple) else made.to(kind)

    return wrap(function, translated, implementation)


def _calls_a_kernel(declared: dict[str, Any]) -> bool:
    return declared["implementation"] is not declared["torch_function"]


def wrap(function: Function, translate: Function, signature: Function | None = None) -> Function:
    """`function`, but Dynamo sees `translate` with the same arguments, by their names, unless that gives NotImplemented."""
    parameters = inspect.signature(signature or function).parameters.values()
    names = tuple(p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD)

    # Attributes are not taken over: among them may be the mark that hides a function from Dynamo.
    @functools.wraps(function, updated=())
    def recognised(*args: Any, **kwargs: Any) -> Any:
        if not torch.compiler.is_dynamo_compiling():
            return function(*args, **kwargs)
        made = translate(**dict(zip(names, args, strict=False)), **kwargs)
        return function(*args, **kwargs) if made is NotImplemented else made

    recognised._autosp = function  # type: ignore[attr-defined]
    return recognised
