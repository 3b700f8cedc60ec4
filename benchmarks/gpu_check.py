"""Are the Triton kernels right on this GPU, and how fast are they beside the kernels that torch ships?

    python benchmarks/gpu_check.py      # from the repository's root, installed or not; under six minutes on an H200

1. Every kernel against float64 on fresh random inputs: two blocks of columns, merged, and their gradients.
2. Forward, backward and merge against cuDNN's and FlashAttention's kernels, in interleaved rounds. A kernel with a failed
   check gets no speed.
3. Linear attention the same way: every kind against float64, four kinds beside flash-linear-attention's functions.
4. Whether NCCL runs two ranks on this one card (NCCL_MULTI_RANK_GPU_ENABLE): a ring exchange, received values compared.

Exit code 0: all right. 1: a check failed or was not reached in time. 2: no CUDA device.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

sys.path.insert(0, str(Path(__file__).parent.parent))

from autosp.kernels import flash_triton
from autosp.kernels.flash_triton import Score
from benchmarks import gpu_linear

CHECKS_SECONDS = 150  # no check starts later than this after the start, no timing later than the next
TIMINGS_SECONDS = 230
LINEAR_SECONDS = 290  # linear attention is timed if its checks end before
NCCL_SECONDS = 60
ROUNDS = 15  # of each contender, one after the other; medians and quartiles are over these
ROUND_MS = 8.0  # a round repeats a call until it takes about so long
FLOAT32_LIMIT = 1e-5  # of errors as `errors` gives them
HALF_LIMIT = 2**-8  # in 16 bits, where torch has no such attention: the rounding of a bfloat16
OWN_FACTOR = 1.5  # where it has: at most so many times its own root mean square error in the same dtype
MAX_FACTOR = 2.0  # the largest error is one value's luck: twice as much room for it

KERNEL_OF = {"out": "forward", "lse": "forward", "dq": "backward", "dk": "backward", "dv": "backward", "dsinks": "backward"}


# Correctness --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Shapes and options of one check; the columns are computed as two blocks, cut at `cut`."""

    heads: int = 4
    kv_heads: int = 2
    rows: int = 300
    columns: int = 333
    cut: int = 140
    size: int = 64
    value_size: int | None = None
    batch: int = 2
    dtype: torch.dtype = torch.bfloat16
    softcap: float = 0.0
    causal: int | None = None
    window: int | None = None
    mask: str = ""  # bool: some rows see nothing; added; keys: boolean [batch, 1, 1, columns]
    sinks: bool = False
    odd: bool = False  # no pointer or stride is divisible by 16 bytes

    @property
    def score(self) -> Score:
        return Score(self.size**-0.5, self.softcap, self.causal, self.window)

    def __str__(self) -> str:
        heads, sizes = f"{self.batch}x{self.heads}/{self.kv_heads}", f"{self.size}/{self.value_size or self.size}"
        numbers = {n: getattr(self, n) for n in ("causal", "window", "softcap") if getattr(self, n) not in (None, 0.0)}
        options = [f"{n} {x}" for n, x in numbers.items()] + [f"{self.mask} mask"] * bool(self.mask)
        options += [n for n in ("sinks", "odd") if getattr(self, n)]
        return " ".join([heads, f"{self.rows}x{self.columns}", sizes, str(self.dtype).removeprefix("torch."), *options])


# What every kernel must do, at every padded head size; small enough to be compiled and run in half the time.
CASES = (
    Case(size=128, rows=1000, columns=1000, cut=512, causal=0),
    Case(size=128, rows=1024, columns=2048, cut=1024, heads=8),
    Case(size=128, causal=70, window=90, softcap=20.0),
    Case(size=128, mask="bool"),
    Case(size=128, causal=0, dtype=torch.float16),
    Case(size=64, rows=1000, columns=1000, cut=512, causal=0, sinks=True),
    Case(size=64, mask="added", softcap=20.0, odd=True),
    Case(size=256, rows=600, columns=700, causal=100),
    Case(size=256, mask="keys", softcap=50.0),
    Case(size=192, value_size=128, rows=600, columns=600, causal=0),
    Case(size=80, causal=-20, window=64, kv_heads=4),
    Case(size=96, value_size=40, kv_heads=1, causal=-400),
    Case(size=16, kv_heads=1, causal=0),
    Case(size=64, rows=200, columns=210, cut=100, causal=0, dtype=torch.float32),
    Case(size=128, rows=100, columns=110, cut=60, mask="bool", dtype=torch.float32),
)


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    grad_lse: Tensor
    mask: Tensor | None
    sinks: Tensor | None


