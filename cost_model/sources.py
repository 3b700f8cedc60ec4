"""Where the value of each quantity of a price comes from: the model, the mesh, the mask, or which numbers of a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import sympy

from . import symbols as q
from .hardware import Hardware, Level, Number
from .problem import Sizes
from .states import LinearAttention

MODEL = (q.B, q.S, q.T, q.H, q.H_kv, q.D, q.D_v, q.e, q.a, q.w, q.s, q.s_A, q.rho)


@dataclass(frozen=True)
class Source:
    """In words; for a machine's quantity also the numbers of its table, by place, whose product times `factor` is the value."""

    text: str
    numbers: tuple[tuple[str, Number], ...] = ()
    factor: float = 1.0

    @property
    def value(self) -> float:
        return math.prod(n.value for _, n in self.numbers) * self.factor


def source(symbol: sympy.Symbol, strategy: str, sizes: Sizes, hardware: Hardware, dtype: str) -> Source:
    """Raises HardwareError where the machine's table lacks a number."""
    machine = _of_machine(symbol, strategy, sizes, hardware, dtype)
    if machine is not None:
        return machine
    if symbol in MODEL:
        return Source("of the model")
    if symbol == q.P:
        return Source("of the mesh")
    if symbol in (q.G, q.G_u):
        if strategy == "two-level":
            return Source("chosen: the ranks of a node")
        return Source(f"{hardware.name} has {hardware.node or 'all'} ranks a {hardware.levels[0].name}")
    if symbol == q.u:
        return Source("chosen: the ranks of a group" if strategy == "ring-a2a" else "all ranks of the sequence")
    if symbol == q.K_b:
        return Source("chosen")
    if symbol == q.C:
        return Source("of the kernels")
    if symbol == q.z:
        return Source("counted from the layout of the sequence")
    return Source(_counted(sizes))


def _counted(sizes: Sizes) -> str:
    if isinstance(sizes, LinearAttention):
        return "counted from heads, state and positions"
    if sizes.work is not None or sizes.moved is not None:
        return "counted from the mask and the positions that each rank holds"
    band = "no mask" if sizes.before is None and sizes.after is None else "a causal mask" if sizes.causal else "the mask's band"
    return f"counted from {band} and the positions that each rank holds"


def _of_machine(symbol: sympy.Symbol, strategy: str, sizes: Sizes, hardware: Hardware, dtype: str) -> Source | None:
    linear = isinstance(sizes, LinearAttention)
    kernel = "linear" if linear else "attention"
    near, far = hardware.levels[0], hardware.level(sizes.ranks)
    inside = hardware.level(sizes.node) if isinstance(sizes, LinearAttention) and strategy == "two-level" else near
    exchange = hardware.level(sizes.inner) if not isinstance(sizes, LinearAttention) and strategy == "ring-a2a" else far
    for rate, direction in ((q.F_f, "forward"), (q.F_b, "backward")):
        if symbol == rate:
            return _numbers(
                (f"peak.{dtype}", hardware.peak[dtype]),
                (f"efficiency.{kernel}_{direction}", hardware.efficiency[f"{kernel}_{direction}"]),
            )
    if symbol == q.tau:
        return _numbers((f"launch.{kernel}_forward", hardware.launch[f"{kernel}_forward"]))
    if symbol == q.phi:
        return _numbers(("overlap", hardware.overlap))
    if symbol == q.beta_m:
        return _numbers(("bandwidth", hardware.bandwidth))
    links = {
        q.alpha_x: (exchange, "all_to_all", "latency"),
        q.gamma_x: (exchange, "all_to_all", "message"),
        q.beta_x: (near, "all_to_all", "bandwidth"),
        q.beta_xf: (far, "all_to_all", "bandwidth"),
        q.alpha_g: (far, "all_gather", "latency"),
        q.gamma_g: (far, "all_gather", "message"),
        q.beta_g: (far, "all_gather", "bandwidth"),
        q.gamma_h: (far, "p2p", "message"),
        q.beta_h: (far, "p2p", "bandwidth"),
        q.gamma_n: (inside, "p2p", "message"),
        q.beta_n: (inside, "p2p", "bandwidth"),
    }
    return _link(*links[symbol]) if symbol in links else None


def _numbers(*numbers: tuple[str, Number]) -> Source:
    return Source("; ".join(f"{place}: {n.source}" for place, n in numbers), numbers)


def _link(level: Level, collective: str, part: str) -> Source:
    link = level.link(collective)
    kind = next(kind for kind, each in level.links.items() if each is link)
    place, number = f"{level.name}.{kind}.{part}", getattr(link, part)
    ports = level.ports if part == "bandwidth" and collective != "p2p" else 1
    many = f", {ports} ports" if ports > 1 else ""
    return Source(f"{place}{many}: {number.source}", ((place, number),), ports)
