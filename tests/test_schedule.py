"""Schedules: every visible pair is computed once, by one rank, and nothing is sent that nobody needs."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autosp.kernels.layout import Intervals, Layout, contiguous, head_tail, size
from autosp.kernels.schedule import (
    STRIP_ROWS,
    Job,
    Schedule,
    Tile,
    Tiling,
    balanced,
    looked_at,
    members,
    owner_computes,
    strip_rows,
)
from autosp.kernels.sight import Causal, Everything, Grid, Sight

FLASH = Tiling(True, 1 << 30)
Make = Callable[[Sight, Layout, Layout, Tiling], Schedule]
MAKES: list[Make] = [owner_computes, balanced]
LAYOUTS = [contiguous, head_tail]


def held(intervals: Intervals) -> np.ndarray:
    """The positions of `intervals`, in order."""
    return np.concatenate([np.arange(a, b) for a, b in intervals]) if intervals else np.zeros(0, int)


def jobs(schedule: Schedule) -> list[tuple[int, int, Job]]:
    """(step, rank, job) of all ranks."""
    return [(t, r, job) for t in schedule.steps for r in range(schedule.ranks) for job in schedule.jobs(t, r)]


def visible(sight: Sight, rows: int, cols: int) -> np.ndarray:
    """The boolean matrix of a sight that is known pair by pair."""
    if isinstance(sight, Everything):
        return np.ones((rows, cols), bool)
    return np.tril(np.ones((rows, cols), bool))


def grid(mask: np.ndarray, row_cuts: np.ndarray, col_cuts: np.ndarray, unsure: np.ndarray | None = None) -> Grid:
    """What cells between the cuts say of a boolean matrix; those that are `unsure` say nothing."""
    cells = np.zeros((len(row_cuts) - 1, len(col_cuts) - 1), np.int8)
    for i, (a, b) in enumerate(itertools.pairwise(row_cuts)):
        for j, (c, d) in enumerate(itertools.pairwise(col_cuts)):
            part = mask[a:b, c:d]
            cells[i, j] = 2 if part.all() else 1 if part.any() else 0
    if unsure is not None:
        cells[unsure] = 1
    return Grid(row_cuts, col_cuts, cells)


def exact(mask: np.ndarray) -> Grid:
    """A grid with a cell for each pair."""
    return Grid(np.arange(mask.shape[0] + 1), np.arange(mask.shape[1] + 1), (2 * mask).astype(np.int8))


def pairs_of(tile: Tile, rows: np.ndarray, cols: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The matrix of pairs that a tile computes and its kernel or its mask lets through."""
    out = np.zeros_like(mask)
    at_rows, at_cols = rows[slice(*tile.rows)], cols[slice(*tile.cols)]
    assert len(at_rows) == tile.rows[1] - tile.rows[0] > 0 and len(at_cols) == tile.cols[1] - tile.cols[0] > 0
    if tile.kind == "mask":
        through = mask[np.ix_(at_rows, at_cols)]
    else:
        through = np.ones((len(at_rows), len(at_cols)), bool)
        if tile.kind == "causal":
            assert len(at_rows) == len(at_cols)
            through = np.tril(through)
    out[np.ix_(at_rows, at_cols)] = through
    return out


