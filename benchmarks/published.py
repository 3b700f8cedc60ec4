"""The cost model beside published measurements: `python benchmarks/published.py` prints every row; no GPU, no torch. With
`--write` it puts them into docs/prices.md.

Compared are ratios, between methods or against an ideal; tests/test_published.py holds them within 20 %, but for those in
`MISSES`, each with its reason. Nothing is fitted to a row of its own:

- A100 and H100 rows use `cost_model/machines` as they are; H800 is H100 with 400 instead of 900 GB/s of NVLink.
- ZeCO's rows use `machines/zeco-h100.toml`, whose four constants of links solve the two equations that the paper's rows of 8
  and 256 GPUs give for each collective. Those four numbers are fitted, all others of that paper predicted.
- MaxText's rows use `machines/tpu-v5p.toml`: Google's figures, and the shares of the peak that H100's table assumes.

Methods that are not strategies of ours are priced here, from the same links and rates: Megatron's tensor parallelism, LASP-1.
Published numbers and where they are from: the functions below.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from autosp.cost_model.hardware import Hardware, Number, load
from autosp.cost_model.planner import Planner
from autosp.cost_model.prices import Cost, cost
from autosp.cost_model.problem import Candidate, Exchange, Layer, Problem, SiteProblem
from autosp.cost_model.states import LinearAttention
from autosp.cost_model.symbols import QUANTITIES
from autosp.cost_model.volumes import Attention, counted

MACHINES = Path(__file__).parent / "machines"
DOCUMENT = Path(__file__).parent.parent / "docs/prices.md"
WITHIN = 0.2
BF16 = 2  # bytes
K = 1024


@dataclass(frozen=True)
class Row:
    """One published ratio and what the model says. `fitted`: a constant was made from it."""

    table: str
    case: str
    what: str
    published: float
    predicted: float
    fitted: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        return self.table, self.case, self.what

    @property
    def off(self) -> float:
        return self.predicted / self.published - 1


# ZeCO, 2507.01004: linear attention on 8 to 256 H100 ----------------------------------------------------

ZECO = "ZeCO"
GPUS = (8, 16, 32, 64, 128, 256)
ALL_GATHER = dict(zip(GPUS, (0.375, 0.658, 1.616, 2.543, 4.350, 8.514), strict=True))  # ms, one state set
ALL_SCAN = dict(zip(GPUS, (0.226, 0.297, 0.448, 0.739, 1.272, 2.165), strict=True))
THROUGHPUT = {  # tokens a second and GPU of a 1B GLA, 32K tokens a GPU: LASP-1, LASP-2, ZeCO, data parallel
    8: (27014, 42946, 47369, 49633),
    64: (12268, 37485, 44468, 48230),
    128: (None, 33327, 43278, 47848),
    256: (None, 25402, 40967, 46588),
}
OPERATOR = {8: (22.59, 19.39, 7.32, 6.39), 32: (39.03, 25.72, 7.65, 6.44), 128: (113.71, 35.72, 9.88, 6.12)}  # ms, 16K a GPU


def gla(tokens: int, ranks: int, blocks: int = 1) -> LinearAttention:
    """The paper's state set, 32 heads of 128 x 128 (2 MiB), decays for each row; `tokens` on each rank."""
    return LinearAttention(1, 32, 32, 32, tokens * ranks, 128, 128, 128, False, BF16, ranks, blocks=blocks)