def surrounded(x: Tensor, by: int) -> Tensor:
    """x as a view into memory that is NaN (of a boolean mask: True) before and after every row of every dimension."""
    poison = True if x.dtype == torch.bool else torch.nan
    room = torch.full([n + 2 * by for n in x.shape], poison, dtype=x.dtype, device=x.device)
    view = room[tuple(slice(by, by + n) for n in x.shape)]
    view.copy_(x)
    return view


def inputs(case: Case, device: str, seed: int) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator)

    def operand(*shape: int) -> Tensor:
        return surrounded(normal(*shape).to(case.dtype), 3 if case.odd else 16)

    value_size = case.value_size or case.size
    q, grad = (operand(case.batch, case.heads, case.rows, n) for n in (case.size, value_size))
    k, v = (operand(case.batch, case.kv_heads, case.columns, n) for n in (case.size, value_size))
    grad_lse = normal(case.batch, case.heads, case.rows)
    if case.dtype != torch.float32:  # torch's own attention, which is compared with, gives no lse to differentiate
        grad_lse.zero_()
    sinks = normal(case.heads) if case.sinks else None
    return Inputs(q, k, v, grad, grad_lse, random_mask(case, normal), sinks)


def random_mask(case: Case, normal: Callable[..., Tensor]) -> Tensor | None:
    pairs = (case.heads, case.rows, case.columns)
    if case.mask == "bool":
        mask = normal(1, *pairs) > 0.5
        mask[:, 1:, :7] = False
        mask[:, :, case.rows // 2 :, : case.cut] = False  # of these rows the first block sees nothing
        return surrounded(mask, 3)
    if case.mask == "keys":
        return normal(case.batch, 1, 1, case.columns) > 0
    if case.mask == "added":
        mask = normal(1, *pairs).to(case.dtype)
        mask[..., 5, :] = -torch.inf
        mask[..., 9, case.cut :] = torch.finfo(case.dtype).min
        return surrounded(mask, 3)
    return None


def oracle(q: Tensor, k: Tensor, v: Tensor, score: Score, mask: Tensor | None, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp with all pairs in memory, in the dtype of q; shapes as `flash_triton.forward`."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    logits = score.scale * q @ k.mT
    if score.softcap:
        logits = score.softcap * torch.tanh(logits / score.softcap)
    hidden = ~visible(q.shape[2], k.shape[2], score, q.device)
    if mask is not None and mask.dtype == torch.bool:
        hidden = hidden | ~mask
    elif mask is not None:
        logits = logits + mask
    logits = logits.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(*logits.shape[:3], 1)], 3)
    empty = (logits == -torch.inf).all(3, keepdim=True)
    lse = torch.logsumexp(logits.masked_fill(empty, 0), 3, keepdim=True)
    weights = torch.exp(logits - lse).masked_fill(empty, 0)
    return weights[..., : k.shape[2]] @ v, lse.masked_fill(empty, -torch.inf)[..., 0]


def visible(rows: int, columns: int, score: Score, device: torch.device) -> Tensor:
    i, j = torch.arange(rows, device=device)[:, None], torch.arange(columns, device=device)[None]
    seen = torch.ones(rows, columns, dtype=torch.bool, device=device)
    if score.causal is not None:
        seen &= j <= i + score.causal
    if score.window is not None:
        seen &= j > i + (score.causal or 0) - score.window
    return seen


