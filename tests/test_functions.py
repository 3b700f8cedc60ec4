"""A derivative that a user wrote is the one that is used, and on part of the sequence where that is right."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from conftest import FULL
from direct import Lowered
from models_functions import LOCAL, MODELS, WHOLE, Clipped, Reversed, Rounded
from torch import Tensor, fx, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, gradient_error, step

import autosp
from autosp.kernels import custom_function
from autosp.passes import functions
from autosp.passes.capture import CaptureError, capture
from pool import Pool

GATHERED = {"own_cumsum": "Cumulative", "unit_gradient": "UnitGradient", "own_summary": "Summary"}
NAMES = list(MODELS)


def lowered(mesh: DeviceMesh, names: Sequence[str], length: int) -> dict[str, tuple[float, Any]]:
    """By model: the largest relative error of its loss and gradients on this rank, and its plan."""
    found = {}
    for name in names:
        plain, inputs = MODELS[name](length, 2, torch.float64)
        module = copy.deepcopy(plain)
        run = Lowered(module, mesh, (None,))
        try:
            want, got = step(plain, inputs), step(run, inputs)  # type: ignore[arg-type]
        except Exception as reason:
            raise RuntimeError(f"{name}: {reason}") from reason
        found[name] = max(abs(got - want) / abs(want), gradient_error(plain, module)), run.plan
        torch._dynamo.reset()
    return found


@pytest.mark.parametrize(("ranks", "names"), [(r, NAMES if FULL else NAMES[(r - 1) // 2 :: 2]) for r in (1, 2, 3, 4)])
def test_own_derivatives_are_exact(pool: Pool, ranks: int, names: list[str]) -> None:
    everyone = pool.run(lowered, names, 37, on=ranks, timeout=280)
    errors = {name: max(found[name][0] for found in everyone) for name in names}
    assert {name: e for name, e in errors.items() if not e <= EXACT} == {}
    for name, (_, plan) in everyone[0].items():
        own = [f for f in plan.fallbacks if f.op.startswith("asp.custom_function")]
        assert name not in LOCAL or plan.fallbacks == (), name
        if name in GATHERED and ranks > 1:
            assert len(own) == 1 and own[0].bytes > 0, name
            assert own[0].reason.startswith(f"torch.autograd.Function {GATHERED[name]}: "), name
            assert "models_functions.py:" in own[0].source_line and f"{GATHERED[name]}.apply(" in own[0].source_line


def compiled(mesh: DeviceMesh, names: Sequence[str], compiler: str) -> dict[str, float]:
    errors = {}
    for name in names:
        plain, inputs = MODELS[name](25, 2, torch.float64)
        parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler=compiler)
        want, got = step(plain, inputs), step(parallel, inputs)
        errors[name] = max(abs(got - want) / abs(want), gradient_error(plain, parallel))
        torch._dynamo.reset()
    return errors


COMPILED = {
    "aot_eager": ("own_in_regions", "two_results", "added_loss", "quantised_weights", "hooked"),
    "inductor": ("two_results",),
}


@pytest.mark.parametrize("compiler", COMPILED)
def test_own_derivatives_survive_the_partitioner(pool: Pool, compiler: str) -> None:
    names = NAMES if FULL else list(COMPILED[compiler])
    for errors in pool.run(compiled, names, compiler, on=2, timeout=280):
        assert {name: e for name, e in errors.items() if not e <= EXACT} == {}


def test_every_model_is_of_one_kind() -> None:
    assert not LOCAL.keys() & WHOLE.keys() and GATHERED.keys() < WHOLE.keys()


# Refused ------------------------------------------------------------------------------------------


class Noisy(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x + torch.rand_like(x)).floor()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Doubling(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class Undefined(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return x * 1, x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor | None) -> Tensor:
        return grad * 3 if other is None else grad * 5 + other


def two_hooks(x: Tensor) -> Tensor:
    y = x * 1.5
    y.register_hook(lambda grad: grad * 3)
    y.register_hook(lambda grad: grad.clamp(-1, 1))
    return y


def hooked_late(x: Tensor) -> Tensor:
    y = x * 1.5
    z = y.sin()
    y.register_hook(lambda grad: grad * 3)
    return y + z


def changed_after(x: Tensor) -> Tensor:
    y = x * 1.5
    y.register_hook(lambda grad: grad * 3)
    return y.mul_(2)


def in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: Rounded.apply(x), lambda x: x.sin(), (x,))


def noise_in_a_branch(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: x + torch.rand_like(x), lambda x: x.sin(), (x,))


REFUSED: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "noise": (lambda x: Noisy.apply(x), "Function Noisy gives cannot be kept: it draws random numbers .aten.rand_like"),
    "in place": (lambda x: Doubling.apply(x * 1), "Function Doubling gives cannot be kept: it changes an argument in place"),
    "undefined": (lambda x: Undefined.apply(x)[0], "Function Undefined gives cannot be kept: it asks for None"),
    "two hooks": (two_hooks, "a hook gives cannot be kept: the tensor has one already"),
    "branch": (in_a_branch, "Function Rounded gives cannot be kept: it is called inside cond"),
    "noisy branch": (noise_in_a_branch, "cond draws random numbers inside .aten.rand_like"),
}
if hasattr(torch.ops.higher_order, functions.HOOK):  # torch 2.11 hooks a tensor where it is made, and lets no one change it
    REFUSED["late hook"] = (hooked_late, "the tensor was used before it was hooked")
    REFUSED["changed"] = (changed_after, "it returns its argument, which is changed in place later")


class Tokens(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]):
        super().__init__()
        self.function, self.embed = function, nn.Embedding(11, 8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.function(self.embed(ids)).square().mean()


IDS = torch.arange(12).view(2, 6) % 11


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_with_its_line(name: str) -> None:
    function, message = REFUSED[name]
    with pytest.raises(CaptureError, match=message) as refused:
        autosp.parallelize(Tokens(function), compiler="aot_eager")(IDS)
    text = str(refused.value)
    assert "test_functions.py:" in text and "\nFix: " in text


def test_undefined_cotangents_are_no_matter_where_all_are_defined() -> None:
    gradients = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = Tokens(lambda x: sum(Undefined.apply(x))).double()  # type: ignore[arg-type, return-value]
        run = autosp.parallelize(model, compiler="aot_eager") if parallel else model
        run(IDS).backward()
        gradients.append(model.embed.weight.grad)
    torch.testing.assert_close(*gradients)


# Details ------------------------------------------------------------------------------------------


def keys(function: Callable[[Tensor], Tensor]) -> list[str]:
    """What the functions of a model are called in its graph."""
    found: list[str] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Any:
        nodes = capture(gm, example_inputs).module.graph.find_nodes(
            op="call_function", target=torch.ops.asp.custom_function.default
        )
        found.extend(n.args[1] for n in nodes)
        return gm

    torch._dynamo.reset()
    torch.compile(Tokens(function), backend=backend, fullgraph=True, dynamic=False)(IDS)
    return found


def test_names_tell_functions_apart_and_are_the_same_each_time() -> None:
    some = keys(lambda x: Reversed.apply(Clipped.apply(x, 0.1), 0.3, {"twice": 2}))
    assert some == keys(lambda x: Reversed.apply(Clipped.apply(x, 0.1), 0.3, {"twice": 2}))
    other = keys(lambda x: Reversed.apply(Clipped.apply(x, 0.1), 0.4, {"twice": 2}))
    wider = keys(lambda x: Clipped.apply(torch.cat([x, x], 1), 0.1))
    assert len({*some, *other, *wider}) == 4 and some[0] == other[0]


def test_the_operator_by_itself_is_the_forward() -> None:
    (key,) = keys(lambda x: Rounded.apply(x))
    x = torch.randn(2, 6, 8, requires_grad=True)
    (want,), (got,) = custom_function.call([x], key), torch.ops.asp.custom_function([x], key)
    torch.testing.assert_close(got, Rounded.apply(x))
    torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (want, Rounded.apply(x))))


class Cast(Function):
    """A product in bfloat16 under autocast, whose backward casts as its forward did."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x.mT

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return (3 * grad) @ x


def cast(x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return Cast.apply(x[0]).float()


def test_autocast_holds_inside() -> None:
    gradients = []
    for parallel in (False, True):
        torch.manual_seed(0)
        model = Tokens(cast)
        run = autosp.parallelize(model, compiler="aot_eager") if parallel else model
        run(IDS).backward()
        gradients.append(model.embed.weight.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0)
