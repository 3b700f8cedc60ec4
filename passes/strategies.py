"""The strategies: one row each, to be read beside `cost_model.prices.COSTS`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ..cost_model.volumes import head_turns
from ..kernels.layout import Layout
from ..kernels.sight import Causal, Everything
from .blockwise import BLOCKWISE, Blockwise
from .detect import Region
from .rules.base import Recipe
from .sites import SiteContext, all_to_all, atmost, covered, gather_kv, no_heads, pairs_of_all, pairs_of_rows, strips_of


@dataclass(frozen=True)
class Strategy:
    """One way to spread an attention over ranks; `Blockwise` is a whole family with the same members.

    layout: how the whole model's sequence must be held (None: in any way). lower: a region's recipe. inapplicable: why it cannot
    be taken for a region, or None. direct: masks under which one kernel covers it. work: pairs that the busiest rank computes
    for each head, where a mask says so. params: its own, for the plan.
    """

    lower: Callable[[Region, SiteContext], Recipe]
    inapplicable: Callable[[Region, SiteContext], str | None]
    work: Callable[[Region, SiteContext], float | None]
    direct: tuple[type, ...]
    layout: Callable[[int, int], Layout] | None = None
    params: tuple[tuple[str, int], ...] = ()

    def variants(self, region: Region, ctx: SiteContext) -> tuple[Strategy, ...]:
        return (self,)

    def latent(self, region: Region, ctx: SiteContext) -> int:
        """Bytes of one position of what keys and values travel as, if not as themselves."""
        return 0

    def counted(self, region: Region, ctx: SiteContext) -> dict[str, Any]:
        """Fields of `volumes.Attention` that are counted on the mask at hand."""
        by_rows = ctx.ranks > 1 and not covered(region, ctx, self.direct)
        rows = region.row.length if self.work is pairs_of_all else region.row.size(0)
        calls = -(-rows // strips_of(region, atmost(ctx.sight(region)))) if by_rows else None
        return {"work": self.work(region, ctx), "by_rows": by_rows, "calls": calls}


@dataclass(frozen=True)
class InTurns(Strategy):
    """All-to-all; in several turns, a strategy for each number of them."""

    def variants(self, region: Region, ctx: SiteContext) -> tuple[Strategy, ...]:
        groups = {1, *region.groups.values()}
        allowed = set.intersection(*(set(head_turns(region.heads, region.heads // g, ctx.ranks)) for g in groups))
        return (
            self,
            *(replace(self, lower=functools.partial(all_to_all, turns=t), params=(("turns", t),)) for t in sorted(allowed)),
        )

    def counted(self, region: Region, ctx: SiteContext) -> dict[str, Any]:
        return {**super().counted(region, ctx), **dict(self.params)}


LOWERINGS: dict[str, Strategy | Blockwise] = {
    "all-to-all": InTurns(all_to_all, no_heads, pairs_of_all, (Everything, Causal)),
    "gather-kv": Strategy(gather_kv, lambda region, ctx: None, pairs_of_rows, (Everything,)),
    **BLOCKWISE,
}
