"""What the compiler asks the planner, and what it is told: frozen data, no torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .plan import Beside, Exchange, Layer, Seconds, Totals
from .states import LinearAttention
from .volumes import Attention

LAYOUTS = ("contiguous", "head-tail")
# What backward finds of a layer: all it needs; of its attention what it read, before heads were exchanged, and gave; what it gave
# and what was exchanged for it, so that neither is done again; only the layer's input. What is less than all can wait in the
# host's memory.
_SOME = ("attention operands and output", "attention output", "layer input")
SAVES = ("everything", *_SOME, *(f"{some} on host" for some in _SOME))


def on_host(save: str) -> bool:
    return save.endswith(" on host")


def with_operands(save: str) -> bool:
    return save.startswith("attention operands")


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
class Problem:
    """A model's sites and what else there is. `layout` is given where the user or an earlier decision fixed it. trained,
    frozen: bytes of parameters with and without a gradient. tokens: of the global batch. parts: into how many each parameter is
    split (ZeRO-3), and then largest_layer: bytes of those that are gathered together. returned: bytes of the model's results."""

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
    parts: int = 1
    largest_layer: float = 0.0
    returned: float = 0.0

    @property
    def beside(self) -> Beside:
        """All but the sites and what was asked for, as a plan keeps it."""
        return Beside(self.dtype, self.layers, self.exchanges, self.tokens, self.trained, self.frozen, self.data_parallel)

    def by_tiles(self, names: Collection[str]) -> Problem:
        """With these layers' feed-forward blocks by tiles, and no others to choose."""
        layers = ((x.by_tiles if x.name in names and x.by_tiles else x) for x in self.layers)
        named = (replace(x, name=of.name, by_tiles=None) for x, of in zip(layers, self.layers, strict=True))
        return replace(self, layers=tuple(named))


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
    """The planner's answer: one layout, a choice for each site in order, what backward finds of a layer where that is not
    everything, by name, and what a step then takes. tiles: the layers of which `Layer.by_tiles` was chosen."""

    layout: str
    choices: tuple[Choice, ...]
    totals: Totals | None = None
    hardware: str = ""
    notes: tuple[str, ...] = field(default=())
    node: int = 0
    saves: Mapping[str, str] = field(default_factory=dict)
    tiles: tuple[str, ...] = ()


Decide = Callable[[Problem], Decision]

# Sizes in a plan ----------------------------------------------------------------------------------

Sizes = Attention | LinearAttention
_KINDS: dict[str, type[Sizes]] = {"attention": Attention, "linear attention": LinearAttention}


def as_row(sizes: Sizes | None) -> dict[str, Any]:
    """Sizes as a `plan.Site` keeps them: fields and "kind", as JSON has them; nothing of None."""
    if sizes is None:
        return {}
    kind = next(name for name, each in _KINDS.items() if isinstance(sizes, each))
    row = dataclasses.asdict(sizes)
    return {"kind": kind, **{key: list(v) if isinstance(v, tuple) else v for key, v in row.items()}}


def sizes_of(row: Mapping[str, Any]) -> Sizes | None:
    """What `as_row` made of sizes; None where there were none. Raises KeyError or TypeError for anything else."""
    if not row:
        return None
    fields: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key != "kind"}
    return _KINDS[row["kind"]](**fields)


__all__ = [
    "LAYOUTS", "SAVES", "Beside", "Candidate", "Choice", "Decide", "Decision", "Exchange", "Layer", "Problem", "Refused",
    "SiteProblem", "Sizes", "as_row", "on_host", "sizes_of", "with_operands",
]  # fmt: skip