def zeco() -> Iterator[Row]:
    machine = load(MACHINES / "zeco-h100.toml")

    def gathered(tokens: int, ranks: int) -> Cost:
        return cost("gather-states", gla(tokens, ranks), machine, "bfloat16")

    def scanned(tokens: int, ranks: int) -> Cost:
        """With the best number of blocks."""
        ways = (cost("all-scan", gla(tokens, ranks, 2**k), machine, "bfloat16") for k in range(9))
        return min(ways, key=lambda c: (c.communication, c.exposed))

    def chained(tokens: int, ranks: int) -> Cost:
        """LASP-1: the state from rank to rank, whole."""
        return cost("all-scan", gla(tokens, ranks), machine, "bfloat16")

    for p in GPUS:
        fitted = p in (8, 256)
        predicted = gathered(K, p).forward[1] / scanned(K, p).forward[1]
        yield Row(f"{ZECO}: communication", f"{p} GPUs", "All-Gather / All-Scan", ALL_GATHER[p] / ALL_SCAN[p], predicted, fitted)

    layer, alone, tokens = GLA_1B.layer(32 * K), cost("all-scan", gla(32 * K, 1), machine, "bfloat16"), 32 * K
    for p, (first, second, ours, parallel) in THROUGHPUT.items():

        def step(attention: Cost, p: int = p) -> float:
            return GLA_1B.layers * (attention.seconds + 3 * layer_seconds(layer, machine)) + head_seconds(GLA_1B, tokens, machine)

        table, case, ideal = f"{ZECO}: throughput of a model", f"{p} GPUs", step(alone)
        yield Row(table, case, "LASP-2 / data parallel", second / parallel, ideal / step(gathered(tokens, p)))
        yield Row(table, case, "ZeCO / data parallel", ours / parallel, ideal / step(scanned(tokens, p)))
        yield Row(table, case, "ZeCO / LASP-2", ours / second, step(gathered(tokens, p)) / step(scanned(tokens, p)))
        if first:
            yield Row(table, case, "LASP-1 / data parallel", first / parallel, ideal / step(chained(tokens, p)))

    alone = cost("all-scan", gla(16 * K, 1), machine, "bfloat16")
    for p, (_, second, ours, parallel) in OPERATOR.items():
        table, case = f"{ZECO}: one operator", f"{p} GPUs"
        yield Row(table, case, "ZeCO / data parallel", ours / parallel, scanned(16 * K, p).seconds / alone.seconds)
        yield Row(table, case, "LASP-2 / data parallel", second / parallel, gathered(16 * K, p).seconds / alone.seconds)


# Whole models -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Model:
    """A decoder: layers, width of the stream, of all keys (and values) together, of the MLP; vocabulary. `mixer` adds products
    of width x width, beside q, k, v and the output."""

    layers: int
    width: int
    keys: int
    values: int
    mlp: int
    vocabulary: int = 32000
    queries: int = 0
    mixer: int = 0

    def layer(self, tokens: float) -> Layer:
        """On one rank that holds `tokens`: products; norms, residuals, rotations and the MLP's gate as memory traffic."""
        queries = self.queries or self.width
        weights = self.width * (queries + self.keys + self.values + self.width * (1 + self.mixer) + 3 * self.mlp)
        touched = 14 * self.width + 3 * self.mlp  # two norms, two residuals, rotary q and k, silu times gate
        stream = tokens * self.width * BF16
        return Layer("layer", 2.0 * weights * tokens, touched * tokens * BF16, 6 * stream, stream)


LLAMA_7B = Model(32, 4096, 4096, 4096, 11008)  # 2302.13971
LLAMA_33H = dataclasses.replace(LLAMA_7B, width=33 * 128, keys=33 * 128, values=33 * 128)
LLAMA_GQA = dataclasses.replace(LLAMA_7B, keys=1024, values=1024)
# The third-party notes say 1B. fla's GLA of that size: 24 layers of 2048, keys half as wide, one more product for the gate.
GLA_1B = Model(24, 2048, 1024, 2048, 5632, queries=1024, mixer=1)


def layer_seconds(layer: Layer, machine: Hardware) -> float:
    return layer.flop / machine.rate("matmul", "bfloat16") + layer.traffic / machine.bandwidth.value


def head_seconds(model: Model, tokens: float, machine: Hardware) -> float:
    return 3 * 2.0 * model.width * model.vocabulary * tokens / machine.rate("matmul", "bfloat16")


def causal(heads: int, kv_heads: int, seq: int, ranks: int, batch: int = 1) -> Attention:
    return Attention(batch, heads, kv_heads, seq, seq, 128, 128, BF16, ranks, seq, 0)


def forwarded(sizes: Attention) -> Attention:
    """A ring as others run it: every block passes every rank, whatever the mask needs."""
    return dataclasses.replace(sizes, moved=(0, (sizes.ranks - 1) * sizes.kv_seq), steps=sizes.ranks - 1)


def step_seconds(
    model: Model, strategy: str, sizes: Attention, machine: Hardware, ranks: int, saved: str, exchanges: Sequence[Exchange] = ()
) -> float:
    """A training step as the planner prices it where there is one way only. Papers shard parameters: memory is not asked for."""
    tokens = sizes.q_seq * sizes.batch / ranks
    layers = tuple(dataclasses.replace(model.layer(tokens), name=f"layers.{i}") for i in range(model.layers))
    sites = tuple(SiteProblem(x.name, "softmax attention", x.name, (Candidate(strategy, sizes),)) for x in layers)
    head = Layer("head", 2.0 * model.width * model.vocabulary * tokens)
    problem = Problem(ranks, "bfloat16", sites, (*layers, head), tuple(exchanges), layout="contiguous")
    totals = Planner(machine, memory=1e18, saves=(saved,))(problem).totals
    assert totals is not None
    return totals.step_s


