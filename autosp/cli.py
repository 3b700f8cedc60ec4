"""The command line: `autosp check`, `plan`, `explain`, `trace`, `diff`, `demo`, `hardware` and `calibrate`."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    name="autosp",
    help="Train an ordinary PyTorch model sequence-parallel, exactly.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
STRATEGIES = (
    "all-to-all, gather-kv, ring, balanced-ring, ring-a2a or halo for attention; "
    "all-scan, log-step, two-level, gather-states or all-to-all for linear attention"
)
SIZE_HELP = "positions of a sequence, for a transformers model: 131072, 128K or 1M"
ZERO_HELP = "3: every rank of the mesh holds a part of the parameters, gathered a layer at a time"
TILE_HELP = (
    "losses and feed-forward blocks by tiles of positions: auto, large logits, and blocks where memory is short; a number of "
    "positions, all of them; none"
)
PLAN_HELP = "a file that `autosp plan --json` wrote"
MEMORY_HELP = (
    "what is computed again in backward: auto, whatever is fastest and fits; bytes that a device may use, such as 80GB; or of "
    "every layer none, qkv (all but attention and its projections), attention (all but attention and its exchange) or full (all "
    "of it), or of these three offload-qkv, offload-attention and offload, with what is kept in the host's memory"
)
MODEL_HELP = "file.py:factory or package.module:factory, returning (module, inputs); or a transformers model type such as llama"


@app.command()
def check(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    ranks: Annotated[int | None, typer.Option(min=1, help="gloo ranks; 4 if neither this nor --mesh is given")] = None,
    seq_len: Annotated[int, typer.Option(min=1, help="tokens, for a transformers model type")] = 96,
    batch: Annotated[int, typer.Option(min=1, help="sequences, for a transformers model type")] = 2,
    dtype: Annotated[str | None, typer.Option(help="float64 or float32; float64 if not given, or float32 for experts")] = None,
    strategy: Annotated[str | None, typer.Option(help=STRATEGIES + ": for all that it applies to")] = None,
    mesh: Annotated[str | None, typer.Option(help="such as dp=2,sp=2")] = None,
    memory: Annotated[str, typer.Option(help=MEMORY_HELP)] = "auto",
    zero: Annotated[int | None, typer.Option(help=ZERO_HELP)] = None,
    tile: Annotated[str, typer.Option(help=TILE_HELP)] = "auto",
    compiler: Annotated[str, typer.Option(help="aot_eager or inductor")] = "aot_eager",
    timeout: Annotated[float, typer.Option(min=1, help="seconds for the whole run")] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="print only JSON")] = False,
) -> None:
    """Run MODEL on one process and on several ranks, and compare the loss and every gradient.

    Exit code 0: exact. 1: mismatch. 2: refused, with the reason.
    """
    from autosp.model_spec import DTYPES, ModelSpec, run_check
    from autosp.render import print_report

    if dtype is not None and dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    shape = parse_mesh(mesh, ranks)
    options = {"compiler": compiler, "memory": memory, "zero": zero, "tile": rows(tile)} | (
        {"strategy": strategy} if strategy else {}
    )
    report = run_check(ModelSpec(model, seq_len, batch, dtype), shape, options, timeout)
    if as_json:
        sys.stdout.write(report.to_json() + "\n")
    else:
        print_report(report, Console())
    raise typer.Exit(report.exit_code)


@app.command()
def plan(
    model: Annotated[str, typer.Argument(help=MODEL_HELP + ", or a directory with a transformers config.json; at its real size")],
    hardware: Annotated[str, typer.Option(help="the machine: `autosp hardware` lists them; or a file of `autosp calibrate`")],
    ranks: Annotated[int | None, typer.Option(min=1, help="devices that share a sequence")] = None,
    seq_len: Annotated[str, typer.Option(help=SIZE_HELP)] = "8K",
    per_node: Annotated[int | None, typer.Option(min=1, help="devices a node; the machine's own number if not given")] = None,
    batch: Annotated[int, typer.Option(min=1, help="sequences, for a transformers model")] = 1,
    dtype: Annotated[str, typer.Option(help="of weights and activations: bfloat16, float16, float32 or float64")] = "bfloat16",
    memory: Annotated[str, typer.Option(help=MEMORY_HELP)] = "auto",
    strategy: Annotated[str | None, typer.Option(help=STRATEGIES + ": for all that it applies to")] = None,
    outputs: Annotated[str, typer.Option(help="local, gather, or loss: scalars only, so that logits need not exist")] = "local",
    mesh: Annotated[str | None, typer.Option(help="such as dp=8,sp=64: the batch is that of one data-parallel group")] = None,
    zero: Annotated[int | None, typer.Option(help=ZERO_HELP)] = None,
    tile: Annotated[str, typer.Option(help=TILE_HELP)] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="write the plan, for `autosp.parallelize(plan=FILE)`")] = None,
    html_file: Annotated[
        Path | None, typer.Option("--html", help="write a report with plots: one page, complete in itself")
    ] = None,
) -> None:
    """Plan MODEL's training step for a cluster, without one: which strategy for each layer, how long it takes, what it needs.

    Exit code 0: planned. 2: refused, with the reason and what would work.
    """
    from autosp.cost_model.amounts import positions
    from autosp.plan_for import Question, mesh_of
    from autosp.plan_tables import console, print_plan

    with refusals():
        where, long = mesh_of(mesh, ranks), positions(seq_len)
        asked = Question(model, long, where, hardware, per_node, batch, dtype, memory, strategy, outputs, zero, rows(tile))
        made = asked.answer()
        print_plan(made, console())
        if json_file is not None:
            write(json_file, made.to_json() + "\n")
        if html_file is not None:
            from autosp.report import report

            write(html_file, report(made, asked.machine()))


@app.command()
def explain(
    plan: Annotated[Path, typer.Argument(help=PLAN_HELP)],
    layer: Annotated[int | None, typer.Option(min=0, help="its number; all if not given")] = None,
    hardware: Annotated[str | None, typer.Option(help="the machine that was planned for, if it was a file")] = None,
) -> None:
    """Why a plan says what it says: formulas, the source of every number, and where another strategy would win.

    Exit code 0: explained. 2: the plan cannot be read, or the machine is not the one that was planned for.
    """
    from autosp.cost_model.hardware import load
    from autosp.explain import explain as run
    from autosp.plan_tables import console
    from autosp.planning import read

    with refusals():
        made = read(plan)
        run(made, load(hardware or made.hardware).with_node(made.node), layer, console())


@app.command()
def trace(
    plan: Annotated[Path, typer.Argument(help=PLAN_HELP)],
    out: Annotated[Path, typer.Option("-o", "--out", help="the trace to write: a JSON file for ui.perfetto.dev")] = Path(
        "trace.json"
    ),
    drawn: Annotated[int, typer.Option("--ranks", min=1, help="how many ranks to draw, the first ones")] = 8,
    hardware: Annotated[str | None, typer.Option(help="the machine that was planned for, if it was a file")] = None,
) -> None:
    """Simulate a plan's training step, rank by rank and message by message, and draw it as a timeline.

    Exit code 0: drawn. 2: the plan or its machine cannot be read.
    """
    from autosp.cost_model.chrome_trace import trace as draw
    from autosp.cost_model.hardware import load
    from autosp.cost_model.training_step import in_words, step_of
    from autosp.plan_tables import console
    from autosp.planning import read

    with refusals():
        made = read(plan)
        found = step_of(made, load(hardware or made.hardware).with_node(made.node))
        write(out, draw(found, drawn) + "\n")
    console().print(in_words(found, made.totals), markup=False, soft_wrap=True)
    drawing = f"{min(drawn, found.ranks)} of {found.ranks} ranks are drawn in {out}; open it at https://ui.perfetto.dev"
    console().print(drawing, markup=False, soft_wrap=True)


@app.command()
def diff(
    a: Annotated[Path, typer.Argument(help=PLAN_HELP)],
    b: Annotated[Path, typer.Argument(help="another")],
) -> None:
    """What differs between two plans: layout, strategies, seconds, bytes, memory, totals.

    Exit code 0: the same decisions. 1: others. 2: one of them cannot be read.
    """
    from autosp.cost_model.compare import difference
    from autosp.plan_tables import console, print_difference
    from autosp.planning import read

    with refusals():
        found = difference(read(a), read(b))
    print_difference(found, str(a), str(b), console())
    raise typer.Exit(0 if found.same_decisions else 1)


@app.command()
def demo(
    steps: Annotated[int, typer.Option(min=1, help="training steps")] = 16,
    seq_len: Annotated[int, typer.Option(min=8, help="bytes in a sequence")] = 8192,
    ranks: Annotated[int, typer.Option(min=1, help="gloo ranks on this machine's CPU")] = 4,
    strategy: Annotated[str | None, typer.Option(help=STRATEGIES + "; autosp's choice if not given")] = None,
    compiler: Annotated[str, typer.Option(help="aot_eager or inductor")] = "aot_eager",
    out: Annotated[Path, typer.Option(help="where the loss curve is saved, a PNG")] = Path("autosp-demo.png"),
) -> None:
    """Train a byte-level Llama on the Python standard library's sources, on several ranks and on one, and compare."""
    from autosp.demo import Settings, run_demo

    run_demo(Settings(steps=steps, seq_len=seq_len, ranks=ranks, strategy=strategy, compiler=compiler), out, Console())


