"""What users do with a module behaves as before once it is parallel."""

from __future__ import annotations

import copy
import importlib
import io
import logging
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lowered import trace
from models import MODELS
from models_common import first_layer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from twins import EXACT, distance, gradient_error, gradients, other_batch, step, twins

import autosp
from autosp import launch, zoo
from autosp.check import loss_of, relative_error
from autosp.kernels.layout import contiguous
from pool import Pool

VOCAB, HIDDEN = 50, 16
LOG = logging.getLogger(__name__)


class TokenMLP(nn.Module):
    """No attention: only the embedded ids say where the sequence is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(VOCAB, HIDDEN), nn.Linear(HIDDEN, 32), nn.Linear(32, VOCAB)
        self.extra = nn.Linear(HIDDEN, HIDDEN)  # not used by the loss

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.down(self.up(self.embed(ids)).tanh())
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Talking(TokenMLP):
    """Logs at every call, as models of transformers do."""

    def forward(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        LOG.warning("a batch of %d", ids.shape[0])
        return super().forward(ids, labels)


def test_a_model_may_log() -> None:
    ids = torch.zeros(2, 12, dtype=torch.long)
    assert trace(Talking(), {"ids": ids, "labels": ids}, 2, backward=False).compiled.plan.ranks == 2


GROUP_AT_IMPORT = dist.is_initialized()


@autosp.parallelize(compiler="aot_eager")
class Decorated(TokenMLP):
    """Decorated before there is any process group."""


@autosp.parallelize
class DecoratedPlainly(TokenMLP):
    """The decorator without arguments."""


class HoldsDecorated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Decorated()

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return self.inner(ids, labels)[0] * 2


def token_mlp(cls: type[nn.Module] = TokenMLP) -> tuple[Any, dict[str, Tensor]]:
    torch.manual_seed(0)
    return cls().double(), {"ids": torch.randint(VOCAB, (2, 33)), "labels": torch.randint(VOCAB, (2, 33))}


# An instance stays what it was.


def keeps(mesh: DeviceMesh) -> None:
    plain, inputs = MODELS["gqa_sdpa"](33, 2, torch.float64)
    model = copy.deepcopy(first_layer(plain))
    tensors = [id(t) for t in (*model.parameters(), *model.buffers())]
    parallel = autosp.parallelize(model, mesh, compiler="aot_eager")
    loss = step(parallel, inputs)
    assert parallel is model and type(model) is type(plain) and isinstance(model, nn.Module)
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [id(t) for t in (*model.parameters(), *model.buffers())] == tensors
    assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    assert loss == pytest.approx(step(plain, inputs), rel=EXACT)
    assert gradient_error(plain, parallel) < EXACT
    assert len(parallel.autosp_plan.sites) == 1 and "2 ranks" in str(parallel.autosp_plan)


def test_the_instance_keeps_class_names_and_parameters(pool: Pool) -> None:
    pool.run(keeps, on=2)


def copies(mesh: DeviceMesh) -> tuple[list[bool], list[float]]:
    plain, parallel, inputs = twins("nanogpt_sdpa", mesh)
    step(parallel, inputs)
    parallel.zero_grad()
    file = io.BytesIO()
    torch.save(parallel, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    others = [loaded, copy.deepcopy(parallel)]
    expected = step(plain, inputs)
    errors = [abs(step(other, inputs) - expected) for other in others]  # plain: this runs without any other rank
    return [other._compiled_call_impl is None for other in others], errors + [gradient_error(plain, o) for o in others]


def test_saved_and_copied_models_are_plain_models_with_the_same_weights(pool: Pool) -> None:
    plain, errors = pool.run(copies, on=2)[0]
    assert plain == [True, True] and max(errors) < EXACT


def only_rank_0_runs_a_copy(mesh: DeviceMesh) -> bool:
    _, parallel, inputs = twins("nanogpt_sdpa", mesh)
    step(parallel, inputs)
    twin = copy.deepcopy(parallel)
    return mesh.get_local_rank() != 0 or math.isfinite(step(twin, inputs))


def test_a_copy_needs_no_other_rank(pool: Pool) -> None:
    assert all(pool.run(only_rank_0_runs_a_copy, on=2, timeout=60))


# Training.


def trains(mesh: DeviceMesh, steps: int = 3) -> float:
    plain, parallel, inputs = twins("nanogpt_sdpa", mesh)
    batches = [other_batch(inputs, seed) for seed in range(steps)]
    for model in (plain, parallel):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for batch in batches:
            optimizer.zero_grad()
            step(model, batch)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return distance(dict(parallel.named_parameters()), dict(plain.named_parameters()))


def test_optimizer_steps_equal_those_of_one_device_with_tied_weights(pool: Pool) -> None:
    assert max(pool.run(trains, on=3)) < 1e-7  # Adam divides gradients of rounding size by their own size


def accumulates(mesh: DeviceMesh) -> float:
    plain, parallel, inputs = twins("gqa_sdpa", mesh)
    for model in (plain, parallel):
        for seed in range(2):
            (loss_of(model(**other_batch(inputs, seed))) / 2).backward()
    return gradient_error(plain, parallel)


def test_gradients_accumulate_over_micro_batches(pool: Pool) -> None:
    assert max(pool.run(accumulates, on=2)) < EXACT


def freezes(mesh: DeviceMesh, strategy: str) -> list[tuple[float, list[str]]]:
    """Only the query projections learn, as with adapters; then, in the same process, another model learns all; then again."""
    models = [twins("gqa_sdpa", mesh, whole=True, strategy=strategy) for _ in range(2)]
    for model in models[0][:2]:
        for name, p in model.named_parameters():
            p.requires_grad_(name.endswith("attention.q.weight"))
    found = []
    for plain, parallel, inputs in (models[0], models[1], models[0]):
        for model in (plain, parallel):
            model.zero_grad()
            step(model, inputs)
        found.append((gradient_error(plain, parallel), [n for n, g in gradients(parallel).items() if g is not None]))
    return found


@pytest.mark.parametrize("strategy", ["gather-kv", "ring"])
def test_frozen_parameters_get_no_gradient_and_the_others_the_right_one(pool: Pool, strategy: str) -> None:
    """Both layers run one program but for what of it learns: keys of the first need no gradient, those of the second do."""
    queries = [f"backbone.blocks.{i}.attention.q.weight" for i in range(2)]
    for first, whole, again in pool.run(freezes, strategy, on=2):
        assert max(error for error, _ in (first, whole, again)) < EXACT
        assert first[1] == again[1] == queries and len(whole[1]) > 20


def splits_by_hint(mesh: DeviceMesh) -> tuple[float, Any, Any]:
    (plain, inputs), (parallel, _) = token_mlp(), token_mlp()
    autosp.parallelize(parallel, mesh, compiler="aot_eager")
    plain(**inputs)[0].backward()
    parallel(**inputs)[0].backward()
    return gradient_error(plain, parallel), parallel.extra.weight.grad, parallel.autosp_plan


def test_tokens_are_split_without_attention_and_an_unused_parameter_has_no_gradient(pool: Pool) -> None:
    error, unused, plan = pool.run(splits_by_hint, on=3)[0]
    assert error < EXACT and unused is None
    assert plan.sites == plan.fallbacks == () and plan.outputs == ("scalar Replicate", "2x33x50 Shard(1)")


class Prefix(nn.Module):
    """The loss sees the first five tokens only: most ranks hold none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MODELS["gqa_sdpa"](33, 2, torch.float64)[0].backbone

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids)[:, :5].pow(3).sum()


