"""Linear attention on a GPU, for `gpu_check.py`: is every kind right, and how fast beside flash-linear-attention's functions?"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autosp.kernels import linear
from autosp.kernels.all_scan import ALONE

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-4}  # root mean square error ÷ that of the value
QUANTITIES = ("out", "state", "dq", "dk", "dv")


@dataclass(frozen=True)
class Kind:
    """One linear attention: 2 x 4 heads over 300 tokens for the check, 1 x 16 over 8192 for the timing."""

    decay: str = ""  # scalar, vector
    remove: bool = False
    key_size: int = 128
    value_size: int = 128
    groups: int = 1
    documents: bool = False
    exclusive: bool = False
    dtype: torch.dtype = torch.bfloat16

    def __str__(self) -> str:
        options = (
            [f"{self.decay} decay"] * bool(self.decay) + ["delta"] * self.remove + [f"{self.groups} groups"] * (self.groups > 1)
        )
        options += [name for name in ("documents", "exclusive") if getattr(self, name)]
        return " ".join([f"{self.key_size}x{self.value_size}", *(options or ["plain"]), str(self.dtype).removeprefix("torch.")])


KINDS = (
    *[Kind(decay, remove) for decay in ("", "scalar", "vector") for remove in (False, True)],
    *[Kind(decay, remove, 96, 80, 2, True, not remove) for decay in ("scalar", "vector") for remove in (False, True)],
    *[Kind(decay, True, 64, 64, dtype=torch.float32) for decay in ("scalar", "vector")],
    Kind("scalar", False, 256, 64, 4),
)


def operands(kind: Kind, batch: int, length: int, heads: int, device: str, seed: int) -> list[Tensor | None]:
    """q, k, v, decay, remove, starts, initial."""
    draw = torch.Generator(device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, device=device, generator=draw)

    few, size = heads // kind.groups, (batch, length, heads)
    q, k, v = normal(batch, length, few, kind.key_size), normal(batch, length, few, kind.key_size), normal(*size, kind.value_size)
    k = torch.nn.functional.normalize(k, dim=-1)
    gates = {"": None, "scalar": size, "vector": (*size, kind.key_size)}[kind.decay]
    decay = None if gates is None else -torch.rand(gates, device=device, generator=draw) / 4
    remove = torch.nn.functional.normalize(normal(*size, kind.key_size), dim=-1) if kind.remove else None
    starts = torch.rand(batch, length, device=device, generator=draw) < 0.02 if kind.documents else None
    given = [q, k, v, decay, remove]
    return [*[x if x is None else x.to(kind.dtype) for x in given], starts, normal(batch, heads, kind.key_size, kind.value_size)]


def computed(kind: Kind, xs: list[Tensor | None], grad: Tensor) -> list[Tensor]:
    """Out, the last state, and gradients of what has one."""
    leaves = [x if x is None or x.dtype == torch.bool else x.detach().requires_grad_() for x in xs]
    wanted = [x for x in leaves if x is not None and x.requires_grad]
    out, end = linear.LinearAttention.apply(*leaves, None, kind.key_size**-0.5, kind.exclusive, ALONE, True)
    return [out.detach(), end.detach(), *torch.autograd.grad([out, end], wanted, [grad.to(out.dtype), torch.ones_like(end)])]


def check(kind: Kind, device: str, seed: int) -> list[tuple[str, float]]:
    """(quantity, error) beside the same in float64 on the host."""
    xs = operands(kind, 2, 300, 4, device, seed)
    grad = torch.randn(xs[2].shape, device=device, generator=torch.Generator(device).manual_seed(seed))  # type: ignore[union-attr]
    exact = [x if x is None or x.dtype == torch.bool else x.cpu().double() for x in xs]
    exact[5] = None if xs[5] is None else xs[5].cpu()
    grad = grad.to(kind.dtype)
    pairs = zip(computed(kind, xs, grad), computed(kind, exact, grad.cpu().double()), strict=True)
    found = [float((a.cpu().double() - b).square().mean().sqrt() / b.square().mean().sqrt().clamp(min=1e-30)) for a, b in pairs]
    given = ["ddecay"] * bool(kind.decay) + ["dremove"] * kind.remove + ["dinitial"]
    return list(zip([*QUANTITIES, *given], found, strict=True))


def checked(device: str, seed: int) -> Iterator[tuple[list[str], bool]]:
    """A row of the table for each kind, and whether it is right."""
    for i, kind in enumerate(KINDS):
        try:
            found = check(kind, device, seed + i)
        except Exception as e:  # a finding, and the others are still of interest
            yield [str(kind), str(seed + i), f"{type(e).__name__}: {str(e).strip().splitlines()[0][:100]}", "red"], False
            continue
        good = all(error <= LIMITS[kind.dtype] for _, error in found)
        yield [str(kind), str(seed + i), "  ".join(f"{n} {e:.1e}" for n, e in found), "ok" if good else "red"], good


# Speed ----------------------------------------------------------------------------------------------

Call = Callable[[], object]
TIMED = {
    "chunk_simple_gla": Kind("scalar"),
    "chunk_gla": Kind("vector"),
    "chunk_gated_delta_rule": Kind("scalar", True),
    "chunk_kda": Kind("vector", True),
}
MODULES = {"chunk_simple_gla": "simple_gla", "chunk_gla": "gla", "chunk_gated_delta_rule": "gated_delta_rule", "chunk_kda": "kda"}


def theirs(name: str, xs: list[Tensor | None], grad: Tensor) -> Call:
    """Forward and backward of a function of flash-linear-attention on the same inputs, with β = 1 for a delta rule."""
    import importlib

    function: Any = getattr(importlib.import_module(f"fla.ops.{MODULES[name]}"), name)
    q, k, v, g = (x.detach().requires_grad_() for x in xs[:4])  # type: ignore[union-attr]
    beta = torch.ones_like(v[..., 0])
    options = {"beta": beta} if "delta" in name or "kda" in name else {}

    def step() -> object:
        out = function(q, k, v, g=g, **options)[0]
        return torch.autograd.grad(out, (q, k, v, g), grad)

    return step


def timings(interleaved: Callable[[dict[str, Call]], dict[str, list[float]]]) -> tuple[list[list[str]], list[str]]:
    """Milliseconds of forward and backward, and why a library is missing."""
    rows, notes = [], []
    for name, kind in TIMED.items():
        xs = [*operands(kind, 1, 8192, 16, "cuda", 0)[:5], None, None]
        if kind.remove:  # what theirs removes: the state's prediction for the decayed key
            decay = xs[3].float().exp()  # type: ignore[union-attr]
            xs[4] = (xs[1].float() * (decay if decay.dim() == 4 else decay[..., None])).to(kind.dtype)  # type: ignore[union-attr]
        grad = torch.randn_like(xs[2])  # type: ignore[arg-type]
        leaves = [x if x is None else x.detach().requires_grad_() for x in xs]

        def ours(kind: Kind = kind, leaves: list[Tensor | None] = leaves, grad: Tensor = grad) -> object:
            out, _ = linear.LinearAttention.apply(*leaves, None, kind.key_size**-0.5, False, ALONE, False)
            return torch.autograd.grad(out, [x for x in leaves if x is not None], grad)

        calls: dict[str, Call] = {"ours": ours}
        try:
            calls["theirs"] = theirs(name, xs, grad)
            calls["theirs"]()
        except Exception as e:
            calls.pop("theirs", None)
            notes.append(f"{name} is not timed: {type(e).__name__}: {str(e).strip().splitlines()[0][:120]}")
        samples = interleaved(calls)
        middle = {n: statistics.median(each) for n, each in samples.items()}
        shown = [f"{middle[n]:.2f}" if n in middle else "-" for n in ("ours", "theirs")]
        share = f"{100 * middle['theirs'] / middle['ours']:.0f}%" if "theirs" in middle else "-"
        rows.append([f"1x16 8192 {kind}", name, *shown, share])
    return rows, notes
