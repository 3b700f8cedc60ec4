"""Every row of the table of rules, against the operator itself: split the operands, run, join, compare."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autosp.cost_model.prices import COSTS, LINEAR_COSTS
from autosp.kernels.comm import cut
from autosp.kernels.layout import contiguous
from autosp.passes.capture import Captured, Input
from autosp.passes.facts import Facts
from autosp.passes.lower import Lowering
from autosp.passes.placement import Pairwise, Partial, Placement, R, Shard, Varying
from autosp.passes.recurrence import RECURRENT
from autosp.passes.relation import operands
from autosp.passes.rules import RULES, rule_of
from autosp.passes.rules.base import Recipe, Rule
from autosp.passes.rules.convolution import Convolution
from autosp.passes.rules.scans import Scan
from autosp.passes.spread import Spread
from autosp.passes.strategies import LOWERINGS

aten = torch.ops.aten
RANKS = 2
torch.manual_seed(0)
X, Y, W = torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.randn(5, 4)
IDS, MASK = torch.randint(0, 5, (2, 6)), torch.rand(2, 6, 4) < 0.5
Q, K = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4)

SAMPLES: dict[str, tuple[Any, ...]] = {
    "add": (aten.add.Tensor, X, Y),
    "add broadcast": (aten.add.Tensor, X, torch.randn(6, 1)),
    "where": (aten.where.self, MASK, X, Y),
    "clamp": (aten.clamp.default, X, -0.5, 0.5),
    "cast": (aten._to_copy.default, X),
    "linear": (aten.linear.default, X, W),
    "linear with bias": (aten.linear.default, X, W, torch.randn(5)),
    "matmul": (aten.matmul.default, Q, K.mT),
    "matmul broadcast": (aten.matmul.default, Q, torch.randn(1, 4, 3)),
    "matmul vector": (aten.matmul.default, X, torch.randn(4)),
    "bmm": (aten.bmm.default, X, Y.mT),
    "addmm": (aten.addmm.default, torch.randn(5), X[0], W.T),
    "baddbmm": (aten.baddbmm.default, torch.randn(2, 1, 6), X, Y.mT),
    "einsum": (aten.einsum.default, "bsd,td->bst", [X, torch.randn(6, 4)]),
    "einsum with a weight": (aten.einsum.default, "bsd,d->d", [X, torch.randn(4)]),
    "outer": (aten.outer.default, torch.randn(4), torch.randn(6)),
    "view": (aten.view.default, X, [12, 4]),
    "view apart": (aten.view.default, X, [2, 6, 2, 2]),
    "flatten": (aten.flatten.using_ints, X, 1, 2),
    "unsqueeze": (aten.unsqueeze.default, X, 1),
    "transpose": (aten.transpose.int, X, 1, 2),
    "permute": (aten.permute.default, X, [2, 0, 1]),
    "movedim": (aten.movedim.int, Q, 1, 3),
    "expand": (aten.expand.default, torch.randn(2, 1, 4), [2, 6, 4]),
    "repeat": (aten.repeat.default, X, [1, 1, 2]),
    "stack": (aten.stack.default, [X, Y], 1),
    "cat": (aten.cat.default, [X, Y], 2),
    "slice": (aten.slice.Tensor, X, 2, 1, 3),
    "select": (aten.select.int, X, 0, 1),
    "pad": (aten.constant_pad_nd.default, X, [1, 1]),
    "softmax": (aten.softmax.int, X, -1),
    "log_softmax": (aten.log_softmax.int, X, 0),
    "cumsum": (aten.cumsum.default, X, 2),
    "flip": (aten.flip.default, X, [2]),
    "roll": (aten.roll.default, X, [1], [2]),
    "glu": (aten.glu.default, X, -1),
    "sort": (aten.sort.default, X, -1),
    "topk": (aten.topk.default, X, 2),
    "argmax": (aten.argmax.default, X, -1),
    "max": (aten.max.dim, X, 0),
    "amax": (aten.amax.default, X, [-1], True),
    "logsumexp": (aten.logsumexp.default, X, [2]),
    "var": (aten.var.correction, X, [2]),
    "any": (aten.any.dim, MASK, 2),
    "norm": (aten.linalg_vector_norm.default, X, 2, [2]),
    "sum": (aten.sum.dim_IntList, X, [1]),
    "sum of all": (aten.sum.default, X),
    "mean": (aten.mean.dim, X, [0, 1], True),
    "mean of all": (aten.mean.default, X),
    "layer_norm": (aten.layer_norm.default, X, [4], torch.randn(4), torch.randn(4)),
    "rms_norm": (aten.rms_norm.default, X, [4], torch.randn(4)),
    "group_norm": (aten.group_norm.default, X, 3),
    "conv1d": (aten.conv1d.default, X, torch.randn(3, 6, 2)),
    "conv1d without batch": (aten.conv1d.default, X[0], torch.randn(3, 6, 2)),
    "repeat_interleave": (aten.repeat_interleave.self_int, X, 2, 2),
    "tril": (aten.tril.default, torch.randn(2, 6, 6)),
    "triu": (aten.triu.default, torch.randn(6, 6), 1),
    "embedding": (aten.embedding.default, W, IDS),
    "index": (aten.index.Tensor, X, [None, torch.tensor([4, 1, 0])]),
    "index apart": (aten.index.Tensor, Q, [torch.tensor([0, 1, 1]), None, torch.tensor([2, 5, 3])]),
    "gather": (aten.gather.default, X, 2, torch.randint(0, 4, (2, 6, 2))),
    "scatter": (aten.scatter.src, torch.zeros(2, 6, 4), 2, torch.randint(0, 4, (2, 6, 1)), torch.randn(2, 6, 1)),
    "slice_scatter": (aten.slice_scatter.default, X, torch.randn(2, 6, 2), 2, 1, 3),
    "select_scatter": (aten.select_scatter.default, X, torch.randn(2, 6), 2, 1),
    "index_select": (aten.index_select.default, X, 0, torch.tensor([1, 1, 0, 1])),
    "one_hot": (aten.one_hot.default, IDS, 5),
    "attention": (aten.scaled_dot_product_attention.default, Q, K, K),
    "attention causal": (aten.scaled_dot_product_attention.default, Q, K, K, None, 0.0, True),
    "attention masked": (aten.scaled_dot_product_attention.default, Q, K, K, torch.rand(6, 6) < 0.7),
    "cross_entropy": (aten.cross_entropy_loss.default, X.flatten(0, 1), torch.tensor([0, 1, -100, 3] * 3)),
    "cross_entropy smoothed": (aten.cross_entropy_loss.default, X.mT, torch.randint(0, 4, (2, 6)), torch.rand(4), 1, -100, 0.1),
    "cross_entropy of probabilities": (aten.cross_entropy_loss.default, X[0], torch.softmax(Y[0], -1)),
    "mse": (aten.mse_loss.default, X, Y),
    "huber": (aten.huber_loss.default, X, Y, 2),
    "view_as_complex": (aten.view_as_complex.default, X.unflatten(-1, (2, 2)).contiguous()),
    "view_as_real": (aten.view_as_real.default, torch.complex(X, Y)),
}


def node_of(op: Any, *args: Any) -> tuple[fx.Node, list[Tensor]]:
    """A graph of one operator on placeholders, with the values in its metadata."""
    graph, tensors = fx.Graph(), []

    def placeholder(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [placeholder(item) for item in x]
        if not isinstance(x, Tensor):
            return x
        node = graph.placeholder(f"x{len(tensors)}")
        node.meta["val"] = x
        tensors.append(x)
        return node

    node = graph.call_function(op, tuple(placeholder(a) for a in args))
    node.meta["val"] = op(*args)
    graph.output((node,))
    return node, tensors


def piece(x: Tensor, placement: Placement, rank: int) -> Tensor:
    if not isinstance(placement, Shard):
        return x
    return cut(x, placement.dim, placement.layout.shards, placement.outer, placement.inner, rank)


def on_rank(node: fx.Node, recipe: Any, rank: int, leaves: list[Tensor] | None = None) -> Any:
    """Run what the recipe emits for one rank on that rank's pieces of the operands, or on `leaves` in their place."""
    module = fx.GraphModule(torch.nn.Module(), node.graph)
    inputs = tuple(Input(n.name, "data", False, "") for n in node.graph.find_nodes(op="placeholder"))
    facts = Facts({}, frozenset(), frozenset(), frozenset(), {}, RANKS)
    low = Lowering(Captured(module, inputs, ()), facts, Spread(rank, RANKS, "nobody"))
    values = [low.graph.placeholder(f"x{i}") for i in range(len(recipe.demands))]
    low.graph.output(recipe.emit(low, values))
    pieces = leaves or [piece(x.meta["val"], p, rank) for x, p in recipe.demands]
    return fx.GraphModule(torch.nn.Module(), low.graph)(*pieces)


