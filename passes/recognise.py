"""Functions recognised before Dynamo traces them, so that they stay whole.

Recurrences and convolutions of known libraries are swapped one by one (`swap`). Of its mixture-of-experts forwards
transformers keeps a public registry: while Dynamo traces, the registered function is one call of the custom op
`asp::token_local`. Our operators also run and differentiate by themselves, so that a graph that some other compiler takes is
right too. Outside tracing nothing changes.
"""

from __future__ import annotations

import gc
import itertools
import sys
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..kernels import token_local
from . import swap

_WRAPPED: set[Callable[..., Any]] = set()
_count = itertools.count()


def install() -> None:
    """Wrap what is loaded of the libraries known. Safe to call again."""
    swap.install()
    moe = sys.modules.get("transformers.integrations.moe")
    if moe is None:
        return
    for name in list(moe.ALL_EXPERTS_FUNCTIONS.valid_keys()):
        function = moe.ALL_EXPERTS_FUNCTIONS[name]
        if name in ("grouped_mm", "batched_mm") and function not in _WRAPPED:
            wrapped = _wrap(function)
            _WRAPPED.add(wrapped)
            moe.ALL_EXPERTS_FUNCTIONS.register(name, wrapped)


def prepare(target: object) -> None:
    """What transformers would do at a model's first call under a lock, which Dynamo cannot trace: install output hooks."""
    hooks = sys.modules.get("transformers.utils.output_capturing")
    module = getattr(target, "__self__", target)
    if hooks is None or not isinstance(module, torch.nn.Module):
        return
    for inner in module.modules():
        if _defined_in(type(inner).forward, hooks.__name__):  # where transformers itself installs them, and nowhere else
            hooks.maybe_install_capturing_hooks(inner)


def _defined_in(function: Any, module: str) -> bool:
    """Some function of a stack of decorators was defined in `module`."""
    while function is not None:
        if getattr(function, "__globals__", {}).get("__name__") == module:
            return True
        function = getattr(function, "__wrapped__", None)
    return False


def _wrap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def experts(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if not torch.compiler.is_dynamo_compiling():
            return function(self, hidden_states, top_k_index, top_k_weights)
        names = _parameter_names(id(self))
        key = _key_of(id(self), function)
        weights = [getattr(self, name) for name in names]
        return torch.ops.asp.token_local([hidden_states, top_k_index, top_k_weights], weights, key)

    return experts


# To functions of constants torch 2.11 hands no modules: they are named by their addresses.
_modules: weakref.WeakValueDictionary[int, torch.nn.Module] = weakref.WeakValueDictionary()


def _module(address: int) -> torch.nn.Module:
    if address not in _modules:
        _modules.update({id(x): x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)})
    return _modules[address]


@torch.compiler.assume_constant_result
def _parameter_names(address: int) -> list[str]:
    return [name for name, _ in _module(address).named_parameters(recurse=False)]


@torch.compiler.assume_constant_result
def _key_of(address: int, function: Callable[..., Tensor]) -> str:
    """Register `function` on a module, with its parameters as arguments, and name it."""
    module = _module(address)
    names = [name for name, _ in module.named_parameters(recurse=False)]
    held = weakref.ref(module)

    def call(hidden: Tensor, index: Tensor, scores: Tensor, *weights: Tensor) -> Tensor:
        module = held()
        assert module is not None
        return function(_Bound(module, dict(zip(names, weights, strict=True))), hidden, index, scores)

    key = f"{type(module).__name__}.{next(_count)}"
    token_local.register(key, call)
    return key


class _Bound:
    """An expert module seen with other tensors as its parameters; methods are bound to this view."""

    def __init__(self, module: torch.nn.Module, parameters: dict[str, Tensor]) -> None:
        self._module, self._parameters = module, parameters

    def __getattr__(self, name: str) -> Any:
        if name in self._parameters:
            return self._parameters[name]
        value = getattr(self._module, name)
        if isinstance(value, types.MethodType) and value.__self__ is self._module:
            return types.MethodType(value.__func__, self)
        return value
