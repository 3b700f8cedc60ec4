"""Seconds and bytes of each strategy, in sympy: one row a strategy in `COSTS` and `LINEAR_COSTS`.

Every row is written in the quantities of `symbols`. What a strategy moves and computes (N, m, r, x, n, ..) is counted by
`volumes` and `states` for the sizes at hand; `textbook` has the same as formulas in S, P, H, .., which hold where everything
divides and the mask is causal or none. Communication is α once a collective, γ a message, and bytes ÷ β on the slowest link;
a rank computes while blocks or states travel, and the share φ of what coincides costs nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sympy
from sympy import Expr, Integer, Max, Rational

from . import states, steps, volumes
from .hardware import Hardware
from .linear_prices import BACK, LINEAR_COSTS
from .price import Pass, Price, many
from .problem import SAVES, with_operands
from .softmax_prices import COSTS, TRAVELLING
from .states import LinearAttention
from .symbols import (
    N_0,
    B,
    C,
    D,
    D_v,
    F_b,
    F_f,
    G,
    G_u,
    H,
    H_kv,
    K_b,
    N,
    N_l,
    P,
    S,
    T,
    a,
    alpha_g,
    alpha_s,
    alpha_x,
    b_b,
    b_f,
    beta_g,
    beta_h,
    beta_m,
    beta_n,
    beta_s,
    beta_x,
    beta_xf,
    c,
    d_b,
    d_f,
    e,
    f,
    f_A,
    f_c,
    f_i,
    f_s,
    g_b,
    g_f,
    gamma_g,
    gamma_h,
    gamma_n,
    gamma_s,
    gamma_x,
    gamma_xf,
    h_r,
    k_0,
    m,
    n,
    n_A,
    n_s,
    n_x,
    omega,
    phi,
    r,
    s,
    s_A,
    s_b,
    s_c,
    t,
    tau,
    tau_b,
    u,
    w,
    x,
    x_k,
    y,
    z,
)  # fmt: skip
from .volumes import Attention
from .work import CHUNK, linear_forward, linear_meanwhile

Values = dict[sympy.Symbol, float]
MASKED = 0.75  # of a kernel's rate, where a mask is made and applied for each block of rows (measured on a CPU: 0.7 to 0.8)


# Of a `Price` and of its numbers: what a device keeps, by what backward finds of the layer (`problem.SAVES`).
_KEPT = dict(zip(SAVES, ("saved", "operands", "output", "always", "always", "always", "always"), strict=True))


@dataclass(frozen=True)
class Cost:
    """A row's numbers for sizes and a machine: seconds and bytes of forward and backward, as in `Pass` and `Price`."""

    forward: tuple[float, float, float, float, float]
    backward: tuple[float, float, float, float, float]
    saved: float
    held: float
    operands: float
    output: float
    always: float
    resent: float
    linear: bool
    exchanged: bool
    late: tuple[bool, bool]

    def _both(self, i: int) -> float:
        return self.forward[i] + self.backward[i]

    @property
    def compute(self) -> float:
        return self._both(0)

    @property
    def communication(self) -> float:
        return self._both(1)

    @property
    def exposed(self) -> float:
        return self._both(2)

    @property
    def seconds(self) -> float:
        return self.compute + self.exposed

    def kept(self, save: str) -> float:
        """Bytes from forward to backward, by what backward finds of the layer (`problem.SAVES`)."""
        return float(getattr(self, _KEPT[save]))

    def hosted(self, save: str) -> float:
        """Bytes that are in the host's memory meanwhile."""
        return self.kept(save.removesuffix(" on host")) - self.kept(save)

    @property
    def passing(self) -> float:
        """Bytes that are there before and after its own backward, of a layer that is computed again: without a linear attention's
        chunks."""
        return self.operands if self.linear else self.saved

    def made(self, save: str) -> float:
        """Bytes that a linear attention's backward makes again for itself; if states travel meanwhile, the layer before may be
        computed again too, and operands are there twice."""
        if not self.linear or save == "everything":
            return 0.0
        kept = self.kept(save.removesuffix(" on host"))
        return self.saved - (max(kept, self.operands) if self.exchanged else kept)

    def again(self, save: str) -> float:
        """Seconds that backward takes to compute again what it does not find."""
        if save == "everything":
            return 0.0
        local, sent = self.forward[0], self.resent if with_operands(save) else 0.0
        if self.linear:
            return local + sent
        return local + self.forward[2] if save.startswith("layer input") else sent

    def has_operands(self, save: str) -> bool:
        """Whether backward finds what attention reads, so that nothing is computed again for that alone."""
        return with_operands(save) or (save.startswith("attention output") and self.exchanged)

    @property
    def sent(self) -> tuple[int, int]:
        return round(self.forward[3]), round(self.backward[3])


