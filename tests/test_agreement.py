"""Ranks that disagree, or a model that cannot run: an error on every rank that says who, what and how to fix it; never a hang."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models_common import Attention, sdpa_causal
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import other_batch, step

import autosp
from autosp.check import refusal_in
from autosp.kernels import agree
from autosp.kernels.agree import DisagreementError
from autosp.passes.choose import STRATEGIES
from autosp.passes.pipeline import SequenceError, StrategyError
from pool import Pool

SECONDS = 60.0  # far below the 600 s after which gloo gives up


def said(act: Callable[[], Any]) -> str:
    """The error that `act` raises, as text; "" if none. Anything but an error of autosp's passes through."""
    try:
        act()
    except Exception as error:
        refusal = refusal_in(error)
        if refusal is None:
            raise
        return f"{type(refusal).__name__}: {refusal}"
    return ""


def everywhere(pool: Pool, task: Callable[..., str], *args: Any, on: int | str = 3) -> list[str]:
    """What every rank said, soon."""
    start = time.monotonic()
    messages = pool.run(task, *args, on=on, timeout=SECONDS)
    assert time.monotonic() - start < SECONDS
    return messages


class Small(nn.Module):
    """One attention of embedded ids and the loss of what follows; any model does, so a quick one."""

    def __init__(self, kv_heads: int) -> None:
        super().__init__()
        self.embed, self.kv = nn.Embedding(50, 32), nn.Linear(32, 16 * kv_heads)

    def forward(self, ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """ids, labels: [batch, seq]."""
        x = self.embed(ids)
        k, v = self.kv(x).unflatten(-1, (-1, 16)).transpose(1, 2).chunk(2, -1)
        q = x.unflatten(-1, (4, 8)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2).flatten(2)
        logits = y @ self.embed.weight.T
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


def small(mesh: DeviceMesh, seq_len: int = 33, kv_heads: int = 2, **options: Any) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = autosp.parallelize(Small(kv_heads), mesh, compiler="aot_eager", **options)
    return model, {name: torch.randint(50, (2, seq_len)) for name in ("ids", "labels")}


def odd(mesh: DeviceMesh, who: int) -> bool:
    return torch.distributed.get_rank() == who


# Weights.


def other_weights_on(mesh: DeviceMesh, who: int) -> str:
    model, inputs = small(mesh)
    if odd(mesh, who):
        with torch.no_grad():
            next(model.parameters())[0] += 1e-3
    return said(lambda: step(model, inputs))


def test_other_weights_on_one_rank_are_an_error_on_all(pool: Pool) -> None:
    """A model that was not seeded starts differently on every rank: the loss would belong to no model at all."""
    for message in everywhere(pool, other_weights_on, 1):
        assert message.startswith("DisagreementError: rank 1 has different weights from ranks 0, 2"), message
        assert "same seed or checkpoint" in message


# Batches.


def other_batch_on(mesh: DeviceMesh, who: int, check_batch: bool) -> str:
    """The second step's batch differs on rank `who`."""
    model, inputs = small(mesh, check_batch=check_batch)
    step(model, inputs)
    batch = other_batch(inputs) if odd(mesh, who) else inputs
    return said(lambda: step(model, batch))


@pytest.mark.parametrize("who", [0, 2])
def test_another_batch_on_one_rank_is_an_error_on_all(pool: Pool, who: int) -> None:
    others = [r for r in range(3) if r != who]
    message = (
        f"DisagreementError: rank {who} has a different batch from ranks {others[0]}, {others[1]} of the same sp group; "
        "fix: give every rank of an sp group the same global batch: shard the data over dp, not over sp"
    )
    assert everywhere(pool, other_batch_on, who, True) == [message] * 3


def test_one_differing_label_is_enough(pool: Pool) -> None:
    assert len(set(everywhere(pool, one_label, 1, on=2))) == 1


def one_label(mesh: DeviceMesh, who: int) -> str:
    model, inputs = small(mesh)
    if odd(mesh, who):
        inputs["labels"][1, 20] += 1
    message = said(lambda: step(model, inputs))
    assert "a different batch" in message
    return message


def test_the_batch_check_can_be_switched_off(pool: Pool) -> None:
    assert everywhere(pool, other_batch_on, 1, False) == [""] * 3


def test_groups_of_a_data_parallel_mesh_may_hold_different_batches(pool: Pool) -> None:
    assert everywhere(pool, batch_of_dp_group, on="2x2") == [""] * 4


def batch_of_dp_group(mesh: DeviceMesh) -> str:
    model, inputs = small(mesh)
    batch = other_batch(inputs, mesh.get_local_rank("dp"))
    return said(lambda: step(model, batch))


def wrong_in_second_group(mesh: DeviceMesh) -> str:
    model, inputs = small(mesh)
    batch = other_batch(inputs, torch.distributed.get_rank() // 2 + odd(mesh, 3))
    return said(lambda: step(model, batch))


def test_a_disagreement_in_one_group_is_raised_in_all_groups(pool: Pool) -> None:
    for message in everywhere(pool, wrong_in_second_group, on="2x2"):
        assert message.startswith("DisagreementError: rank 3 has a different batch from rank 2 of the same sp group")


# Plans.


def other_length_on(mesh: DeviceMesh, who: int) -> str:
    length = 40 if odd(mesh, who) else 33
    model, inputs = small(mesh, length)
    return said(lambda: step(model, inputs))


def other_options_on(mesh: DeviceMesh, who: int) -> str:
    model, inputs = small(mesh, strategy="gather-kv" if odd(mesh, who) else "all-to-all")
    return said(lambda: step(model, inputs))


def other_model_on(mesh: DeviceMesh, who: int) -> str:
    model, inputs = small(mesh, kv_heads=1 if odd(mesh, who) else 2)
    return said(lambda: step(model, inputs))


def other_output_on(mesh: DeviceMesh, who: int) -> str:
    model, inputs = small(mesh, outputs="gather" if odd(mesh, who) else "local", check_batch=False)
    return said(lambda: step(model, inputs))


@pytest.mark.parametrize("task", [other_length_on, other_options_on, other_model_on, other_output_on])
def test_another_plan_on_one_rank_is_an_error_on_all(pool: Pool, task: Callable[..., str]) -> None:
    """With the batch check off too: a plan is compared before the first collective that depends on it."""
    message = (
        "DisagreementError: rank 1 has a different plan from ranks 0, 2 of the same sp group; "
        "fix: give every rank the same model, options and sequence length"
    )
    assert everywhere(pool, task, 1) == [message] * 3


# Failures.


class Broken(nn.Module):
    """Fails while it is compiled, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.embed, self.attention = how, nn.Embedding(50, 32), Attention(sdpa_causal)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.attention(self.embed(ids))
        if self.how == "print":
            print(x.mean())  # BREAK print
        elif self.how == "branch":
            if x.mean().item() > 0:  # BREAK branch
                x = x * 2
        elif self.how == "shapes":
            x = x @ x.new_zeros(5, 5)
        elif self.how == "raises":
            raise ValueError("the user's own")
        elif self.how == "nonzero":
            x = x[x[..., 0] > 0]
        return x.square().mean()


def broken(mesh: DeviceMesh, how: str, who: int | None, route: str = "parallelize") -> str:
    torch.manual_seed(0)
    model: Any = Broken(how if who is None or odd(mesh, who) else "")
    if route == "parallelize":
        model = autosp.parallelize(model, mesh, compiler="aot_eager")
    else:
        model = torch.compile(model, backend=autosp.backend(mesh=mesh, compiler="aot_eager"))
    ids = torch.arange(66).reshape(2, 33) % 50
    try:
        return said(lambda: model(ids).backward())
    except Exception as error:  # the user's own mistake is shown as it is
        return f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("how", ["print", "branch", "shapes", "raises"])
def test_a_rank_that_cannot_compile_makes_the_others_raise(pool: Pool, how: str) -> None:
    messages = everywhere(pool, broken, how, 1)
    assert messages[1] and "DisagreementError" not in messages[1]
    waiting = "DisagreementError: rank 1 could not compile the model; see the error there. No collective was started."
    assert [messages[0], messages[2]] == [waiting] * 2


@pytest.mark.parametrize("route", ["parallelize", "torch.compile"])
@pytest.mark.parametrize("how", ["print", "branch"])
def test_a_graph_break_shows_the_users_line_and_dynamos_reason(pool: Pool, how: str, route: str) -> None:
    with open(__file__) as f:
        line = next(i for i, text in enumerate(f, 1) if f"# BREAK {how}" in text)
    for message in everywhere(pool, broken, how, None, route, on=2):
        assert message.startswith("CaptureError: the model ")
        assert f'{__file__}", line {line}' in message and f"# BREAK {how}"[:5] in message
        reason = "print" if how == "print" else "item"
        assert reason in message and "Fix: rewrite" in message


def test_a_size_that_depends_on_data_is_refused(pool: Pool) -> None:
    for message in everywhere(pool, broken, "nonzero", None, on=2):
        assert message.startswith("CaptureError: ") and "test_agreement.py" in message


def short(mesh: DeviceMesh) -> str:
    model, inputs = small(mesh, 3)
    return said(lambda: step(model, inputs))


def test_a_sequence_shorter_than_the_ranks_is_refused(pool: Pool) -> None:
    message = (
        f"{SequenceError.__name__}: the longest sequence of the model has 3 positions, fewer than the 4 ranks of the sp axis; "
        "fix: use a longer sequence or a mesh with at most 3 ranks on sp"
    )
    assert everywhere(pool, short, on=4) == [message] * 4


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"strategy": "rings"}, "strategy='rings' is not known; choose from None, " + ", ".join(map(repr, STRATEGIES))),
        ({"outputs": "whole"}, "outputs='whole' is not known; choose from 'local', 'gather', 'loss'"),
        ({"compiler": "eager"}, "compiler='eager' is not known; choose from 'inductor', 'aot_eager'"),
        ({"grad_sync": "ddp"}, "grad_sync='ddp' is not known; choose from 'autosp', 'external'"),
    ],
)
@pytest.mark.parametrize("make", [lambda o: autosp.parallelize(nn.Linear(2, 2), **o), lambda o: autosp.backend(**o)])
def test_unknown_options_are_refused_at_once(make: Callable[[dict[str, str]], Any], options: dict[str, str], text: str) -> None:
    with pytest.raises(StrategyError) as caught:
        make(options)
    assert str(caught.value) == text


# The message itself.


def test_the_hash_depends_on_values_order_shape_and_type() -> None:
    x = torch.arange(12).reshape(3, 4)
    variants = [x, x.flip(0), x.flip(1), x.T.contiguous(), x.reshape(4, 3), x.int(), x.float(), x.double(), x + 1, -x]
    hashes = [int(agree.batch_hash([v])) for v in variants]
    assert len(set(hashes)) == len(variants)
    assert int(agree.batch_hash([x, x + 1])) != int(agree.batch_hash([x + 1, x]))
    assert int(agree.batch_hash([x.T])) == int(agree.batch_hash([x.T.contiguous()])), "strides do not matter"
    assert int(agree.batch_hash([])) == 0 and int(agree.batch_hash([torch.tensor(True)])) != 0
    assert int(agree.batch_hash([torch.full((3,), float("nan"))])) == int(agree.batch_hash([torch.full((3,), float("nan"))]))
    assert int(agree.batch_hash([torch.zeros(3)])) != int(agree.batch_hash([torch.tensor([0.0, 0.0, -0.0])]))


def test_a_flipped_bit_anywhere_changes_the_hash() -> None:
    x = torch.randint(2, (64,), generator=torch.Generator().manual_seed(0))
    seen = {int(agree.batch_hash([x]))}
    for i in range(64):
        y = x.clone()
        y[i] ^= 1
        seen.add(int(agree.batch_hash([y])))
    assert len(seen) == 65


@pytest.mark.parametrize(
    ("messages", "text"),
    [
        ([[0, 7, 5, 9, 1], [0, 7, 5, 9, 1]], None),
        ([[0, 7, 5, 9, 1], [0, 7, 5, 9, 1], [0, 7, 5, 9, 2], [0, 7, 5, 9, 2]], None),
        ([[0, 7, 5, 9, 1], [0, 8, 5, 9, 1]], "rank 1 has a different plan from rank 0"),
        ([[0, 7, 5, 9, 1], [0, 7, 6, 9, 1]], "rank 1 has another order of collectives from rank 0"),
        ([[0, 7, 5, 9, 1], [0, 7, 5, 8, 1]], "rank 1 has different weights from rank 0"),
        (
            [[0, 7, 5, 9, 1], [0, 7, 5, 9, 1], [0, 7, 5, 8, 2], [0, 7, 5, 8, 2]],
            "ranks 2, 3 has different weights from ranks 0, 1",
        ),
        ([[0, 7, 5, 9, 1], [0, 7, 5, 9, 2], [0, 7, 5, 9, 1], [0, 7, 5, 9, 1]], "rank 1 has a different batch from rank 0"),
        ([[1, 0, 0, 0, 0], [0, 7, 5, 9, 1], [1, 0, 0, 0, 0], [0, 7, 5, 9, 1]], "ranks 0, 2 could not compile"),
    ],
)
def test_judgement_of_two_ranks_an_sp_group(messages: list[list[int]], text: str | None) -> None:
    if text is None:
        agree.judge(messages, 2)
        return
    with pytest.raises(DisagreementError, match=text):
        agree.judge(messages, 2)
