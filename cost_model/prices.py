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
from sympy import Eq, Expr, Float, Integer, Max, Min, Piecewise, Rational, ceiling, log

from . import states, steps, volumes
from .hardware import Hardware
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
    alpha_x,
    b_b,
    b_f,
    beta_g,
    beta_h,
    beta_m,
    beta_n,
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
    gamma_x,
    gamma_xf,
    m,
    n,
    n_A,
    n_s,
    n_x,
    phi,
    r,
    s,
    s_A,
    tau,
    tau_b,
    u,
    w,
    x,
    z,
)  # fmt: skip
from .volumes import Attention
from .work import CHUNK, linear_forward, linear_meanwhile

Values = dict[sympy.Symbol, float]


@dataclass(frozen=True)
class Pass:
    """One direction. Seconds of the busiest rank: `compute`, `communication`, and as much of it as is `exposed`, not hidden
    behind computation. Bytes one rank sends, as the mean over ranks: `sent`, and `far` of them to other nodes."""

    compute: Expr
    communication: Expr
    exposed: Expr
    sent: Expr
    far: Expr


@dataclass(frozen=True)
class Price:
    """A strategy's row. Bytes on a rank: `saved` from forward for backward, `held` at most while it runs beside them."""

    forward: Pass
    backward: Pass
    saved: Expr
    held: Expr

    @property
    def terms(self) -> list[Expr]:
        return [*vars(self.forward).values(), *vars(self.backward).values(), self.saved, self.held]


@dataclass(frozen=True)
class Cost:
    """A row's numbers for sizes and a machine: seconds and bytes of forward and backward, as in `Pass` and `Price`."""

    forward: tuple[float, float, float, float, float]
    backward: tuple[float, float, float, float, float]
    saved: float
    held: float

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

    @property
    def sent(self) -> tuple[int, int]:
        return round(self.forward[3]), round(self.backward[3])


# Exchanges ----------------------------------------------------------------------------------------

NOTHING, ONE, TINY = Integer(0), Integer(1), Float(1e-30)
MASKED = 0.75  # of a kernel's rate, where a mask is made and applied for each block of rows (measured on a CPU: 0.7 to 0.8)
many = Min(1, P - 1)  # 0 on one rank
FAR = (P - G) / Max(1, P - 1)  # of the other ranks, those in other nodes


def _exchange(sent: Expr, count: Expr) -> Expr:
    """`count` all-to-alls among u ranks in which a rank sends `sent` bytes: links inside and between nodes are used at once."""
    others = Max(1, u - 1)
    near, far = (G_u - 1) / others, (u - G_u) / others
    inside = count * (G_u - 1) * gamma_x + sent * near / beta_x
    return Min(1, u - 1) * count * alpha_x + Max(inside, count * (u - G_u) * gamma_xf + sent * far / beta_xf)


def _gathers(sent: Expr, count: int) -> Expr:
    """`count` all-gathers or reduce-scatters, around a ring."""
    return many * count * alpha_g + count * (P - 1) * gamma_g + sent / beta_g


@dataclass(frozen=True)
class Turns:
    """What a rank computes in the first step, in each of those between and in the last, and bytes of a step that its busiest port
    passes: of blocks, of results, of both at once."""

    first: Expr
    middle: Expr
    last: Expr
    blocks: Expr
    results: Expr
    both: Expr

    def priced(self) -> tuple[Expr, Expr]:
        """Seconds of all transfers, and as many of them as are not hidden. Blocks of step i + 1 and results of step i − 1 travel
        while step i is computed; nothing hides the results of the last step."""
        back = Min(1, self.results) * gamma_h
        come, go = gamma_h + self.blocks / beta_h, back + self.results / beta_h
        both = gamma_h + back + self.both / beta_h
        once, twice, more = Min(1, n), Min(1, Max(0, n - 1)), Max(0, n - 2)
        moved = (once + twice) * (come + go) + more * both
        hidden = once * _hidden(come, self.first) + twice * (_hidden(come, self.middle) + _hidden(go, self.last))
        return moved, moved - hidden - more * _hidden(both, self.middle)