# Numbers ------------------------------------------------------------------------------------------

_ROWS = (*COSTS.values(), *LINEAR_COSTS.values())
_ALL = tuple(sorted({q for row in _ROWS for term in row.terms for q in term.free_symbols}, key=str))


def row(strategy: str, linear: bool) -> Price:
    return (LINEAR_COSTS if linear else COSTS)[strategy]


@functools.cache
def _compiled(linear: bool, strategy: str) -> Callable[..., tuple[float, ...]]:
    return sympy.lambdify(_ALL, row(strategy, linear).terms, "math", cse=True)


@functools.lru_cache(maxsize=65536)
def cost(strategy: str, sizes: Attention | LinearAttention, hardware: Hardware, dtype: str) -> Cost:
    """The row's numbers. Raises HardwareError where the machine's table lacks a number."""
    values = bound(strategy, sizes, hardware, dtype)
    found = _compiled(isinstance(sizes, LinearAttention), strategy)(*(values.get(q, 0.0) for q in _ALL))
    numbers = tuple(float(v) for v in found)
    linear = isinstance(sizes, LinearAttention)
    price = row(strategy, linear)
    saved, held, operands, output, always, resent = numbers[10:]
    ways = numbers[:5], numbers[5:10]
    return Cost(*ways, saved, held, operands, output, always, resent, linear, price.exchanged, price.late)  # type: ignore[arg-type]


def sent(strategy: str, sizes: Attention | LinearAttention) -> tuple[int, int]:
    """Bytes that one rank sends, as the mean over ranks, forward and backward: on any machine the same."""
    price, values = row(strategy, isinstance(sizes, LinearAttention)), counted(strategy, sizes)
    forward, backward = (term.subs(values) for term in (price.forward.sent, price.backward.sent))
    return round(float(forward)), round(float(backward))


def kept(strategy: str, sizes: Attention | LinearAttention, save: str) -> float:
    """`Cost.kept`: on any machine the same."""
    price = row(strategy, isinstance(sizes, LinearAttention))
    return float(getattr(price, _KEPT[save]).subs(counted(strategy, sizes)))


def bound(strategy: str, sizes: Attention | LinearAttention, hardware: Hardware, dtype: str) -> Values:
    """Every symbol's value."""
    linear = isinstance(sizes, LinearAttention)
    kernel = "linear" if linear else "attention"
    forward, backward = rates(sizes, hardware, dtype)
    values = {
        **counted(strategy, sizes),
        **_links(hardware, sizes.ranks, getattr(sizes, "inner", 1) if strategy == "ring-a2a" else sizes.ranks),
        F_f: forward,
        F_b: backward,
        tau: hardware.seconds_per_call(f"{kernel}_forward"),
        tau_b: hardware.seconds_per_call(f"{kernel}_backward"),
        phi: hardware.overlap.value,
        omega: hardware.alone.value,
        beta_m: hardware.bandwidth.value,
    }
    if isinstance(sizes, Attention) and strategy in TRAVELLING and values[n]:
        values |= _turns(strategy, sizes, values)
    if strategy == "two-level" and isinstance(sizes, LinearAttention):
        inside = hardware.level(sizes.node).link("p2p")
        values |= {G: min(sizes.node, sizes.ranks), gamma_n: inside.message.value, beta_n: inside.bandwidth.value}
    return values


