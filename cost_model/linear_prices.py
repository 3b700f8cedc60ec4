"""Seconds and bytes of each strategy of a linear attention: one row a strategy in `LINEAR_COSTS`."""

from __future__ import annotations

from sympy import Eq, Expr, Max, Min, Piecewise, Rational, ceiling, log

from .price import FAR, NOTHING, ONE, TINY, Pass, Price, exchange, hidden, many
from .symbols import (
    B,
    D_v,
    F_b,
    F_f,
    G,
    H,
    K_b,
    P,
    T,
    alpha_g,
    alpha_x,
    beta_g,
    beta_h,
    beta_m,
    beta_n,
    beta_xf,
    e,
    f,
    f_A,
    f_c,
    f_i,
    f_s,
    gamma_g,
    gamma_h,
    gamma_n,
    gamma_xf,
    n_A,
    n_s,
    n_x,
    omega,
    phi,
    s,
    s_A,
    s_b,
    s_c,
    tau,
    tau_b,
    w,
    x,
    z,
)  # fmt: skip

TOKENS = B * w * T / P  # bytes of a rank's tokens
FOUND = TOKENS + s  # and of the state that it found
OUTPUT = B * H * T / P * D_v * e + s  # results, and the state that the rank found: backward repeats the rest, but no exchange
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
    copied = 4 * TOKENS / beta_m
    return Min(1, z * P) * many * (n_x * call + copied + Min(1, (P - 1) / 2) * TOKENS / beta_xf), z * TOKENS


def _scanned(passed: Expr, sent: Expr, far: Expr, joins: Expr = NOTHING) -> Price:
    """What ranks do to states travels while f_i is computed; what has arrived is put together in `joins` steps of S' = A S + B.

    To know what it does, a rank of a delta rule sends nothing through its chunks, and forward also the identity (f_A): more work.
    """
    order, relaid = _reordered()

    def way(work: Expr, rate: Expr, call: Expr, more: Expr) -> Pass:
        compute = (work * f + more * many) / rate + call + joins * (JOINED / beta_m + f_c / rate)
        exposed = passed - hidden(passed, work * f_i / rate + call / 3)
        return Pass(compute, passed + order, exposed + order, sent + relaid, far + relaid * FAR)

    matrix = (s_A - s) * Min(1, f_A)
    forward, backward = way(ONE, F_f, tau, f_s + f_A), way(BACK, F_b, tau_b, f_s)
    return Price(forward, backward, FOUND + s_c + matrix, s_b + 2 * s_A + relaid, FOUND, OUTPUT, OUTPUT)


def _chained() -> Price:
    """A state passes from rank to rank in K blocks: from the first to the last, then one block after another over the slowest
    link or through the rank that takes longest. Each rank adds to it; a delta rule's passes through the rank's chunks, and as the
    others wait for it, omega times as fast as when all compute.

    The last rank computes f_i while it waits. A transfer is slowed where it coincides with another rank's f_i: both go
    1 / (2 − φ) as fast.
    """
    order, relaid = _reordered()
    faster = 1 + many * (omega - 1)
    near, slow = gamma_n + s / (K_b * beta_n), gamma_h + s / (K_b * beta_h)  # seconds of a block's hop

    def way(work: Expr, rate: Expr, call: Expr) -> Pass:
        block = (work * f_s / rate + JOINED / beta_m) / (K_b * faster)
        met = 2 * Min(1, K_b - 1) * (1 - phi) * Min(near, block)  # with work on the next block, and the next hop with work
        behind = many * (K_b - 1) * hidden(slow, block)  # a hop while the block before is computed
        hops = many * ((P - 1 - BETWEEN) * near + BETWEEN * slow + (P - 1) * met + (K_b - 1) * slow) - behind
        passed = hops + (P - 1) * block
        pace = 1 + (1 - phi) * hops / Max(passed, TINY)
        own = (1 - phi) * Min(hops, (K_b + 1) * slow)
        exposed = Max(own, passed - (work * f_i / rate + call / 3) / pace)
        compute = work * (f - f_s * (1 - 1 / faster)) / rate + call + JOINED / (beta_m * faster)
        sent, far = n_s * s, n_s * s * BETWEEN / Max(1, P - 1)
        return Pass(compute, passed + behind + order, exposed + order, sent + relaid, far + relaid * FAR)

    return Price(way(ONE, F_f, tau), way(BACK, F_b, tau_b), FOUND + s_c, s_b + 2 * s_A + relaid, FOUND, OUTPUT, OUTPUT)


def _linear_all_to_all() -> Price:
    moved = exchange(x, n_x)
    order, relaid = _reordered()

    def way(work: Expr, rate: Expr, call: Expr) -> Pass:
        return Pass(work * f / rate + call, moved + order, moved + order, x + relaid, (x + relaid) * FAR)

    resent = exchange(x * (1 - 1 / n_x), n_x - 1)  # all but results
    forward, backward = way(ONE, F_f, tau), way(BACK, F_b, tau_b)
    saved, held, late = FOUND + s_c, s_b + 2 * TOKENS + relaid, (False, False)
    return Price(forward, backward, saved, held, FOUND, FOUND, OUTPUT, resent=resent, exchanged=True, late=late)


LINEAR_COSTS: dict[str, Price] = {
    "all-scan": _chained(),
    "log-step": _scanned(
        DOUBLINGS * (gamma_h + s_A / beta_h),
        n_A * s_A,
        n_A * s_A * FAR,
        joins=2 * DOUBLINGS * s_A / s,  # of what is before a rank, and of that with the rank itself; A too where it is a matrix
    ),
    "two-level": _scanned(
        # The first rank hands its state round while it sends what it does, the last rank of a node while it passes the state on.
        (G - 1) * (3 * gamma_n + (s_A + 2 * s) / beta_n)
        + (Min(1, BETWEEN) + Max(0, BETWEEN - 1) * CROWD) * (gamma_h + s / beta_h),
        n_A * s_A + n_s * s,
        n_s * s * BETWEEN / Max(1, P - 1),
        joins=(G - 1) * s_A / s + BETWEEN + Min(1, G - 1),
    ),
    "gather-states": _scanned(many * alpha_g + (P - 1) * (gamma_g + s_A / beta_g), n_A * s_A, n_A * s_A * FAR, joins=P - 1),
    "all-to-all": _linear_all_to_all(),
}
