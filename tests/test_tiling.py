"""Losses and feed-forward blocks by tiles: exact, never whole, and computed once more in backward."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import FULL
from direct import Lowered
from lowered import trace
from models import MODELS
from models_common import HIDDEN, IGNORE, VOCAB, Backbone, token_ids, token_labels
from test_memory import in_fresh_processes, peak_gb
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, distance, gradient_error, gradients, step

import autosp
from autosp import zoo
from autosp.check import relative_error
from autosp.kernels import tiles
from autosp.passes.pipeline import StrategyError
from pool import Pool

INNER = 5 * HIDDEN + 3


class Head(nn.Module):
    """An embedding, a feed-forward block, a head and a loss of one's own; returns the loss alone, or logits as well."""

    def __init__(self, loss: Any = None, bias: bool = False, logits: bool = False, vocab: int = VOCAB):
        super().__init__()
        self.backbone = nn.Embedding(VOCAB, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.SiLU(), nn.Linear(INNER, HIDDEN))
        self.head, self.loss, self.logits = nn.Linear(HIDDEN, vocab, bias=bias), loss or mean, logits

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.backbone(ids)
        x = x + self.mlp(x)
        logits = self.head(x)
        loss = self.loss(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits} if self.logits else loss


def mean(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORE)


def capped(logits: Tensor, labels: Tensor) -> Tensor:
    """Soft-capping (Gemma 2), a scale (T5) and a cast, as transformers emits them."""
    logits = torch.tanh(logits / 3.0) * 3.0
    return mean((logits * 0.5).float(), labels)


def smoothed(logits: Tensor, labels: Tensor) -> Tensor:
    weight = torch.linspace(0.5, 1.5, logits.shape[-1], dtype=logits.dtype)
    return F.cross_entropy(logits, labels, weight, label_smoothing=0.1)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """A log-softmax whose narrow values lie between wide ones, and a term beside it."""
    top = logits.max(dim=-1, keepdim=True).values
    total = (logits - top).exp().sum(-1, keepdim=True)
    log_p = logits - top - total.log()
    picked = log_p.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    keep = labels != IGNORE
    return -(picked * keep).sum() / keep.sum() + 1e-3 * logits.square().mean() + 1e-3 * logits.logsumexp(-1).square().mean()


class TiedHead(Head):
    """The head's weight is the embedding's, and a frozen bias is added."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.head.weight = self.backbone.weight
        self.head.bias.requires_grad_(False)


class FrozenHead(Head):
    def __init__(self) -> None:
        super().__init__(bias=True)
        self.head.requires_grad_(False)


class Dropped(Head):
    """Dropout inside the wide part of a feed-forward block."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, INNER), nn.GELU(), nn.Dropout(0.3), nn.Linear(INNER, HIDDEN))


class Gated(Head):
    """A gate and a norm across the inner width."""

    def __init__(self) -> None:
        super().__init__(capped, bias=True)
        self.mlp = nn.ModuleDict(
            {"both": nn.Linear(HIDDEN, 2 * INNER), "norm": nn.RMSNorm(INNER), "out": nn.Linear(INNER, HIDDEN)}
        )

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.backbone(ids)
        gate, up = self.mlp["both"](x).chunk(2, -1)
        x = x + self.mlp["out"](self.mlp["norm"](F.silu(gate) * up))
        return self.loss(self.head(x).flatten(0, 1), labels.flatten())


class Adapted(Head):
    """A low-rank adapter widens what is narrow everywhere else, beside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(Backbone(layers=1), Adapter())


class Adapter(nn.Module):
    def __init__(self, rank: int = 4):
        super().__init__()
        self.down, self.up = nn.Linear(HIDDEN, rank, bias=False), nn.Linear(rank, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.up(self.down(x))


OWN: dict[str, Any] = {
    "mean": Head,
    "capped": lambda: Head(capped, bias=True),
    "smoothed": lambda: Head(smoothed),
    "by_hand": lambda: Head(by_hand),
    "tied": TiedHead,
    "frozen": FrozenHead,
    "gated": Gated,
    "adapted": Adapted,
}
# Those of the zoo, under attention.
LOSSES = ["ce_none", "ce_transposed", "ce_shift_pad", "ce_shift_slice", "log_softmax_nll", "gather_nll", "z_loss", "row_means"]


def built(name: str, seq_len: int, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, dict[str, Tensor]]:
    if name in MODELS:
        return MODELS[name](seq_len, 2, dtype)
    torch.manual_seed(0)
    module = OWN[name]().to(dtype)
    return module, {"ids": token_ids(seq_len, 2), "labels": token_labels(seq_len, 2)}


def by_tiles(mesh: DeviceMesh, names: Sequence[str], seq_len: int, rows: int) -> dict[str, tuple[float, list[str]]]:
    """By model: the largest relative error of its loss and gradients on this rank, and the plan's notes."""
    results = {}
    for name in names:
        plain, inputs = built(name, seq_len)
        module = copy.deepcopy(plain)
        lowered = Lowered(module, mesh, [None], tile=rows)
        want, got = step(plain, inputs), step(lowered, inputs)
        loss = relative_error(torch.tensor(got), torch.tensor(want), 0.0) if name not in ("capped", "gated") else 0.0
        results[name] = max(loss, gradient_error(plain, module)), list(lowered.plan.notes)
        torch._dynamo.reset()
    return results


