"""What a plan costs, from the plan alone: bytes of its layers, and its sites priced again on a machine.

Byte counts need no machine. A price does, and must be the one that the plan was made with.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from .hardware import Hardware
from .plan import Layer, Plan, PlanError, Site
from .plan_text import Run
from .planner import kept_bytes
from .prices import Cost, cost
from .prices import kept as kept_by
from .problem import Sizes, sizes_of


def sizes(site: Site) -> Sizes:
    """What a site was priced with. Raises PlanError where the plan does not say."""
    try:
        found = sizes_of(site.sizes)
    except (KeyError, TypeError) as error:
        raise PlanError(f"the sizes of {site.name} are none that this autosp knows ({error}); fix: `autosp plan` again") from None
    if found is None:
        raise PlanError(f"the plan does not say with which sizes {site.name} was priced; fix: `autosp plan` again")
    return found


def kept(plan: Plan) -> dict[str, float]:
    """By site's name: bytes that a rank keeps for its backward, with its share of the layer around it."""
    layers = {layer.name: layer for layer in (plan.beside.layers if plan.beside else ())}
    shares = Counter(site.layer for site in plan.sites)
    known: dict[tuple[str, Sizes, str], float] = {}
    found = {}
    for site in plan.sites:
        key = (site.strategy, sizes(site), site.saved)
        if key not in known:
            known[key] = kept_by(*key)
        layer, parts = layers.get(site.layer, Layer(site.layer)), shares[site.layer]
        own = replace(layer, saved=layer.saved / parts, entering=layer.entering / parts, around=layer.around / parts)
        found[site.name] = kept_bytes(site.saved, own) + known[key]
    return found


def kept_in(run: Run, by_site: Mapping[str, float]) -> float:
    return sum(by_site[site.name] for site in run.sites)


def price(site: Site, hardware: Hardware, dtype: str) -> Cost:
    """A site's price again. Raises PlanError where the machine is not the one that the plan was made for, HardwareError where
    its table lacks a number."""
    found = cost(site.strategy, sizes(site), hardware, dtype)
    told = site.seconds.total
    if abs(found.seconds - told) > 1e-6 * max(told, 1e-12):
        raise PlanError(
            f"{site.name} takes {found.seconds:.4g} s on {hardware.name} ({hardware.node or 'all'} ranks a node), the plan says "
            f"{told:.4g} s: it was made with other numbers; fix: --hardware with the file it was made for, or `autosp plan` again"
        )
    return found
