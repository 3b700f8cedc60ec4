"""Seconds and bytes of each strategy of a softmax attention: one row a strategy in `COSTS`."""

from __future__ import annotations

from dataclasses import dataclass

from sympy import Expr, Integer, Max, Min

from .price import FAR, Pass, Price, exchange, gathers, hidden, in_order, many, scatters, travel
from .symbols import (
    N_0,
    B,
    D,
    D_v,
    F_b,
    F_f,
    G,
    G_u,
    H,
    H_kv,
    N,
    N_l,
    P,
    S,
    T,
    a,
    b_b,
    b_f,
    beta_h,
    beta_m,
    c,
    d_b,
    d_f,
    e,
    g_b,
    g_f,
    gamma_h,
    h_r,
    k_0,
    m,
    n,
    phi,
    r,
    t,
    tau,
    tau_b,
    u,
    x,
    x_k,
    y,
)  # fmt: skip

PAIR_F, PAIR_B = 2 * B * (D + D_v), 2 * B * (3 * D + 2 * D_v)  # FLOP of a (query, key, head): two products, and five
ROWS = S / P * B * H  # (query, head) pairs of a rank
MERGED_F = 3 * a * ROWS * D_v  # bytes read and written where a block's result is added: twice read, once written
MERGED_B = 3 * a * (ROWS * D + T / P * B * H_kv * (D + D_v))  # dq; dk and dv
SAVED = ROWS * (D * e + D_v * e + a) + T / P * B * H_kv * (D + D_v) * e  # q, out, log-sum-exp; k, v
OUTPUT = ROWS * (D_v * e + a)  # out, log-sum-exp
ON_HEADS = (D + D_v) * B * e  # bytes of an exchanged (position, head): q and out, or k and v
PAIRS = {"forward": (PAIR_F / F_f, tau), "backward": (PAIR_B / F_b, tau_b)}  # seconds of one, and of a call


def _all_to_all() -> Price:
    """While a turn's heads are computed and what it exchanges is put in order, what comes for the next turns travels, and the
    results of those before. The first turn's come and the last one's go while other turns' are put in order. (Backward, results
    come and queries, keys and values go: the same the other way round.)"""
    queries, results, both = (x - x_k) * D * B * e, (x - x_k) * D_v * B * e, x_k * (D + D_v) * B * e
    later = (queries + y * both) / t
    first, come, go = travel(later + (1 - y) * both, 3), travel(later, 1 + 2 * y), travel(results / t, 1)
    put, back = in_order(later), in_order(results / t)
    moved = 2 * in_order(x * ON_HEADS) + first + (t - 1) * come + t * go
    far = x * ON_HEADS * FAR

    def way(direction: str) -> Pass:
        each, call = PAIRS[direction]
        turn = N * each / t + k_0 * call + put + back
        more = t - 1
        beside = Min(more * (come + go), more * (come + turn), more * (go + turn), t * turn)
        hides = phi * (beside + Min(first, more * put) + Min(go, more * back))
        return Pass(N * each + t * k_0 * call, moved, moved - hides, x * ON_HEADS, far)

    again = Max(0, P / H_kv - 1) * T / P * B * H_kv * (D + D_v) * e  # key/value heads that several ranks need
    rows = Min(1, h_r)  # blocks of rows are computed again, and read neither results nor log-sum-exp
    operands = SAVED + many * ROWS * D_v * e - rows * ROWS * (many * D_v * e + a)  # results on heads, and what came back
    resent = exchange(queries + both, 3 + (t - 1) * (1 + 2 * y))
    arrived = operands + again
    return Price(way("forward"), way("backward"), arrived, SAVED, operands, arrived, resent=resent, exchanged=True)


def _gather_kv() -> Price:
    forward, backward = (N * each + k_0 * call for each, call in PAIRS.values())
    once, back = gathers(m * c, 2), gathers(m * c, 2) + scatters(m * c, 2)
    whole = T * B * H_kv * (D + D_v) * e
    return Price(
        Pass(forward, once, once, m * c, m * c * FAR),
        Pass(backward, back, back, 2 * m * c, 2 * m * c * FAR),
        SAVED - Min(1, h_r) * OUTPUT,  # blocks of rows are computed again
        # Gathered again; gradients, and what they are added to or scattered from.
        whole * (1 - 1 / P) + 2 * whole * (1 + h_r / H_kv),
        SAVED,
        OUTPUT,
        late=(False, True),
    )


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
        behind = once * hidden(come, self.first) + twice * (hidden(come, self.middle) + hidden(go, self.last))
        return moved, moved - behind - more * hidden(both, self.middle)


def _travelling(exchanged: bool = False) -> Price:
    """Keys and values of m positions, and queries of r, travel in n steps; results, and backward gradients in the type they
    are summed in, go back. Each step's transfer runs while the step before is computed."""
    query = r * B * H
    sent = m * c + query * (D * e + D_v * a + a)
    back = m * c * (1 + a / e) + query * (D * e + D_v * e + 2 * a + D * a)
    far = Min(1, (P - G) / Max(1, P - u)) if exchanged else FAR  # ranks that take the same heads are u apart
    heads = exchange(x * ON_HEADS, 4) if exchanged else Integer(0)
    extra = x * ON_HEADS if exchanged else Integer(0)

    def way(direction: str, merged: Expr, bytes_sent: Expr, passed: tuple[Expr, Expr, Expr]) -> Pass:
        each, call = PAIRS[direction]
        more = (k_0 - 1) * call  # in the first step
        call += merged * Min(1, n)  # nothing to merge where one block is all
        between = (N - N_0 - N_l) / Max(1, n - 1)
        moved, exposed = Turns(N_0 * each + call + more, between * each + call, N_l * each + call, *passed).priced()
        away = bytes_sent * far + extra * (u - G_u) / Max(1, u - 1)
        return Pass(N * each + (1 + n) * call + more, heads + moved, heads + exposed, extra + bytes_sent, away)

    own = T / P * B * H_kv * (D + D_v)
    step = (m * c + query * (D * e + D_v * a + a)) / Max(1, n)  # of bytes that travel: one is read, one comes
    summed = a * (ROWS * D + own)  # gradients that blocks are added to; each block's are as large
    held = many * (e * (ROWS * (D + D_v) + own) + 2 * summed) + step * (2 + 3 * a / e)  # of results, one more goes
    forward = way("forward", MERGED_F / beta_m, sent, (b_f, g_f, d_f))
    backward = way("backward", MERGED_B / beta_m, back, (b_b, g_b, d_b))
    whole = SAVED + ROWS * D_v * e if exchanged else SAVED
    resent = exchange(extra - (u - 1) / u * ROWS * D_v * e, 3) if exchanged else Integer(0)  # all but results
    output, late = whole if exchanged else OUTPUT, (exchanged, exchanged)
    return Price(forward, backward, whole, held + extra, whole, output, resent=resent, exchanged=exchanged, late=late)


TRAVELLING = ("halo", "ring", "balanced-ring", "ring-a2a")
_BLOCKS = _travelling()
COSTS: dict[str, Price] = {
    "all-to-all": _all_to_all(),
    "gather-kv": _gather_kv(),
    "halo": _BLOCKS,
    "ring": _BLOCKS,
    "balanced-ring": _BLOCKS,
    "ring-a2a": _travelling(exchanged=True),
}