def check(schedule: Schedule, mask: np.ndarray, rows: Layout, cols: Layout, tiling: Tiling, known: bool = True) -> None:
    """The whole of what a schedule promises, against the matrix of what is visible; `known`: pair by pair."""
    computed = np.zeros(mask.shape, int)
    ranks = schedule.ranks
    assert schedule.steps[0] == 0 and list(schedule.steps) == sorted(set(schedule.steps)) and schedule.steps[-1] < ranks
    for t, r, job in jobs(schedule):
        assert {job.row_owner, job.col_owner} == {r, (r - t) % ranks}, "a step is one exchange between pairs"
        at_rows, at_cols = held(rows.shards[job.row_owner]), held(cols.shards[job.col_owner])
        for tile in job.tiles:
            through = pairs_of(tile, at_rows, at_cols, mask)
            computed += through
            assert through.any() or not known, f"{tile} computes nothing"
            if not tiling.flash or tile.kind == "mask":
                assert tile.pairs <= max(tiling.largest, tile.cols[1] - tile.cols[0]), "no larger than asked for"
                assert tile.rows[1] - tile.rows[0] <= STRIP_ROWS
                for axis, held_at, span in ((0, at_rows, tile.rows), (1, at_cols, tile.cols)):
                    assert list(held_at[slice(*span)]) == list(range(tile.at[axis], tile.at[axis] + span[1] - span[0]))
        for runs, spans in ((job.rows, [x.rows for x in job.tiles]), (job.cols, [x.cols for x in job.tiles])):
            touched = {i for span in spans for i in range(*span)}
            assert set(held(runs)) == touched and size(runs) == len(touched), "what travels is what tiles touch"
    assert (computed == mask).all(), "every visible pair once, and no other"
    away = [(r, job) for _, r, job in jobs(schedule)]
    assert schedule.travelling == (
        sum(size(job.rows) for r, job in away if job.row_owner != r),
        sum(size(job.cols) for r, job in away if job.col_owner != r),
    )


tilings = st.builds(Tiling, st.booleans(), st.sampled_from([1, 7, 64, 1 << 30]))


@settings(max_examples=120)
@given(st.integers(1, 8), st.integers(0, 40), st.sampled_from(LAYOUTS), st.sampled_from(MAKES), tilings)
def test_causal_pairs_are_computed_once(ranks: int, more: int, layout: Make, make: Make, tiling: Tiling) -> None:
    held_by = layout(ranks + more, ranks)
    check(make(Causal(), held_by, held_by, tiling), visible(Causal(), *[ranks + more] * 2), held_by, held_by, tiling)


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(0, 30), st.integers(0, 30), st.sampled_from(LAYOUTS), st.sampled_from(MAKES), tilings)
def test_pairs_of_two_sequences_are_computed_once(
    ranks: int, more_rows: int, more_cols: int, layout: Make, make: Make, tiling: Tiling
) -> None:
    rows, cols = layout(ranks + more_rows, ranks), layout(ranks + more_cols, ranks)
    mask = visible(Everything(), rows.length, cols.length)
    check(make(Everything(), rows, cols, tiling), mask, rows, cols, tiling)


@st.composite
def masks(draw: st.DrawFn) -> np.ndarray:
    """Any boolean matrix: noise, a window, or documents, of which some rows see nothing."""
    rows, cols = draw(st.integers(1, 30)), draw(st.integers(1, 30))
    kind = draw(st.sampled_from(["noise", "window", "documents", "nothing"]))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    offset = np.arange(cols)[None, :] - np.arange(rows)[:, None]
    if kind == "noise":
        return rng.random((rows, cols)) < draw(st.sampled_from([0.02, 0.3, 0.97]))
    if kind == "window":
        return (offset <= draw(st.integers(-3, 5))) & (offset > -draw(st.integers(1, 12)))
    if kind == "documents":
        ids = np.cumsum(rng.random(max(rows, cols)) < 0.2)
        return (ids[:rows, None] == ids[None, :cols]) & (offset <= 0)
    return np.zeros((rows, cols), bool)


@settings(max_examples=200)
@given(masks(), st.integers(1, 8), st.sampled_from(LAYOUTS), st.sampled_from(MAKES), tilings, st.data())
def test_pairs_under_any_mask_are_computed_once(
    mask: np.ndarray, ranks: int, layout: Make, make: Make, tiling: Tiling, data: st.DataObject
) -> None:
    """What is known of the mask is coarse, or wrongly unsure: still every visible pair once."""
    rows, cols = layout(mask.shape[0], ranks), layout(mask.shape[1], ranks)
    step = data.draw(st.sampled_from([1, 2, 5]))
    cuts = [np.unique([*range(0, n, step), n, *held_cuts(at)]) for n, at in zip(mask.shape, (rows, cols), strict=True)]
    unsure = None
    if data.draw(st.booleans()):
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        unsure = rng.random((len(cuts[0]) - 1, len(cuts[1]) - 1)) < 0.2
    check(make(grid(mask, *cuts, unsure), rows, cols, tiling), mask, rows, cols, tiling, step == 1 and unsure is None)


