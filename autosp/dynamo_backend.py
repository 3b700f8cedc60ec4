"""The Dynamo backend: compile one graph for this rank, check agreement each step, run.

`torch.compile(model, backend="autosp")` uses `autosp`; `autosp.backend(...)` makes one with options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.debugging import boxed_nop
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.distributed.device_mesh import DeviceMesh

from .cost_model.plan import Plan
from .inductor import Partition, communicates, settings
from .kernels import agree
from .mesh import World, resolve
from .passes import recognise
from .passes.overlap import overlap
from .passes.pipeline import Compiled, Settings, compile_graph
from .planning import Planning, room
from .zero import Zero3


class Backend:
    """A callable that `torch.compile` accepts as `backend=`. `plan` is that of the last graph it compiled."""

    def __init__(
        self,
        mesh: DeviceMesh | None,
        settings: Settings,
        check_batch: bool = True,
        planning: Planning | None = None,
        zero: Zero3 | None = None,
    ) -> None:
        self.mesh, self.settings, self.check_batch = mesh, settings, check_batch
        self.planning = planning or Planning()
        self.zero = zero
        self.plan: Plan | None = None
        self.on_plan: Callable[[Plan], None] | None = None
        self.stepped = False  # weights have been compared, before anything could have changed them
        self.answered = False  # the other ranks have had this call's message, so none waits for one
        self.__name__ = "autosp"  # what Dynamo calls it in messages

    def world(self) -> World:
        return resolve(self.mesh, self.settings.grad_sync)

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        world = self.world()
        if self.zero is not None:
            self.zero.set_apart(gm)
        try:
            compiled = compile_graph(gm, example_inputs, world.spread, self.settings, self.planning.decide(world.device))
            self.planning.compare(compiled.plan)
            run, graphs = _compile(compiled, self._example(compiled, example_inputs), self.settings.compiler)
        except torch._dynamo.exc.RestartAnalysis:
            raise  # Dynamo traces again and comes back: nothing failed
        except Exception:
            self.announce_failure()
            raise
        self.plan = compiled.plan
        if self.on_plan is not None:
            self.on_plan(compiled.plan)
        return _Step(compiled, run, graphs, world, self)

    def local(self, compiled: Compiled, args: Sequence[Any]) -> list[Any]:
        """The graph's inputs as this rank has them: of parameters, with `zero`, its parts."""
        if self.zero is None:
            return list(args)
        kinds = [item.kind for item in compiled.captured.inputs]
        return [self.zero.part(x) if kind == "parameter" else x for x, kind in zip(args, kinds, strict=True)]

    def _example(self, compiled: Compiled, args: Sequence[Any]) -> Sequence[Any]:
        """Fixed sizes for what Dynamo has not seen: AOTAutograd would make them symbols."""
        if self.zero is None:
            return args
        mode = torch._guards.detect_fake_mode(list(args)) or torch._guards.TracingContext.get().fake_mode
        local = self.local(compiled, args)
        return [x if x is seen else mode.from_tensor(x, static_shapes=True) for x, seen in zip(local, args, strict=True)]

    def announce_failure(self) -> None:
        """Tell ranks that wait for this one's message that it will not come to a collective."""
        self.answered = True
        world = self.world()
        if world.everyone is not None:
            agree.exchange([agree.FAILED, 0, 0, 0, 0, 0], world.everyone, world.device)


class _Step:
    """One compiled step: agree, then run. Plans are compared in the first step, whether or not batches are in each."""

    def __init__(self, compiled: Compiled, run: Callable[..., Any], graphs: str, world: World, backend: Backend) -> None:
        self._run, self._world, self._backend = run, world, backend
        self._compiled, self._extras = compiled, compiled.extras
        self._takes_seed = "seed" in compiled.extras
        kinds = [item.kind for item in compiled.captured.inputs]
        self._data = tuple(i for i, kind in enumerate(kinds) if kind == "data")
        # Parts differ by rank: whole parameters were compared before they were split.
        self._alike = tuple(i for i, kind in enumerate(kinds) if kind == "buffer" or (kind == "parameter" and not backend.zero))
        self._promise = (agree.READY, agree.text_hash(compiled.plan.fingerprint), agree.text_hash(graphs))
        self._first = True

    def __call__(self, *args: Tensor) -> Any:
        seed = int(torch.randint(1 << 62, ()).item()) if self._takes_seed else 0
        made: dict[Any, Tensor] = {what: what(args) for what in self._extras if not isinstance(what, str)}
        world, check = self._world, self._backend.check_batch
        self._backend.answered = True
        if world.everyone is not None and (check or self._extras or self._first):
            # What rows see decides who computes what: with no check of the batch, at least that is compared.
            batch = agree.batch_hash([args[i] for i in self._data] if check else list(made.values()))
            messages = agree.exchange([*self._promise, self._weights(args), batch, seed], world.everyone, world.device)
            agree.judge(messages, world.spread.ranks)
            self._first = False
            seed = messages[world.dp_rank * world.spread.ranks][-1]
        self._backend.stepped = True
        mixed = (seed + world.dp_rank * 0x9E3779B97F4A7C15) % (1 << 62)
        made["seed"] = torch.tensor(mixed, dtype=torch.int64, device=args[0].device if args else world.device)
        return self._run(*self._backend.local(self._compiled, args), *[made[what] for what in self._extras])

    def _weights(self, args: Sequence[Tensor]) -> Tensor | int:
        """Hash of parameters and buffers, before the first step of all: later, replicated work may differ in its last bits."""
        return 0 if self._backend.stepped else agree.batch_hash([args[i] for i in self._alike])


