"""Linear attention a chunk at a time, in plain torch: matrix products over chunks, and one short step per chunk.

Within a chunk that finds the state S [K, V], with Γ_i the product of decays up to token i:

    u_i = v_i − (Γ_{i−1} r_i)ᵀ S − Σ_{j<i} L_ij u_j       L_ij = r_iᵀ (Γ_{i−1}/Γ_j) k_j, so (I + L) u = v − R S
    o_i = (Γ_i q_i)ᵀ S + Σ_{j≤i} P_ij u_j                 P_ij = q_iᵀ (Γ_i/Γ_j) k_j
    S'  = Γ_C S + Σ_j (Γ_C/Γ_j) k_j u_jᵀ

r removes what the state predicts (the delta rule); without it u = v. The mathematics and the gradients stand in
docs/linear.md. The work is cut into stages, so that everything within chunks can run while the state of the ranks before is
on its way: `begin` (nothing of the state), `carry` (the state through all chunks, with `remove`) or `arrive` (without),
`finish`; and backward the same.

Every exponent is ≤ 0: decays are logarithms ≤ 0, Γ_i/Γ_j is only taken for j ≤ i, and what a mask hides never meets an
exponential.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

CHUNK = 64


def accumulator(x: Tensor) -> torch.dtype:
    """States and sums are float32, or float64 where the inputs are."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def cut(x: Tensor, heads: int) -> Tensor:
    """[B, T, H or a divisor of it, D] -> [B, H, chunks, CHUNK, D] in the accumulator's type, zeros behind the end."""
    x = x.to(accumulator(x))
    if x.shape[2] != heads:
        x = x.repeat_interleave(heads // x.shape[2], 2)
    x = x.transpose(1, 2)
    short = -x.shape[2] % CHUNK
    x = pad(x, (0, 0, 0, short)) if short else x
    return x.reshape(*x.shape[:2], -1, CHUNK, x.shape[-1])


def uncut(x: Tensor, like: Tensor) -> Tensor:
    """The way back from `cut`, summed over the heads that share one of `like`, in its type."""
    x = x.flatten(2, 3).transpose(1, 2)[:, : like.shape[1]]
    if x.shape[2] != like.shape[2]:
        x = x.reshape(*x.shape[:2], like.shape[2], -1, x.shape[-1]).sum(3)
    return x.to(like.dtype, memory_format=torch.contiguous_format)


@dataclass(frozen=True)
class Gates:
    """Logarithms of decays within each chunk: up to token i, up to the one before it, and over the whole chunk.

    upto, before: [B, H, N, C, 1 or K]; total: [B, H, N, 1, 1 or K]; all None without decays. segment: [B, 1, N, C], the number of
    documents that started in the chunk so far; None if there is one document.
    """

    upto: Tensor | None
    before: Tensor | None
    total: Tensor | None
    segment: Tensor | None

    @classmethod
    def of(cls, decay: Tensor | None, starts: Tensor | None, heads: int) -> Gates:
        upto = before = total = segment = None
        if decay is not None:
            upto = cut(decay if decay.dim() == 4 else decay[..., None], heads).cumsum(-2)
            before, total = pad(upto[..., :-1, :], (0, 0, 1, 0)), upto[..., -1:, :]
        if starts is not None:
            marks = starts.long()[:, None]
            marks = pad(marks, (0, -marks.shape[-1] % CHUNK))
            segment = marks.reshape(*marks.shape[:2], -1, CHUNK).cumsum(-1)
        return cls(upto, before, total, segment)

    def read(self, x: Tensor, exclusive: bool) -> Tensor:
        """Rows that meet the chunk's entering state: Γ_i x_i, or Γ_{i−1} x_i; 0 behind the start of a document."""
        if self.upto is not None and self.before is not None:
            x = x * (self.before if exclusive else self.upto).exp()
        return x if self.segment is None else x * (self.segment == 0)[..., None]

    def write(self, x: Tensor) -> Tensor:
        """Rows that reach the chunk's leaving state: (Γ_C/Γ_j) x_j; 0 before the start of a later document."""
        if self.upto is not None and self.total is not None:
            x = x * (self.total - self.upto).exp()
        return x if self.segment is None else x * (self.segment == self.segment[..., -1:])[..., None]

    def through(self, like: Tensor) -> Tensor:
        """What is left of the entering state: [B, H, N, 1 or K, 1], where like is [B, H, N, ..]."""
        if self.total is not None:
            left = self.total.exp().transpose(-1, -2)
        else:
            left = like.new_ones(*like.shape[:3], 1, 1)
        return left if self.segment is None else left * (self.segment[..., -1] == 0)[..., None, None]

    # Sums over pairs of one chunk, with E_ijk = Γ_ik/Γ_jk for j ≤ i (Γ_{i−1} and j < i if exclusive), else 0.

    @property
    def scalar(self) -> bool:
        return self.upto is None or self.upto.shape[-1] == 1

    def hidden(self, like: Tensor, exclusive: bool) -> Tensor:
        """Pairs without an entry: bool, broadcastable to [B, H, N, C, C]."""
        rows = torch.arange(CHUNK, device=like.device)
        hidden = rows[:, None] < rows + exclusive
        return hidden if self.segment is None else hidden | (self.segment[..., :, None] != self.segment[..., None, :])

    def ratio(self, like: Tensor, exclusive: bool) -> Tensor:
        """E of scalar decays, broadcastable to [B, H, N, C, C]."""
        hidden = self.hidden(like, exclusive)
        if self.upto is None or self.before is None:
            return (~hidden).to(like.dtype)
        steps = (self.before if exclusive else self.upto) - self.upto.transpose(-1, -2)
        return steps.masked_fill(hidden, -torch.inf).exp()

    def pairs(self, x: Tensor, y: Tensor, exclusive: bool) -> Tensor:
        """Σ_k x_ik E_ijk y_jk: [B, H, N, C, C]."""
        if self.scalar:
            return (x @ y.transpose(-1, -2)) * self.ratio(x, exclusive)
        out = x.new_zeros(*x.shape[:-1], CHUNK)
        if not exclusive:
            out.diagonal(0, -2, -1).copy_((x * y).sum(-1))
        for half, late, early in self._halves(exclusive):
            quarter = (_late(x, half) * late) @ (_early(y, half) * early).transpose(-1, -2)
            _corner(out, half).copy_(quarter.movedim(-3, -1))
        return out.masked_fill_(self.hidden(x, exclusive), 0)

    def pairs_left(self, g: Tensor, y: Tensor, exclusive: bool) -> Tensor:
        """Σ_j g_ij E_ijk y_jk: the gradient of `pairs` by x."""
        if self.scalar:
            return (g * self.ratio(y, exclusive)) @ y
        g = g.masked_fill(self.hidden(y, exclusive), 0)
        out = y.new_zeros(y.shape) if exclusive else g.diagonal(0, -2, -1)[..., None] * y
        for half, late, early in self._halves(exclusive):
            _late(out, half).add_((_corner(g, half).movedim(-1, -3) @ (_early(y, half) * early)) * late)
        return out

    def pairs_right(self, g: Tensor, x: Tensor, exclusive: bool) -> Tensor:
        """Σ_i g_ij E_ijk x_ik: the gradient of `pairs` by y."""
        if self.scalar:
            return (g * self.ratio(x, exclusive)).transpose(-1, -2) @ x
        g = g.masked_fill(self.hidden(x, exclusive), 0)
        out = x.new_zeros(x.shape) if exclusive else g.diagonal(0, -2, -1)[..., None] * x
        for half, late, early in self._halves(exclusive):
            _early(out, half).add_((_corner(g, half).movedim(-1, -3).transpose(-1, -2) @ (_late(x, half) * late)) * early)
        return out

    def _halves(self, exclusive: bool) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Blocks of 2·half tokens: (half, Γ of the late half over the middle, the middle over Γ of the early half).

        A pair lies in exactly one such block, and the middle between its tokens keeps both exponents ≤ 0.
        """
        assert self.upto is not None and self.before is not None
        half = CHUNK // 2
        while half:
            early = _early(self.upto, half)
            middle = early[..., -1:, :]
            yield half, (_late(self.before if exclusive else self.upto, half) - middle).exp(), (middle - early).exp()
            half //= 2


def _late(x: Tensor, half: int) -> Tensor:
    """[.., C, D] -> [.., C/2half, half, D]: the second half of every block of 2·half."""
    return x.unflatten(-2, (-1, 2, half))[..., 1, :, :]


def _early(x: Tensor, half: int) -> Tensor:
    return x.unflatten(-2, (-1, 2, half))[..., 0, :, :]


def _corner(x: Tensor, half: int) -> Tensor:
    """[.., C, C] -> [.., half, half, C/2half]: late rows and early columns of every block on the diagonal, a view."""
    blocks = x.unflatten(-1, (-1, 2, half)).unflatten(-4, (-1, 2, half))  # [.., I, 2, half, J, 2, half]
    return blocks[..., :, 1, :, :, 0, :].diagonal(0, -4, -2)


# Stages of the forward pass -----------------------------------------------------------------------


def begin(k: Tensor, v: Tensor, decay: Tensor | None, starts: Tensor | None) -> list[Tensor]:
    """Without `remove`: states from zero and what is left of an entering one.

    states [B, H, N, K, V]: what each chunk finds; reach [B, H, N, 1 or K, 1]: what is left there of the state before the
    first chunk; end [B, H, K, V] and total [B, H, 1 or K, 1]: the same behind the last chunk.
    """
    heads = v.shape[2]
    gates = Gates.of(decay, starts, heads)
    added = gates.write(cut(k, heads)).transpose(-1, -2) @ cut(v, heads)
    return _accumulated(added, gates.through(added), reverse=False)


def _accumulated(added: Tensor, through: Tensor, reverse: bool) -> list[Tensor]:
    """S_{c+1} = through_c S_c + added_c from zero: the state each chunk finds, and what is left there of one from outside."""
    states, reach = torch.empty_like(added), torch.empty_like(through)
    state, left = torch.zeros_like(added[:, :, 0]), torch.ones_like(through[:, :, 0])
    count = added.shape[2]
    for c in reversed(range(count)) if reverse else range(count):
        states[:, :, c], reach[:, :, c] = state, left
        state = torch.addcmul(added[:, :, c], through[:, :, c], state)
        left = left * through[:, :, c]
    return [states, reach, state, left]


def arrive(states: Tensor, reach: Tensor, found: Tensor) -> Tensor:
    """States when the first chunk finds `found` [B, H, K, V] instead of zero."""
    return torch.addcmul(states, reach, found[:, :, None])


def begin_removing(k: Tensor, v: Tensor, decay: Tensor | None, remove: Tensor, starts: Tensor | None) -> list[Tensor]:
    """With `remove`: what `carry` needs. u = (I + L)⁻¹v − (I + L)⁻¹R S.

    read [B, H, N, C, K] and values [B, H, N, C, V]: the two terms; write [B, H, N, C, K]; through [B, H, N, 1 or K, 1].
    """
    heads = v.shape[2]
    gates = Gates.of(decay, starts, heads)
    k, v, remove = (cut(x, heads) for x in (k, v, remove))
    both = torch.cat([gates.read(remove, True), v], -1)
    solved = torch.linalg.solve_triangular(gates.pairs(remove, k, True), both, upper=False, unitriangular=True)
    return [solved[..., : k.shape[-1]], solved[..., k.shape[-1] :], gates.write(k), gates.through(k)]


def carry(read: Tensor, values: Tensor, write: Tensor, through: Tensor, found: Tensor) -> list[Tensor]:
    """The state `found` [B, H, K, V] through all chunks: the states they find, u [B, H, N, C, V], and the last state."""
    states, u = read.new_empty(*through.shape[:3], *found.shape[-2:]), torch.empty_like(values)
    state = found
    for c in range(values.shape[2]):
        states[:, :, c] = state
        u[:, :, c] = values[:, :, c] - read[:, :, c] @ state
        state = torch.addcmul(write[:, :, c].transpose(-1, -2) @ u[:, :, c], through[:, :, c], state)
    return [states, u, state]


def inside(
    q: Tensor, k: Tensor, decay: Tensor | None, starts: Tensor | None, heads: int, scale: float, exclusive: bool
) -> Tensor:
    """P [B, H, N, C, C]: how much of each token of its chunk a token reads."""
    gates = Gates.of(decay, starts, heads)
    return gates.pairs(cut(q, heads) * scale, cut(k, heads), exclusive)


def finish(
    q: Tensor, v: Tensor, decay: Tensor | None, starts: Tensor | None, weights: Tensor, u: Tensor | None, states: Tensor,
    scale: float, exclusive: bool,
) -> Tensor:  # fmt: skip
    """o [B, T, H, V], from weights (`inside`), u (`carry`; None: v itself) and the states that chunks find."""
    heads = v.shape[2]
    gates = Gates.of(decay, starts, heads)
    out = gates.read(cut(q, heads) * scale, exclusive) @ states
    return uncut(out + weights @ (cut(v, heads) if u is None else u), v)


# Stages of the backward pass ----------------------------------------------------------------------


def begin_back(
    q: Tensor, decay: Tensor | None, starts: Tensor | None, grad: Tensor, scale: float, exclusive: bool
) -> list[Tensor]:
    """Without `remove`, `begin` in the other direction: cotangents of the states that chunks leave."""
    heads = grad.shape[2]
    gates = Gates.of(decay, starts, heads)
    asked = gates.read(cut(q, heads) * scale, exclusive).transpose(-1, -2) @ cut(grad, heads)
    return _accumulated(asked, gates.through(asked), reverse=True)


def begin_removing_back(
    q: Tensor, decay: Tensor | None, starts: Tensor | None, grad: Tensor, weights: Tensor, scale: float, exclusive: bool
) -> list[Tensor]:
    """With `remove`, what is asked of states [B, H, N, K, V] and of u [B, H, N, C, V] within chunks."""
    heads = grad.shape[2]
    gates, grad = Gates.of(decay, starts, heads), cut(grad, heads)
    asked = gates.read(cut(q, heads) * scale, exclusive).transpose(-1, -2) @ grad
    return [asked, weights.transpose(-1, -2) @ grad]


def carry_back(read: Tensor, write: Tensor, through: Tensor, asked: Tensor, du: Tensor, found: Tensor) -> list[Tensor]:
    """The cotangent `found` of the last state back through all chunks.

    Gives the cotangents of the states that chunks leave, of u, and of the first state.
    """
    leaving, du = torch.empty_like(asked), du.clone()
    state = found
    for c in reversed(range(du.shape[2])):
        leaving[:, :, c] = state
        du[:, :, c] += write[:, :, c] @ state
        back = torch.addcmul(asked[:, :, c], through[:, :, c], state)
        state = back - read[:, :, c].transpose(-1, -2) @ du[:, :, c]
    return [leaving, du, state]


def inside_back(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, starts: Tensor | None, grad: Tensor,
    weights: Tensor, u: Tensor | None, states: Tensor, scale: float, exclusive: bool,
) -> list[Tensor]:  # fmt: skip
    """What needs no state from elsewhere: cotangents of what is read and written, [B, H, N, C, K], and without `remove` of u."""
    heads = v.shape[2]
    gates = Gates.of(decay, starts, heads)
    read, write, do = cut(q, heads) * scale, cut(k, heads), cut(grad, heads)
    dp = do @ (cut(v, heads) if u is None else u).transpose(-1, -2)
    dread = gates.read(do @ states.transpose(-1, -2), exclusive) + gates.pairs_left(dp, write, exclusive)
    dwrite = gates.pairs_right(dp, read, exclusive)
    return [dread, dwrite] if u is not None else [dread, dwrite, weights.transpose(-1, -2) @ do]


def finish_back(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, remove: Tensor | None, starts: Tensor | None,
    dread: Tensor, dwrite: Tensor, du: Tensor, u: Tensor | None, states: Tensor, end: Tensor, leaving: Tensor,
    scale: float, exclusive: bool,
) -> list[Tensor]:  # fmt: skip
    """Gradients of q, k, v, then of decay and remove where they are given.

    dread, dwrite, du: from `inside_back`, with `remove` du from `carry_back`; u and states as in `finish`; end [B, H, K, V]:
    the last state; leaving: cotangents of the states that chunks leave.
    """
    heads = v.shape[2]
    gates = Gates.of(decay, starts, heads)
    write, value = cut(k, heads), cut(v, heads) if u is None else u
    dwrite = dwrite + gates.write(value @ leaving.transpose(-1, -2))
    out = list[Tensor]()
    if remove is None:
        dv = du + gates.write(write) @ leaving
    else:
        taken = cut(remove, heads)
        system = gates.pairs(taken, write, True)
        dv = torch.linalg.solve_triangular(system.transpose(-1, -2), du, upper=True, unitriangular=True)
        dl = -(dv @ value.transpose(-1, -2))
        dtaken = gates.pairs_left(dl, write, True) - gates.read(dv @ states.transpose(-1, -2), True)
        dwrite = dwrite + gates.pairs_right(dl, taken, True)
    if decay is not None:
        # Γ_i stands at every read_i and 1/Γ_j at every write_j, so its logarithm's gradient is a sum of what is known already.
        upto, before = -write * dwrite, torch.zeros_like(write)
        if exclusive:
            before = before + cut(q, heads) * scale * dread
        else:
            upto = upto + cut(q, heads) * scale * dread
        if remove is not None:
            before = before + taken * dtaken
        left = torch.cat([states[:, :, 1:], end[:, :, None]], 2)
        total = (left * leaving).sum(-1)[..., None, :]
        upto = upto + pad(before[..., 1:, :], (0, 0, 0, 1))
        if gates.scalar:
            upto, total = upto.sum(-1, keepdim=True), total.sum(-1, keepdim=True)
        step = upto.flip(-2).cumsum(-2).flip(-2) + total
        out.append(uncut(step, decay if decay.dim() == 4 else decay[..., None]).reshape(decay.shape))
    if remove is not None:
        out.append(uncut(dtaken, remove))
    return [uncut(dread * scale, q), uncut(dwrite, k), uncut(dv, v), *out]


def summary(read: Tensor, values: Tensor, write: Tensor, through: Tensor) -> list[Tensor]:
    """With `remove`, all chunks as one step: matrix [B, H, K, K] and end [B, H, K, V] of S' = matrix S + end."""
    (b, h), width = read.shape[:2], read.shape[-1]
    eye = torch.eye(width, dtype=read.dtype, device=read.device).expand(b, h, width, width)
    end = carry(read, values, write, through, values.new_zeros(b, h, width, values.shape[-1]))[2]
    matrix = carry(read, values.new_zeros(*values.shape[:-1], width), write, through, eye)[2]
    return [matrix, end]