def _hidden(transfer: Expr, work: Expr) -> Expr:
    return phi * Min(transfer, work)


# Softmax attention --------------------------------------------------------------------------------

PAIR_F, PAIR_B = 2 * B * (D + D_v), 2 * B * (3 * D + 2 * D_v)  # FLOP of a (query, key, head): two products, and five
ROWS = S / P * B * H  # (query, head) pairs of a rank
MERGED_F = 3 * a * ROWS * D_v  # bytes read and written where a block's result is added: twice read, once written
MERGED_B = 3 * a * (ROWS * D + T / P * B * H_kv * (D + D_v))  # dq; dk and dv
SAVED = ROWS * (D * e + D_v * e + a) + T / P * B * H_kv * (D + D_v) * e  # q, out, log-sum-exp; k, v
ON_HEADS = (D + D_v) * B * e  # bytes of an exchanged (position, head): q and out, or k and v


PAIRS = {"forward": (PAIR_F / F_f, tau), "backward": (PAIR_B / F_b, tau_b)}  # seconds of one, and of a call


def _all_to_all() -> Price:
    forward, backward = (N * each + call for each, call in PAIRS.values())
    sent, moved = x * ON_HEADS, _exchange(x * ON_HEADS, 4)
    far = sent * FAR
    again = Max(0, P / H_kv - 1) * T / P * B * H_kv * (D + D_v) * e  # key/value heads that several ranks need
    return Price(Pass(forward, moved, moved, sent, far), Pass(backward, moved, moved, sent, far), SAVED + again, 2 * SAVED)


def _gather_kv() -> Price:
    forward, backward = (N * each + call for each, call in PAIRS.values())
    once, back = _gathers(m * c, 2), _gathers(2 * m * c, 4)
    whole = T * B * H_kv * (D + D_v) * e
    return Price(
        Pass(forward, once, once, m * c, m * c * FAR),
        Pass(backward, back, back, 2 * m * c, 2 * m * c * FAR),
        SAVED,
        whole * (1 + a / e),
    )


def _travelling(exchanged: bool = False) -> Price:
    """Keys and values of m positions, and queries of r, travel in n steps; results, and backward gradients in the type they
    are summed in, go back. Each step's transfer runs while the step before is computed."""
    query = r * B * H
    sent = m * c + query * (D * e + D_v * a + a)
    back = m * c * (1 + a / e) + query * (D * e + D_v * e + 2 * a + D * a)
    far = Min(1, (P - G) / Max(1, P - u)) if exchanged else FAR  # ranks that take the same heads are u apart
    heads = _exchange(x * ON_HEADS, 4) if exchanged else Integer(0)
    extra = x * ON_HEADS if exchanged else Integer(0)

    def way(direction: str, merged: Expr, bytes_sent: Expr, passed: tuple[Expr, Expr, Expr]) -> Pass:
        each, call = PAIRS[direction]
        call += merged * Min(1, n)  # nothing to merge where one block is all
        between = (N - N_0 - N_l) / Max(1, n - 1)
        moved, exposed = Turns(N_0 * each + call, between * each + call, N_l * each + call, *passed).priced()
        away = bytes_sent * far + extra * (u - G_u) / Max(1, u - 1)
        return Pass(N * each + (1 + n) * call, heads + moved, heads + exposed, extra + bytes_sent, away)

    block = T / P * B * H_kv * (D + D_v) * e
    forward = way("forward", MERGED_F / beta_m, sent, (b_f, g_f, d_f))
    return Price(forward, way("backward", MERGED_B / beta_m, back, (b_b, g_b, d_b)), SAVED, 2 * block * (1 + a / e))


TRAVELLING = ("halo", "ring", "balanced-ring", "ring-a2a")
COSTS: dict[str, Price] = {
    "all-to-all": _all_to_all(),
    "gather-kv": _gather_kv(),
    "halo": _travelling(),
    "ring": _travelling(),
    "balanced-ring": _travelling(),
    "ring-a2a": _travelling(exchanged=True),
}

