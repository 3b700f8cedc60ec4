"""Linear attention as Triton kernels: every stage against `linear_torch` in float64, and what the compiler makes of them.

As in test_flash_triton: values come from Triton's interpreter in one child process, the compiler runs in this one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

pytest.importorskip("triton", reason="triton has no build for this platform")

from conftest import FULL
from test_flash_triton import POINTERS, REGISTER_LIMIT, SHARED_LIMIT, Usage, interpreter, usage

from autosp.kernels import linear_torch, linear_triton, reference
from autosp.kernels.flash_triton import Launch

__all__ = ["interpreter"]  # a fixture, taken by name

F32, F64, BF16, F16 = torch.float32, torch.float64, torch.bfloat16, torch.float16
LIMITS = {F32: 1e-5, BF16: 2e-2, F16: 3e-3}  # of the largest error over the largest value


@dataclass(frozen=True)
class Case:
    """`strength`: decays are uniform in (−strength, 0); `even`: all of them are −strength."""

    batch: int = 1
    length: int = 100
    heads: int = 2
    shared_by: int = 1  # heads of v to one of q and k
    key_size: int = 24
    value_size: int = 40
    decay: str = ""
    remove: bool = False
    documents: bool = False
    exclusive: bool = False
    strength: float = 1.0
    even: bool = False
    dtype: torch.dtype = F32
    limit: float | None = None

    def __str__(self) -> str:
        return (
            " ".join(f"{n}={getattr(self, n)}" for n in self.__dataclass_fields__ if getattr(self, n) != getattr(Case, n))
            or "plain"
        )


PLAIN = (
    Case(length=64),
    Case(shared_by=2, documents=True, exclusive=True, batch=2, length=70),
    Case(decay="scalar", key_size=72),
    Case(decay="scalar", documents=True, exclusive=True, length=129, key_size=16, value_size=16),
    Case(decay="vector", length=130),
    Case(decay="vector", shared_by=2, documents=True, exclusive=True, length=70, key_size=40),
    Case(decay="vector", length=1, key_size=5, value_size=3),
    # Sums over 64 tokens to −320 and −3200: differences of float32's are exact to 1e-5 and 1e-4.
    Case(decay="scalar", strength=5, even=True, length=70, heads=1, limit=1e-4),
    Case(decay="vector", strength=5, even=True, length=70, heads=1, limit=1e-4),
    Case(decay="scalar", strength=50, even=True, length=70, heads=1, limit=1e-3),
    Case(decay="vector", strength=50, length=70, heads=1, limit=1e-3),
    Case(decay="vector", dtype=BF16),
    Case(decay="scalar", dtype=F16),
)
REMOVING = (
    Case(remove=True),
    Case(remove=True, decay="scalar", shared_by=2, documents=True, length=129, key_size=16),
    Case(remove=True, decay="vector", documents=True, exclusive=True, batch=2, length=70),
    Case(remove=True, decay="vector", key_size=72, length=70),  # a state in two halves
    Case(remove=True, decay="scalar", strength=5, even=True, length=70, heads=1, limit=1e-4),
    Case(remove=True, decay="vector", strength=5, even=True, length=70, heads=1, limit=1e-4),
    Case(remove=True, decay="vector", strength=50, length=70, heads=1, limit=1e-3),
    Case(remove=True, decay="scalar", dtype=BF16, length=70, heads=1),
    Case(remove=True, decay="vector", dtype=F16, length=70, heads=1),
)
MORE = [
    Case(length=n, key_size=k, value_size=v, decay=d, remove=r, documents=s, exclusive=e, shared_by=g)
    for n, k, v in ((63, 20, 130), (200, 100, 64))
    for d in ("", "scalar", "vector")
    for r in (False, True)
    for s, e, g in ((False, False, 2), (True, True, 1), (True, False, 1))
]


@dataclass
class Inputs:
    q: Tensor
    k: Tensor
    v: Tensor
    decay: Tensor | None
    remove: Tensor | None
    starts: Tensor | None
    grad: Tensor
    found: Tensor
    last: Tensor  # cotangent of the last state

    def map(self, of: Callable[[Tensor], Tensor]) -> Inputs:
        return Inputs(**{n: x if x is None else of(x) for n, x in vars(self).items()})


def poisoned(x: Tensor) -> Tensor:
    """x with NaN (of booleans: True) around it in memory."""
    room = torch.full([n + 6 for n in x.shape], True if x.dtype == torch.bool else torch.nan, dtype=x.dtype, device=x.device)
    view = room[tuple(slice(3, 3 + n) for n in x.shape)]
    return view.copy_(x)


def inputs(case: Case, device: str = "cpu", seed: int = 0) -> Inputs:
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, device=device)

    tokens, sizes = (case.batch, case.length), (case.key_size, case.value_size)
    k = normalize(normal(*tokens, case.heads // case.shared_by, case.key_size), dim=-1)
    decay = remove = starts = None
    if case.decay:
        share = uniform(*tokens, case.heads, *sizes[: case.decay == "vector"])
        decay = -case.strength * (torch.ones_like(share) if case.even else share)
    if case.remove:
        near = k.repeat_interleave(case.shared_by, 2) + 0.3 * normal(*tokens, case.heads, case.key_size)
        remove = normalize(near, dim=-1) * uniform(*tokens, case.heads, 1)
    if case.documents:
        starts = uniform(*tokens) < 0.05
        starts[:, 0] = False
    plain = Inputs(
        normal(*k.shape) * case.key_size**-0.5, k, normal(*tokens, case.heads, case.value_size), decay, remove, starts,
        normal(*tokens, case.heads, case.value_size), *(normal(case.batch, case.heads, *sizes) for _ in range(2)),
    )  # fmt: skip
    states = ("found", "last")
    return Inputs(
        **{
            n: x if x is None else poisoned(x if n in states or x.dtype == torch.bool else x.to(case.dtype))
            for n, x in vars(plain).items()
        }
    )


def stages(kernels: Any, x: Inputs, exclusive: bool) -> dict[str, Tensor]:
    """Whatever the stages give, forward and backward, by name."""
    q, k, v, decay, remove, starts = x.q, x.k, x.v, x.decay, x.remove, x.starts
    options, made = (0.7, exclusive), {}

    def keep(names: str, values: list[Tensor] | Tensor) -> Any:
        made.update(zip(names.split(), [values] if isinstance(values, Tensor) else values, strict=True))
        return values

    weights = keep("weights", kernels.inside(q, k, decay, starts, v.shape[2], *options))
    if remove is None:
        states, reach, end, total = keep("states reach end total", kernels.begin(k, v, decay, starts))
        u, states, end = None, kernels.arrive(states, reach, x.found), torch.addcmul(end, total, x.found)
    else:
        here = keep("read values write through", kernels.begin_removing(k, v, decay, remove, starts))
        states, u, end = keep("states u end", kernels.carry(*here, x.found))
        keep("matrix matrix_end", kernels.summary(*here))
    keep("out", kernels.finish(q, v, decay, starts, weights, u, states, *options))
    if remove is None:
        leaving, reach, *_ = keep("leaving reach_back asked total_back", kernels.begin_back(q, decay, starts, x.grad, *options))
        within = kernels.inside_back(q, k, v, decay, starts, x.grad, weights, u, states, *options)
        dread, dwrite, du = keep("dread dwrite du", within)
        leaving = kernels.arrive(leaving, reach, x.last)
    else:
        asked, du = keep("asked du", kernels.begin_removing_back(q, decay, starts, x.grad, weights, *options))
        within = kernels.inside_back(q, k, v, decay, starts, x.grad, weights, u, states, *options)
        dread, dwrite = keep("dread dwrite", within)
        read, _, write, through = here
        leaving, du, _ = keep("leaving du_all first", kernels.carry_back(read, write, through, asked, du, x.last))
    grads = ["dq", "dk", "dv"] + ["ddecay"] * (decay is not None) + ["dremove"] * (remove is not None)
    back = kernels.finish_back(q, k, v, decay, remove, starts, dread, dwrite, du, u, states, end, leaving, *options)
    keep(" ".join(grads), back)
    return made


def check(case: Case, device: str = "cpu", seed: int = 0) -> dict[str, str]:
    """What is wrong, by name. Fresh memory is NaN."""
    import gpu_check

    x = inputs(case, device, seed)
    with gpu_check.fresh_memory_is_nan():
        got = stages(linear_triton, x, case.exclusive)
    wanted = stages(linear_torch, x.map(lambda t: t if t.dtype == torch.bool else t.double()), case.exclusive)
    narrow = {"out": "v", "dq": "q", "dk": "k", "dv": "v", "ddecay": "decay", "dremove": "remove"}
    wrong = {}
    for name, value in wanted.items():
        dtype = getattr(x, narrow[name]).dtype if name in narrow else F32
        if got[name].shape != value.shape or got[name].dtype != dtype or not got[name].is_contiguous():
            wrong[name] = f"{got[name].dtype} {list(got[name].shape)} {got[name].stride()}, expected {dtype} {list(value.shape)}"
            continue
        error = float((got[name].double() - value).abs().max() / max(float(value.abs().max()), 1e-3))
        if not error <= (case.limit or LIMITS[case.dtype]):
            wrong[name] = f"{error:.1e}"
    return wrong


@pytest.mark.parametrize("case", [*PLAIN, *REMOVING, *(MORE if FULL else [])], ids=str)
def test_stages(case: Case, interpreter: ProcessPoolExecutor) -> None:
    assert interpreter.submit(check, case).result() == {}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", [*PLAIN, *REMOVING, *MORE], ids=str)
def test_stages_on_a_gpu(case: Case) -> None:
    assert check(case, "cuda") == {}


def whole(case: Case) -> tuple[Tensor, Tensor]:
    """The stages in float32 and the oracle that knows nothing of chunks."""
    x = inputs(case)
    wide = x.map(lambda t: t if t.dtype == torch.bool else t.double())
    expected = reference.linear_attention(
        wide.q, wide.k, wide.v, wide.decay, wide.remove, wide.starts, wide.found, 0.7, case.exclusive
    )
    return stages(linear_triton, x, case.exclusive)["out"], expected[0]


@pytest.mark.parametrize(
    "case", [Case(decay="vector", remove=True, documents=True), Case(decay="scalar", exclusive=True)], ids=str
)
def test_it_is_the_recurrence(case: Case, interpreter: ProcessPoolExecutor) -> None:
    out, expected = interpreter.submit(whole, case).result()
    torch.testing.assert_close(out.double(), expected, rtol=1e-4, atol=1e-5)


def hard_system() -> tuple[Tensor, Tensor]:
    """Equal keys that are removed whole: (I + L)⁻¹ has −1 beside its diagonal, and an error in a row spreads to all below."""
    k, v = torch.zeros(1, 128, 1, 16), torch.randn(1, 128, 1, 16, generator=torch.Generator().manual_seed(0))
    k[..., 3] = 1.0
    return linear_triton.begin_removing(k, v, None, k, None)[1], linear_torch.begin_removing(k, v, None, k, None)[1]


def test_equal_keys(interpreter: ProcessPoolExecutor) -> None:
    torch.testing.assert_close(*interpreter.submit(hard_system).result())


def test_what_does_not_fit_is_refused() -> None:
    x = torch.empty(1, 3, 1, 272)
    with pytest.raises(ValueError, match=r"at most 256 values of .*got \[1, 3, 1, 272\]"):
        linear_triton.begin(x, x, None, None)
    with pytest.raises(ValueError, match=r"float32, float16 or bfloat16; got .*torch\.float64"):
        linear_triton.begin(x[..., :3], x[..., :3].double(), None, None)


def mixed_types() -> list[tuple[Tensor, Tensor]]:
    """As under autocast: the products are as good as the wider type's."""
    x = inputs(Case(dtype=BF16, length=70, heads=1, decay="scalar"))
    v = poisoned(torch.randn(x.v.shape))
    made = linear_triton.begin(x.k, v, x.decay, None)
    wanted = linear_torch.begin(x.k.double(), v.double(), None if x.decay is None else x.decay.double(), None)
    return list(zip(made, wanted, strict=True))


