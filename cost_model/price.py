"""What a row of prices is, and what rows have in common: collectives, and what hides behind computation."""

from __future__ import annotations

from dataclasses import dataclass

from sympy import Expr, Float, Integer, Max, Min

from .symbols import (
    G,
    G_u,
    P,
    alpha_g,
    alpha_s,
    alpha_x,
    beta_g,
    beta_m,
    beta_s,
    beta_x,
    beta_xf,
    gamma_g,
    gamma_s,
    gamma_x,
    gamma_xf,
    phi,
    u,
)  # fmt: skip

NOTHING, ONE, TINY = Integer(0), Integer(1), Float(1e-30)


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
    """A strategy's row. Bytes on a rank: `saved` from forward for backward, `held` at most while it runs beside them. Where its
    layer is computed again: `operands`, what is saved of what it reads, before heads are exchanged, and gives; `output`, what is
    saved for backward to repeat neither its exchange nor, if it is no linear attention, its work; `always`, what is saved even
    where all else is repeated. resent: seconds to exchange operands again. exchanged: whether `output` has the operands, as they
    arrived. late: whether weights' gradients wait for an exchange of its backward, beside which they are made, where nothing is
    repeated and where its layer is."""

    forward: Pass
    backward: Pass
    saved: Expr
    held: Expr
    operands: Expr
    output: Expr
    always: Expr = NOTHING
    resent: Expr = NOTHING
    exchanged: bool = False
    late: tuple[bool, bool] = (True, True)

    @property
    def terms(self) -> list[Expr]:
        kept = [self.saved, self.held, self.operands, self.output, self.always, self.resent]
        return [*vars(self.forward).values(), *vars(self.backward).values(), *kept]


# Shared -------------------------------------------------------------------------------------------

many = Min(1, P - 1)  # 0 on one rank
FAR = (P - G) / Max(1, P - 1)  # of the other ranks, those in other nodes


def exchange(sent: Expr, count: Expr) -> Expr:
    """`count` all-to-alls among u ranks in which a rank sends `sent` bytes: links inside and between nodes are used at once.

    What goes to a rank must lie in one piece: tensors are read and written once before they are sent, and once after.
    """
    return 2 * in_order(sent) + travel(sent, count)


def in_order(sent: Expr) -> Expr:
    """What a rank exchanges is read and written."""
    return 2 * sent * u / Max(1, u - 1) / beta_m


def travel(sent: Expr, count: Expr) -> Expr:
    """An exchange without what is done before and after it."""
    others = Max(1, u - 1)
    near, far = (G_u - 1) / others, (u - G_u) / others
    inside = count * (G_u - 1) * gamma_x + sent * near / beta_x
    return Min(1, u - 1) * count * alpha_x + Max(inside, count * (u - G_u) * gamma_xf + sent * far / beta_xf)


def gathers(sent: Expr, count: int) -> Expr:
    """`count` all-gathers, around a ring."""
    return many * count * alpha_g + count * (P - 1) * gamma_g + sent / beta_g


def scatters(sent: Expr, count: int) -> Expr:
    """`count` reduce-scatters, around a ring."""
    return many * count * alpha_s + count * (P - 1) * gamma_s + sent / beta_s


def hidden(transfer: Expr, work: Expr) -> Expr:
    return phi * Min(transfer, work)
