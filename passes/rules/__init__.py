"""The table of rules: {aten operator: rule}. An operator without a row is gathered and run replicated."""

from __future__ import annotations

import operator

import torch
from torch import fx

from . import (
    along,
    attention,
    contractions,
    convolution,
    dispatch,
    functions,
    indexing,
    linear,
    losses,
    pointwise,
    scans,
    sequence,
    views,
)
from .base import Rule

RULES: dict[object, Rule] = {
    **pointwise.RULES,
    **views.RULES,
    **along.RULES,
    **contractions.RULES,
    **indexing.RULES,
    **sequence.RULES,
    **convolution.RULES,
    **scans.RULES,
    **losses.RULES,
    **attention.RULES,
    **dispatch.RULES,
    **functions.RULES,
    **linear.RULES,
}


def rule_of(node: fx.Node) -> Rule | None:
    """The row for a node: its overload's, else its operator's."""
    if node.target is operator.getitem:
        return RULES["getitem"]
    if isinstance(node.target, torch._ops.OpOverload):
        return RULES.get(node.target) or RULES.get(node.target.overloadpacket)
    return None
