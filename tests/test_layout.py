"""Layouts: every operation on intervals agrees with the same operation on the positions themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autosp.kernels.layout import Layout, concatenated, contiguous, kv_heads, lacking, split


def positions(layout: Layout, rank: int) -> list[int]:
    return [p for a, b in layout.shards[rank] for p in range(a, b)]


def whole(layout: Layout) -> list[int]:
    return sorted(p for rank in range(layout.ranks) for p in positions(layout, rank))


@st.composite
def layouts(draw: st.DrawFn, most: int = 40) -> Layout:
    """Any assignment of runs of positions to ranks, in any order within a rank; some ranks may hold nothing."""
    length, ranks = draw(st.integers(0, most)), draw(st.integers(1, 5))
    cuts = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=8))})
    runs = [(a, b) for a, b in itertools.pairwise(cuts) if a < b]
    owners = draw(st.lists(st.integers(0, ranks - 1), min_size=len(runs), max_size=len(runs)))
    order = draw(st.permutations(range(len(runs))))
    return Layout(length, tuple(tuple(runs[i] for i in order if owners[i] == rank) for rank in range(ranks)))


@st.composite
def ascending(draw: st.DrawFn) -> Layout:
    """Contiguous or head-tail, the layouts of whole models."""
    length, ranks = draw(st.integers(0, 60)), draw(st.integers(1, 5))
    if draw(st.booleans()):
        return contiguous(length, ranks)
    cuts = split(length, 2 * ranks)
    pairs = [(cuts[r], cuts[2 * ranks - 1 - r]) for r in range(ranks)]
    return Layout(length, tuple(tuple((a, b) for a, b in pair if a < b) for pair in pairs))


def held_once(layout: Layout) -> None:
    assert whole(layout) == list(range(layout.length))
    assert layout.sizes == tuple(len(positions(layout, rank)) for rank in range(layout.ranks))
    assert all(a < b for shard in layout.shards for a, b in shard), "no empty interval"


@given(st.integers(0, 200), st.integers(1, 9))
def test_contiguous_layouts_are_even_to_one_position(length: int, ranks: int) -> None:
    layout = contiguous(length, ranks)
    held_once(layout)
    assert max(layout.sizes) - min(layout.sizes) <= 1
    assert layout.even == (length % ranks == 0)
    assert [p for r in range(ranks) for p in positions(layout, r)] == list(range(length)), "in rank order"


@given(ascending(), st.data())
def test_a_slice_holds_what_slicing_held_positions_gives(layout: Layout, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, layout.length))
    stop = data.draw(st.integers(start, layout.length))
    step = data.draw(st.integers(1, 7))
    sliced, local = layout.sliced(start, stop, step)
    held_once(sliced)
    wanted = list(range(layout.length))[start:stop:step]
    assert sliced.length == len(wanted)
    for rank in range(layout.ranks):
        held = positions(layout, rank)
        kept = [held[i] for first, last in local[rank] for i in range(first, last, step)]
        assert kept == [p for p in held if p in wanted] == [wanted[p] for p in positions(sliced, rank)]


@given(ascending(), st.integers(0, 5), st.integers(0, 5))
def test_padding_goes_to_the_holders_of_the_ends(layout: Layout, left: int, right: int) -> None:
    padded = layout.padded(left, right)
    assert padded.length == layout.length + left + right and padded.ranks == layout.ranks
    if layout.length == 0:
        return
    held_once(padded)
    for rank in range(layout.ranks):
        moved = [p + left for p in positions(layout, rank)]
        before = list(range(left)) if left in moved else []
        after = list(range(layout.length + left, padded.length)) if layout.length + left - 1 in moved else []
        assert sorted(positions(padded, rank)) == sorted(before + moved + after)


@given(st.integers(1, 5), st.data())
def test_concatenation_is_local(ranks: int, data: st.DataObject) -> None:
    parts = [contiguous(n, ranks) for n in data.draw(st.lists(st.integers(0, 12), min_size=1, max_size=4))]
    joined = concatenated(parts)
    held_once(joined)
    for rank in range(ranks):
        expected, offset = [], 0
        for part in parts:
            expected += [p + offset for p in positions(part, rank)]
            offset += part.length
        assert positions(joined, rank) == expected


@given(st.data())
def test_overlaps_move_every_position_from_holder_to_holder(data: st.DataObject) -> None:
    one, other = data.draw(layouts()), data.draw(layouts())
    length = min(one.length, other.length)
    moved = []
    for src in range(one.ranks):
        for dst in range(other.ranks):
            here, there = positions(one, src), positions(other, dst)
            for a, b, count in one.overlap(src, other, dst):
                assert count > 0 and here[a : a + count] == there[b : b + count]
                moved += here[a : a + count]
    assert sorted(moved) == list(range(length))


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 8))
def test_key_value_heads_cover_what_the_query_heads_of_a_rank_read(kv: int, groups: int, ranks: int) -> None:
    for first, last in split(kv * groups, ranks):
        a, b = kv_heads((first, last), groups)
        assert list(range(a, b)) == sorted({q // groups for q in range(first, last)})


def test_a_layout_prints_who_holds_what() -> None:
    layout = Layout(8, (((0, 2), (6, 8)), ((2, 6),), ()))
    assert str(layout) == "8 over 3 ranks: [0,2)+[6,8) [2,6) -"
    with pytest.raises(AttributeError):
        layout.length = 9  # type: ignore[misc]


@given(layouts(), st.integers(-100, 100))
def test_a_sequence_turned_or_rolled_is_held_where_it_was(layout: Layout, shift: int) -> None:
    """A rank holds the same elements: turned around in memory, or put in ascending order by local index ranges."""
    back = layout.reversed()
    held_once(back)
    rolled, cuts = layout.rolled(shift)
    held_once(rolled)
    for rank in range(layout.ranks):
        held = positions(layout, rank)
        assert positions(back, rank) == [layout.length - 1 - p for p in reversed(held)]
        kept = [held[i] for a, b in cuts[rank] for i in range(a, b)]
        assert positions(rolled, rank) == [(p + shift) % layout.length for p in kept]
        assert sorted(kept) == sorted(held) and positions(rolled, rank) == sorted(positions(rolled, rank))


@given(layouts(), st.data())
def test_what_is_lacking_is_in_a_window_and_not_held(layout: Layout, data: st.DataObject) -> None:
    ends = st.tuples(st.integers(-5, layout.length + 5), st.integers(0, 9)).map(lambda w: (w[0], w[0] + w[1]))
    windows = tuple(tuple(data.draw(st.lists(ends, max_size=3))) for _ in range(layout.ranks))
    missing = lacking(layout.length, layout.shards, windows)
    for rank in range(layout.ranks):
        wanted = {p for a, b in windows[rank] for p in range(a, b) if 0 <= p < layout.length}
        assert [p for a, b in missing[rank] for p in range(a, b)] == sorted(wanted - set(positions(layout, rank)))
