"""What a machine can do: every number with its unit and where it comes from. One TOML file a machine."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "machines"
KERNELS = ("matmul", "attention_forward", "attention_backward", "linear_forward", "linear_backward")
COLLECTIVES = ("p2p", "all_to_all", "all_gather", "all_reduce")


class HardwareError(ValueError):
    """A machine, or a number about one, that is not known."""


@dataclass(frozen=True)
class Number:
    """value in `unit`; source: a document or the measurement it comes from."""

    value: float
    unit: str
    source: str


@dataclass(frozen=True)
class Link:
    """A collective on one level: `latency` once a call, `message` for each message one after another, then bytes ÷ `bandwidth`
    (bytes a second that one rank sends through one port)."""

    latency: Number
    message: Number
    bandwidth: Number


@dataclass(frozen=True)
class Level:
    """Ranks that a kind of link connects: `ranks` of them (0: as many as there are), each with `ports` links to others at once.

    links: by collective; those not given are the same as "p2p".
    """

    name: str
    ranks: int
    ports: int
    links: Mapping[str, Link]

    def link(self, collective: str) -> Link:
        return self.links.get(collective) or self.links["p2p"]


@dataclass(frozen=True)
class Hardware:
    """A machine, or a cluster of them.

    memory: bytes a device; bandwidth: of its memory, bytes/s; peak: FLOP/s by dtype; efficiency: what share of it a kernel
    reaches; launch: seconds a call of a kernel takes beside its work; overlap: the share of a transfer that costs nothing while a kernel
    runs. levels: nearest ranks first.
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
    """A machine of our tables by name, or a TOML file by path. Raises HardwareError that names what is wrong and what there is."""
    path = Path(name)
    if path.suffix != ".toml":
        path = TABLES / f"{str(name).lower()}.toml"
        if not path.exists():
            close = difflib.get_close_matches(str(name).lower(), names(), n=1)
            raise HardwareError(
                f"no hardware is called {name!r}; "
                + (f"did you mean {close[0]!r}? " if close else "")
                + f"known: {', '.join(names())}; "
                "fix: one of these, or the path of a file that `autosp calibrate` wrote"
            )
    try:
        return from_dict(tomllib.loads(path.read_text()), path.stem)
    except FileNotFoundError:
        raise HardwareError(f"no such hardware file: {path}; fix: `autosp calibrate --out {path}` writes one") from None
    except tomllib.TOMLDecodeError as error:
        raise HardwareError(f"{path} is not TOML: {error}") from None


def from_dict(raw: Mapping[str, Any], name: str) -> Hardware:
    """Raises HardwareError where a number or its source is missing."""

    def number(row: Any, where: str) -> Number:
        if not isinstance(row, Mapping) or not {"value", "unit", "source"} <= set(row):
            raise HardwareError(f"hardware {name}: {where} needs a value, a unit and a source, it is {row!r}")
        return Number(float(row["value"]), str(row["unit"]), str(row["source"]))

    def table(key: str) -> dict[str, Number]:
        return {k: number(v, f"{key}.{k}") for k, v in raw.get(key, {}).items()}

    def level(row: Mapping[str, Any]) -> Level:
        links = {
            kind: Link(
                *(
                    number(given.get(part), f"levels.{row.get('name')}.{kind}.{part}")
                    for part in ("latency", "message", "bandwidth")
                )
            )
            for kind, given in row.items()
            if isinstance(given, Mapping)
        }
        if "p2p" not in links or set(links) - set(COLLECTIVES):
            raise HardwareError(
                f"hardware {name}: level {row.get('name')!r} needs a table p2p and at most {', '.join(COLLECTIVES[1:])}"
            )
        return Level(str(row["name"]), int(row["ranks"]), int(row.get("ports", 1)), links)

    missing = {"memory", "bandwidth", "overlap", "levels"} - set(raw)
    if missing:
        raise HardwareError(f"hardware {name} lacks {', '.join(sorted(missing))}")
    return Hardware(
        str(raw.get("name", name)),
        str(raw.get("description", "")),
        number(raw["memory"], "memory"),
        number(raw["bandwidth"], "bandwidth"),
        table("peak"),
        table("efficiency"),
        table("launch"),
        number(raw["overlap"], "overlap"),
        tuple(level(row) for row in raw["levels"]),
    )


def to_toml(hardware: Hardware) -> str:
    """The file that `load` reads back."""

    def number(n: Number) -> str:
        return f"{{ value = {n.value:.6g}, unit = {json.dumps(n.unit)}, source = {json.dumps(n.source)} }}"

    lines = [f"name = {json.dumps(hardware.name)}", f"description = {json.dumps(hardware.description)}"]
    lines += [f"{key} = {number(getattr(hardware, key))}" for key in ("memory", "bandwidth", "overlap")]
    for key in ("peak", "efficiency", "launch"):
        lines += ["", f"[{key}]", *(f"{k} = {number(n)}" for k, n in getattr(hardware, key).items())]
    for level in hardware.levels:
        lines += ["", "[[levels]]", f"name = {json.dumps(level.name)}", f"ranks = {level.ranks}", f"ports = {level.ports}"]
        for kind, link in level.links.items():
            lines += [
                f"[levels.{kind}]",
                *(f"{part} = {number(getattr(link, part))}" for part in ("latency", "message", "bandwidth")),
            ]
    return "\n".join(lines) + "\n"