def held_cuts(layout: Layout) -> list[int]:
    return [x for shard in layout.shards for interval in shard for x in interval]


@settings(max_examples=80)
@given(masks(), st.integers(2, 8), st.sampled_from(LAYOUTS), st.sampled_from(MAKES))
def test_no_column_travels_that_only_later_or_earlier_ones_are_seen_with(
    mask: np.ndarray, ranks: int, layout: Make, make: Make
) -> None:
    """With a mask known pair by pair, the first and the last column of each run that travels are seen."""
    rows, cols = layout(mask.shape[0], ranks), layout(mask.shape[1], ranks)
    schedule = make(exact(mask), rows, cols, FLASH)
    for _, r, job in jobs(schedule):
        if job.col_owner == r:
            continue
        at_rows, at_cols = held(rows.shards[job.row_owner])[held(job.rows)], held(cols.shards[job.col_owner])
        for a, b in job.cols:
            seen = mask[np.ix_(at_rows, at_cols[a:b])].any(0)
            assert seen[0] and seen[-1]


@given(masks(), st.integers(0, 29), st.integers(0, 29), st.integers(1, 30), st.integers(1, 30))
def test_a_grid_answers_as_its_mask(mask: np.ndarray, r: int, c: int, high: int, wide: int) -> None:
    assume(r < mask.shape[0] and c < mask.shape[1])
    rows, cols = (r, min(mask.shape[0], r + high)), (c, min(mask.shape[1], c + wide))
    part, sight = mask[slice(*rows), slice(*cols)], exact(mask)
    first, last = sight.seen(rows, cols)
    seen = np.flatnonzero(part.any(0))
    assert (first, last) == ((c + seen[0], c + seen[-1] + 1) if len(seen) else (c, c))
    assert sight.every(rows, cols) == part.all() and sight.pairs(rows, cols) == part.sum()
    i, j = np.nonzero(mask)
    assert sight.band == ((max(0, (i - j).max()), max(0, (j - i).max())) if len(i) else (0, 0))


@given(masks(), st.integers(1, 7), st.integers(1, 7), st.data())
def test_a_grid_of_larger_cells_counts_half_of_what_it_knows_in_part(
    mask: np.ndarray, high: int, wide: int, data: st.DataObject
) -> None:
    """By the definition, pair by pair; a cell of which an interval cuts out a single pair is visible or not."""
    rows, cols = ([*range(0, n, step), n] for n, step in zip(mask.shape, (high, wide), strict=True))
    sight = grid(mask, np.array(rows), np.array(cols))
    runs = [[tuple(sorted(data.draw(st.tuples(*[st.integers(0, n)] * 2)))) for _ in range(2)] for n in mask.shape]
    table = sight.table(*map(np.array, runs))
    for (i, at_rows), (j, at_cols) in itertools.product(*map(enumerate, runs)):
        expected = 0.0
        for (r, (a, b)), (c, (d, e)) in itertools.product(*(enumerate(itertools.pairwise(cuts)) for cuts in (rows, cols))):
            size = max(0, min(b, at_rows[1]) - max(a, at_rows[0])) * max(0, min(e, at_cols[1]) - max(d, at_cols[0]))
            known = sight.cells[r, c] / 2
            expected += size * (np.ceil(known) if size == 1 else known)
        assert table[i, j] == sight.pairs(at_rows, at_cols) == expected


@given(st.integers(0, 20), st.integers(0, 20), st.integers(0, 20), st.integers(0, 20))
def test_the_causal_sight_answers_as_its_matrix(a: int, high: int, c: int, wide: int) -> None:
    rows, cols = (a, a + high), (c, c + wide)
    part = np.array([[j <= i for j in range(*cols)] for i in range(*rows)], bool).reshape(high, wide)
    assert Causal().pairs(rows, cols) == part.sum()
    if high and wide:
        seen = np.flatnonzero(part.any(0))
        assert Causal().seen(rows, cols) == ((c, c + seen[-1] + 1) if len(seen) else (c, c))
        assert Causal().every(rows, cols) == part.all()


# Who holds what.


