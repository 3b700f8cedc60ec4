"""A user's `torch.autograd.Function`, or a hook on a tensor: a forward whose derivative is a function of its own.

A captured graph holds it as one node, `asp::custom_function`, with both functions under a key. Local graphs call `call`, which
a compiler sees through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx


@dataclass(frozen=True)
class Bodies:
    """`forward(*args) -> (*results, *saved)` and `backward(*cotangents, *saved) -> cotangents of args`, as ATen graphs.

    Backward takes cotangents of those results that are not `fixed`, and gives those of the arguments that `given` is true of.
    `like` are the results of whole arguments, as fakes; `name` is what a user calls the function.
    """

    name: str
    forward: fx.GraphModule
    backward: fx.GraphModule
    like: tuple[Tensor, ...]
    fixed: tuple[int, ...]
    given: tuple[bool, ...]

    @property
    def results(self) -> int:
        return len(self.like)

    @property
    def text(self) -> str:
        """Everything that says what the two functions compute, but for the values of their constants."""
        return repr((self.forward.code, self.backward.code, self.results, self.fixed, self.given))


_BODIES: dict[str, Bodies] = {}  # a custom op takes strings, not functions


def register(key: str, bodies: Bodies) -> None:
    """Keep both functions under the name that graphs carry."""
    _BODIES[key] = bodies


def bodies(key: str) -> Bodies:
    return _BODIES[key]


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, key: str, *args: Tensor) -> tuple[Tensor, ...]:
        ctx.key, found = key, _BODIES[key]
        values = found.forward(*args)
        ctx.device = values[0].device.type
        ctx.save_for_backward(*values[found.results :])
        results = _distinct(values[: found.results], args)
        ctx.mark_non_differentiable(*[results[i] for i in found.fixed])
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        found = _BODIES[ctx.key]
        taken = [g for i, g in enumerate(cotangents) if i not in found.fixed]
        # An eager backward does not run under the autocast of its forward.
        with torch.autocast(ctx.device, enabled=False):
            made = iter(found.backward(*taken, *ctx.saved_tensors))
        return None, *(next(made) if given else None for given in found.given)


def _distinct(results: Sequence[Tensor], args: Sequence[Tensor]) -> list[Tensor]:
    """Autograd gives each result one function: what is an argument, or a result already, becomes a view of it."""
    distinct: list[Tensor] = []
    for x in results:
        distinct.append(x.view_as(x) if any(x is other for other in [*args, *distinct]) else x)
    return distinct


def call(args: Sequence[Tensor], key: str) -> tuple[Tensor, ...]:
    """The results on `args`, differentiated by the function's own backward."""
    return _Function.apply(key, *args)


@torch.library.custom_op("asp::custom_function", mutates_args=())
def _op(args: list[Tensor], key: str) -> list[Tensor]:
    """What captured graphs hold; the rule replaces it by `call`."""
    found = _BODIES[key]
    values = found.forward(*args)[: found.results]
    return [x.to(like.dtype).clone(memory_format=torch.contiguous_format) for x, like in zip(values, found.like, strict=True)]


@_op.register_fake
def _(args: list[Tensor], key: str) -> list[Tensor]:
    # Not by running the forward: an operator's own code does not see the autocast state around it.
    return [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in _BODIES[key].like]