def expected(case: Case, x: Inputs) -> dict[str, Tensor]:
    """The oracle's values and gradients in float64."""
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v)]
    sinks = None if x.sinks is None else x.sinks.double().requires_grad_()
    mask = x.mask if x.mask is None or x.mask.dtype == torch.bool else x.mask.double()
    out, lse = oracle(*leaves, case.score, mask, sinks)
    seen = lse != -torch.inf
    loss = (out * x.grad).sum() + (lse[seen] * x.grad_lse[seen]).sum()
    grads = torch.autograd.grad(loss, [*leaves, *([] if sinks is None else [sinks])])
    return dict(zip(("out", "lse", "dq", "dk", "dv", "dsinks"), (out.detach(), lse.detach(), *grads), strict=False))


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # it fills what torch.empty gives, too
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def computed(case: Case, x: Inputs) -> dict[str, Tensor]:
    """The same by the kernels: each block of columns by itself, then one merge, then each block's gradients."""
    score, cut = case.score, case.cut
    after = replace(score, causal=None if score.causal is None else score.causal - cut)
    wide = x.mask is not None and x.mask.shape[3] > 1
    blocks = [
        (x.k[:, :, part], x.v[:, :, part], s, x.mask[..., part] if wide and x.mask is not None else x.mask)
        for part, s in ((slice(0, cut), score), (slice(cut, None), after))
    ]
    with fresh_memory_is_nan():
        out, lse = flash_triton.forward(x.q, *blocks[0], x.sinks)
        flash_triton.merge_(out, lse, *flash_triton.forward(x.q, *blocks[1]))
        delta = (x.grad * out).sum(3) - x.grad_lse.where(lse != -torch.inf, 0)
        parts = [flash_triton.backward(x.grad, x.q, k, v, lse, delta, s, mask) for k, v, s, mask in blocks]
        again = [flash_triton.backward(x.grad, x.q, k, v, lse, delta, s, mask) for k, v, s, mask in blocks]
    (dq, dk, dv), (dq_2, dk_2, dv_2) = parts
    same = all(torch.equal(a, b) for one, two in zip(parts, again, strict=True) for a, b in zip(one, two, strict=True))
    result = {"out": out, "lse": lse, "dq": dq + dq_2, "dk": torch.cat([dk, dk_2], 2), "dv": torch.cat([dv, dv_2], 2)}
    if x.sinks is not None:
        result["dsinks"] = -(torch.exp(x.sinks[:, None] - lse) * delta).sum((0, 2))
    return {**result, "repeat": torch.tensor(0.0 if same else 1.0)}


def torchs_own(case: Case, x: Inputs) -> dict[str, Tensor]:
    """The same by torch's attention in the case's dtype; empty where it has no such attention."""
    if case.dtype == torch.float32 or case.softcap or case.sinks:
        return {}
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    mask = visible(case.rows, case.columns, case.score, x.q.device)
    if x.mask is not None:
        mask = x.mask & mask if x.mask.dtype == torch.bool else x.mask.masked_fill(~mask, -torch.inf)
    out = scaled_dot_product_attention(*leaves, mask, scale=case.score.scale, enable_gqa=True)
    grads = torch.autograd.grad(out, leaves, x.grad)
    names = ("out", "dq", "dk", "dv")
    return {n: t.detach().nan_to_num(0.0) for n, t in zip(names, (out, *grads), strict=True)}


def errors(a: Tensor, b: Tensor) -> tuple[float, float]:
    """Root mean square of the difference over that of b, and the largest over the largest; infinite for what is not finite."""
    difference = (a.double() - b).masked_fill(a == b, 0)  # -inf of both is right
    value = b.masked_fill(b.abs() == torch.inf, 0)
    pair = (x.abs().max() if largest else x.square().mean().sqrt() for largest in (False, True) for x in (difference, value))
    rms, of_rms, most, of_most = map(float, pair)
    found = (rms / max(of_rms, 1e-30), most / max(of_most, 1e-30))
    return found if all(map(math.isfinite, found)) else (math.inf, math.inf)


@dataclass(frozen=True)
class Result:
    """The error of one quantity and the most that it may be."""

    quantity: str
    error: float
    limit: float

    @property
    def good(self) -> bool:
        return self.error <= self.limit