# Linear attention ---------------------------------------------------------------------------------

TOKENS = B * w * T / P  # bytes of a rank's tokens
BACK = Rational(5, 2)  # work of backward ÷ work of forward
JOINED = 3 * s  # bytes read and written to make S' = A S + B: S and B read, S' written


BETWEEN = Max(0, P / G - 1)  # links between nodes
DOUBLINGS = ceiling(log(P, 2))
# Messages that share a port where nodes have no links of their own; and for how many hops a state between nodes then counts.
CROWD = Piecewise((G, Eq(beta_h, beta_n)), (1, True))
PASSED_ON = Min(1, BETWEEN) + Max(0, BETWEEN - 1) * CROWD


def _reordered() -> tuple[Expr, Expr]:
    """Tokens from a head-tail layout and back: seconds, and bytes that a rank sends, as the mean over ranks. It holds two runs,
    each of which goes to one other rank."""
    call = alpha_x + Min(2, P - 1) * gamma_xf
    return Min(1, z * P) * many * (n_x * call + Min(1, (P - 1) / 2) * TOKENS / beta_xf), z * TOKENS


def _scanned(passed: Expr, sent: Expr, far: Expr, more: Expr = NOTHING, joins: Expr = NOTHING) -> Price:
    """What ranks do to states travels while f_i is computed; what has arrived is put together in `joins` steps of S' = A S + B.
    `more` work tells a rank what it does."""
    order, relaid = _reordered()

    def way(work: Expr, rate: Expr, call: Expr) -> Pass:
        compute = (work * f + more) / rate + call + joins * (JOINED / beta_m + f_c / rate)
        exposed = passed - _hidden(passed, work * f_i / rate + call / 3)
        return Pass(compute, passed + order, exposed + order, sent + relaid, far + relaid * FAR)

    return Price(way(ONE, F_f, tau), way(BACK, F_b, tau_b), TOKENS + s, 2 * s_A + relaid)


def _chained() -> Price:
    """A state passes from rank to rank in K blocks: from the first to the last, then one block after another over the slowest
    link or through the rank that takes longest. Each rank adds to it; a delta rule's passes through the rank's chunks.

    The last rank computes f_i while it waits. A transfer is slowed where it coincides with another rank's f_i: both go
    1 / (2 − φ) as fast.
    """
    order, relaid = _reordered()
    near, slow = gamma_n + s / (K_b * beta_n), gamma_h + s / (K_b * beta_h)  # seconds of a block's hop

    def way(work: Expr, rate: Expr, call: Expr) -> Pass:
        block = (work * f_s / rate + JOINED / beta_m) / K_b
        met = 2 * Min(1, K_b - 1) * (1 - phi) * Min(near, block)  # with work on the next block, and the next hop with work
        hops = many * ((P - 1 - BETWEEN) * near + BETWEEN * slow + (P - 1) * met + (K_b - 1) * (slow - _hidden(slow, block)))
        passed = hops + (P - 1) * block
        pace = 1 + (1 - phi) * hops / Max(passed, TINY)
        own = (1 - phi) * Min(hops, (K_b + 1) * slow)
        exposed = Max(own, passed - (work * f_i / rate + call / 3) / pace)
        compute = work * f / rate + call + JOINED / beta_m
        sent, far = n_s * s, n_s * s * BETWEEN / Max(1, P - 1)
        return Pass(compute, passed + order, exposed + order, sent + relaid, far + relaid * FAR)

    return Price(way(ONE, F_f, tau), way(BACK, F_b, tau_b), TOKENS + s, 2 * s_A + relaid)


def _linear_all_to_all() -> Price:
    moved = _exchange(x, n_x)
    order, relaid = _reordered()

    def way(work: Expr, rate: Expr, call: Expr) -> Pass:
        return Pass(work * f / rate + call, moved + order, moved + order, x + relaid, (x + relaid) * FAR)

    return Price(way(ONE, F_f, tau), way(BACK, F_b, tau_b), TOKENS + s, 2 * TOKENS + relaid)


