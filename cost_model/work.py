"""Work and messages, counted: FLOP of kernels, and what one rank sends in a collective. Plain integers, no machine."""

from __future__ import annotations

CHUNK = 64  # tokens that the kernels of linear attention take at once (kernels/linear_torch.py)


def matmul(rows: int, inner: int, columns: int) -> int:
    """FLOP of [rows, inner] @ [inner, columns]."""
    return 2 * rows * inner * columns


def pairs(rows: int, columns: int, causal: bool) -> int:
    """(row, column) pairs of a block that are visible: all, or with `causal` those with column ≤ row."""
    if not causal:
        return rows * columns
    square = min(rows, columns)
    return square * (square + 1) // 2 + (rows - square) * columns


def attention_forward(batch: int, heads: int, head_dim: int, value_dim: int, visible: int) -> int:
    """FLOP of q kᵀ and p v over `visible` pairs of each head."""
    return 2 * batch * heads * (head_dim + value_dim) * visible


def attention_backward(batch: int, heads: int, head_dim: int, value_dim: int, visible: int) -> int:
    """FLOP of five products: q kᵀ again, dq and dk along the head's size, dp and dv along the value's."""
    return 2 * batch * heads * (3 * head_dim + 2 * value_dim) * visible


def linear_forward(
    batch: int, heads: int, tokens: int, key_dim: int, value_dim: int, remove: bool = False, decays: int = 1
) -> int:
    """FLOP of a linear attention in chunks of C tokens, for states [K, V].

    q kᵀ and its product with values within a chunk, 2C(K + V) a token; a state read and one written, 4KV. A delta rule (`remove`)
    adds r kᵀ, 2CK, the triangular solve for K + V columns, C(K + V), and another state read, 2KV. More than one decay a token and
    head counts twice: sums within a chunk are then formed in log₂ C parts (on a CPU it takes 2 to 2.4 times as long).
    """
    each = 2 * CHUNK * (key_dim + value_dim) + 4 * key_dim * value_dim
    if remove:
        each += CHUNK * (3 * key_dim + value_dim) + 2 * key_dim * value_dim
    return batch * heads * tokens * each * (2 if decays > 1 else 1)


def linear_meanwhile(batch: int, heads: int, tokens: int, key_dim: int, decays: int = 1) -> int:
    """FLOP of what the forward pass does while a state travels: q kᵀ within chunks (kernels/linear.py, `inside`)."""
    return batch * heads * tokens * 2 * CHUNK * key_dim * (2 if decays > 1 else 1)


def linear_backward(
    batch: int, heads: int, tokens: int, key_dim: int, value_dim: int, remove: bool = False, decays: int = 1
) -> int:
    """FLOP: two and a half times the forward pass, whose products each have two gradients, and some are formed again."""
    return linear_forward(batch, heads, tokens, key_dim, value_dim, remove, decays) * 5 // 2


def messages(collective: str, ranks: int) -> int:
    """Messages that a rank sends one after another: a hop of p2p is one; others have one for each other rank, all_reduce two."""
    return {"p2p": 1, "all_reduce": 2 * (ranks - 1)}.get(collective, ranks - 1)


def sent(collective: str, size: int, ranks: int) -> int:
    """Bytes one rank sends.

    size: of the message (p2p), of all that a rank has for others and itself (all_to_all), of its own part of the result
    (all_gather), of the value that is summed (all_reduce, reduce_scatter).
    """
    if collective == "p2p":
        return size
    if collective == "all_gather":
        return size * (ranks - 1)
    return size * (ranks - 1) // ranks * (2 if collective == "all_reduce" else 1)