def check(case: Case, device: str, seed: int) -> list[Result]:
    x = inputs(case, device, seed)
    got, wanted, own = computed(case, x), expected(case, x), torchs_own(case, x)
    results = [Result("repeat", float(got["repeat"]), 0.0)]
    for name, value in wanted.items():
        limit = FLOAT32_LIMIT if case.dtype == torch.float32 else HALF_LIMIT
        limits = (limit, MAX_FACTOR * limit)
        if name in own:
            rms, most = errors(own[name], value)
            limits = (max(FLOAT32_LIMIT, OWN_FACTOR * rms), max(FLOAT32_LIMIT, MAX_FACTOR * OWN_FACTOR * most))
        results += [Result(n, *of) for n, *of in zip((name, f"{name} max"), errors(got[name], value), limits, strict=True)]
    return results


# Speed --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    """One attention to be timed, bfloat16: as many rows as columns."""

    batch: int
    heads: int
    kv_heads: int
    length: int
    size: int
    value_size: int
    causal: bool

    def flops(self, backward: bool) -> float:
        """Of the products that are needed: q·k and p·v, and backward q·k again, dv, dp, dq, dk; a multiply-add is two."""
        pairs = self.length * (self.length + 1) / 2 if self.causal else self.length**2
        per_pair = 3 * self.size + 2 * self.value_size if backward else self.size + self.value_size
        return 2.0 * self.batch * self.heads * pairs * per_pair

    def __str__(self) -> str:
        heads = f"{self.batch}x{self.heads}/{self.kv_heads}"
        return f"{heads} {self.length} {self.size}/{self.value_size} {'causal' if self.causal else 'full'}"


SHAPES = (
    Shape(1, 16, 16, 16384, 128, 128, True),
    Shape(1, 16, 16, 16384, 128, 128, False),
    Shape(4, 32, 8, 4096, 128, 128, True),
    Shape(1, 32, 32, 16384, 64, 64, True),
    Shape(1, 32, 32, 16384, 64, 64, False),
    Shape(1, 16, 16, 8192, 192, 128, True),
    Shape(1, 8, 4, 8192, 256, 256, True),
)
LIBRARIES = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
Call = Callable[[], object]


def ours(shape: Shape, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Call, Call]:
    score = Score(shape.size**-0.5, causal=0 if shape.causal else None)
    out, lse = flash_triton.forward(q, k, v, score)

    def backward() -> object:
        return flash_triton.backward(grad, q, k, v, lse, (grad * out).sum(3), score)

    return (lambda: flash_triton.forward(q, k, v, score)), backward