# DistFlashAttn, 2310.03294: A100 80 GB ------------------------------------------------------------------

DFA = "DistFlashAttn"
NODES = "2 x 8 A100"
STEPS = (  # s: Megatron, Ulysses, DistFlashAttn
    ("7B, 256K", LLAMA_7B, 32, 32, 256 * K, (43.44, 37.53, 30.21)),
    ("7B, 512K", LLAMA_7B, 32, 32, 512 * K, (147.06, 134.09, 106.37)),
    ("33 heads, 512K", LLAMA_33H, 33, 33, 512 * K, (216.70, 202.89, 107.76)),
    ("8 KV heads, 512K", LLAMA_GQA, 32, 8, 512 * K, (146.38, None, 102.34)),
)
CHECKPOINTED = dict(zip((1, 2, 4, 8, 16, 32), (0.84, 1.29, 2.64, 6.93, 21.44, 76.38), strict=True))  # s, by K tokens a GPU
REMAT_AWARE = dict(zip((1, 2, 4, 8, 16, 32), (0.84, 1.36, 2.50, 5.98, 17.26, 58.46), strict=True))


@dataclass(frozen=True)
class Narrow(Attention):
    """As DistFlashAttn's released code runs it: results and gradients are summed, and sent, in the type of the inputs
    (github.com/RulinShao/LightSeq, lightseq_async_attn.py)."""

    @property
    def accumulator(self) -> int:
        return self.itemsize


def narrow(sizes: Attention) -> Attention:
    return Narrow(**{f.name: getattr(sizes, f.name) for f in dataclasses.fields(sizes)})