def first(value: Any) -> Tensor:
    return value[0] if isinstance(value, tuple | list) else value


@pytest.mark.parametrize("name", SAMPLES)
def test_a_version_is_the_split_of_the_whole(name: str) -> None:
    """For each dimension of the result that the rule can split: each rank's result is its piece of the whole."""
    node, _ = node_of(*SAMPLES[name])
    rule = rule_of(node)
    assert rule is not None
    whole = first(node.meta["val"])
    for dim, size in enumerate(whole.shape):
        recipe = rule.version(node, Shard(dim, contiguous(size, RANKS)))
        if recipe is not None:
            for rank in range(RANKS):
                torch.testing.assert_close(first(on_rank(node, recipe, rank)), piece(whole, recipe.out, rank))


def derived(node: fx.Node, tensors: list[Tensor]) -> Iterator[Recipe]:
    """What the rule gives when one operand is split along one of its dimensions, for each of them it has an answer to."""
    rule = rule_of(node)
    assert rule is not None
    for i, x in enumerate(operands(node)):
        for dim, size in enumerate(x.meta["val"].shape):
            ins: list[Placement] = [R] * len(tensors)
            ins[i] = Shard(dim, contiguous(size, RANKS))
            recipe = rule.native(node, ins)
            if recipe is not None and not isinstance(recipe.out, Pairwise) and not (talks(rule) and dim in rule.changed(node)):
                yield recipe