def library(shape: Shape, backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> tuple[Call, Call]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(q, k, v, is_causal=shape.causal, enable_gqa=shape.heads != shape.kv_heads)

    out = attend(*leaves)
    return (lambda: attend(q, k, v)), (lambda: torch.autograd.grad(out, leaves, grad, retain_graph=True))


def milliseconds(call: Call, times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / times


def interleaved(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Milliseconds of each call in each of ROUNDS rounds."""
    times = {}
    for name, call in calls.items():
        milliseconds(call, 2)  # compiles, and fills the caches
        times[name] = max(1, min(100, round(ROUND_MS / milliseconds(call, 2))))
    rounds = [{name: milliseconds(call, times[name]) for name, call in calls.items()} for _ in range(ROUNDS)]
    return {name: [r[name] for r in rounds] for name in calls}


def speed(amount: float, samples: list[float]) -> str:
    """Median and quartiles of amount (TFLOP or TB) a second from milliseconds."""
    low, middle, high = statistics.quantiles([amount / ms * 1e3 for ms in samples], n=4)
    return f"{middle:.0f} [{low:.0f}-{high:.0f}]" if middle >= 10 else f"{middle:.2f} [{low:.2f}-{high:.2f}]"


def timed(shape: Shape, red: set[str], device: str = "cuda") -> tuple[list[list[str]], list[str]]:
    """Rows of the table for one shape, and why a library is missing."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(heads: int, size: int) -> Tensor:
        return torch.randn(shape.batch, heads, shape.length, size, device=device, generator=generator).bfloat16()

    q, grad = normal(shape.heads, shape.size), normal(shape.heads, shape.value_size)
    k, v = normal(shape.kv_heads, shape.size), normal(shape.kv_heads, shape.value_size)
    contenders, notes = {"ours": ours(shape, q, k, v, grad)} if "forward" not in red else {}, []
    for name, backend in LIBRARIES.items():
        try:
            contenders[name] = library(shape, backend, q, k, v, grad)
            contenders[name][1]()
        except RuntimeError as e:
            contenders.pop(name, None)
            notes.append(f"{name} does not run {shape}: {str(e).splitlines()[0][:120]}")
    rows = []
    for which, direction in enumerate(("forward", "backward")):
        taken = {n: c[which] for n, c in contenders.items() if n != "ours" or direction not in red}
        samples = interleaved(taken)
        best = min((statistics.median(s) for n, s in samples.items() if n != "ours"), default=math.nan)
        share = f"{100 * best / statistics.median(samples['ours']):.0f}%" if "ours" in samples else "red"
        tera = shape.flops(direction == "backward") / 1e12
        shown = [speed(tera, samples[n]) if n in samples else "-" for n in ("ours", *LIBRARIES)]
        rows.append([str(shape), direction, *shown, share])
    return rows, notes


def timed_merge() -> list[str]:
    """Merging reads two results and writes one; beside it, a copy, which reads one and writes one."""
    out, other = (torch.randn(1, 16, 16384, 128, device="cuda") for _ in range(2))
    lse, other_lse = (torch.randn(1, 16, 16384, device="cuda") for _ in range(2))
    samples = interleaved({"ours": lambda: flash_triton.merge_(out, lse, other, other_lse), "copy": lambda: out.copy_(other)})
    amounts = {"ours": 3 * (out.nbytes + lse.nbytes) / 1e12, "copy": 2 * out.nbytes / 1e12}
    rates = {n: amounts[n] / statistics.median(s) for n, s in samples.items()}
    shown = f"{speed(amounts['ours'], samples['ours'])} TB/s"
    copy = f"copy {speed(amounts['copy'], samples['copy'])} TB/s"
    return ["1x16 16384 128", "merge", shown, copy, "-", f"{100 * rates['ours'] / rates['copy']:.0f}%"]


# NCCL ---------------------------------------------------------------------------------------------


def ring_rank(rank: int, store: str, answers: mp.SimpleQueue) -> None:  # type: ignore[type-arg]
    try:
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
        torch.cuda.set_device(0)
        timeout = datetime.timedelta(seconds=NCCL_SECONDS)
        dist.init_process_group("nccl", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timeout)
        sent, received = torch.arange(1 << 20, device="cuda") + rank, torch.empty(1 << 20, dtype=torch.int64, device="cuda")
        ops = [dist.P2POp(dist.isend, sent, 1 - rank), dist.P2POp(dist.irecv, received, 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        right = torch.equal(received, torch.arange(1 << 20, device="cuda") + 1 - rank)
        answers.put("works" if right else "runs, but what arrives is wrong")
    except Exception as e:
        answers.put(f"does not: {type(e).__name__}: {str(e).strip().splitlines()[-1][:200]}")


def ranks_on_one_card() -> str:
    """Two processes exchange tensors by NCCL on device 0. They are killed if that takes longer than NCCL_SECONDS."""
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=ring_rank, args=(r, f"{folder}/store", answers), daemon=True) for r in range(2)]
        for process in ranks:
            process.start()
        deadline, heard = time.monotonic() + NCCL_SECONDS, []
        while len(heard) < 2 and time.monotonic() < deadline and "works" in (heard or ["works"]):
            if answers.empty():
                time.sleep(0.1)
                if not any(p.is_alive() for p in ranks) and answers.empty():
                    break
            else:
                heard.append(answers.get())
        for process in ranks:
            process.kill()
            process.join()
    if len(heard) < 2 and "works" in (heard or ["works"]):
        heard.append(f"does not: no answer within {NCCL_SECONDS} s, or a rank died")
    return next((h for h in heard if h != "works"), "works")


# All of it ----------------------------------------------------------------------------------------


def show(title: str, columns: list[str], rows: list[list[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[i]) for row in [columns, *rows]) for i in range(len(columns))]
        print(title, *("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in [columns, *rows]), sep="\n")
        return
    table = Table(*columns, title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def run_checks(cases: tuple[Case, ...], device: str, seed: int, deadline: float) -> tuple[list[list[str]], set[str]]:
    """Rows of the table of errors, and the kernels that are red: wrong somewhere, or with a case not reached."""
    rows, red = [], set()
    for i, case in enumerate(cases):
        if time.monotonic() > deadline:
            rows.append([str(case), "", "not reached in time", "red"])
            red |= {"forward", "backward", "merge"}
            continue
        try:
            results = check(case, device, seed + i)
        except Exception as e:  # a kernel that does not compile or launch is a finding, and the others are still of interest
            rows.append([str(case), str(seed + i), f"{type(e).__name__}: {str(e).strip().splitlines()[0][:100]}", "red"])
            red |= {"forward", "backward", "merge"}
            continue
        wrong = [r for r in results if not r.good]
        for r in wrong:
            kernel = KERNEL_OF.get(r.quantity.split()[0], "backward")
            red |= {kernel, "merge"} if kernel == "forward" else {kernel}  # merged results are what is looked at
        shown = wrong or [r for r in results if r.quantity in KERNEL_OF]
        text = "  ".join(f"{r.quantity} {r.error:.1e}/{r.limit:.1e}" for r in shown)
        rows.append([str(case), str(seed + i), text, "red" if wrong else "ok"])
    return rows, red


def linear_attention(where: str, seed: int, began: float, notes: list[str]) -> bool:
    """Its two tables; whether anything is wrong."""
    found = list(gpu_linear.checked("cuda", seed))
    show(
        f"linear attention: root mean square error, relative\n{where}", ["kind", "seed", "errors", ""], [row for row, _ in found]
    )
    if time.monotonic() > began + LINEAR_SECONDS:
        notes.append("linear attention not timed, out of time")
    else:
        try:
            rows, why = gpu_linear.timings(interleaved)
            notes += why
            columns = ["batch x heads, length", "library's function", "ours, ms", "library, ms", "of the library's speed"]
            show(f"linear attention: forward and backward, median of {ROUNDS} rounds\n{where}", columns, rows)
        except Exception as e:
            notes.append(f"linear attention not timed: {type(e).__name__}: {str(e).strip().splitlines()[0][:120]}")
    return not all(good for _, good in found)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: nothing checked, nothing timed")
        return 2
    began, seed = time.monotonic(), int(time.time()) % 1_000_000
    when = datetime.datetime.now().isoformat(" ", "minutes")
    where = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}, {when}"
    rows, red = run_checks(CASES, "cuda", seed, began + CHECKS_SECONDS)
    show(f"correctness: root mean square error/limit, relative\n{where}", ["case", "seed", "errors", ""], rows)
    rows, notes = [], [f"checks took {time.monotonic() - began:.0f} s"]
    for shape in SHAPES:
        if time.monotonic() > began + TIMINGS_SECONDS:
            notes.append(f"not timed, out of time: {shape}")
            continue
        try:
            more, why = timed(shape, red)
            rows, notes = rows + more, notes + why
        except Exception as e:
            notes.append(f"not timed: {shape}: {type(e).__name__}: {str(e).strip().splitlines()[0][:120]}")
        torch.cuda.empty_cache()
    rows += [timed_merge()] if "merge" not in red else []
    columns = ["batch x heads/kv, length, D/D_v", "", "ours", *LIBRARIES, "of the best library's"]
    show(f"speed: TFLOP/s, median [quartiles] of {ROUNDS} interleaved rounds, bfloat16\n{where}", columns, rows)
    wrong = linear_attention(where, seed, began, notes)
    try:
        notes.append(f"two NCCL ranks on one card: {ranks_on_one_card()}")
    except Exception as e:
        notes.append(f"two NCCL ranks on one card: could not be tried: {type(e).__name__}: {e}")
    print(*notes, f"{time.monotonic() - began:.0f} s in all", sep="\n")
    return 1 if red or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
