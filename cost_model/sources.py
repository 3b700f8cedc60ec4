"""Where the value of each quantity of a price comes from: the model, the mesh, the mask, or which numbers of a machine."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import sympy

from . import symbols as q
from .hardware import Hardware, Level, Number
from .prices import rates
from .problem import Sizes
from .states import LinearAttention
from .volumes import Attention

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
    kernel = "linear" if isinstance(sizes, LinearAttention) else "attention"
    numbers = {
        "F_f": ((f"peak.{dtype}", hardware.peak), (f"efficiency.{kernel}_forward", hardware.efficiency)),
        "F_b": ((f"peak.{dtype}", hardware.peak), (f"efficiency.{kernel}_backward", hardware.efficiency)),
        "tau": ((f"launch.{kernel}_forward", hardware.launch),),
        "tau_b": ((f"launch.{kernel}_backward", hardware.launch),),
    }
    if symbol.name in numbers:
        named = _numbers(*((place, table[place.partition(".")[2]]) for place, table in numbers[symbol.name]))
        if symbol not in (q.F_f, q.F_b):
            return named
        return replace(named, factor=rates(sizes, hardware, dtype)[symbol == q.F_b] / named.value)  # less where it works by rows
    if symbol == q.phi:
        return _numbers(("overlap", hardware.overlap))
    if symbol == q.omega:
        return _numbers(("alone", hardware.alone))
    if symbol == q.beta_m:
        return _numbers(("bandwidth", hardware.bandwidth))
    links = _links(strategy, sizes, hardware)
    if symbol.name not in links:
        return None
    level, collective, part = links[symbol.name]
    among = sizes.ranks
    if collective == "all_to_all" and strategy == "ring-a2a" and isinstance(sizes, Attention):
        among = sizes.inner
    return _link(level, collective, part, among)


def _links(strategy: str, sizes: Sizes, hardware: Hardware) -> dict[str, tuple[Level, str, str]]:
    near, far = hardware.levels[0], hardware.level(sizes.ranks)
    inside = hardware.level(sizes.node) if isinstance(sizes, LinearAttention) and strategy == "two-level" else near
    exchange = hardware.level(sizes.inner) if not isinstance(sizes, LinearAttention) and strategy == "ring-a2a" else far
    return {
        "alpha_x": (exchange, "all_to_all", "latency"),
        "gamma_x": (near, "all_to_all", "message"),
        "gamma_xf": (far, "all_to_all", "message"),
        "beta_x": (near, "all_to_all", "bandwidth"),
        "beta_xf": (far, "all_to_all", "bandwidth"),
        "alpha_g": (far, "all_gather", "latency"),
        "gamma_g": (far, "all_gather", "message"),
        "beta_g": (far, "all_gather", "bandwidth"),
        "alpha_s": (far, "reduce_scatter", "latency"),
        "gamma_s": (far, "reduce_scatter", "message"),
        "beta_s": (far, "reduce_scatter", "bandwidth"),
        "gamma_h": (far, "p2p", "message"),
        "beta_h": (far, "p2p", "bandwidth"),
        "gamma_n": (inside, "p2p", "message"),
        "beta_n": (inside, "p2p", "bandwidth"),
    }


def _numbers(*numbers: tuple[str, Number]) -> Source:
    return Source("; ".join(f"{place}: {n.source}" for place, n in numbers), numbers)


def _link(level: Level, collective: str, part: str, ranks: int) -> Source:
    link = level.link(collective)
    kind = next(kind for kind, each in level.links.items() if each is link)
    place, number = f"{level.name}.{kind}.{part}", getattr(link, part)
    ports = level.used(ranks) if part == "bandwidth" and collective != "p2p" else 1
    many = f", {ports} ports" if ports > 1 else ""
    return Source(f"{place}{many}: {number.source}", ((place, number),), ports)
