"""The Triton kernels: values and gradients against float64, and what the compiler makes of them for an H200.

There is no GPU here. Values come from Triton's interpreter, which runs kernels on CPU tensors if TRITON_INTERPRET is set
before triton is imported: triton's own functions (tl.cdiv, tl.zeros) are decorated then, so that a second copy of our module
would not do. These tests run in one child process with the variable set. The compiler needs kernels that are
not interpreted: it runs in this process.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton has no build for this platform")

import triton
from conftest import FULL
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autosp.kernels import flash_triton, reference
from autosp.kernels.flash_triton import Launch, Score, Tile

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import gpu_check
from gpu_check import Case

# Values, in the interpreter -----------------------------------------------------------------------

F32, BF16 = torch.float32, torch.bfloat16
SMALL = Case(batch=1, heads=2, kv_heads=2, rows=37, columns=45, cut=19, size=16, dtype=F32)
MULTIPLE_TILES = replace(SMALL, rows=70, columns=90, cut=41)  # of 32 x 32: some seen throughout, some in part, some not at all
CASES = (
    replace(MULTIPLE_TILES, batch=2, odd=True),
    replace(MULTIPLE_TILES, causal=10, heads=4),
    replace(MULTIPLE_TILES, causal=10, window=40),
    replace(MULTIPLE_TILES, columns=200, cut=170, causal=80, window=75),  # wide enough for tiles that are seen throughout
    replace(MULTIPLE_TILES, causal=50, window=3, softcap=2.0, sinks=True),
    replace(SMALL, heads=4, kv_heads=1, size=80, causal=-5),
    replace(SMALL, size=24, value_size=40, softcap=3.0, sinks=True, odd=True),
    replace(SMALL, size=40, value_size=24, mask="keys", batch=2),
    replace(SMALL, mask="bool", heads=4, causal=30),
    replace(SMALL, mask="bool", sinks=True, window=12, causal=8),
    replace(SMALL, mask="added", softcap=4.0, odd=True),
    replace(SMALL, causal=-100),  # nothing is seen
    replace(SMALL, causal=100),  # all is seen
    replace(SMALL, causal=-20),  # the second block sees nothing, nor do the first rows of the first
    replace(SMALL, rows=1, columns=70, cut=1, causal=69),
    replace(SMALL, size=192, value_size=128),  # dk and dv apart
    Case(batch=1, heads=2, kv_heads=1, rows=140, columns=150, cut=10, size=64, causal=20),
    Case(batch=1, heads=2, kv_heads=1, rows=40, columns=150, cut=70, size=16, mask="bool"),
    Case(batch=1, heads=2, kv_heads=2, rows=70, columns=90, cut=50, size=32, value_size=16, dtype=torch.float16, causal=0),
)


def version(module: ModuleType) -> tuple[int, ...]:
    return tuple(map(int, module.__version__.split(".")[:2]))


@pytest.fixture(scope="module")
def interpreter() -> Iterator[ProcessPoolExecutor]:
    if version(triton) < (3, 7) and version(numpy) >= (2, 4):
        pytest.skip("triton 3.6 interprets with conversions that numpy 2.4 refuses")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("OMP_NUM_THREADS", "1")
        executor = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        executor.submit(os.getpid).result()  # the process has started, with the environment as it is now
    with executor:
        yield executor


@pytest.mark.parametrize("case", CASES, ids=str)
def test_two_blocks_merged_and_their_gradients(case: Case, interpreter: ProcessPoolExecutor) -> None:
    """All inputs are views into NaN, fresh memory is NaN, and the second backward pass must give the same bits."""
    results = interpreter.submit(gpu_check.check, case, "cpu", 0).result()
    assert {r.quantity: (r.error, r.limit) for r in results if not r.good} == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", gpu_check.CASES, ids=str)
def test_on_a_gpu(case: Case) -> None:
    assert {r.quantity: (r.error, r.limit) for r in gpu_check.check(case, "cuda", 0) if not r.good} == {}


def test_the_oracle_is_attention() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, 5), (2, 7), (2, 7)))
    mask = torch.rand(4, 5, 7) < 0.5
    mask[1, 2] = False
    out, lse = gpu_check.oracle(q, k, v, Score(0.3), mask, None)
    torch.testing.assert_close(out, reference.attention(q, k, v, mask, scale=0.3))
    logits = (0.3 * q @ k.repeat_interleave(2, 1).mT).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(lse, torch.logsumexp(logits, 3))
    causal = gpu_check.oracle(q, k, v, Score(0.3, causal=0), None, None)[0]
    torch.testing.assert_close(causal, reference.attention(q, k, v, causal=True, scale=0.3))


def unseen_columns_are_nan() -> tuple[Tensor, ...]:
    """Rows 64 .. 96 under a window of 5, of whose columns 59 .. 96 only the tiles of 32 around them may be read."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, n, 16) for n in (32, 160, 160, 32))
    k[:, :, :32], v[:, :, :32], k[:, :, 96:], v[:, :, 96:] = (torch.nan,) * 4
    score = Score(0.25, causal=64, window=5)
    out, lse = flash_triton.forward(q, k, v, score)
    return out, lse, *flash_triton.backward(grad, q, k, v, lse, (grad * out).sum(3), score)


