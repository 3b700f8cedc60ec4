"""The strategies: one row each, to be read beside `cost_model.volumes.COSTS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..kernels.layout import Layout
from .blockwise import BLOCKWISE, Blockwise
from .detect import Region
from .rules.base import Recipe
from .sites import SiteContext, all_to_all, gather_kv, no_heads


@dataclass(frozen=True)
class Strategy:
    """One way to spread an attention over ranks; `Blockwise` is a whole family with the same members.

    layout: how the whole model's sequence must be held (None: in any way). lower: a region's recipe. inapplicable: why it cannot
    be taken for a region, or None. inner: how many neighbouring ranks exchange heads. latent: bytes of one position
    of what keys and values travel as, if not as themselves. moved: positions of
    rows and of columns that travel between ranks, where a schedule says so.
    """

    layout: Callable[[int, int], Layout] | None
    lower: Callable[[Region, SiteContext], Recipe]
    inapplicable: Callable[[Region, SiteContext], str | None]
    inner: Callable[[Region, int], int] = lambda region, ranks: 1
    latent: Callable[[Region, SiteContext], int] = lambda region, ctx: 0
    moved: Callable[[Region, SiteContext], tuple[int, int] | None] = lambda region, ctx: None


LOWERINGS: dict[str, Strategy | Blockwise] = {
    "all-to-all": Strategy(None, all_to_all, no_heads),
    "gather-kv": Strategy(None, gather_kv, lambda region, ctx: None),
    **BLOCKWISE,
}
