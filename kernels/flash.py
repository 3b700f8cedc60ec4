"""One block of attention with its log-sum-exp, and the merge of two: what every distributed attention is made of.

Block results are accumulated in float32 (float64 for float64 inputs) whatever the inputs are: rounded to bfloat16 block by
block, the error would grow with the number of blocks. That rules out kernels that return their output in the
input's type (aten's CUDA flash and cuDNN attention); those run where one block is all there is
(`passes.sites`), and our own Triton kernels everywhere else on CUDA. On CPU aten's flash attention does the work.

q: [batch, heads, rows, D], k: [batch, kv heads, columns, D], v: [batch, kv heads, columns, D_v]; query head h reads key/value
head h // (heads / kv heads). lse: [batch, heads, rows], natural; −inf, with output 0, for a row that sees nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type in which blocks of this type are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, mask: Tensor | None, scale: float | None) -> tuple[Tensor, Tensor]:
    """(out, lse) of a block. causal: row i of the block sees columns j <= i. mask: boolean or additive, [.., rows, columns]."""
    if q.is_cuda:
        from . import flash_triton

        return flash_triton.forward(q, k, v, _score(q, causal, scale), mask)
    width, scale = v.shape[-1], q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, additive = _cpu(q, k, v, mask)
    out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, attn_mask=additive, scale=scale)
    if additive is not None:  # torch's kernel gives lse 0 to a row that sees nothing
        empty = (additive == -torch.inf).all(-1).expand(lse.shape)
        lse = lse.masked_fill(empty, -torch.inf)
    return out[..., :width], lse


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    delta: Tensor,
    causal: bool,
    mask: Tensor | None,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) of a block within a row's whole attention.

    lse: of the whole row; delta: [batch, heads, rows], Σ grad · out over the whole row, less the cotangent of lse.
    """
    if q.is_cuda:
        from . import flash_triton

        return flash_triton.backward(grad, q, k, v, lse, delta, _score(q, causal, scale), mask)
    widths, scale = (q.shape[-1], k.shape[-1], v.shape[-1]), q.shape[-1] ** -0.5 if scale is None else scale
    q, k, v, additive = _cpu(q, k, v, mask)
    grad, lse = _padded(grad.to(q.dtype), v.shape[-1]), lse.masked_fill(lse == -torch.inf, 0)
    grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, _out_with(grad, delta), lse, 0.0, causal, attn_mask=additive, scale=scale
    )
    dq, dk, dv = (g[..., :width] for g, width in zip(grads, widths, strict=True))
    return dq, dk, dv


def _out_with(grad: Tensor, delta: Tensor) -> Tensor:
    """An output whose product with `grad` is `delta`: aten's kernel takes the output, of which it needs this product only."""
    largest = grad.abs().amax(-1, keepdim=True)
    unit = grad / largest.masked_fill(largest == 0, 1)
    length = unit.square().sum(-1, keepdim=True)
    return unit * (delta.unsqueeze(-1) / (largest * length).masked_fill(largest == 0, 1))


def _cpu(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Operands of one width in the accumulator's type (aten's kernel rounds its output to theirs), and an additive mask."""
    dtype, width = accumulator(q.dtype), max(q.shape[-1], v.shape[-1])
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros((), dtype=dtype, device=q.device).masked_fill(~mask, -torch.inf)
    if mask is not None:
        mask = mask.to(dtype).expand(*[1] * (4 - mask.dim()), *mask.shape)
    q, k, v = (_padded(x.to(dtype), width) for x in (q, k, v))
    return q, k, v, mask


def _padded(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _score(q: Tensor, causal: bool, scale: float | None) -> Any:
    from . import flash_triton

    return flash_triton.Score(q.shape[-1] ** -0.5 if scale is None else scale, causal=0 if causal else None)


def applies(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether `forward` takes these."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4 or not q.shape[0] == k.shape[0] == v.shape[0]:
        return False
    return q.device.type == "cpu" or (max(q.shape[-1], v.shape[-1]) <= 256 and q.dtype != torch.float64)


def merge_pairs_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """As `merge_`, for log-sum-exps as pairs [.., rows, 2] of a maximum and the logarithm of the sum that remains."""
    (top, rest), (block_top, block_rest) = lse.unbind(-1), block_lse.unbind(-1)
    most = torch.maximum(top, block_top)
    seen = most.masked_fill(most == -torch.inf, 0)
    mine, theirs = top - seen + rest, block_top - seen + block_rest
    total = torch.logaddexp(mine, theirs)
    total = total.masked_fill(total == -torch.inf, 0)
    out.mul_(torch.exp(mine - total).unsqueeze(-1)).add_(block_out * torch.exp(theirs - total).unsqueeze(-1))
    lse.copy_(torch.stack([most, total], -1))


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a block's normalised result into `out` and `lse`, in place; rows that neither has seen stay (0, −inf)."""
    if out.is_cuda and out.dim() == 4 and out.dtype == torch.float32:
        from . import flash_triton

        return flash_triton.merge_(out, lse, block_out, block_lse)
    total = torch.logaddexp(lse, block_lse)
    seen = total.masked_fill(total == -torch.inf, 0)
    out.mul_(torch.exp(lse - seen).unsqueeze(-1)).add_(block_out * torch.exp(block_lse - seen).unsqueeze(-1))
    lse.copy_(total)
    return None