@pytest.mark.parametrize(("ranks", "seq_len", "rows"), [(1, 96, 40), (2, 101, 7), (3, 101, 5), (4, 96, 24)])
def test_losses_and_blocks_are_exact_by_tiles(pool: Pool, ranks: int, seq_len: int, rows: int) -> None:
    names = [*OWN, *LOSSES] if FULL else [*list(OWN)[ranks % 2 :: 2], *LOSSES[ranks - 1 :: 4]]
    for results in pool.run(by_tiles, names, seq_len, rows, on=ranks, timeout=280):
        assert {name: error for name, (error, _) in results.items() if not error <= EXACT} == {}
        for name, (_, notes) in results.items():
            assert any("loss in tiles of" in n for n in notes) and any("feed-forward block" in n for n in notes), (name, notes)
            assert not any("not computed in tiles" in n for n in notes), (name, notes)


if FULL:

    @pytest.mark.parametrize("first", range(0, len(MODELS), 8))
    def test_every_model_is_exact_by_tiles(pool: Pool, first: int) -> None:
        names = list(MODELS)[first : first + 8]
        for results in pool.run(by_tiles, names, 101, 7, on=2, timeout=280):
            assert {name: error for name, (error, _) in results.items() if not error <= EXACT} == {}


def whole_step(mesh: DeviceMesh, name: str, seq_len: int, options: dict[str, Any]) -> tuple[float, list[str]]:
    plain, inputs = built(name, seq_len)
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, **options)
    losses = [step(m, inputs) for m in (plain, parallel)]
    return max(abs(losses[0] - losses[1]) / abs(losses[0]), gradient_error(plain, parallel)), list(parallel.autosp_plan.notes)


WAYS = [
    ("by_hand", {"compiler": "aot_eager", "strategy": "ring"}, 3),
    ("smoothed", {"compiler": "aot_eager"}, "2x2"),
    ("tied", {"compiler": "inductor"}, 2),
]


@pytest.mark.parametrize(("name", "options", "on"), WAYS)
def test_steps_by_tiles_are_exact(pool: Pool, name: str, options: dict[str, Any], on: int | str) -> None:
    """Through PyTorch's partitioner, in head-tail layout, beside data parallelism, and with Inductor."""
    for error, notes in pool.run(whole_step, name, 45, {**options, "tile": 6}, on=on, timeout=280):
        assert error < EXACT and any("loss in tiles of 6" in n for n in notes)


def dropped(mesh: DeviceMesh) -> float:
    """Distance of gradients with tiles and without, from one seed: the mask depends on the element alone."""
    torch.manual_seed(0)
    found = []
    module = Dropped().double()
    inputs = {"ids": token_ids(33, 2), "labels": token_labels(33, 2)}
    for tile in ("none", 4):
        twin = copy.deepcopy(module)
        lowered = Lowered(twin, mesh, [None], tile=tile)
        lowered.seed = 7
        step(lowered, inputs)
        assert any("feed-forward" in n for n in lowered.plan.notes) == (tile == 4)
        found.append(gradients(twin))
        torch._dynamo.reset()
    return distance(*found)


def test_dropout_inside_a_tile_is_that_of_the_whole(pool: Pool) -> None:
    assert max(pool.run(dropped, on=2)) < EXACT


def transformers_steps(mesh: DeviceMesh, family: str) -> tuple[float, list[str], bool]:
    """Distance of gradients with tiles and without (eager attention is in float32, and so not that of one device)."""
    module, inputs = zoo.build(family, 45, 2)
    found = []
    for tile in ("none", 8):
        model = autosp.parallelize(copy.deepcopy(module), mesh, compiler="aot_eager", outputs="loss", tile=tile)
        made = model(**inputs)
        made.loss.backward()
        found.append(gradients(model))
        torch._dynamo.reset()
    return distance(found[1], found[0]), list(model.autosp_plan.notes), made.get("logits") is None