def _compile(compiled: Compiled, example_inputs: Sequence[Any], compiler: str) -> tuple[Callable[..., Any], str]:
    """The local graph through AOTAutograd and PyTorch's partitioner, then Inductor or eager kernels.

    Forward and backward are compiled now, not at the first backward, so that a failure is known before anything runs.
    The second result names the collectives of both graphs in order, for ranks to compare.
    """
    inputs, seen = list(example_inputs), list[str]()
    for what in compiled.extras:
        seed = torch.zeros((), dtype=torch.int64, device=inputs[0].device)
        inputs.append(seed if isinstance(what, str) else what.example)

    def eager(module: fx.GraphModule, values: Sequence[Any], **options: Any) -> Any:
        overlap(module.graph, communicates)
        seen.append(_collectives(module))
        _reshape(module)
        return boxed_nop(module, list(values))  # which lets go of what forward kept as soon as it has been read

    def inductor(module: fx.GraphModule, values: Sequence[Any], **options: Any) -> Any:
        overlap(module.graph, communicates)
        module.recompile()
        seen.append(_collectives(module))
        return compile_fx_inner(module, values, **options)

    # Where a torch does not know the setting, the backward graph is compared by nobody and fails at the first backward.
    known = hasattr(torch._functorch.config, "force_non_lazy_backward_lowering")
    now = torch._functorch.config.patch({"force_non_lazy_backward_lowering": True} if known else {})
    with fx.traceback.preserve_node_meta(), now:
        if compiler == "inductor":
            run = compile_fx(compiled.module, inputs, inner_compile=inductor, config_patches=settings(compiled.module.graph))
        else:
            partition = Partition(compiled.module.graph)
            run = aot_module_simplified(
                compiled.module, inputs, eager, eager, partition, inference_compiler=eager, keep_inference_input_mutations=True
            )
    return run, "; ".join(seen)


def _collectives(module: fx.GraphModule) -> str:
    return " ".join(str(n.target) for n in module.graph.nodes if communicates(n.target))


def _reshape(module: fx.GraphModule) -> None:
    """In place of views, for a graph that is run operator by operator.

    A view in it relies on strides that torch's meta kernels predict, and a few predict other strides than the kernel
    gives (elu_backward on CPU, torch 2.13): reshape is the same where they agree and right where they do not.
    """
    for node in module.graph.nodes:
        if node.target is torch.ops.aten.view.default:
            node.target = torch.ops.aten.reshape.default


def backend(
    *,
    mesh: DeviceMesh | None = None,
    compiler: str = "inductor",
    strategy: str | None = None,
    outputs: str = "local",
    grad_sync: str = "autosp",
    seq_dim: int | Mapping[str, int] = 1,
    check_batch: bool = True,
    plan: Plan | str | Path | None = None,
    hardware: str | Path | None = None,
    memory: str | float = "auto",
    tile: str | int = "auto",
) -> Backend:
    """A backend for `torch.compile` with options; see `autosp.parallelize` for what they mean."""
    recognise.install()
    settings = Settings(strategy, outputs, seq_dim, compiler, grad_sync, tile=tile)
    return Backend(mesh, settings, check_batch, Planning(hardware, plan, *room(memory)))


_plain: Backend | None = None


def autosp(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
    """The entry point `torch.compile(..., backend="autosp")` finds: all options at their defaults."""
    global _plain
    if _plain is None:
        _plain = backend()
    return _plain(gm, example_inputs)


recognise.install()  # torch.compile(backend="autosp") loads this module before it traces anything