def test_inputs_of_different_types(interpreter: ProcessPoolExecutor) -> None:
    for a, b in interpreter.submit(mixed_types).result():
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-5)


# What the compiler makes of them ------------------------------------------------------------------

USAGES: dict[str, Usage] = {}
POINTERS.setdefault(torch.int32, "*i32")


def launches(case: Case, patch: pytest.MonkeyPatch) -> list[Launch]:
    """The different launches of all stages, of tensors without memory."""
    found: dict[tuple[Any, ...], Launch] = {}

    def record(launch: Launch) -> None:
        given = tuple(n for n, x in launch.arguments.items() if x is None)
        found.setdefault((launch.kernel.__name__, given, *launch.constants.items()), launch)

    patch.setattr(Launch, "__call__", record)
    stages(linear_triton, inputs(replace(case, length=256, batch=1)).map(lambda x: x.contiguous().to("meta")), case.exclusive)
    return list(found.values())


def compiled_cases() -> Iterator[Case]:
    for size in (64, 128, 256) if FULL else (128,):
        for decay in ("", "scalar", "vector") if FULL else ("vector",):
            for remove in (False, True):
                for dtype in (BF16, F16, F32) if FULL else (BF16,):
                    for documents in (False, True) if FULL and size == 128 else (False,):
                        yield Case(
                            key_size=size, value_size=size, decay=decay, remove=remove, dtype=dtype, documents=documents,
                            exclusive=documents,
                        )  # fmt: skip


@pytest.mark.parametrize("case", compiled_cases(), ids=str)
def test_nothing_spills(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {}
    for launch in launches(case, monkeypatch):
        used, c = usage(launch), launch.constants
        shape = f"{c.get('BK', c.get('PK'))}x{c.get('BV')} {launch.warps} warps {launch.stages} stages"
        name = f"{launch.kernel.__name__:20} {case!s:70} {shape}"
        USAGES[name] = used
        if used.stack_bytes or used.registers > REGISTER_LIMIT or used.shared_bytes > SHARED_LIMIT:
            wrong[name] = used
    assert wrong == {}


@pytest.fixture(scope="module", autouse=True)
def table() -> Iterator[None]:
    """Registers of a thread, stack and shared memory of all that was compiled: `pytest -s` shows them."""
    yield
    for name, used in USAGES.items():
        print(
            f"\n{name:125} {used.registers:4} registers {used.stack_bytes:5} B stack {used.shared_bytes / 1024:6.1f} KiB shared",
            end="",
        )
