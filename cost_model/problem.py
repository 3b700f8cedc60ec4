"""What the compiler asks the planner, and what it is told: frozen data, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from .plan import Seconds, Totals
from .states import LinearAttention
from .volumes import Attention

LAYOUTS = ("contiguous", "head-tail")
# What backward finds of a layer: all it needs; the results of its attention, whose exchange and work it then need not repeat;
# only the layer's input.
SAVES = ("everything", "attention output", "layer input")


@dataclass(frozen=True)
class Candidate:
    """One way to run one site. `layout`: how the whole model's sequence must be held for it (None: in any way). `reason`: why
    it cannot apply; then sizes may be None."""

    strategy: str
    sizes: Attention | LinearAttention | None
    layout: str | None = None
    params: tuple[tuple[str, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class SiteProblem:
    """A site and the ways to run it. layer: the part of the model it belongs to, by name."""

    name: str
    kind: str
    layer: str
    candidates: tuple[Candidate, ...]


@dataclass(frozen=True)
class Layer:
    """What else a part of the model does on one rank, forward: FLOP of matrix products, bytes read and written by everything
    else.

    saved: bytes that backward needs if nothing is computed again; entering: bytes of what enters the layer.
    """

    name: str
    flop: float = 0.0
    traffic: float = 0.0
    saved: float = 0.0
    entering: float = 0.0


@dataclass(frozen=True)
class Exchange:
    """Collectives beside those of sites: `count` of them in which a rank sends `sent` bytes, forward and backward together."""

    collective: str
    count: int
    sent: float


@dataclass(frozen=True)
class Problem:
    """A model's sites and what else there is. `layout` is given where the user or an earlier decision fixed it. trained,
    frozen: bytes of parameters with and without a gradient. tokens: of the global batch."""

    ranks: int
    dtype: str
    sites: tuple[SiteProblem, ...]
    layers: tuple[Layer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    layout: str | None = None
    strategy: str | None = None
    tokens: int = 0
    trained: float = 0.0
    frozen: float = 0.0
    data_parallel: int = 1


@dataclass(frozen=True)
class Refused:
    """A candidate that was not chosen: its price, if it has one, and why."""

    candidate: Candidate
    reason: str
    seconds: float | None = None
    bytes_sent: int | None = None


@dataclass(frozen=True)
class Choice:
    """What was chosen for a site; `notes` say where that is not what was asked for."""

    candidate: Candidate
    seconds: Seconds
    bytes_sent: tuple[int, int]
    saved: str
    refused: tuple[Refused, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Decision:
    """The planner's answer: one layout, a choice for each site in order, and what a step then takes."""

    layout: str
    choices: tuple[Choice, ...]
    totals: Totals | None = None
    hardware: str = ""
    notes: tuple[str, ...] = field(default=())


Decide = Callable[[Problem], Decision]