@pytest.mark.parametrize("family", ["gemma2", "llama", "t5"] if FULL else ["gemma2"])
def test_transformers_models_are_exact_by_tiles(pool: Pool, family: str) -> None:
    """Soft-capping and a cast; a scale and a shared embedding. Without their logits, which would be an output."""
    for error, notes, no_logits in pool.run(transformers_steps, family, on=2, timeout=280):
        assert error < EXACT and no_logits
        assert any(n.startswith("1 loss in tiles of 8") for n in notes), notes
        assert any("feed-forward block" in n for n in notes), notes


def chosen(mesh: DeviceMesh, seq_len: int, memory: float) -> tuple[float, tuple[str, ...], list[str]]:
    plain, inputs = zoo.build("llama", seq_len)
    model = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager", strategy="ring", memory=memory)
    step(plain, inputs)
    step(model, inputs)
    return gradient_error(plain, model), model.autosp_plan.tiles, str(model.autosp_plan).splitlines()


def test_blocks_that_the_planner_tiles_are_exact(pool: Pool) -> None:
    """Where a tenth of the activations has no room."""
    module, inputs = zoo.build("llama", 101)
    free = trace(module, inputs, 3, backward=False, strategy="ring").compiled.plan
    assert free.totals is not None and free.tiles == ()
    own = free.totals.parameter_bytes
    for error, tiled, text in pool.run(chosen, 101, (own + 0.9 * (free.totals.peak_bytes - own)) / 0.97, on=3):
        assert error < EXACT and tiled and set(tiled) <= {"model.layers.0", "model.layers.1"}
        assert any(line.startswith("  feed-forward blocks by tiles: model.layers.") for line in text)
        assert any("feed-forward block" in line and "never exist whole" in line for line in text)


def one_sided(mesh: DeviceMesh) -> float:
    """All labels of the second half are ignored: the last rank has a loss of nothing."""
    plain, inputs = built("mean", 30)
    inputs["labels"][:, 15:] = IGNORE
    module = copy.deepcopy(plain)
    lowered = Lowered(module, mesh, [None], tile=4)
    want, got = step(plain, inputs), step(lowered, inputs)
    return max(abs(want - got), gradient_error(plain, module))


def test_a_rank_may_have_ignored_labels_only(pool: Pool) -> None:
    assert max(pool.run(one_sided, on=2)) < EXACT


def half_precision(mesh: DeviceMesh) -> tuple[float, float]:
    """Distances to float64 of gradients under autocast to bfloat16, with tiles and without."""
    exact, inputs = built("mean", 64)
    step(exact, inputs)
    errors = []
    for tile in ("none", 4):
        module = built("mean", 64, torch.float32)[0]
        model = autosp.parallelize(module, mesh, compiler="aot_eager", tile=tile)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(**inputs)
        assert loss.dtype == torch.float32
        loss.backward()
        errors.append(distance({n: p.grad for n, p in module.named_parameters()}, gradients(exact)))
        torch._dynamo.reset()
    return errors[0], errors[1]


def test_autocast_holds_inside_tiles(pool: Pool) -> None:
    for plain, tiled in pool.run(half_precision, on=2):
        assert 1e-4 < tiled < 1.2 * plain < 0.2


def test_sums_of_half_precision_tiles_are_kept_in_float32() -> None:
    """4096 tiles that give 1 each: bfloat16 would stop at 256."""
    along = tiles.Along(0)
    program = tiles.TileProgram(lambda rows, x, w: ((x * w).sum(),), "sum of x w", (along, None), (None,), 4096, 1, (0, 1), (0,))
    x, w = torch.ones(4096, dtype=torch.bfloat16), torch.ones((), dtype=torch.bfloat16, requires_grad=True)
    (total,) = torch.ops.asp.tiled([x, w], tiles.register(program))
    total.backward()
    assert total.item() == 4096 and w.grad is not None and w.grad.item() == 4096


# What exists, and how often it is computed.


def largest(traced: Any) -> int:
    """Elements of the largest value of the forward and backward graphs, but for flat buffers, in which gradients are reduced."""
    values = [n.meta.get("val") for graph in (0, 1) for n in traced.nodes(graph)]
    flat = [x for v in values for x in (v if isinstance(v, list | tuple) else [v])]
    return max(x.numel() for x in flat if isinstance(x, Tensor) and x.dim() > 1)


@pytest.mark.parametrize("tile", ["none", 16])
def test_no_value_is_as_wide_as_the_vocabulary_or_the_inner_width(tile: str | int) -> None:
    """64 positions of 2 rows on a rank: the largest values left are as wide as what enters, or a weight."""
    torch.manual_seed(0)
    module, positions = Head(vocab=6 * HIDDEN), 64 * 2
    inputs = {"ids": token_ids(128, 2), "labels": token_labels(128, 2)}
    found = largest(trace(module, inputs, 2, tile=tile))
    assert found == positions * 6 * HIDDEN if tile == "none" else found <= max(positions * HIDDEN, 6 * HIDDEN * HIDDEN)