def rates(sizes: Attention | LinearAttention, hardware: Hardware, dtype: str) -> tuple[float, float]:
    """FLOP/s forward and backward; by rows, backward with the forward that comes before it again."""
    kernel = "linear" if isinstance(sizes, LinearAttention) else "attention"
    forward, backward = (hardware.rate(f"{kernel}_{way}", dtype) for way in ("forward", "backward"))
    if isinstance(sizes, LinearAttention) or not sizes.by_rows:
        return forward, backward
    again = (sizes.head_dim + sizes.value_dim) / (3 * sizes.head_dim + 2 * sizes.value_dim)
    return MASKED * forward, MASKED / (again / forward + 1 / backward)


def counted(strategy: str, sizes: Attention | LinearAttention) -> Values:
    """The symbols that depend on no machine: sizes, counts and work."""
    return linear_values(strategy, sizes) if isinstance(sizes, LinearAttention) else values_of(strategy, sizes)


def values_of(strategy: str, q: Attention) -> Values:
    """Of a softmax attention: sizes and counts."""
    moved = volumes.counted(strategy, q)
    return {
        B: q.batch, S: q.q_seq, T: q.kv_seq, H: q.q_heads, H_kv: q.kv_heads, D: q.head_dim, D_v: q.value_dim, e: q.itemsize,
        a: q.accumulator, P: q.ranks, N: moved.work, m: moved.columns / q.ranks, r: moved.rows / q.ranks,
        x: moved.exchanged / q.ranks, x_k: moved.keys / q.ranks, t: q.turns, y: moved.own_keys,
        n: moved.steps, k_0: moved.calls, c: steps.column_bytes(q, moved.kv_heads),
        h_r: q.q_heads if q.by_rows else 0,
    }  # fmt: skip


