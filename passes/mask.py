"""What rows see, known without building a mask: everything, causally, by a grid of cells, or by cells that a batch has anew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from ..kernels.layout import Layout
from ..kernels.sight import Causal, Everything, Grid, Sight
from .bounds import BROADCASTS, CONJUNCTIONS, Bounds, Cells, limit
from .capture import Captured
from .detect import SDPA, Region, Use
from .relation import operands, shape
from .rules.base import argument

aten = torch.ops.aten
CELLS = 1024  # cells along an axis; a sequence that is no longer is known position by position
BATCH_CELLS = 512  # the same where each batch has them anew
LARGEST_ANCESTRY = 200  # operators between a batch's inputs and a mask's vectors
LARGEST_CONSTANT = 1 << 24  # elements; row and column vectors of any real sequence are smaller


class Constants:
    """Values that depend on no input, evaluated on the host when asked for."""

    def __init__(self, captured: Captured) -> None:
        self._module = captured.module
        self._known: dict[fx.Node, Tensor | None] = {}

    def of(self, node: fx.Node) -> Tensor | None:
        """The value, or None if it depends on an input, is random, or is too large to be a vector."""
        if node not in self._known:
            self._known[node] = self._evaluate(node)
        return self._known[node]

    def _evaluate(self, node: fx.Node) -> Tensor | None:
        value = node.meta.get("val")
        if (not isinstance(value, Tensor) and node.op != "get_attr") or node.op == "placeholder":
            return None
        if node.op == "get_attr":
            held = getattr(self._module, str(node.target))
            return held.cpu() if isinstance(held, Tensor) and held.numel() <= LARGEST_CONSTANT else None
        if value.numel() > LARGEST_CONSTANT or node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            return None
        if torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        xs = operands(node)
        if any(self.of(x) is None for x in xs):
            return None
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: self.of(n))
        if "device" in kwargs:
            kwargs = {**kwargs, "device": torch.device("cpu")}
        # The graph may be read while the compiler's fake mode is on; these are real numbers.
        with torch.utils._python_dispatch._disable_current_modes():
            result = node.target(*args, **kwargs)
        return result if isinstance(result, Tensor) else None


def mask_use(region: Region) -> Use | None:
    """The boolean mask of a scaled_dot_product_attention region."""
    return region.reads.get(((region.closing, region.axes), 3)) if region.closing.target is SDPA else None


def is_causal(region: Region, constants: Constants) -> bool:
    """The mask says `column <= row` and nothing else."""
    use = mask_use(region)
    if use is None or use[0].meta["val"].dtype != torch.bool:
        return False
    rows, columns = region.row.length, region.columns
    if rows != columns:
        return False
    whole = Cells(region, constants.of, (np.array([0, rows]), np.array([0, columns])))

    def certain(use: Use) -> bool:
        return bool(np.min(whole.of(use)[0]) >= 1)

    def lower(use: Use) -> bool:
        node = use[0]
        if use in region.leaves:
            return False
        below = [region.reads[(use, i)] for i in range(len(operands(node)))]
        packet = getattr(node.target, "overloadpacket", None)
        if packet in CONJUNCTIONS:
            a, b = below
            return (certain(a) and lower(b)) or (certain(b) and lower(a))
        return lower(below[0]) if packet in BROADCASTS else _is_lower(node, rows, constants)

    return lower(use)


def _is_lower(node: fx.Node, length: int, constants: Constants) -> bool:
    packet = getattr(node.target, "overloadpacket", None)
    xs = operands(node)
    if packet not in (aten.le, aten.ge, aten.less_equal, aten.greater_equal) or len(xs) != 2:
        return False
    small, large = xs if packet in (aten.le, aten.less_equal) else reversed(xs)
    if len(shape(small)) < 1 or shape(small)[-1] != length or len(shape(large)) < 2 or shape(large)[-2:] != (length, 1):
        return False
    column, row = constants.of(small), constants.of(large)
    if column is None or row is None or column.numel() != length or row.numel() != length:
        return False
    steps = torch.arange(length)
    return bool((column.flatten() == steps).all() and (row.flatten() == steps).all())


# Sights -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class BatchSight:
    """Rows see what the batch says (packed documents, padding). `atmost` is what holds of any batch.

    Called with the graph's inputs it gives the cells, int8 [row cells, column cells], on the host: once a step, whatever the
    number of layers, and alike on every rank that has the same batch.
    """

    row_cuts: np.ndarray
    col_cuts: np.ndarray
    atmost: Grid
    inputs: tuple[int, ...]
    vectors: fx.GraphModule
    cells: Callable[[Sequence[Tensor]], np.ndarray]

    @property
    def example(self) -> Tensor:
        """A tensor of the shape and type that a call gives."""
        return torch.from_numpy(self.atmost.cells.copy())

    def __call__(self, args: Sequence[Any]) -> Tensor:
        known = self.vectors(*[args[i].detach().cpu() for i in self.inputs])
        return torch.from_numpy(self.cells(known))


@dataclass(frozen=True, eq=False)
class BatchLinks:
    """Between which ranks a document goes on, [P − 1] bool, on the host: `first[r]` is the first position of rank r + 1.

    Like `BatchSight`, called with the graph's inputs once a step.
    """

    first: tuple[int, ...]
    inputs: tuple[int, ...]
    vectors: fx.GraphModule

    @property
    def example(self) -> Tensor:
        return torch.ones(len(self.first), dtype=torch.bool)

    def __call__(self, args: Sequence[Any]) -> Tensor:
        (starts,) = self.vectors(*[args[i].detach().cpu() for i in self.inputs])
        return ~starts[:, list(self.first)].all(0)


Extra = BatchSight | BatchLinks


class Sights:
    """What the rows of each region see; regions under one mask share the answer."""

    def __init__(self, captured: Captured, constants: Constants) -> None:
        self._captured, self._constants = captured, constants
        self._known: dict[object, Sight | BatchSight] = {}
        self._links: dict[tuple[fx.Node, Layout], BatchLinks | None] = {}

    def links(self, starts: fx.Node, layout: Layout) -> BatchLinks | None:
        """Between which neighbouring ranks documents go on; None where the batch's integers do not say where they start."""
        key = (starts, layout)
        if key not in self._links:
            found = self._graph_of([starts]) if self._decided(starts) else None
            first = tuple(shard[0][0] for shard in layout.shards[1:])
            self._links[key] = BatchLinks(first, *found) if found else None
        return self._links[key]

    def of(self, region: Region, scores: Use | None, columns: Layout | None) -> Sight | BatchSight:
        """scores: the value under the region's softmax, where it is spelled out; columns: the layout of the keys, or None."""
        masked = mask_use(region)
        kernel = region.closing.target is SDPA
        causal = kernel and bool(argument(region.closing, "is_causal", False))
        if kernel and masked is None:
            return Causal() if causal else Everything()
        if not kernel and scores is None:
            return Everything()
        key = (masked or scores, region.row, region.columns, columns, kernel, causal)
        if key not in self._known:
            simple = kernel and not causal and is_causal(region, self._constants)
            self._known[key] = Causal() if simple else self._grid(region, scores, columns)
        return self._known[key]

    def _grid(self, region: Region, scores: Use | None, columns: Layout | None) -> Grid | BatchSight:
        found = self._of_batch(region, scores)
        most = BATCH_CELLS if found else CELLS
        cuts = (_cuts(region.row.length, region.row, most), _cuts(region.columns, columns, most))
        grid = Grid(*cuts, self._cells(region, scores, cuts, self._constants.of))
        if not found:
            return grid
        inputs, vectors, names = found

        def cells(known: Sequence[Tensor]) -> np.ndarray:
            values = dict(zip(names, known, strict=True))
            return self._cells(region, scores, cuts, lambda n: values[n] if n in values else self._constants.of(n))

        return BatchSight(*cuts, grid, inputs, vectors, cells)

    def _cells(
        self, region: Region, scores: Use | None, cuts: tuple[np.ndarray, np.ndarray], values: Callable[[fx.Node], Tensor | None]
    ) -> np.ndarray:
        use = mask_use(region) or scores
        assert use is not None
        shape_of = (len(cuts[0]) - 1, len(cuts[1]) - 1)
        low, high = (np.broadcast_to(x, shape_of) for x in Cells(region, values, cuts).of(use))
        if use[0].meta["val"].dtype == torch.bool:
            some, every = high > 0, low >= 1
        else:
            # A finite mask hides a score from a row that sees some other one; a row with no other is an average over all.
            hidden = high == -np.inf
            if self._rows_see_themselves(region, use, values):
                hidden = hidden | (high <= -limit(use[0]) / 2)
            # A kernel may leave out a mask that adds nothing; where scores are spelled out they are always computed.
            every = (low == 0) & (high == 0) if region.closing.target is SDPA else low > -limit(use[0]) / 2
            some = ~hidden
        if region.closing.target is SDPA and argument(region.closing, "is_causal", False):
            some = some & (cuts[1][:-1][None, :] < cuts[0][1:][:, None])
            every = every & (cuts[1][1:][None, :] - 1 <= cuts[0][:-1][:, None])
        return (some.astype(np.int8) + (some & every)).astype(np.int8)

    def hides_rows(self, region: Region) -> bool:
        """A mask that adds finite numbers may hide whole rows, for all that is known: their log-sum-exp forgets their columns."""
        use = mask_use(region)
        if use is None or use[0].meta["val"].dtype == torch.bool:
            return False
        return not self._rows_see_themselves(region, use, self._constants.of)

    def _rows_see_themselves(self, region: Region, use: Use, values: Callable[[fx.Node], Tensor | None]) -> bool:
        if region.row.length != region.columns:
            return False
        low, _ = Cells(region, values, None).of(use)
        return bool(np.min(low) >= -limit(use[0]) / 2)

    def _of_batch(self, region: Region, scores: Use | None) -> tuple[tuple[int, ...], fx.GraphModule, list[fx.Node]] | None:
        """The vectors under the mask that a batch decides, as a graph of its inputs."""
        use = mask_use(region) or scores
        assert use is not None
        seen, stack, wanted = set[Use](), [use], dict[fx.Node, None]()
        while stack:
            at = stack.pop()
            if at in seen:
                continue
            seen.add(at)
            if at in region.interior:
                stack += [region.reads[(at, i)] for i in range(len(operands(at[0])))]
            elif self._constants.of(at[0]) is None and self._decided(at[0]):
                wanted[at[0]] = None
        if not wanted:
            return None
        return *self._graph_of(list(wanted)), list(wanted)

    def _graph_of(self, wanted: Sequence[fx.Node]) -> tuple[tuple[int, ...], fx.GraphModule]:
        """What a batch decides, as a graph on the host of the inputs with these places."""
        graph, copied = fx.Graph(), dict[fx.Node, fx.Node]()
        needed = set[fx.Node]()
        for node in wanted:
            needed |= self._ancestry(node) or set()
        placeholders = [n for n in self._captured.module.graph.nodes if n.op == "placeholder"]
        inputs = [i for i, n in enumerate(placeholders) if n in needed]
        for node in self._captured.module.graph.nodes:
            if node in needed:
                copied[node] = graph.node_copy(node, copied.__getitem__)
                if "device" in copied[node].kwargs:
                    copied[node].kwargs = {**copied[node].kwargs, "device": torch.device("cpu")}
        graph.output([copied[n] for n in wanted])
        return tuple(inputs), fx.GraphModule(self._captured.module, graph)

    def _decided(self, node: fx.Node) -> bool:
        """By the batch's integers alone."""
        value = node.meta.get("val")
        return isinstance(value, Tensor) and value.numel() <= LARGEST_CONSTANT and self._ancestry(node) is not None

    def _ancestry(self, node: fx.Node) -> set[fx.Node] | None:
        """All a value is computed from, or None if that is more than integers of the batch and constants."""
        inputs = dict(zip([n for n in node.graph.nodes if n.op == "placeholder"], self._captured.inputs, strict=True))
        seen, stack = set[fx.Node](), [node]
        while stack:
            n = stack.pop()
            if n in seen:
                continue
            seen.add(n)
            if n.op == "placeholder" and (inputs[n].kind != "data" or n.meta["val"].is_floating_point()):
                return None
            if n.op == "call_function" and torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()):
                return None
            if len(seen) > LARGEST_ANCESTRY:
                return None
            stack += operands(n)
        return seen


def _cuts(length: int, layout: Layout | None, most: int) -> np.ndarray:
    """Cells of equal length, cut again where a rank's positions begin or end."""
    step = max(1, -(-length // most))
    held = [x for shard in (layout.shards if layout else ()) for interval in shard for x in interval]
    return np.unique(np.array([*range(0, length, step), length, *held]))


__all__ = ["BatchLinks", "BatchSight", "Bounds", "Constants", "Extra", "Sights", "is_causal", "mask_use"]