@given(st.integers(0, 200), st.integers(1, 9))
def test_head_tail_holds_every_position_once_in_order(length: int, ranks: int) -> None:
    layout = head_tail(length, ranks)
    assert sorted(p for shard in layout.shards for p in held(shard)) == list(range(length))
    assert max(layout.sizes) - min(layout.sizes) <= 2
    assert all(list(held(shard)) == sorted(held(shard)) for shard in layout.shards)
    if length >= ranks:
        assert min(layout.sizes) > 0
    if length % (2 * ranks) == 0 and length:
        assert {sum(held(shard)) for shard in layout.shards} == {(length - 1) * length // 2 // ranks}, "the middle of all is one"


@given(st.integers(0, 100), st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4), (4, 1), (4, 4)]), st.sampled_from(LAYOUTS))
def test_a_group_holds_what_its_ranks_hold(length: int, sizes: tuple[int, int], layout: Make) -> None:
    ranks, inner = sizes
    whole, groups = layout(length, ranks), members(layout(length, ranks), inner)
    assert groups.ranks == ranks // inner
    for g in range(groups.ranks):
        together = np.concatenate([held(whole.shards[r]) for r in range(g * inner, (g + 1) * inner)])
        assert list(held(groups.shards[g])) == sorted(together)


# How even work is, and how much travels.


def unevenness(schedule: Schedule) -> float:
    work = [schedule.work(r) for r in range(schedule.ranks)]
    return max(work) * schedule.ranks / sum(work)


@pytest.mark.parametrize("ranks", [4, 8, 16])
@pytest.mark.parametrize(("make", "layout"), [(owner_computes, head_tail), (balanced, contiguous), (balanced, head_tail)])
def test_causal_work_is_level(make: Make, layout: Make, ranks: int) -> None:
    held_by = layout(512 * ranks, ranks)
    schedule = make(Causal(), held_by, held_by, FLASH)
    assert unevenness(schedule) <= 1.05
    assert sum(schedule.work(r) for r in range(ranks)) == held_by.length * (held_by.length + 1) // 2, "and no more than there is"


def test_a_plain_ring_on_contiguous_shards_is_not_level() -> None:
    """What the other two are for: the last rank has almost twice the mean."""
    held_by = contiguous(4096, 8)
    assert unevenness(owner_computes(Causal(), held_by, held_by, FLASH)) > 1.8