def talks(rule: Rule) -> bool:
    """Ranks exchange something where it works along the sequence; those are tested on ranks (test_comm, test_prefix)."""
    return isinstance(rule, Convolution | Scan)


def joins(recipe: Recipe, results: list[Tensor], whole: Tensor) -> None:
    """The ranks' results are the terms or the pieces of the whole."""
    if isinstance(recipe.out, Partial):
        torch.testing.assert_close(torch.stack(results).sum(0), whole)
    else:
        for rank, result in enumerate(results):
            torch.testing.assert_close(result, piece(whole, recipe.out, rank))


@pytest.mark.parametrize("name", SAMPLES)
def test_what_follows_from_a_split_operand_is_right(name: str) -> None:
    """For each operand and dimension: what the rule derives is the whole again, split or summed; or it has no answer."""
    node, tensors = node_of(*SAMPLES[name])
    for recipe in derived(node, tensors):
        joins(recipe, [first(on_rank(node, recipe, rank)) for rank in range(RANKS)], first(node.meta["val"]))


@pytest.mark.parametrize("name", SAMPLES)
def test_gradients_of_a_derived_recipe_are_those_its_placements_promise(name: str) -> None:
    """Varying: the ranks' gradients sum to the whole one. Replicate: each is the whole one. Shard: each is its piece."""
    node, tensors = node_of(*SAMPLES[name])
    whole = first(node.meta["val"])
    if not whole.is_floating_point() or not any(x.is_floating_point() for x in tensors):
        return
    upstream = torch.randn(whole.shape)
    for recipe in derived(node, tensors):
        promised(node, recipe, upstream)


