"""What a plan is made of: a site, what was rejected for it, a layer, a collective, what a step takes. Frozen data, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Seconds:
    """Forward and backward of the busiest rank; `exposed` is what of `communication` is not hidden behind `compute`."""

    compute: float = 0.0
    communication: float = 0.0
    exposed: float = 0.0

    @property
    def total(self) -> float:
        return self.compute + self.exposed


@dataclass(frozen=True)
class Rejected:
    """A strategy that was not chosen for a site, and why. Seconds and bytes are None where it cannot apply."""

    strategy: str
    reason: str
    bytes_sent: int | None = None
    seconds: float | None = None
    params: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Totals:
    """A training step without the optimizer, on each of `devices`: seconds, tokens a second and device, and `efficiency`, the
    time one device would take for 1/P of the work, alone, as a share of that. Bytes a device: `peak_bytes`, of which
    `parameter_bytes` (parameters, gradients and Adam's two moments) and `activation_bytes` (kept from forward for backward).

    gap: how much shorter another plan's step could at most be, as a share; 0: none is. host_bytes: kept for backward in the
    host's memory, by each device.
    """

    step_s: float
    tokens_per_s_per_device: float
    efficiency: float
    peak_bytes: float
    parameter_bytes: float
    activation_bytes: float
    compute_s: float
    exposed_s: float
    budget_bytes: float
    gap: float = 0.0
    host_bytes: float = 0.0


@dataclass(frozen=True)
class Site:
    """One attention of the model, at global shapes.

    `name` is the module path, `kind` is "softmax attention", "pairwise", "linear attention" or "last state"; `sees` says
    what rows see ("mask causal") or what becomes of the state ("state a decay per head"). A state is [head_dim, value_dim]
    a head.
    `params` are the strategy's own: `inner` ranks that exchange heads, `turns` in which heads are exchanged and computed,
    `blocks` of a chain, ranks of a `node`. `saved` says what backward keeps of its layer. `bytes_forward` and `bytes_backward`
    are what one rank sends, as the mean over ranks.
    """

    name: str
    kind: str
    strategy: str
    source_line: str
    batch: int
    q_heads: int
    kv_heads: int
    q_seq: int
    kv_seq: int
    head_dim: int
    value_dim: int
    sees: str
    bytes_forward: int
    bytes_backward: int
    note: str = ""
    params: Mapping[str, int] = field(default_factory=dict)
    seconds: Seconds = Seconds()
    saved: str = "everything"
    rejected: tuple[Rejected, ...] = ()
    layer: str = ""
    sizes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def bytes_sent(self) -> int:
        return self.bytes_forward + self.bytes_backward


@dataclass(frozen=True)
class Fallback:
    """An operator run replicated because no sharded rule applies; `bytes` were gathered for it."""

    op: str
    source_line: str
    bytes: int
    reason: str


@dataclass(frozen=True)
class Collective:
    """`count` equal collectives of the lowered forward graph; bytes one rank sends in each direction."""

    op: str
    purpose: str
    count: int
    bytes_forward: int
    bytes_backward: int


@dataclass(frozen=True)
class Layer:
    """What else a part of the model does on one rank, forward: FLOP of matrix products, bytes read and written by everything
    else.

    saved: bytes that backward needs if nothing is computed again; entering: bytes of what enters the layer; around: of what other
    ranks give beside its sites, for convolutions and shifts. checkpointed: the model itself has it computed again.

    Bytes beside what all layers keep: held, of gradients at their widest; waiting, of those that are there when an attention's
    gradient begins; unfinished, of those that are left for the layer before. held_early and waiting_early: where no weight's
    gradient waits for an exchange, less what is no longer kept.

    FLOP of products: repeated, of those that backward computes once more in any case, by tiles; unread, of those whose results
    backward never reads, so that it need not compute them again; projections, of those that it reads for attention's operands
    alone. by_tiles: the same layer with its feed-forward block by tiles, where that may be chosen.
    """

    name: str
    flop: float = 0.0
    traffic: float = 0.0
    saved: float = 0.0
    entering: float = 0.0
    around: float = 0.0
    checkpointed: bool = False
    held: float = 0.0
    waiting: float = 0.0
    unfinished: float = 0.0
    held_early: float = 0.0
    waiting_early: float = 0.0
    repeated: float = 0.0
    unread: float = 0.0
    projections: float = 0.0
    by_tiles: Layer | None = None


@dataclass(frozen=True)
class Exchange:
    """Collectives beside those of sites: `count` of them in which a rank sends `sent` bytes, forward and backward together.
    everyone: they span the data-parallel ranks as well, as those that sum gradients always do."""

    collective: str
    count: int
    sent: float
    everyone: bool = False


@dataclass(frozen=True)
class Beside:
    """What a step was priced with beside its sites. tokens: of the global batch; trained, frozen: bytes of parameters with and
    without a gradient."""

    dtype: str
    layers: tuple[Layer, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    tokens: int = 0
    trained: float = 0.0
    frozen: float = 0.0
    data_parallel: int = 1
