"""A rank's place on the mesh, and among whom gradients are summed."""

from __future__ import annotations

from dataclasses import dataclass

from .placement import Placement, Varying


@dataclass(frozen=True)
class Spread:
    """Where a rank stands: its place on the sp axis, the groups by name, and how gradients are reduced.

    `whole_group` spans sp and dp together; `dp_group` is None without a dp axis. With `external` someone else averages
    parameter gradients over every rank, so a sum over sp must be scaled up by its size here. With `zero` each rank of the
    whole group holds a part of each parameter.
    """

    rank: int
    ranks: int
    group: str
    dp: int = 1
    dp_group: str | None = None
    whole_group: str | None = None
    external: bool = False
    dp_rank: int = 0
    zero: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.ranks

    @property
    def place(self) -> int:
        """This rank's number among all of them."""
        return self.dp_rank * self.ranks + self.rank

    @property
    def everyone(self) -> str | None:
        return self.whole_group if self.dp > 1 else self.group

    def reduction(self, placement: Placement) -> tuple[str | None, float]:
        """(group to sum over or None, factor) for the gradient of a parameter used in this placement."""
        if self.external:
            return None, float(self.ranks) if isinstance(placement, Varying) else 1.0
        if isinstance(placement, Varying):
            group = self.everyone if self.world > 1 else None
        else:
            group = self.dp_group
        return group, 1.0 / self.dp


__all__ = ["Spread"]