def _turns(strategy: str, q: Attention, at: Values) -> Values:
    """What the busiest rank computes in the first and the last of several steps, and what the busiest port passes in each."""
    travel = steps.travel(strategy, q)
    busiest = travel.work.sum(0).argmax()
    share = travel.work[:, busiest] * (at[N] / max(1.0, travel.work[:, busiest].sum()))
    near = q.ranks // travel.places
    heads = -(-q.q_heads // near), max(volumes.needed_heads(q.q_heads, q.kv_heads, near))
    places, slower = max(1, round(at[G]) // near), at[beta_h] / at[beta_n]
    forward, backward = (steps.loads(travel, steps.blocks(q, back, *heads), places, slower) for back in (False, True))
    return {
        N_0: share[0], N_l: share[-1],
        b_f: forward.there, g_f: forward.back, d_f: forward.both, b_b: backward.there, g_b: backward.back, d_b: backward.both,
    }  # fmt: skip


def linear_values(strategy: str, q: LinearAttention) -> Values:
    """Of a linear attention: sizes, counts and work."""
    moved, tokens = states.LINEAR_COUNTS[strategy](q), -(-q.seq // q.ranks)
    heads = q.batch * q.heads
    own = linear_forward(q.batch, q.heads, tokens, q.key_dim, q.value_dim, q.remove, q.decays)
    numbers = (q.query_heads + q.key_heads * (1 + q.remove)) * q.key_dim + 2 * q.heads * q.value_dim + q.heads * q.decays
    share = states.reordered(q.seq, q.ranks) if q.relaid else 0.0
    chunks, square = heads * max(4, q.itemsize) * -(-tokens // CHUNK), q.key_dim * q.value_dim
    solved = CHUNK * (q.value_dim + 2 * q.key_dim) + max(1, q.decays) if q.remove else 0
    chunked = chunks * (CHUNK**2 + square + solved) + q.state
    passed = chunks * 2 * (square + CHUNK * (q.key_dim + q.value_dim))
    if strategy == "all-to-all":
        own = linear_forward(q.batch, -(-q.heads // q.ranks), q.seq, q.key_dim, q.value_dim, q.remove, q.decays)
    return {
        B: q.batch, S: q.seq, T: q.seq, H: q.heads, H_kv: q.key_heads, D: q.key_dim, D_v: q.value_dim, e: q.itemsize,
        a: max(4, q.itemsize), P: q.ranks, C: CHUNK, K_b: q.blocks, f: own,
        f_i: linear_meanwhile(q.batch, q.heads, tokens, q.key_dim, q.decays),
        f_s: heads * tokens * 4 * q.key_dim * q.value_dim * q.remove, f_A: heads * tokens * 4 * q.key_dim**2 * q.remove,
        f_c: heads * 2 * q.key_dim**2 * q.value_dim * q.remove,
        s: q.state, s_A: q.pair, s_c: chunked, s_b: passed, n_s: moved.states / q.ranks, n_A: moved.pairs / q.ranks,
        x: moved.numbers * q.batch * q.itemsize / q.ranks, n_x: 4 + bool(q.decays) + q.remove, w: numbers * q.itemsize, z: share,
    }  # fmt: skip


def _links(hardware: Hardware, ranks: int, group: int) -> Values:
    """What links do for all ranks of a sequence, and for those that exchange heads."""
    near, far = hardware.levels[0], hardware.level(ranks)
    node = min(near.ranks or ranks, ranks)
    exchange = hardware.level(group).link("all_to_all")
    gather, scatter, hop, inside = far.link("all_gather"), far.link("reduce_scatter"), far.link("p2p"), near.link("p2p")
    return {
        G: node, u: group, G_u: min(node, group),
        alpha_x: exchange.latency.value, gamma_x: near.link("all_to_all").message.value,
        gamma_xf: far.link("all_to_all").message.value,
        beta_x: near.link("all_to_all").bandwidth.value * near.used(group),
        beta_xf: far.link("all_to_all").bandwidth.value * far.used(group),
        alpha_g: gather.latency.value, gamma_g: gather.message.value, beta_g: gather.bandwidth.value * far.used(ranks),
        alpha_s: scatter.latency.value, gamma_s: scatter.message.value, beta_s: scatter.bandwidth.value * far.used(ranks),
        gamma_h: hop.message.value, beta_h: hop.bandwidth.value, gamma_n: inside.message.value, beta_n: inside.bandwidth.value,
    }  # fmt: skip


# The same as formulas -----------------------------------------------------------------------------


def textbook(strategy: str, causal: bool = True) -> Mapping[sympy.Symbol, Expr]:
    """Counts of a softmax attention in sizes: exact where lengths, heads and groups divide and S = T. (anchors: U_q =
    B·S/P·H·D·e, U_k = B·T/P·H_kv·D·e.)"""
    share = (1 + 1 / S) / 2 if causal else Integer(1)
    kv = B * H_kv * (D + D_v) * e
    level = H * S * T * share / P
    keys = (P - 1) / P * T / P * Max(H_kv, P)
    rows: dict[str, dict[sympy.Symbol, Expr]] = {
        "all-to-all": {N: level, x: (P - 1) / P * S / P * H + keys, x_k: keys},
        "gather-kv": {N: H * S / P * (T - (S / P - 1) / 2 if causal else T), m: (P - 1) * T / P, c: kv, n: many},
        "ring": {N: level, m: (Rational(3, 4) if causal else 1) * (P - 1) * T / P, c: kv, n: P - 1},
        "ring-a2a": {
            N: level,
            x: (u - 1) / u * (S / P * H + T / P * H_kv),
            m: (Rational(3, 4) if causal else 1) * (P / u - 1) * T / P,
            c: kv,
            n: P / u - 1,
        },
        "balanced-ring": {N: level, c: kv, n: P / 2, m: (3 * P / 8 - Rational(1, 4)) * T / P, r: S / 8}
        if causal
        else {N: level, m: (P - 1) * T / P, c: kv, n: P - 1},
        "halo": {N: level, m: (P - 1) * T / P, c: kv, n: P - 1},
    }
    zero = {q: Integer(0) for q in (x, x_k, m, r, n, c)}
    return {**zero, **rows[strategy]}


__all__ = [
    "BACK",
    "COSTS",
    "LINEAR_COSTS",
    "Cost",
    "Pass",
    "Price",
    "bound",
    "cost",
    "counted",
    "kept",
    "row",
    "sent",
    "textbook",
]