def megatron(model: Model, heads: int, seq: int, ranks: int, machine: Hardware) -> float:
    """Tensor parallelism with the sequence split between: each layer gathers and scatters the stream twice forward, again for
    the checkpoint, and backward, where it also gathers what the products' weights need. Heads that do not divide are padded."""
    own = -(-heads // ranks)
    sent = (ranks - 1) * seq / ranks * model.width * BF16
    exchanges = (
        Exchange("all_gather", model.layers * 8, model.layers * 8 * sent),
        Exchange("reduce_scatter", model.layers * 6, model.layers * 6 * sent),
    )
    local = dataclasses.replace(causal(own, own, seq, 1), ranks=1)
    return step_seconds(model, "all-to-all", local, machine, ranks, "layer input", exchanges)


def dist_flash_attn() -> Iterator[Row]:
    machine = load("a100-80")
    for case, model, heads, kv_heads, seq, (tensor, heads_exchanged, published) in STEPS:
        sizes = narrow(causal(heads, kv_heads, seq, 16))
        balanced = step_seconds(model, "balanced-ring", sizes, machine, 16, "attention output")
        yield Row(
            f"{DFA}: a step on {NODES}", case, "Megatron / DistFlashAttn", tensor / published,
            megatron(model, heads, seq, 16, machine) / balanced,
        )  # fmt: skip
        if heads_exchanged:
            ulysses = step_seconds(model, "all-to-all", sizes, machine, 16, "layer input")
            yield Row(
                f"{DFA}: a step on {NODES}", case, "Ulysses / DistFlashAttn", heads_exchanged / published, ulysses / balanced
            )
    for thousands, plain in CHECKPOINTED.items():
        sizes = narrow(causal(32, 32, thousands * K * 8, 8))
        ways = [step_seconds(LLAMA_7B, "balanced-ring", sizes, machine, 8, s) for s in ("layer input", "attention output")]
        yield Row(
            f"{DFA}: what a checkpoint keeps, 8 A100", f"{thousands}K a GPU", "layer input / attention output",
            plain / REMAT_AWARE[thousands], ways[0] / ways[1],
        )  # fmt: skip

    sizes = narrow(causal(32, 32, 256 * K, 8))
    alone = cost("all-to-all", dataclasses.replace(sizes, ranks=1), machine, "bfloat16").forward[0]
    for strategy, what, published in (("balanced-ring", "balanced", 7.5), ("halo", "unbalanced", 4.5)):
        forward = cost(strategy, sizes, machine, "bfloat16").forward
        yield Row(f"{DFA}: speed-up of 8 A100", "256K", what, published, alone / (forward[0] + forward[2]))

    forward = cost("balanced-ring", narrow(causal(32, 32, 128 * K, 16)), machine, "bfloat16").forward
    table = f"{DFA}: a forward pass on {NODES} / its computation alone"
    yield Row(table, "128K", "no overlap", 2.05, 1 + forward[1] / forward[0])
    yield Row(table, "128K", "overlap", 1.44, 1 + forward[2] / forward[0])


# ring-flash-attention's README (github.com/zhuzilin/ring-flash-attention, commit 01c8baf): share of the ideal -----------

RINGS = "ring-flash-attention"
IDEAL = {  # forward, forward and backward: contiguous, head-tail
    "8 H800": ((0.521, 0.539), (0.852, 0.902)),
    "8 A100": ((0.514, 0.525), (0.817, 0.898)),
}
PACKED = {  # contiguous within each document, head-tail within each, gathered keys and values
    "8 H800": ((0.491, 0.511), (0.702, 0.759), (0.570, 0.581)),
    "8 A100": ((0.498, 0.521), (0.720, 0.802), (0.516, 0.580)),
}
DOCUMENTS = ((0, 8192), (0, 256, 7648, 8192), (0, 4096, 8192), (0, 3104, 6304, 7904, 8064, 8192))  # ends on one GPU; times 8 on 8
PASSES = ("forward", "forward and backward")


def h800() -> Hardware:
    """H100 with 400 GB/s of NVLink in both directions instead of 900."""
    machine = load("h100")

    def slower(n: Number) -> Number:
        return dataclasses.replace(n, value=n.value * 400 / 900, source=f"H800: 400/900 of {n.source}")

    node = machine.levels[0]
    links = {kind: dataclasses.replace(link, bandwidth=slower(link.bandwidth)) for kind, link in node.links.items()}
    levels = (dataclasses.replace(node, links=links), *machine.levels[1:])
    return dataclasses.replace(machine, name="h800", levels=levels)


def rings() -> Iterator[Row]:
    for case, machine in (("8 H800", h800()), ("8 A100", load("a100-80"))):
        sizes = causal(32, 8, 64 * K, 8)
        ideal = _both(cost("all-to-all", dataclasses.replace(causal(32, 8, 8 * K, 1)), machine, "bfloat16"), 8)
        for strategy, what, shares in zip(("halo", "ring"), ("ring", "head-tail ring"), IDEAL[case], strict=True):
            found = _both(cost(strategy, forwarded(sizes), machine, "bfloat16"))
            for i in (0, 1):
                yield Row(f"{RINGS}: share of the ideal", f"{case}, {PASSES[i]}", what, shares[i], ideal[i] / found[i])
        names = ("ring", "head-tail ring", "gathered keys and values")
        for strategy, what, shares in zip(("halo", "ring", "gather-kv"), names, PACKED[case], strict=True):
            found = [sum(x) for x in zip(*(_both(_packed(strategy, ends, machine)) for ends in DOCUMENTS), strict=True)]
            whole = [sum(x) for x in zip(*(_both(_packed("", ends, machine), 8) for ends in DOCUMENTS), strict=True)]
            for i in (0, 1):
                yield Row(f"{RINGS}: packed documents", f"{case}, {PASSES[i]}", what, shares[i], whole[i] / found[i])


def _both(c: Cost, times: int = 1) -> tuple[float, float]:
    """Seconds forward, and forward and backward."""
    forward = c.forward[0] + c.forward[2]
    return times * forward, times * c.seconds


def _packed(strategy: str, ends: Sequence[int], machine: Hardware) -> Cost:
    """Documents that end at `ends`, on one GPU ("") or eight times as long on eight."""
    ranks = 8 if strategy else 1
    sizes = causal(32, 8, 8 * K * ranks, ranks)
    documents = [ranks * (stop - start) for start, stop in itertools.pairwise(ends)]
    if strategy == "gather-kv":  # ranks hold whole stretches of the batch
        seen = np.concatenate([np.arange(1, n + 1) for n in documents])
        pairs = float(seen.reshape(ranks, -1).sum(1).max())
    else:  # each document is split over all ranks
        each = [dataclasses.replace(sizes, q_seq=n, kv_seq=n, before=n) for n in documents]
        pairs = sum(counted(strategy or "all-to-all", a).work for a in each) / sizes.q_heads
        sizes = forwarded(sizes)
    return cost(strategy or "all-to-all", dataclasses.replace(sizes, work=pairs), machine, "bfloat16")


# MaxText (github.com/AI-Hypercomputer/maxtext, pull request 4687): Llama-2-7B, 32K, 64 TPU v5p, 16 to a sequence ----------

MAXTEXT = {"all-to-all": 8.90, "gather-kv": 8.83, "ring": 16.38}  # s a step of 2M tokens; attention's output is kept


def maxtext() -> Iterator[Row]:
    machine = load(MACHINES / "tpu-v5p.toml")
    sizes = dataclasses.replace(causal(32, 32, 32 * K, 16, batch=16), folded=True)
    ways = {"all-to-all": sizes, "gather-kv": sizes, "ring": forwarded(sizes)}
    found = {s: step_seconds(LLAMA_7B, s, a, machine, 16, "attention output") for s, a in ways.items()}
    for strategy, what in (("gather-kv", "gathered keys and values / Ulysses"), ("ring", "ring / Ulysses")):
        published, predicted = (x[strategy] / x["all-to-all"] for x in (MAXTEXT, found))
        yield Row("MaxText: a step on 64 TPU v5p", "7B, 32K, 16 chips a sequence", what, published, predicted)


# All of them ------------------------------------------------------------------------------------------

SOURCES: tuple[Callable[[], Iterator[Row]], ...] = (zeco, dist_flash_attn, rings, maxtext)

_BASELINE = (
    "on 8 GPUs the paper's LASP operators take 13 to 16 ms more than a data-parallel one, while states travel for less than 2; "
    "the rest is how they compute, which our notes of the paper do not say"
)
MISSES: dict[tuple[str, str, str], str] = {
    (f"{ZECO}: communication", "32 GPUs", "All-Gather / All-Scan"): (
        "All-Gather jumps: 60 us a rank from 16 to 32 GPUs, 28 to 35 before and after; a latency and a bandwidth make a line"
    ),
    (f"{ZECO}: throughput of a model", "8 GPUs", "LASP-1 / data parallel"): _BASELINE,
    (f"{ZECO}: throughput of a model", "64 GPUs", "LASP-1 / data parallel"): (
        "the cost of the paper's LASP operators as on 8 GPUs; and each rank delays the state by 0.5 ms, of which the hop is 0.1"
    ),
    **{(f"{ZECO}: one operator", f"{p} GPUs", "LASP-2 / data parallel"): _BASELINE for p in OPERATOR},
    (f"{ZECO}: one operator", "128 GPUs", "ZeCO / data parallel"): (
        "3.76 ms more than data parallel, though two All-Scans take 2.54: nothing was hidden, and more was done"
    ),
    (f"{RINGS}: packed documents", f"8 A100, {PASSES[0]}", "head-tail ring"): (
        "kernels on pieces of documents are slower; the model has one rate for all sizes of blocks"
    ),
}


@functools.cache
def rows() -> tuple[Row, ...]:
    return tuple(row for source in SOURCES for row in source())


def markdown(found: Sequence[Row]) -> str:
    """A table for each published one, then why rows miss."""
    lines: list[str] = []
    reasons: list[str] = []
    ordered = sorted(found, key=lambda r: list(dict.fromkeys(x.table for x in found)).index(r.table))
    for table, group in itertools.groupby(ordered, key=lambda r: r.table):
        lines += ["", f"**{table}**", "", "| | | published | predicted | off |", "|---|---|---|---|---|"]
        for r in group:
            mark = " fitted" if r.fitted else ""
            if why := MISSES.get(r.key):
                reasons += [] if why in reasons else [why]
                mark = f" misses ({reasons.index(why) + 1})"
            lines.append(f"| {r.case} | {r.what} | {r.published:.3g} | {r.predicted:.3g} | {r.off:+.0%}{mark} |")
    lines += ["", f"{len(found)} rows, {len(found) - len(MISSES)} within {WITHIN:.0%}. Those that miss:", ""]
    lines += [f"{i}. {why}" for i, why in enumerate(reasons, 1)]
    return "\n".join(lines).strip()


def quantities() -> str:
    lines = ["| | unit | |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {q.unit} | {q.meaning} |" for name, q in QUANTITIES.items())])


def document(text: str) -> str:
    """docs/prices.md with what is printed between its marks."""
    for mark, block in (("quantities", quantities()), ("published", markdown(rows()))):
        before, _, rest = text.partition(f"<!-- {mark} -->\n")
        text = f"{before}<!-- {mark} -->\n{block}\n<!-- end -->{rest.partition('<!-- end -->')[2]}"
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        DOCUMENT.write_text(document(DOCUMENT.read_text()))
    else:
        print(markdown(rows()))
