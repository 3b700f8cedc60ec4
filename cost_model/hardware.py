"""What a machine can do: every number with its unit and where it comes from. One TOML file a machine.

A number in a file is `{ value = 3.35, unit = "TB/s", source = ".." }`: a unit may have a prefix, values here never have one.
Sources name a document, a measurement, or say "assumed: why".
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from .errors import PlanningError

TABLES = Path(__file__).parent / "machines"
KERNELS = ("matmul", "attention_forward", "attention_backward", "linear_forward", "linear_backward")
COLLECTIVES = ("p2p", "all_to_all", "all_gather", "all_reduce", "reduce_scatter")
DTYPES = ("bfloat16", "float16", "float32", "float64")
ALIASES = {"a100": "a100-80", "h100-sxm": "h100", "h200-sxm": "h200", "mi300": "mi300x"}
PREFIXES = {"": 0, "n": -9, "u": -6, "m": -3, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15}  # powers of ten
TABLE_KEYS = {"peak": DTYPES, "efficiency": KERNELS, "launch": KERNELS}
UNITS = {  # by the first or the last part of a number's name
    "memory": "B", "bandwidth": "B/s", "overlap": "share", "peak": "FLOP/s", "efficiency": "share", "launch": "s",
    "latency": "s", "message": "s", "alone": "times", "host": "B/s",
}  # fmt: skip


class HardwareError(PlanningError):
    """A machine, or a number about one, that is not known."""


@dataclass(frozen=True)
class Number:
    """value in `unit`; source: a document or the measurement it comes from."""

    value: float
    unit: str
    source: str


OWN = Number(1.0, "times", "every rank has a device of its own")
_SINGLE = ("memory", "bandwidth", "overlap", "alone", "host")  # numbers in no table of a file


@dataclass(frozen=True)
class Link:
    """A collective on one level: `latency` once a call, `message` for each message one after another (`work.messages`), then
    bytes sent (`work.sent`) ÷ `bandwidth` (bytes a second that one rank sends through one port, in one direction).

    A hop of "p2p" is one message: all that it costs beside its bytes is `message`, and `latency` is 0.
    """

    latency: Number
    message: Number
    bandwidth: Number


@dataclass(frozen=True)
class Level:
    """Ranks that a kind of link connects: `ranks` of them (0: as many as there are), each with `ports` links to others at once.

    links: by collective; a reduce-scatter not given is the same as an all-gather, others not given are the same as "p2p".
    Collectives use as many ports as there are other ranks, a hop uses one. A switch that gives a rank its whole bandwidth to any
    other is one port.
    """

    name: str
    ranks: int
    ports: int
    links: Mapping[str, Link]

    def used(self, ranks: int) -> int:
        """Ports that a collective of so many ranks uses."""
        return min(self.ports, max(1, ranks - 1))

    def link(self, collective: str) -> Link:
        if collective == "reduce_scatter" and collective not in self.links:
            collective = "all_gather"
        return self.links.get(collective) or self.links["p2p"]


@dataclass(frozen=True)
class Hardware:
    """A machine, or a cluster of them.

    memory: bytes a device; bandwidth: of its memory, bytes/s that a pointwise kernel reads and writes; peak: FLOP/s by dtype;
    efficiency: what share of it a kernel reaches; launch: seconds a call of a kernel takes beside its work; overlap: the share of
    a transfer that costs nothing while a kernel runs. levels: nearest ranks first. alone: how many times as fast a rank computes
    while all others wait, where several share a core. host: bytes/s that each device copies to the host's memory, or back, while
    all of a node do; None: its memory is the host's.
    """

    name: str
    description: str
    memory: Number
    bandwidth: Number
    peak: Mapping[str, Number]
    efficiency: Mapping[str, Number]
    launch: Mapping[str, Number]
    overlap: Number
    levels: tuple[Level, ...]
    alone: Number = OWN
    host: Number | None = None

    def __hash__(self) -> int:
        return hash(self.name)

    def rate(self, kernel: str, dtype: str) -> float:
        """FLOP/s of a kernel. Raises HardwareError for a dtype or kernel the table lacks."""
        return self._number(self.peak, dtype, "peak").value * self._number(self.efficiency, kernel, "efficiency").value

    def seconds_per_call(self, kernel: str) -> float:
        return self._number(self.launch, kernel, "launch").value

    def _number(self, numbers: Mapping[str, Number], key: str, table: str) -> Number:
        if key not in numbers:
            raise HardwareError(
                f"hardware {self.name} has no {table}.{key} (it has {', '.join(numbers) or 'none'}); "
                f"fix: add it to the table with its source, or measure it with `autosp calibrate`"
            )
        return numbers[key]

    def level(self, ranks: int) -> Level:
        """The nearest level that connects `ranks` neighbours. Raises HardwareError where none does."""
        for level in self.levels:
            if level.ranks == 0 or ranks <= level.ranks:
                return level
        raise HardwareError(
            f"hardware {self.name} connects {self.levels[-1].ranks} ranks, {ranks} were asked for; "
            f"fix: add a level to its table with latency and bandwidth of the links between such groups"
        )

    def numbers(self) -> Iterator[tuple[str, Number]]:
        """Every number with its place in the file: ("peak.bfloat16", ..), ("node.p2p.latency", ..)."""
        yield from ((key, n) for key in _SINGLE if (n := getattr(self, key)) is not None)
        for key in TABLE_KEYS:
            yield from ((f"{key}.{k}", n) for k, n in getattr(self, key).items())
        for level in self.levels:
            for kind, link in level.links.items():
                yield from ((f"{level.name}.{kind}.{f.name}", getattr(link, f.name)) for f in dataclasses.fields(link))

    @property
    def node(self) -> int:
        """Ranks of the nearest level; 0: all there are."""
        return self.levels[0].ranks

    def with_node(self, ranks: int) -> Hardware:
        """The same machine with `ranks` devices a node."""
        return dataclasses.replace(self, levels=(dataclasses.replace(self.levels[0], ranks=ranks), *self.levels[1:]))


# Files --------------------------------------------------------------------------------------------


def names() -> list[str]:
    return sorted(path.stem for path in TABLES.glob("*.toml"))


def load(name: str | Path) -> Hardware:
    """A machine of our tables by name, or a TOML file by path. Raises HardwareError that names the mistake and what there is."""
    path = Path(name)
    if path.suffix != ".toml":
        asked = str(name).lower()
        path = TABLES / f"{ALIASES.get(asked, asked)}.toml"
        if not path.exists():
            raise HardwareError(
                f"no hardware is called {str(name)!r}; {_meant(asked, (*names(), *ALIASES))}known: {', '.join(names())}; "
                "fix: one of these, or the path of a file that `autosp calibrate` wrote"
            )
    try:
        return from_dict(tomllib.loads(path.read_text()), path.stem)
    except FileNotFoundError:
        raise HardwareError(f"no such hardware file: {path}; fix: `autosp calibrate --out {path}` writes one") from None
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path} is not TOML: {error}") from None


def _meant(given: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(given, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def from_dict(raw: Mapping[str, Any], name: str) -> Hardware:
    """Raises HardwareError where a number or its source is missing, or its unit is of another kind."""
    missing = {"memory", "bandwidth", "overlap", "levels", *TABLE_KEYS} - set(raw)
    if missing:
        raise HardwareError(f"hardware {name} lacks {', '.join(sorted(missing))}")

    def table(key: str) -> dict[str, Number]:
        for k in raw[key]:
            if k not in TABLE_KEYS[key]:
                raise HardwareError(
                    f"hardware {name}: {key}.{k} is not known; {_meant(k, TABLE_KEYS[key])}known: {', '.join(TABLE_KEYS[key])}"
                )
        return {k: _number(row, f"{key}.{k}", UNITS[key], name) for k, row in raw[key].items()}

    def one(key: str) -> Number:
        return _number(raw[key], key, UNITS[key], name)

    return Hardware(
        name=str(raw.get("name", name)),
        description=str(raw.get("description", "")),
        memory=one("memory"),
        bandwidth=one("bandwidth"),
        peak=table("peak"),
        efficiency=table("efficiency"),
        launch=table("launch"),
        overlap=one("overlap"),
        levels=tuple(_level(row, name) for row in raw["levels"]),
        alone=one("alone") if "alone" in raw else OWN,
        host=one("host") if "host" in raw else None,
    )


def _level(row: Mapping[str, Any], name: str) -> Level:
    title = str(row.get("name"))
    given = {kind: link for kind, link in row.items() if isinstance(link, Mapping)}
    if "name" not in row or "ranks" not in row or "p2p" not in given or set(given) - set(COLLECTIVES):
        raise HardwareError(
            f"hardware {name}: level {title!r} needs a name, ranks (0: as many as there are), a table p2p and at most "
            f"{', '.join(COLLECTIVES[1:])}; it has {', '.join(row)}"
        )
    links = {
        kind: Link(*(_number(link.get(p), f"{title}.{kind}.{p}", UNITS[p], name) for p in ("latency", "message", "bandwidth")))
        for kind, link in given.items()
    }
    return Level(title, int(row["ranks"]), int(row.get("ports", 1)), links)


def _number(row: Any, where: str, unit: str, name: str) -> Number:
    """In `unit` without a prefix."""
    whole = isinstance(row, Mapping) and isinstance(row.get("value"), int | float) and "unit" in row
    if not whole or not str(row.get("source", "")).strip():
        raise HardwareError(f"hardware {name}: {where} needs a value, a unit and a source, it is {row!r}")
    given = str(row["unit"])
    if not given.endswith(unit) or (prefix := given.removesuffix(unit)) not in PREFIXES:
        raise HardwareError(
            f"hardware {name}: {where} is in {given!r}; fix: {unit}, or that with a prefix, such as G or u (for µ)"
        )
    value = float(Decimal(str(row["value"])).scaleb(PREFIXES[prefix]))
    may_be_zero = unit == "s" or where == "overlap"
    if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero) or (unit == "share" and value > 1):
        raise HardwareError(f"hardware {name}: {where} is {row['value']}, which is no {'share' if unit == 'share' else 'amount'}")
    return Number(value, unit, str(row["source"]))


def to_toml(hardware: Hardware) -> str:
    """The file that `load` reads back, with nine significant digits."""

    def text(x: str) -> str:
        return json.dumps(x, ensure_ascii=False)

    def number(n: Number) -> str:
        return f"{{ value = {n.value:.9g}, unit = {text(n.unit)}, source = {text(n.source)} }}"

    lines = [f"name = {text(hardware.name)}", f"description = {text(hardware.description)}"]
    lines += [f"{key} = {number(n)}" for key in _SINGLE if (n := getattr(hardware, key)) is not None]
    for key in TABLE_KEYS:
        lines += ["", f"[{key}]", *(f"{k} = {number(n)}" for k, n in getattr(hardware, key).items())]
    for level in hardware.levels:
        lines += ["", "[[levels]]", f"name = {text(level.name)}", f"ranks = {level.ranks}", f"ports = {level.ports}"]
        for kind, link in level.links.items():
            lines += [
                f"[levels.{kind}]",
                *(f"{part} = {number(getattr(link, part))}" for part in ("latency", "message", "bandwidth")),
            ]
    return "\n".join(lines) + "\n"