@pytest.mark.parametrize("ranks", range(2, 18))
def test_a_balanced_ring_takes_half_the_steps(ranks: int) -> None:
    held_by = contiguous(64 * ranks, ranks)
    schedule = balanced(Causal(), held_by, held_by, FLASH)
    assert len(schedule.steps) == ranks // 2 + 1
    assert schedule.steps == tuple(range(ranks // 2 + 1))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 16])
def test_what_travels_is_the_textbooks(ranks: int) -> None:
    """In shards a rank sends: a ring without a mask P − 1, a causal one ¾(P − 1), a balanced one of even P ⅜P − ¼ columns and ⅛P
    rows, half a block of which comes from splitting the block half way round."""
    shard, length = 64, 64 * ranks
    zigzag, runs = head_tail(length, ranks), contiguous(length, ranks)
    assert owner_computes(Everything(), zigzag, zigzag, FLASH).travelling == (0, (ranks - 1) * length)
    assert owner_computes(Causal(), zigzag, zigzag, FLASH).travelling == (0, 3 * (ranks - 1) * length // 4)
    assert owner_computes(Causal(), runs, runs, FLASH).travelling == (0, (ranks - 1) * length // 2)
    rows, cols = balanced(Causal(), runs, runs, FLASH).travelling
    if ranks % 2 == 0:
        assert (rows, cols) == (ranks * ranks * shard // 8, (3 * ranks - 2) * ranks * shard // 8)
    else:  # blocks up to (P − 1)/2 away go to their owner, those beyond to their helper
        near = sum(ranks - d for d in range(1, (ranks + 1) // 2))
        assert (rows, cols) == ((ranks * (ranks - 1) // 2 - near) * shard, near * shard)
    assert balanced(Everything(), runs, runs, FLASH).travelling == (0, (ranks - 1) * length), "level already: nothing is moved"


@pytest.mark.parametrize("window", [1, 2, 16, 17, 31, 32, 33, 64, 200])
def test_a_window_reaches_its_neighbours_only(window: int) -> None:
    """window − 1 positions before each shard's first one, as far as there are any."""
    ranks, shard = 8, 32
    offset = np.arange(256)[None, :] - np.arange(256)[:, None]
    held_by = contiguous(256, ranks)
    schedule = owner_computes(exact((offset <= 0) & (offset > -window)), held_by, held_by, FLASH)
    assert schedule.travelling == (0, sum(min(window - 1, r * shard) for r in range(ranks)))
    assert max(schedule.steps) == min(ranks - 1, -(-(window - 1) // shard))


def documents(*lengths: int) -> np.ndarray:
    ids = np.repeat(np.arange(len(lengths)), lengths)
    return (ids[:, None] == ids[None, :]) & np.tril(np.ones((len(ids), len(ids)), bool))


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize(
    "lengths", [(37, 51, 40), (64, 64), (1, 127), (100, 28), (128,), (17, 3, 60, 48)], ids=lambda n: "+".join(map(str, n))
)
def test_packed_documents_are_spread_evenly(lengths: tuple[int, ...], ranks: int) -> None:
    """Visible pairs a rank computes, against the best there is: a block is computed by its row's or its column's rank, so
    what lies within a set of ranks is theirs (and Hakimi's theorem says that nothing else stands in the way)."""
    mask, held_by = documents(*lengths), contiguous(128, ranks)
    schedule = balanced(exact(mask), held_by, held_by, FLASH)
    load = np.zeros(ranks)
    for _, r, job in jobs(schedule):
        rows, cols = held(held_by.shards[job.row_owner]), held(held_by.shards[job.col_owner])
        load[r] += sum(pairs_of(tile, rows, cols, mask).sum() for tile in job.tiles)
    assert load.sum() == mask.sum()
    block = np.add.reduceat(np.add.reduceat(mask.astype(int), held_cuts(held_by)[::2], 0), held_cuts(held_by)[::2], 1)
    sets = [list(some) for n in range(1, ranks + 1) for some in itertools.combinations(range(ranks), n)]
    best = max(block[np.ix_(some, some)].sum() / len(some) for some in sets)
    assert load.max() <= 1.05 * best + 16, "a split block is cut between two rows"


def test_the_best_split_is_the_same_every_time() -> None:
    """Ranks solve the linear program each for itself: a difference would be a deadlock."""
    mask, held_by = documents(17, 3, 60, 48, 100, 28), contiguous(256, 8)
    one, other = (balanced(exact(mask.copy()), held_by, held_by, FLASH) for _ in range(2))
    assert len(one.steps) > 1 and [jobs(one)] == [jobs(other)]
    assert one.travelling[0] > 0, "some block was moved"


@pytest.mark.parametrize(("make", "layout"), [(owner_computes, contiguous), (balanced, contiguous), (balanced, head_tail)])
def test_a_window_s_strips_are_as_low_as_it_asks(make: Make, layout: Make) -> None:
    """What is gone through for what is visible: a window of 256 in strips of 1024 rows is 5 times as much, in strips of 128 half
    more; a mask that hides little gains nothing from low strips."""
    length, window, held_by = 2048, 256, layout(2048, 2)
    i = np.arange(length)
    mask = (i[None] <= i[:, None]) & (i[None] > i[:, None] - window)
    high, low = (make(exact(mask), held_by, held_by, Tiling(True, 1 << 30, least=least)) for least in (1024, 128))
    through = [sum(s.work(r) for r in range(2)) / mask.sum() for s in (high, low)]
    assert through[1] < 1.7 and through[0] > 1.5 * through[1]
    assert looked_at(exact(mask), length, length, 128) == pytest.approx(through[1], rel=0.1), "what the price takes"
    assert strip_rows(exact(mask), length, length, 128) == 128
    assert strip_rows(Everything(), length, length, 128) == 1024 and strip_rows(Causal(), 1 << 14, 1 << 14, 128) == 1024