def test_the_planner_counts_neither_logits_nor_inner_activations_as_kept() -> None:
    inputs = {"ids": token_ids(128, 2), "labels": token_labels(128, 2)}
    whole, by_tiles = (trace(Head(), inputs, 2, backward=False, tile=tile).compiled.plan.beside.layers for tile in ("none", 16))
    kept, least = (sum(layer.saved for layer in layers) for layers in (whole, by_tiles))
    assert kept - least >= 4 * 64 * 2 * (VOCAB + INNER) and least >= 4 * 64 * 2 * HIDDEN
    assert sum(x.flop for x in whole) == sum(x.flop for x in by_tiles) == sum(x.repeated for x in by_tiles) > 0
    assert sum(x.held for x in by_tiles) < sum(x.held for x in whole)


def test_each_tile_is_computed_once_in_forward_and_once_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    run, counted = tiles.TileProgram.tile, []

    def count(self: tiles.TileProgram, leaves: Sequence[Tensor], rows: int) -> Sequence[Tensor]:
        counted.append((self.results == (None,), rows))
        return run(self, leaves, rows)

    inputs = {"ids": token_ids(33, 2), "labels": token_labels(33, 2)}
    model = autosp.parallelize(Head(), compiler="aot_eager", tile=10)
    step(model, inputs)
    model.zero_grad()
    monkeypatch.setattr(tiles.TileProgram, "tile", count)
    step(model, inputs)
    assert sorted(counted) == sorted([(loss, rows) for loss in (False, True) for rows in (10, 10, 10, 3)] * 2)


def loss_peak(rank: int, ranks: int, port: int, tile: str | int) -> tuple[float, float]:
    """Peak memory of a step in GB, and its loss."""
    os.environ.update(OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = Head(vocab=1 << 17)
    inputs = {"ids": token_ids(1024, 1), "labels": token_labels(1024, 1)}
    before = peak_gb()
    loss = step(autosp.parallelize(module, compiler="aot_eager", tile=tile), inputs)
    dist.destroy_process_group()
    return peak_gb() - before, loss


def test_logits_of_a_large_vocabulary_never_exist() -> None:
    """1024 positions of 131,072 words are 0.5 GB in float32, of which a step holds several at once."""
    (whole, want), (by_tiles, loss) = (in_fresh_processes(loss_peak, 1, tile)[0] for tile in ("none", 64))
    assert whole > 1.0 and by_tiles < 0.35, (whole, by_tiles)
    assert math.isclose(loss, want, rel_tol=1e-5)


# When.


def notes_of(module: nn.Module, seq_len: int = 128, **options: Any) -> str:
    inputs = {"ids": token_ids(seq_len, 2), "labels": token_labels(seq_len, 2)}
    return "\n".join(trace(module, inputs, 2, backward=False, **options).compiled.plan.notes)


def test_auto_tiles_losses_whose_logits_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "tiles" not in notes_of(Head())
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 40 * 2 * VOCAB)
    notes = notes_of(Head())
    assert "1 loss in tiles of 40 positions, 2 on a rank: 0.0 MB never exist whole" in notes and "feed-forward" not in notes
    assert "tiles" not in notes_of(Head(), tile="none")


def test_logits_that_are_an_output_exist_whole_and_the_plan_says_so() -> None:
    notes = notes_of(Head(logits=True), tile=16)
    assert "was not computed in tiles: it is an output of the model; outputs='loss' drops all but scalars" in notes
    assert "1 loss in tiles of 16" in notes_of(Head(logits=True), tile=16, outputs="loss")


def test_outputs_loss_returns_scalars_only() -> None:
    inputs = {"ids": token_ids(33, 2), "labels": token_labels(33, 2)}
    module = Head(logits=True)
    want = module(**inputs)["loss"]
    made = autosp.parallelize(module, compiler="aot_eager", outputs="loss")(**inputs)
    assert made["logits"] is None and torch.allclose(made["loss"], want)
    with pytest.raises(StrategyError, match=r"outputs='loss' keeps scalars only, and the model returns none; fix: "):
        autosp.parallelize(Backbone(layers=1), compiler="aot_eager", outputs="loss")(inputs["ids"])


@pytest.mark.parametrize("tile", [0, -3, True, 1.5, "all"])
def test_other_tiles_are_refused_at_once(tile: Any) -> None:
    with pytest.raises(StrategyError, match=r"is not known; choose 'auto', 'none' or a number of positions"):
        autosp.parallelize(Head(), tile=tile)