def looks_at_a_prefix(mesh: DeviceMesh) -> float:
    plain, ids = Prefix(), torch.arange(66).reshape(2, 33) % 50
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager")
    for model in (plain, parallel):
        model(ids).backward()
    return gradient_error(plain, parallel)


@pytest.mark.parametrize("on", [2, 4])
def test_a_loss_of_tokens_that_one_rank_holds(pool: Pool, on: int) -> None:
    assert max(pool.run(looks_at_a_prefix, on=on, timeout=60)) < EXACT


class Heads(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.embed, self.qkv = heads, nn.Embedding(VOCAB, 8 * heads), nn.Linear(8 * heads, 24 * heads)

    def forward(self, ids: Tensor) -> Tensor:
        q, k, v = (x.unflatten(-1, (self.heads, 8)).transpose(1, 2) for x in self.qkv(self.embed(ids)).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def few_heads(mesh: DeviceMesh, heads: int, strategy: str) -> float:
    torch.manual_seed(0)
    plain, ids = Heads(heads).double(), torch.arange(66).reshape(2, 33) % VOCAB
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager", strategy=strategy)
    for model in (plain, parallel):
        model(ids).backward()
    return gradient_error(plain, parallel)


@pytest.mark.parametrize("strategy", ["all-to-all", "gather-kv"])
@pytest.mark.parametrize("heads", [1, 2])
def test_there_may_be_fewer_heads_than_ranks(pool: Pool, heads: int, strategy: str) -> None:
    assert max(pool.run(few_heads, heads, strategy, on=3, timeout=60)) < EXACT


class Features(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, HIDDEN), nn.Linear(HIDDEN, 6)

    def forward(self, features: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        out = self.head((self.inner(features) * scale).tanh())
        return out.square().mean(), out


def declares(mesh: DeviceMesh) -> tuple[float, Any]:
    """features: [seq, batch, 6], scale: [batch, hidden]."""
    torch.manual_seed(0)
    plain, features, scale = Features().double(), torch.randn(33, 2, 6).double(), torch.randn(2, HIDDEN).double()
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager", seq_dim={"features": 0})
    for model in (plain, parallel):
        model(features, scale=scale)[0].backward()
    return gradient_error(plain, parallel), parallel.autosp_plan


def test_the_sequence_of_each_argument_can_be_declared(pool: Pool) -> None:
    error, plan = pool.run(declares, on=2)[0]
    assert error < EXACT and plan.outputs == ("scalar Replicate", "33x2x6 Shard(0)") and plan.fallbacks == ()


def lengthens(mesh: DeviceMesh) -> list[tuple[float, float, tuple[int, ...]]]:
    plain, parallel, _ = twins("gqa_sdpa", mesh)
    out = []
    for seq_len in (33, 40, 33, 41):
        inputs = other_batch(MODELS["gqa_sdpa"](seq_len, 2, torch.float64)[1], seq_len)
        plain.zero_grad()
        parallel.zero_grad()
        loss = abs(step(parallel, inputs) - step(plain, inputs))
        out.append((loss, gradient_error(plain, parallel), parallel.autosp_plan.sequence))
    return out


def test_each_sequence_length_is_compiled_and_right(pool: Pool) -> None:
    rows = pool.run(lengthens, on=3)[0]
    assert max(max(loss, error) for loss, error, _ in rows) < EXACT
    assert [sequence for *_, sequence in rows] == [(33,), (40,), (40,), (41,)], "the plan is that of the last compilation"


# Evaluation.


def evaluates(mesh: DeviceMesh) -> list[float]:
    """Forward only without a gradient, in inference mode and with one; then training goes on."""
    plain, parallel, inputs = twins("token_logits", mesh, outputs="gather")
    errors = []
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for model in (plain, parallel):
            model.eval()
        with mode():
            got, want = parallel(**inputs)["logits"], plain(**inputs)["logits"]
        assert not parallel.training and got.requires_grad == want.requires_grad
        errors.append(relative_error(got.detach(), want.detach(), 0.0))
    for model in (plain, parallel):
        model.train()
        model(**inputs)["logits"].square().mean().backward()
    return [*errors, gradient_error(plain, parallel)]


def test_evaluation_runs_forward_only_and_training_goes_on(pool: Pool) -> None:
    assert max(max(e) for e in pool.run(evaluates, on=3)) < EXACT


def switches_dropout(mesh: DeviceMesh) -> tuple[float, float, float]:
    from models import DROPOUT_MODELS

    plain, inputs = DROPOUT_MODELS["dropout_mlp"](33, 2, torch.float64)
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager")
    trained = loss_of(parallel(**inputs)).item()
    plain.eval()
    parallel.eval()
    return trained, loss_of(parallel(**inputs)).item(), loss_of(plain(**inputs)).item()


def test_eval_turns_dropout_off(pool: Pool) -> None:
    trained, evaluated, expected = pool.run(switches_dropout, on=2)[0]
    assert evaluated == pytest.approx(expected, rel=EXACT) and trained != pytest.approx(expected, rel=1e-4)


# Autocast.


def autocasts(mesh: DeviceMesh, family: str | None) -> tuple[list[str], list[float], list[float]]:
    """Errors of (loss, gradient) against float64 with autocast, on one device and in parallel."""
    exact, inputs = zoo.build(family, 33, 2, torch.float64) if family else MODELS["gqa_sdpa"](33, 2, torch.float64)
    plain = copy.deepcopy(exact).float()
    parallel = autosp.parallelize(copy.deepcopy(plain), mesh, compiler="aot_eager")
    expected = loss_of(exact(**inputs))
    expected.backward()
    dtypes, errors = [], []
    for model in (plain, parallel):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(**inputs)
        dtypes.append(str(out["logits"].dtype))
        loss_of(out).backward()
        errors.append([relative_error(loss_of(out).detach(), expected.detach(), 0.0), whole_error(model, exact)])
        assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    return dtypes, errors[0], errors[1]


def whole_error(model: nn.Module, exact: nn.Module) -> float:
    """Relative error of the whole gradient as one vector."""
    flat = [torch.cat([p.grad.double().flatten() for p in m.parameters()]) for m in (model, exact)]
    return relative_error(*flat, 0.0)


@pytest.mark.parametrize("family", [None, "llama"])
def test_autocast_is_as_near_to_float64_as_on_one_device(pool: Pool, family: str | None) -> None:
    """transformers' rotary tables are computed where autocast is switched off."""
    dtypes, plain, parallel = pool.run(autocasts, family, on=3)[0]
    assert dtypes == ["torch.bfloat16"] * 2
    assert 1e-4 < plain[1] < 0.1, "bfloat16 was used"
    assert parallel[1] < 1.5 * plain[1] and parallel[0] < 2 * plain[0] + 1e-3


# Classes and functions.


def takes_mesh_at_first_call(mesh: DeviceMesh, way: str) -> tuple[float, int, bool]:
    plain, inputs = token_mlp()
    if way == "argument":
        cls: Any = autosp.parallelize(type("Late", (TokenMLP,), {}), mesh, compiler="aot_eager")
    else:
        cls = Decorated
    model, _ = token_mlp(cls)
    if way == "use_mesh":
        with autosp.use_mesh(mesh):
            model(**inputs)[0].backward()
    else:
        model(**inputs)[0].backward()
    plain(**inputs)[0].backward()
    return gradient_error(plain, model), model.autosp_plan.ranks, GROUP_AT_IMPORT


@pytest.mark.parametrize(("way", "on"), [("argument", 3), ("use_mesh", 2), ("default group", 4)])
def test_a_decorated_class_takes_its_mesh_at_the_first_call(pool: Pool, way: str, on: int) -> None:
    error, ranks, _ = pool.run(takes_mesh_at_first_call, way, on=on)[0]
    assert error < EXACT and ranks == on


def test_a_class_may_be_decorated_before_the_process_group_exists() -> None:
    error, ranks, initialised = launch.run_ranks(takes_mesh_at_first_call, {"sp": 2}, "default group", timeout=100)[0]
    assert not initialised and error < EXACT and ranks == 2


def outer_wins(mesh: DeviceMesh) -> float:
    torch.manual_seed(0)
    model = autosp.parallelize(HoldsDecorated().double(), mesh, compiler="aot_eager")
    plain, inputs = token_mlp()
    model(**inputs).backward()
    (plain(**inputs)[0] * 2).backward()
    return gradient_error(plain, model.inner)


def test_a_decorated_part_of_a_parallel_model_is_one_with_it(pool: Pool) -> None:
    assert max(pool.run(outer_wins, on=2)) < EXACT


def copies_of_decorated(mesh: DeviceMesh) -> tuple[float, bool, int]:
    with autosp.use_mesh(mesh):
        model, inputs = token_mlp(Decorated)
        model(**inputs)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        loaded(**inputs)[0].backward()
    plain, _ = token_mlp()
    plain(**inputs)[0].backward()
    return gradient_error(plain, loaded), isinstance(loaded, TokenMLP), loaded.autosp_plan.ranks


def test_loaded_instances_of_a_decorated_class_run_in_parallel(pool: Pool) -> None:
    error, is_instance, ranks = pool.run(copies_of_decorated, on=2)[0]
    assert error < EXACT and is_instance and ranks == 2


@autosp.parallelize(compiler="aot_eager")
def attention_loss(ids: Tensor, embedding: Tensor, w: Tensor) -> Tensor:
    """Attention of embedded ids with themselves. embedding: [vocab, hidden], w: [3, hidden, hidden]."""
    x = F.embedding(ids, embedding)[:, None]
    q, k, v = (x @ w[i] for i in range(3))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).square().mean()


def runs_function(mesh: DeviceMesh, as_parameters: bool) -> tuple[float, str, int]:
    torch.manual_seed(0)
    ids, weights = torch.randint(VOCAB, (2, 33)), (torch.randn(VOCAB, HIDDEN).double(), torch.randn(3, HIDDEN, HIDDEN).double())
    grads = []
    for function in (attention_loss.__wrapped__, attention_loss):
        leaves = [nn.Parameter(w.clone()) if as_parameters else w.clone().requires_grad_() for w in weights]
        with autosp.use_mesh(mesh):
            function(ids, *leaves).backward()
        grads.append(dict(zip(("embedding", "w"), (leaf.grad for leaf in leaves), strict=True)))
    return distance(grads[1], grads[0]), attention_loss.__name__, len(attention_loss.autosp_plan.sites)


@pytest.mark.parametrize("as_parameters", [False, True])
def test_a_decorated_function_differentiates_its_weights(pool: Pool, as_parameters: bool) -> None:
    error, name, sites = pool.run(runs_function, as_parameters, on=3)[0]
    assert error < EXACT and name == "attention_loss" and sites == 1


@pytest.mark.parametrize("target", [3, "model", None])
def test_only_modules_classes_and_functions_can_be_parallel(target: Any) -> None:
    if target is None:
        assert callable(autosp.parallelize(None))
        return
    with pytest.raises(autosp.errors.AutospError, match=r"takes a module, a class .* or a function, not (int|str)"):
        autosp.parallelize(target)


# torch.compile.


def compiles(mesh: DeviceMesh, by_name: bool) -> float:
    plain, inputs = token_mlp() if by_name else MODELS["gqa_sdpa"](33, 2, torch.float64)
    model = copy.deepcopy(plain)
    backend: Any = "autosp" if by_name else autosp.backend(mesh=mesh, compiler="aot_eager", strategy="gather-kv")
    compiled = torch.compile(model, backend=backend)
    with autosp.use_mesh(mesh):
        loss_of(compiled(**inputs)).backward()
    loss_of(plain(**inputs)).backward()
    if not by_name:
        assert {s.strategy for s in backend.plan.sites} == {"gather-kv"}
    return gradient_error(plain, model)


@pytest.mark.parametrize("by_name", [False, True])
def test_torch_compile_takes_the_backend(pool: Pool, by_name: bool) -> None:
    """By name it is compiled by Inductor."""
    assert max(pool.run(compiles, by_name, on=2, timeout=280)) < EXACT


def test_the_backend_is_registered_with_torch() -> None:
    assert "autosp" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("autosp") is importlib.import_module("autosp.dynamo_backend").autosp


def uses_inductor(mesh: DeviceMesh) -> tuple[float, str]:
    (plain, inputs), (parallel, _) = token_mlp(), token_mlp(DecoratedPlainly)
    with autosp.use_mesh(mesh):
        parallel(**inputs)[0].backward()
    plain(**inputs)[0].backward()
    return gradient_error(plain, parallel), parallel.autosp_plan.compiler


def test_the_default_compiler_is_inductor(pool: Pool) -> None:
    error, compiler = pool.run(uses_inductor, on=2, timeout=280)[0]
    assert error < EXACT and compiler == "inductor"


# Outputs.


def gathers(mesh: DeviceMesh) -> tuple[list[float], tuple[str, ...]]:
    plain, parallel, inputs = twins("token_logits", mesh, outputs="gather")
    labels = torch.randint(50, (2, 33))
    losses = []
    for model in (plain, parallel):
        logits = model(**inputs)["logits"]
        losses.append(F.cross_entropy(logits.flatten(0, 1), labels.flatten()))
        losses[-1].backward()
    return [abs(losses[0] - losses[1]).item(), gradient_error(plain, parallel)], parallel.autosp_plan.outputs


def test_gathered_outputs_are_whole_and_the_users_own_loss_is_differentiated(pool: Pool) -> None:
    for errors, outputs in pool.run(gathers, on=3):
        assert max(errors) < EXACT and outputs == ("2x33x61 Replicate",)


def leaves_local(mesh: DeviceMesh) -> tuple[dict[str, Tensor], dict[str, Tensor], float, tuple[str, ...]]:
    """The user's loss is this rank's share of a sum: parts of the hidden states, and the pooled logits once."""
    plain, parallel, inputs = twins("pooled_logits", mesh)
    outputs = [model(**inputs) for model in (plain, parallel)]
    (outputs[0]["logits"].square().sum() + outputs[0]["hidden"].pow(3).sum()).backward()
    (outputs[1]["logits"].square().sum() + outputs[1]["hidden"].pow(3).sum()).backward()
    whole, local = ({name: x.detach() for name, x in out.items()} for out in outputs)
    return whole, local, gradient_error(plain, parallel), parallel.autosp_plan.outputs


def test_local_outputs_are_the_parts_that_the_plan_names(pool: Pool) -> None:
    ranks = pool.run(leaves_local, on=3)
    whole, _, _, outputs = ranks[0]
    assert outputs == ("2x5x61 Replicate", "2x33x32 Shard(1)") or outputs == ("2x61 Replicate", "2x33x32 Shard(1)")
    assert torch.allclose(torch.cat([local["hidden"] for _, local, *_ in ranks], 1), whole["hidden"], rtol=EXACT)
    assert [local["hidden"].shape[1] for _, local, *_ in ranks] == list(contiguous(33, 3).sizes)
    for _, local, error, _ in ranks:
        assert torch.allclose(local["logits"], whole["logits"], rtol=EXACT) and error < EXACT


# Activation checkpointing.


def recomputes(mesh: DeviceMesh) -> tuple[list[float], list[int]]:
    """Errors of a llama with and without checkpointing, and the matrix products of its backward graph."""
    module = importlib.import_module("autosp.dynamo_backend")
    reshape, graphs, counts, errors = module._reshape, [], [], []
    module._reshape = lambda gm: graphs.append(gm) or reshape(gm)
    try:
        for checkpointed in (False, True):
            plain, inputs = zoo.build("llama", 33)
            parallel = copy.deepcopy(plain)
            if checkpointed:
                parallel.gradient_checkpointing_enable()
            autosp.parallelize(parallel, mesh, compiler="aot_eager")
            step(plain, inputs)
            step(parallel, inputs)
            errors.append(gradient_error(plain, parallel))
            products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
            counts.append(sum(n.target in products for n in graphs[-1].graph.nodes))
    finally:
        module._reshape = reshape
    return errors, counts


def test_a_checkpointed_model_is_exact_and_its_backward_recomputes(pool: Pool) -> None:
    errors, (kept, recomputed) = pool.run(recomputes, on=2)[0]
    assert max(errors) < EXACT
    assert recomputed >= kept + 2 * 3, "at least attention's projection, gate and up of both layers are computed again"
