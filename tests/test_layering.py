"""Every import points down: the face may use all, the compiler the runtime and the plan, the two ground floors nothing."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PREFIX = "autosp."

# What modules of each folder may import of ours; a trailing dot means everything below.
ALLOWED = {
    "kernels": ("autosp.kernels.",),
    "cost_model": ("autosp.cost_model.",),
    "passes": (
        "autosp.passes.",
        "autosp.kernels.",
        "autosp.cost_model.plan.",
        "autosp.cost_model.problem.",
        "autosp.cost_model.states.",
        "autosp.cost_model.volumes.",
    ),
    "autosp": ("autosp.",),
}
FILES = [path for folder in ALLOWED for path in sorted((ROOT / folder).rglob("*.py"))]


def imported(source: str, package: str) -> Iterator[str]:
    """Full dotted names that `source`, a module in `package`, imports anywhere, `from` names included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def package_of(path: Path) -> str:
    parts = path.relative_to(ROOT).parent.parts
    return ".".join(parts if parts[0] == "autosp" else ("autosp", *parts))


def forbidden(folder: str, names: list[str]) -> list[str]:
    ours = [n for n in names if n.split(".")[0] == "autosp" or n.split(".")[0] in ("passes", "kernels", "cost_model")]
    wrong = [n for n in ours if not any((n + ".").startswith(allowed) for allowed in ALLOWED[folder])]
    if folder == "cost_model":
        wrong += [n for n in names if n.split(".")[0] == "torch"]
    return wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    names = list(imported(path.read_text(), package_of(path)))
    assert forbidden(path.relative_to(ROOT).parts[0], names) == []


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("kernels", "from autosp import cost_model"),
        ("kernels", "from ..passes import place"),
        ("cost_model", "import torch.fx"),
        ("cost_model", "from autosp.kernels.layout import Layout"),
        ("passes", "from autosp.cost_model import planner"),
        ("passes", "def f():\n    import autosp.backend"),
        ("passes", "import kernels"),
    ],
)
def test_a_wrong_import_is_seen(folder: str, line: str) -> None:
    assert forbidden(folder, list(imported(line, f"autosp.{folder}")))


@pytest.mark.parametrize(
    ("folder", "line"),
    [
        ("passes", "from autosp.cost_model.plan import Plan"),
        ("passes", "from autosp.cost_model import volumes"),
        ("passes", "from . import place"),
        ("kernels", "from .layout import Layout"),
        ("autosp", "from autosp.passes import pipeline"),
    ],
)
def test_a_right_import_passes(folder: str, line: str) -> None:
    assert not forbidden(folder, list(imported(line, f"autosp.{folder}")))


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {f"{package_of(path)}.{path.stem}": path for path in FILES if path.stem != "__init__"}
    needs = {}
    for name, path in files.items():
        imports = list(imported(path.read_text(), package_of(path)))
        needs[name] = {n if n in files else n.rpartition(".")[0] for n in imports} & files.keys() - {name}
    while free := {name for name, used in needs.items() if not used & needs.keys()}:
        needs = {name: used for name, used in needs.items() if name not in free}
    assert not needs, "each of these needs another of them"
