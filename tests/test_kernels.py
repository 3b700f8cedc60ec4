"""Operators against their oracles, values and gradients, in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from autosp.kernels import attend, reference, token_local

GRADIENT_TOLERANCE = 1e-12


def close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-10, atol=GRADIENT_TOLERANCE))


def qkv(heads: int, kv_heads: int, rows: int, columns: int, head_dim: int = 8, value_dim: int = 5) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(2, heads, rows, head_dim), (2, kv_heads, columns, head_dim), (2, kv_heads, columns, value_dim)]
    return [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]


def gradients(out: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
    torch.manual_seed(1)
    return list(torch.autograd.grad(out, inputs, torch.randn_like(out)))


def program(run: Callable[..., Tensor], blocks: Sequence[tuple[int, int, int, int]], extra_rows: int = 0) -> str:
    """Name of a program over q (rows), k and v (columns) and `extra_rows` vectors of rows."""
    return attend.register(
        attend.RowProgram(
            run,
            f"{run.__qualname__} {len(attend._PROGRAMS)}",
            (2, None, None, *[0] * extra_rows),
            (None, 2, 2, *[None] * extra_rows),
            2,
            tuple(attend.Block(*b) for b in blocks),
            (0, 1, 2),
        )
    )


def test_blocks_of_rows_give_the_whole_and_its_gradients() -> None:
    q, k, v = qkv(4, 4, 11, 13)
    name = program(lambda rows, columns, q, k, v: reference.attention(q, k, v), [(0, 4, 0, 13), (4, 5, 0, 13), (5, 11, 0, 13)])
    out, expected = torch.ops.asp.attend([q, k, v], name), reference.attention(q, k, v)
    assert close(out, expected)
    assert all(map(close, gradients(out, [q, k, v]), gradients(expected, [q, k, v])))


def test_columns_outside_a_block_are_not_read() -> None:
    """Causal attention whose blocks see no column after their last row; what they must not read is NaN."""
    q, k, v = qkv(2, 2, 12, 12)

    def run(rows: int, columns: int, q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
        return attend.sdpa(q, k, v, None, at, torch.arange(columns), None, False)

    name = program(run, [(0, 5, 0, 5), (5, 12, 0, 12)], extra_rows=1)
    out = torch.ops.asp.attend([q, k, v, torch.arange(12)], name)
    expected = reference.attention(q, k, v, causal=True)
    assert close(out, expected)
    assert all(map(close, gradients(out, [q, k, v]), gradients(expected, [q, k, v])))
    poisoned = [x.detach().clone() for x in (k, v)]
    for x in poisoned:
        x[:, :, 5:] = torch.nan
    first = torch.ops.asp.attend([q, *poisoned, torch.arange(12)], name)[:, :, :5]
    assert close(first, expected[:, :, :5])


@pytest.mark.parametrize("scale", [None, 0.3])
def test_sdpa_gives_zero_where_a_row_sees_nothing(scale: float | None) -> None:
    q, k, v = qkv(4, 2, 6, 7)
    mask = torch.rand(6, 7) < 0.5
    mask[2] = False
    out = attend.sdpa(q, k, v, mask, None, None, scale, True)
    expected = reference.attention(q, k, v, mask, scale=scale)
    assert close(out, expected) and not out[:, :, 2].any()
    assert all(map(close, gradients(out, [q, k, v]), gradients(expected, [q, k, v])))


def test_sdpa_without_columns_is_zero_and_connected() -> None:
    """A rank whose rows see nothing still has a gradient (of zeros): it takes part in the same backward collectives."""
    q, k, v = qkv(2, 2, 3, 0)
    out = attend.sdpa(q, k, v, None, None, None, None, False)
    assert out.shape == (2, 2, 3, 5) and not out.any()
    assert all(not g.any() for g in gradients(out, [q, k, v]))


@pytest.mark.parametrize(("first", "heads", "groups"), [(0, 6, 2), (1, 3, 2), (5, 1, 2), (2, 0, 2), (3, 3, 6)])
def test_expand_heads_repeats_the_heads_that_are_read(first: int, heads: int, groups: int) -> None:
    first_kv, last_kv = first // groups, -(-(first + heads) // groups)
    x = torch.arange(last_kv - first_kv, dtype=torch.float64)[None, :, None] + first_kv
    expanded = attend.expand_heads(x, 1, first, heads, first_kv, groups)
    assert expanded.flatten().tolist() == [h // groups for h in range(first, first + heads)]


def test_attention_with_dropout_drops_by_global_index() -> None:
    """Computed whole, or in two halves of rows and heads: the same weights are dropped."""
    q, k, v = qkv(4, 4, 6, 6)
    seed, shape = torch.tensor(7), (2, 4, 6, 6)

    def part(heads: slice, rows: slice) -> Tensor:
        where = [0, heads.start, torch.arange(rows.start, rows.stop), 0]
        mine = (q[:, heads, rows], k[:, heads], v[:, heads])
        return attend.sdpa_dropout(*mine, None, None, None, None, False, 0.4, seed, 3, shape, where)

    whole = part(slice(0, 4), slice(0, 6))
    halves = [torch.cat([part(slice(h, h + 2), slice(r, r + 3)) for r in (0, 3)], 2) for h in (0, 2)]
    assert close(torch.cat(halves, 1), whole)
    assert not close(whole, reference.attention(q, k, v))


def test_token_local_is_its_function_and_differentiates() -> None:
    token_local.register("test", lambda x, index, w: torch.tanh(x * index[:, None]) @ w)
    torch.manual_seed(0)
    x, w = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (3, 3)))
    index = torch.tensor([1, 0, 2, 1, 3])
    out = torch.ops.asp.token_local([x, index], [w], "test")
    expected = torch.tanh(x * index[:, None]) @ w
    assert close(out, expected)
    assert all(map(close, gradients(out, [x, w]), gradients(expected, [x, w])))


def test_token_local_keeps_the_strides_it_promised() -> None:
    """Code compiled around the operator reads results by the strides of the fake kernel, whatever those of the function are."""
    token_local.register("transposed", lambda x, w: (w.mT @ x.mT).mT)
    x, w = torch.randn(5, 3), torch.randn(3, 3).t()
    out = torch.ops.asp.token_local([x], [w], "transposed")
    grads = torch.ops.asp.token_local_backward(torch.ones(5, 3), [x], [w], "transposed")
    assert all(value.is_contiguous() for value in (out, *grads))


def test_registered_operators_pass_torchs_own_checks() -> None:
    q, k, v = qkv(2, 2, 4, 4)
    name = program(lambda rows, columns, q, k, v: reference.attention(q, k, v), [(0, 2, 0, 4), (2, 4, 0, 4)])
    torch.library.opcheck(torch.ops.asp.attend, ([q, k, v], name))