def test_tiles_that_no_row_sees_are_not_read(interpreter: ProcessPoolExecutor) -> None:
    out, lse, dq, dk, dv = interpreter.submit(unseen_columns_are_nan).result()
    assert all(x.isfinite().all() for x in (out, lse, dq))
    for x in (dk, dv):  # the key's own gradient is of its own NaN only where it is seen
        assert x[:, :, 59:96].isfinite().all() and not x[:, :, :32].any() and not x[:, :, 96:].any()


def empty_blocks() -> list[tuple[Tensor, ...]]:
    found = []
    for batch, rows, columns in ((1, 3, 0), (1, 0, 3), (0, 3, 3)):
        q, k, v, grad = (torch.randn(batch, 2, n, 16) for n in (rows, columns, columns, rows))
        out, lse = flash_triton.forward(q, k, v, Score(1.0))
        flash_triton.merge_(out, lse, out.clone(), lse.clone())
        found.append((out, lse, *flash_triton.backward(grad, q, k, v, lse, (grad * out).sum(3), Score(1.0))))
    return found


def test_blocks_without_rows_or_columns(interpreter: ProcessPoolExecutor) -> None:
    no_columns, no_rows, no_batch = interpreter.submit(empty_blocks).result()
    out, lse, dq, dk, _ = no_columns
    assert out.shape == (1, 2, 3, 16) and not out.any() and (lse == -torch.inf).all() and not dq.any() and dk.numel() == 0
    assert not no_rows[3].any() and no_rows[3].shape == (1, 2, 3, 16)
    assert no_batch[0].shape == (0, 2, 3, 16)


def merged() -> tuple[Tensor, ...]:
    """Rows where none, one or both have seen something, into a transposed result; what is empty holds NaN."""
    torch.manual_seed(0)
    out, other = torch.randn(2, 3, 5, 24).transpose(1, 2), torch.randn(2, 5, 3, 24)
    lse, other_lse = torch.randn(2, 3, 5).transpose(1, 2), torch.randn(2, 5, 3) * 40
    lse[0, 1], other_lse[1, 2] = -torch.inf, -torch.inf
    lse[0, 0, 0], other_lse[0, 0, 0] = -torch.inf, -torch.inf
    out[0, 1], other[1, 2], out[0, 0, 0], other[0, 0, 0] = torch.nan, torch.nan, 0.0, 0.0
    before = out.clone(), lse.clone()
    flash_triton.merge_(out, lse, other, other_lse)
    return *before, other, other_lse, out, lse