LINEAR_COSTS: dict[str, Price] = {
    "all-scan": _chained(),
    "log-step": _scanned(
        DOUBLINGS * (gamma_h + s_A / beta_h),
        n_A * s_A,
        n_A * s_A * FAR,
        more=f_A * many,
        joins=2 * DOUBLINGS * s_A / s,  # of what is before a rank, and of that with the rank itself; A too where it is a matrix
    ),
    "two-level": _scanned(
        # The first rank hands its state round while it sends what it does, the last rank of a node while it passes the state on.
        (G - 1) * (3 * gamma_n + (s_A + 2 * s) / beta_n)
        + (Min(1, BETWEEN) + Max(0, BETWEEN - 1) * CROWD) * (gamma_h + s / beta_h),
        n_A * s_A + n_s * s,
        n_s * s * BETWEEN / Max(1, P - 1),
        more=f_A * many,
        joins=(G - 1) * s_A / s + BETWEEN + Min(1, G - 1),
    ),
    "gather-states": _scanned(
        many * alpha_g + (P - 1) * (gamma_g + s_A / beta_g), n_A * s_A, n_A * s_A * FAR, more=f_A * many, joins=P - 1
    ),
    "all-to-all": _linear_all_to_all(),
}


# Numbers ------------------------------------------------------------------------------------------

_ROWS = (*COSTS.values(), *LINEAR_COSTS.values())
_ALL = tuple(sorted({q for row in _ROWS for term in row.terms for q in term.free_symbols}, key=str))


@functools.cache
def _compiled(linear: bool, strategy: str) -> Callable[..., tuple[float, ...]]:
    row = (LINEAR_COSTS if linear else COSTS)[strategy]
    return sympy.lambdify(_ALL, row.terms, "math", cse=True)


@functools.lru_cache(maxsize=65536)
def cost(strategy: str, sizes: Attention | LinearAttention, hardware: Hardware, dtype: str) -> Cost:
    """The row's numbers. Raises HardwareError where the machine's table lacks a number."""
    values = bound(strategy, sizes, hardware, dtype)
    found = _compiled(isinstance(sizes, LinearAttention), strategy)(*(values.get(q, 0.0) for q in _ALL))
    numbers = tuple(float(v) for v in found)
    return Cost(numbers[:5], numbers[5:10], *numbers[10:])  # type: ignore[arg-type]


def sent(strategy: str, sizes: Attention | LinearAttention) -> tuple[int, int]:
    """Bytes that one rank sends, as the mean over ranks, forward and backward: on any machine the same."""
    linear = isinstance(sizes, LinearAttention)
    row = (LINEAR_COSTS if linear else COSTS)[strategy]
    values = linear_values(strategy, sizes) if isinstance(sizes, LinearAttention) else values_of(strategy, sizes)
    forward, backward = (term.subs(values) for term in (row.forward.sent, row.backward.sent))
    return round(float(forward)), round(float(backward))