def promised(node: fx.Node, recipe: Any, upstream: Tensor) -> None:
    constants = operands(node)[2:] if node.target is aten.cross_entropy_loss.default else []  # torch takes class weights so
    takes = {x: x.meta["val"].is_floating_point() and x not in constants for x in operands(node)}
    inputs = {x: x.meta["val"].clone().requires_grad_(takes[x]) for x in operands(node)}
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: inputs[n])
    (first(node.target(*args, **kwargs)) * upstream).sum().backward()  # type: ignore[operator]
    local: list[list[Tensor]] = []
    for rank in range(RANKS):
        leaves = [piece(x.meta["val"], p, rank).clone().requires_grad_(takes[x]) for x, p in recipe.demands]
        (first(on_rank(node, recipe, rank, leaves)) * piece(upstream, recipe.out, rank)).sum().backward()
        local.append([torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves])
    for j, (x, placement) in enumerate(recipe.demands):
        want = inputs[x].grad
        if want is None:
            continue
        if isinstance(placement, Varying):
            torch.testing.assert_close(sum(grads[j] for grads in local), want)
        else:
            for rank, grads in enumerate(local):
                torch.testing.assert_close(grads[j], piece(want, placement, rank))


CHANGES: dict[str, tuple[Callable[[Tensor], Any], ...]] = {
    "slice": (lambda x: (aten.slice.Tensor, x, 1, 2, 5), lambda x: (aten.slice.Tensor, x, 1, 1, 6, 2)),
    "select": (lambda x: (aten.select.int, x, 1, 0), lambda x: (aten.select.int, x, 1, -1)),
    "pad": (lambda x: (aten.constant_pad_nd.default, x, [0, 0, 2, 1], 3.0), lambda x: (aten.pad.default, x, [0, 1, 1, -1])),
    "cat": (lambda x: (aten.cat.default, [x[:, :2], x], 1), lambda x: (aten.cat.default, [x, x], 1)),
    "flip": (lambda x: (aten.flip.default, x, [1]), lambda x: (aten.flip.default, x, [2, 1])),
    "roll": (lambda x: (aten.roll.default, x, [2], [1]), lambda x: (aten.roll.default, x, [-7, 1, 3], [1, 2, 1])),
}


@pytest.mark.parametrize("name", CHANGES)
def test_operators_that_change_the_sequence_keep_every_position(name: str) -> None:
    """Cut, pad and join along the split dimension itself: the layout that follows says who holds what."""
    for sample in CHANGES[name]:
        node, tensors = node_of(*sample(X))
        rule = rule_of(node)
        assert rule is not None
        split = Shard(1, contiguous(6, RANKS))
        recipe = rule.native(node, [split if x.shape[1] == 6 else R for x in tensors])
        assert recipe is not None and isinstance(recipe.out, Partial | Shard)
        joins(recipe, [on_rank(node, recipe, rank) for rank in range(RANKS)], node.meta["val"])


def test_samples_cover_the_table() -> None:
    """Operators with a rule of their own, not of the elementwise family, have a sample."""
    sampled = {packet for op, *_ in SAMPLES.values() for packet in (op, op.overloadpacket)}
    sampled |= {op for samples in CHANGES.values() for s in samples for op in (s(X)[0], s(X)[0].overloadpacket)}
    kinds = {type(rule_of(node_of(*sample)[0])).__name__ for sample in SAMPLES.values()}
    assert {"Sized", "ReshapeTo", "Mean", "Triangle", "CrossEntropy", "Elementwise", "Attention", "Slice", "Cat"} <= kinds
    relations = {rule.relate for rule in RULES.values() if hasattr(rule, "relate")}
    seen = {rule.relate for op, rule in RULES.items() if hasattr(rule, "relate") and op in sampled}
    assert len(seen) >= len(relations) // 2


def test_every_strategy_has_a_price_and_a_lowering() -> None:
    assert COSTS.keys() == LOWERINGS.keys()
    assert LINEAR_COSTS.keys() == RECURRENT.keys()