def test_merge(interpreter: ProcessPoolExecutor) -> None:
    a, a_lse, b, b_lse, out, lse = (x.double() for x in interpreter.submit(merged).result())
    expected_lse = torch.logaddexp(a_lse, b_lse)
    weights = [torch.exp(x - expected_lse.nan_to_num(neginf=0.0))[..., None] for x in (a_lse, b_lse)]
    expected = sum(w * x.nan_to_num(0.0) for w, x in zip(weights, (a, b), strict=True))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, expected, rtol=1e-6, atol=1e-6)
    assert lse[0, 0, 0] == -torch.inf and not out[0, 0, 0].any()


def lowest_rows() -> tuple[Tensor, Tensor]:
    q, k, v = (torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(0)) for n in (4, 6, 6))
    lowest = torch.full((4, 6), torch.finfo(F32).min)
    return flash_triton.forward(q, k, v, Score(1.0), lowest)[0], v.mean(2, keepdim=True)


def test_a_row_of_lowest_values_is_even(interpreter: ProcessPoolExecutor) -> None:
    """As in eager torch, where every logit of the row is rounded to that value."""
    out, mean = interpreter.submit(lowest_rows).result()
    torch.testing.assert_close(out, mean.expand_as(out))


def negative_scale() -> tuple[Tensor, Tensor]:
    q, k, v = (torch.randn(1, 1, n, 16, generator=torch.Generator().manual_seed(0)) for n in (40, 50, 50))
    out = flash_triton.forward(q, k, v, Score(-2.0, causal=0))[0]
    return out, gpu_check.oracle(q.double(), k.double(), v.double(), Score(-2.0, causal=0), None, None)[0]


def test_a_negative_scale(interpreter: ProcessPoolExecutor) -> None:
    out, expected = interpreter.submit(negative_scale).result()
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)


