"""Amounts as people write and read them: sequence lengths, bytes, seconds, the axes of a mesh."""

from __future__ import annotations

import math
import re

from .errors import PlanningError

POSITIONS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
BYTES = {"": 1, "B": 1} | {
    prefix + unit: base**power
    for power, prefix in enumerate("KMGT", 1)
    for unit, base in (("B", 1000), ("iB", 1024))
}  # fmt: skip
PREFIXES = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n"))


class AmountError(PlanningError):
    """A text that is no amount of what was asked for."""


def positions(text: str) -> int:
    """A sequence length: "1M" is 1024 x 1024, "128K" 128 x 1024. Raises AmountError."""
    value = _amount(text, {key.upper(): factor for key, factor in POSITIONS.items()})
    if value is None or value < 1 or value != int(value):
        raise AmountError(
            f"{text!r} is no sequence length; fix: a number of positions such as 131072, 128K or 1M (K is 1024, M 1024 x 1024)"
        )
    return int(value)


def nbytes(text: str) -> float:
    """Bytes of memory: "80GB" is 80e9, "80GiB" 80 x 1024 x 1024 x 1024. Raises AmountError."""
    value = _amount(text, {key.upper(): factor for key, factor in BYTES.items()})
    if value is None or value < 1:
        raise AmountError(
            f"{text!r} is no amount of memory; fix: bytes, or a number with kB, MB, GB or TB, or KiB, MiB, GiB or TiB: 80GB"
        )
    return value


def _amount(text: str, units: dict[str, int]) -> float | None:
    found = re.fullmatch(r"([0-9][0-9_]*\.?[0-9]*(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2].upper() not in units:
        return None
    return float(found[1]) * units[found[2].upper()]


def axes(text: str) -> dict[str, int]:
    """Sizes by name: "dp=2, sp=4"; empty for anything else, or where a size is below 1."""
    try:
        found = {name.strip(): int(size) for name, size in (part.split("=") for part in text.split(","))}
    except ValueError:
        return {}
    return found if min(found.values()) >= 1 else {}


def length(count: int) -> str:
    """A sequence length as short as it can be said exactly: "1M", "128K", "1,000,000"."""
    for unit in "GMK":
        if count and count % POSITIONS[unit] == 0:
            return f"{count // POSITIONS[unit]}{unit}"
    return f"{count:,}"


def rounded(count: float) -> str:
    """A length with three digits: "2.1M"; all of them where that is short."""
    exact = length(round(count))
    if count == round(count) and len(exact) <= 5:
        return exact
    unit = next((u for u in "GMK" if count >= POSITIONS[u]), "")
    return f"{count / POSITIONS[unit]:.3g}{unit}"


def shown(value: float, unit: str) -> str:
    """With three digits and a prefix: "3.35 TB/s", "1.90 µs", "0 s"."""
    if value == 0 or not math.isfinite(value):
        return f"{value:g} {unit}"
    factor, prefix = next((p for p in PREFIXES if abs(value) >= p[0] * 0.9995), PREFIXES[-1])
    digits = f"{value / factor:.3g}" if abs(value / factor) >= 99.95 else f"{value / factor:#.3g}"
    return f"{float(digits):,.0f}" + f" {prefix}{unit}" if "e" in digits else f"{digits} {prefix}{unit}"
