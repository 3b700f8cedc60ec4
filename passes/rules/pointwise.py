"""Operators that compute each element from the elements above it: the largest family, one relation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from ...kernels import random
from ..placement import Placement
from ..relation import Dims, broadcast, operand_shape, operands, shape
from .base import Builder, Related, Rule, argument

aten = torch.ops.aten


def pointwise(node: fx.Node) -> Dims:
    return broadcast([shape(x) for x in operands(node)], shape(node))


_NAMES = """
add sub rsub mul div true_divide floor_divide remainder fmod pow square neg abs sign exp exp2 expm1 log log2 log10 log1p sqrt
rsqrt reciprocal sin cos tan asin acos atan atan2 sinh cosh tanh asinh acosh atanh erf erfc erfinv sigmoid silu gelu relu
relu6 elu celu selu leaky_relu mish softplus softsign hardtanh hardswish hardsigmoid log_sigmoid logit threshold clamp
clamp_min clamp_max clip maximum minimum fmax fmin floor ceil round trunc frac eq ne lt le gt ge logical_and logical_or
logical_not logical_xor __and__ __or__ __xor__ bitwise_and bitwise_or bitwise_not bitwise_xor bitwise_left_shift
bitwise_right_shift __lshift__ __rshift__ isnan isinf isfinite where masked_fill to _to_copy type_as contiguous clone alias
detach lift_fresh_copy lift_fresh positive nan_to_num lerp addcmul addcdiv zeros_like ones_like full_like empty_like xlogy
logaddexp sgn copysign heaviside rad2deg deg2rad sinc float_power polar complex resolve_conj resolve_neg real imag conj
conj_physical nextafter hypot i0 digamma lgamma special_expit special_xlogy special_erf special_log1p fill divide multiply
subtract greater greater_equal less less_equal not_equal absolute negative fix
""".split()


@dataclass(frozen=True)
class Dropout(Related):
    """Dropout by global element index, so that the mask does not depend on who computes it."""

    def emit(self, b: Builder, node: fx.Node, out: Placement, values: Sequence[fx.Node]) -> fx.Node:
        p, train = argument(node, "p"), argument(node, "train", True)
        if not train or p == 0:
            return values[0]
        where = b.where(node, out)
        return b.call(random.dropout, values[0], p, b.seed(), site_salt(node), tuple(shape(node)), where)


def site_salt(node: fx.Node) -> int:
    """A number that differs between the random sites of one graph and is the same on every rank."""
    return next(i for i, n in enumerate(node.graph.nodes) if n is node)


def _prelu(node: fx.Node) -> Dims:
    x = operand_shape(node, 0)
    return Dims((tuple(range(len(x))), tuple(1 if len(x) > 1 and d == x[1] else None for d in operand_shape(node, 1))))


RULES: dict[object, Rule] = {getattr(aten, name): Related(pointwise) for name in _NAMES if hasattr(aten, name)}
RULES |= {
    aten.prelu: Related(_prelu),
    aten.dropout: Dropout(pointwise),
}