def shaped(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...], **options: Any) -> Callable[[], object]:
    return lambda: flash_triton.forward(*(torch.empty(s) for s in (q, k, v)), Score(1.0), **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (shaped((1, 2, 3, 16), (1, 2, 3, 24), (1, 2, 3, 16)), r"expected q \[B, H, R, D\].*k \[1, 2, 3, 24\]"),
        (shaped((1, 3, 3, 16), (1, 2, 3, 16), (1, 2, 3, 16)), "query heads must be a multiple"),
        (shaped((1, 1, 3, 272), (1, 1, 3, 272), (1, 1, 3, 16)), "at most 256 values"),
        (shaped(*[(1, 1, 3, 16)] * 3, mask=torch.ones(3, 3, dtype=torch.int32)), "a mask is boolean"),
        (lambda: flash_triton.forward(*(torch.empty(1, 1, 1, 16, dtype=d) for d in (F32, F32, BF16)), Score(1.0)), "one dtype"),
        (lambda: Score(1.0, window=3), "give `causal` as well"),
        (lambda: flash_triton.merge_(*[torch.empty(1, 1, 4, 4).mT, torch.empty(1, 1, 4)] * 2), "dense along its last dimension"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


# What the compiler makes of them ------------------------------------------------------------------

H200 = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 227 * 1024  # bytes a program may have: CUDA C++ Programming Guide, compute capability 9.0
REGISTER_LIMIT = 255  # of a thread
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
POINTERS = {F32: "*fp32", BF16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}


@dataclass(frozen=True)
class Usage:
    registers: int
    stack_bytes: int  # where spilled registers go
    shared_bytes: int


USAGES: dict[str, Usage] = {}


def source(launch: Launch) -> ASTSource:
    """What the launch would compile: 1 and multiples of 16 are known to the compiler, except of what is not specialised."""
    loose = {p.name for p in launch.kernel.params if p.do_not_specialize}
    signature, constants, attributes = {}, {}, {}
    for i, name in enumerate(launch.kernel.arg_names):
        value = launch.constants[name] if name in launch.constants else launch.arguments[name]
        if name in launch.constants or value is None or (type(value) is int and value == 1 and name not in loose):
            signature[name], constants[name] = "constexpr", value
            continue
        if isinstance(value, Tensor):
            signature[name] = POINTERS[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        if isinstance(value, Tensor) or (type(value) is int and value % 16 == 0 and name not in loose):
            attributes[(i,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Launch) -> Any:
    """Triton keeps what it has compiled by the hash of its source: only changed kernels are compiled again."""
    return triton.compile(source(launch), target=H200, options={"num_warps": launch.warps, "num_stages": launch.stages})


def usage(launch: Launch) -> Usage:
    binary = compiled(launch)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run(
            [TOOLS / "cuobjdump", "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = {name: int(n) for name, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}
    return Usage(found["REG"], found["STACK"] + found["LOCAL"], binary.metadata.shared)


VARIANTS = {
    "full": ("", 0.0, None, None),
    "causal": ("", 0.0, 0, None),
    "window softcap": ("", 50.0, 0, 100),
    "bool mask": ("bool", 0.0, None, None),
    "bool mask softcap": ("bool", 50.0, None, None),
    "added mask softcap": ("bfloat16", 50.0, None, None),
    "float32 mask softcap": ("float32", 50.0, None, None),
}
SIZES = [(16, 16), (32, 32), (64, 64), (96, 96), (128, 128), (192, 128), (256, 256)]
KERNELS = ("forward", "queries", "keys")


def launches(kernel: str, size: int, value_size: int, variant: str, dtype: torch.dtype = BF16) -> list[Launch]:
    """The launches of one kernel, of tensors without memory."""

    def tensor(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    kind, softcap, causal, window = VARIANTS[variant]
    score = Score(0.1, softcap, causal, window)
    q, k, v, grad = (
        tensor(2, 8, 1024, size),
        tensor(2, 2, 2048, size),
        tensor(2, 2, 2048, value_size),
        tensor(2, 8, 1024, value_size),
    )
    mask = tensor(1, 1, 1024, 2048, dtype=getattr(torch, kind)) if kind else None
    rows, dq, dk, dv, out = (tensor(*s, dtype=F32) for s in ((2, 8, 1024), q.shape, k.shape, v.shape, grad.shape))
    if kernel == "forward":
        return [flash_triton.forward_launch(q, k, v, score, mask, tensor(8, dtype=F32), out, rows)]
    if kernel == "queries":
        return [flash_triton.queries_launch(grad, q, k, v, rows, rows, score, mask, dq)]
    passes = flash_triton.KEYS_PASSES[flash_triton._size(q, v)]
    wanted = [(dk if "k" in p else None, dv if "v" in p else None) for p in passes]
    return [flash_triton.keys_launch(grad, q, k, v, rows, rows, score, mask, *w) for w in wanted]


# All sizes and variants are in the full matrix; these are the tightest.
REPRESENTATIVE = [(s, v) for s in ((64, 64), (128, 128), (192, 128), (256, 256)) for v in ("causal", "bool mask softcap")]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("sizes", "variant"), [(s, v) for s in SIZES for v in VARIANTS] if FULL else REPRESENTATIVE)
def test_nothing_spills(kernel: str, sizes: tuple[int, int], variant: str) -> None:
    for launch in launches(kernel, *sizes, variant):
        used = usage(launch)
        passes = "".join(n for n in ("DK", "DV") if launch.constants.get(n))
        tile = f"{launch.constants['M']}x{launch.constants['N']} {launch.warps} warps {launch.stages} stages"
        USAGES[f"{kernel:8}{passes:5}{sizes[0]:4}/{sizes[1]:<4}{variant:22}{tile:27}"] = used
        assert used.stack_bytes == 0 and used.registers <= REGISTER_LIMIT and used.shared_bytes <= SHARED_LIMIT, used


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("sizes", "variant"),
    [(s, v) for s in SIZES for v in ("full", "causal", "window softcap")]
    if FULL
    else [((128, 128), "causal"), ((64, 64), "full")],
)
def test_products_do_not_wait_for_each_other(kernel: str, sizes: tuple[int, int], variant: str, tmp_path: Path) -> None:
    """Tensor cores run on while the next product is issued, unless ptxas takes fright (its advisory C7515)."""
    for launch in launches(kernel, *sizes, variant):
        (tmp_path / "kernel.ptx").write_text(compiled(launch).asm["ptx"])
        command = [TOOLS / "ptxas", "-v", "--gpu-name=sm_90a", tmp_path / "kernel.ptx", "-o", tmp_path / "kernel.cubin"]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert "bytes spill stores" in said and "serialized" not in said


def test_merge_does_not_spill() -> None:
    for size in (16, 64, 80, 128, 256):
        out, lse = torch.empty(2, 8, 1024, size, device="meta"), torch.empty(2, 8, 1024, device="meta")
        used = usage(flash_triton.merge_launch(out, lse, out, lse))
        USAGES[f"merge        {size:4}"] = used
        assert used.stack_bytes == 0 and used.shared_bytes <= SHARED_LIMIT, used


def test_a_spill_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_triton, "tile", lambda *_: Tile(128, 128, 4, 1))
    assert usage(launches("queries", 64, 64, "causal")[0]).stack_bytes > 0


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Registers of a thread, stack and shared memory of all that was compiled: `pytest -s` shows them."""
    yield
    for name, used in USAGES.items():
        print(
            f"\n{name} {used.registers:4} registers {used.stack_bytes:5} B stack {used.shared_bytes / 1024:6.1f} KiB shared",
            end="",
        )


# The script for a GPU -----------------------------------------------------------------------------


def test_without_a_gpu_the_check_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert "no CUDA device" in capsys.readouterr().out


def wrong_lse_is_red() -> tuple[list[list[str]], set[str]]:
    """One right case, the same with a wrong log-sum-exp, and one past the deadline."""
    right = gpu_check.run_checks((SMALL,), "cpu", 7, float("inf"))
    forward = flash_triton.forward
    flash_triton.forward = lambda *args: [x + 1e-3 for x in forward(*args)]  # type: ignore[assignment]
    wrong = gpu_check.run_checks((SMALL,), "cpu", 7, float("inf"))
    late = gpu_check.run_checks((SMALL,), "cpu", 7, 0.0)
    flash_triton.forward = forward
    assert right[1] == set() and late[1] == {"forward", "backward", "merge"}
    return right[0] + wrong[0] + late[0], wrong[1]


def test_a_wrong_kernel_is_red(interpreter: ProcessPoolExecutor) -> None:
    rows, red = interpreter.submit(wrong_lse_is_red).result()
    assert [row[3] for row in rows] == ["ok", "red", "red"] and [row[1] for row in rows] == ["7", "7", ""]
    assert red == {"forward", "backward", "merge"}


def tiny_timing(red: set[str]) -> tuple[list[list[str]], list[str]]:
    from torch.nn.attention import SDPBackend

    gpu_check.milliseconds = lambda call, times: float(call() is not None) * 4
    gpu_check.LIBRARIES = {"math": SDPBackend.MATH, "cuDNN": SDPBackend.CUDNN_ATTENTION}
    return gpu_check.timed(gpu_check.Shape(1, 2, 1, 16, 16, 16, True), red, "cpu")


def test_what_is_red_is_not_timed(interpreter: ProcessPoolExecutor) -> None:
    """The table's rows, with a clock on which every call takes 4 ms; a library that cannot run is named with its reason."""
    rows, notes = interpreter.submit(tiny_timing, {"backward"}).result()
    assert [(row[1], row[3], row[4], row[5]) for row in rows] == [
        ("forward", "0.00 [0.00-0.00]", "-", "100%"),
        ("backward", "0.00 [0.00-0.00]", "-", "red"),
    ]
    assert rows[1][2] == "-" and len(notes) == 1 and notes[0].startswith("cuDNN does not run")


def test_products_are_counted() -> None:
    shape = gpu_check.Shape(2, 3, 3, 10, 4, 5, False)
    assert shape.flops(False) == 2 * 2 * 3 * 100 * 9
    assert shape.flops(True) == 2 * 2 * 3 * 100 * 22
    assert replace(shape, causal=True).flops(False) == 2 * 2 * 3 * 55 * 9