def bound(strategy: str, sizes: Attention | LinearAttention, hardware: Hardware, dtype: str) -> Values:
    """Every symbol's value."""
    linear = isinstance(sizes, LinearAttention)
    kernel = "linear" if linear else "attention"
    forward, backward = rates(sizes, hardware, dtype)
    values = {
        **(linear_values(strategy, sizes) if isinstance(sizes, LinearAttention) else values_of(strategy, sizes)),
        **_links(hardware, sizes.ranks, getattr(sizes, "inner", 1) if strategy == "ring-a2a" else sizes.ranks),
        F_f: forward,
        F_b: backward,
        tau: hardware.seconds_per_call(f"{kernel}_forward"),
        tau_b: hardware.seconds_per_call(f"{kernel}_backward"),
        phi: hardware.overlap.value,
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


def values_of(strategy: str, q: Attention) -> Values:
    """Of a softmax attention: sizes and counts."""
    moved = volumes.counted(strategy, q)
    return {
        B: q.batch, S: q.q_seq, T: q.kv_seq, H: q.q_heads, H_kv: q.kv_heads, D: q.head_dim, D_v: q.value_dim, e: q.itemsize,
        a: q.accumulator, P: q.ranks, N: moved.work, m: moved.columns / q.ranks, r: moved.rows / q.ranks,
        x: moved.exchanged / q.ranks, n: moved.steps, c: steps.column_bytes(q, moved.kv_heads),
    }  # fmt: skip


def _turns(strategy: str, q: Attention, at: Values) -> Values:
    """What the busiest rank computes in the first and the last of several steps, and what the busiest port passes in each."""
    travel = steps.travel(strategy, q)
    busiest = travel.work.sum(0).argmax()
    share = travel.work[:, busiest] * (at[N] / max(1.0, travel.work[:, busiest].sum()))
    near = q.ranks // travel.places
    heads = -(-q.q_heads // near), max(volumes.needed_heads(q, near))
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
    if strategy == "all-to-all":
        own = linear_forward(q.batch, -(-q.heads // q.ranks), q.seq, q.key_dim, q.value_dim, q.remove, q.decays)
    return {
        B: q.batch, S: q.seq, T: q.seq, H: q.heads, H_kv: q.key_heads, D: q.key_dim, D_v: q.value_dim, e: q.itemsize,
        a: max(4, q.itemsize), P: q.ranks, C: CHUNK, K_b: q.blocks, f: own,
        f_i: linear_meanwhile(q.batch, q.heads, tokens, q.key_dim, q.decays),
        f_s: heads * tokens * 4 * q.key_dim * q.value_dim * q.remove, f_A: heads * tokens * 4 * q.key_dim**2 * q.remove,
        f_c: heads * 2 * q.key_dim**2 * q.value_dim * q.remove,
        s: q.state, s_A: q.pair, n_s: moved.states / q.ranks, n_A: moved.pairs / q.ranks,
        x: moved.numbers * q.batch * q.itemsize / q.ranks, n_x: 4 + bool(q.decays) + q.remove, w: numbers * q.itemsize, z: share,
    }  # fmt: skip


def _links(hardware: Hardware, ranks: int, group: int) -> Values:
    """What links do for all ranks of a sequence, and for those that exchange heads."""
    near, far = hardware.levels[0], hardware.level(ranks)
    node = min(near.ranks or ranks, ranks)
    exchange = hardware.level(group).link("all_to_all")
    gather, hop, inside = far.link("all_gather"), far.link("p2p"), near.link("p2p")
    return {
        G: node, u: group, G_u: min(node, group),
        alpha_x: exchange.latency.value, gamma_x: near.link("all_to_all").message.value,
        gamma_xf: far.link("all_to_all").message.value,
        beta_x: near.link("all_to_all").bandwidth.value * min(near.ports, max(1, node - 1)),
        beta_xf: far.link("all_to_all").bandwidth.value * far.ports, alpha_g: gather.latency.value, gamma_g: gather.message.value,
        beta_g: gather.bandwidth.value * min(far.ports, max(1, ranks - 1)),
        gamma_h: hop.message.value, beta_h: hop.bandwidth.value, gamma_n: inside.message.value, beta_n: inside.bandwidth.value,
    }  # fmt: skip


# The same as formulas -----------------------------------------------------------------------------


def textbook(strategy: str, causal: bool = True) -> Mapping[sympy.Symbol, Expr]:
    """Counts of a softmax attention in sizes: exact where lengths, heads and groups divide and S = T. (anchors: U_q =
    B·S/P·H·D·e, U_k = B·T/P·H_kv·D·e.)"""
    share = (1 + 1 / S) / 2 if causal else Integer(1)
    kv = B * H_kv * (D + D_v) * e
    level = H * S * T * share / P
    exchanged = (P - 1) / P * (S / P * H + T / P * Max(H_kv, P))
    rows: dict[str, dict[sympy.Symbol, Expr]] = {
        "all-to-all": {N: level, x: exchanged},
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
    zero = {q: Integer(0) for q in (x, m, r, n, c)}
    return {**zero, **rows[strategy]}


__all__ = ["COSTS", "LINEAR_COSTS", "Cost", "Pass", "Price", "bound", "cost", "sent", "textbook"]