@app.command()
def hardware(
    name: Annotated[str | None, typer.Argument(help="a machine, or a file.toml; all machines if not given")] = None,
) -> None:
    """List the machines that autosp has numbers of, or every number of one with its unit and source."""
    from autosp.cost_model.hardware import HardwareError, load, names
    from autosp.tables import hardware_table, machines_table

    try:
        Console().print(hardware_table(load(name)) if name else machines_table([load(n) for n in names()]))
    except HardwareError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None


@app.command()
def calibrate(
    ranks: Annotated[int, typer.Option(min=2, help="gloo ranks on this machine; under torchrun, its ranks are taken")] = 4,
    out: Annotated[Path | None, typer.Option(help="the file to write; NAME.toml if not given")] = None,
    name: Annotated[str, typer.Option(help="what to call the machine")] = "cpu",
    dtype: Annotated[str, typer.Option(help="bfloat16, float16, float32 or float64")] = "float32",
) -> None:
    """Measure kernels and links of this machine, or of the cluster that torchrun spans, and write them as a hardware table."""
    from autosp.calibrate import calibrate as run
    from autosp.cost_model.hardware import DTYPES, HardwareError, to_toml
    from autosp.tables import hardware_table

    if dtype not in DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not one of {', '.join(DTYPES)}", param_hint="--dtype")
    try:
        found = run(ranks, name, dtype)
    except HardwareError as error:
        raise typer.BadParameter(str(error)) from None
    if found is None:  # not the first rank
        return
    path = out or Path(f"{name}.toml")
    path.write_text(to_toml(found))
    Console().print(hardware_table(found, sources=False))
    Console().print(
        f"written to {path}; `autosp hardware {path}` says how each number was measured", markup=False, soft_wrap=True
    )


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    """What autosp refuses becomes one message and exit code 2."""
    from autosp.cost_model.errors import PlanningError
    from autosp.kernels.errors import AutospError

    try:
        yield
    except (AutospError, PlanningError) as error:
        Console(stderr=True).print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def write(path: Path, text: str) -> None:
    """Exit code 2, with the reason, where that cannot be."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        reason = f"error: cannot write {path}: {error.strerror}; fix: a file in a directory that exists"
        Console(stderr=True).print(reason, markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(2) from None


def rows(tile: str) -> str | int:
    """A number of positions, or the word as it is."""
    return int(tile) if tile.isdigit() else tile


def parse_mesh(mesh: str | None, ranks: int | None) -> dict[str, int]:
    """{"sp": ranks}, or the axes named in `mesh` ("dp=2,sp=2": dp before sp).

    Raises `typer.BadParameter` for anything else, or if `ranks` contradicts `mesh`.
    """
    if mesh is None:
        return {"sp": ranks or 4}
    from autosp.cost_model.amounts import axes

    shape = axes(mesh)
    if list(shape) not in (["sp"], ["dp", "sp"]):
        raise typer.BadParameter(f"{mesh!r} is neither sp=N nor dp=N,sp=M", param_hint="--mesh")
    if ranks is not None and math.prod(shape.values()) != ranks:
        raise typer.BadParameter(f"{mesh} has {math.prod(shape.values())} ranks, --ranks says {ranks}", param_hint="--mesh")
    return shape


def main() -> None:
    app()


if __name__ == "__main__":
    main()
