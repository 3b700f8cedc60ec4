"""One rank's lowered graph without any process group: what a plan promises can be counted on fake tensors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from direct import PLANNER
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func

from autosp.cost_model.problem import Decide
from autosp.inductor import Partition
from autosp.kernels import blocks, comm
from autosp.kernels.parts import part_of
from autosp.parallelizer import tracing
from autosp.passes import recognise
from autosp.passes.pipeline import Compiled, Settings, compile_graph
from autosp.passes.spread import Spread


@dataclass
class Traced:
    """The compiled result of one rank, and the forward and backward graphs PyTorch's partitioner made of it."""

    compiled: Compiled
    graphs: list[fx.GraphModule] = field(default_factory=list)

    def nodes(self, graph: int) -> Sequence[fx.Node]:
        return list(self.graphs[graph].graph.nodes)

    @property
    def saved(self) -> int:
        """How many values forward leaves for backward: its last results, and backward's first inputs."""
        inputs = [n.name for n in self.nodes(1) if n.op == "placeholder"]
        return sum(not name.startswith("tangents") for name in inputs)

    def sent(self, graph: int, ranks: int, rank: int) -> Counter[str]:
        """Bytes this rank sends in graph 0 (forward) or 1 (backward), by collective.

        A gather sends its shard to each other rank, a reduce-scatter one shard for each other rank, an all-to-all what its
        split sizes say less its own part, an all-reduce 2(P-1)/P of its value. Blocks of attention are the mean over ranks.
        """
        sent: Counter[str] = Counter()
        for node in self.nodes(graph):
            name = getattr(getattr(node.target, "_schema", None), "name", "")
            if name.startswith("asp::block_attention"):
                back = name.endswith("backward")
                leaves = [x.meta["val"] for x in node.args[4 if back else 0]]  # type: ignore[union-attr]
                sent["blocks"] += blocks.traffic(str(node.args[6 if back else 2]), leaves)[back]
            if name.startswith("asp::halo"):
                out, into = comm.halo_counts(str(node.args[2]), rank)
                value, dim = node.meta["val"], node.args[1]
                positions = sum(into if name.endswith("back") else out)
                sent["halo"] += positions * value.nbytes // value.shape[dim]
            if not name.startswith("_c10d_functional::") or "wait" in name:
                continue
            x: Tensor = node.args[0].meta["val"]  # type: ignore[union-attr]
            if "all_gather" in name:
                sent["all-gather"] += (ranks - 1) * x.nbytes
            elif "reduce_scatter" in name:
                sent["reduce-scatter"] += (ranks - 1) * x.nbytes // ranks
            elif "all_to_all" in name:
                splits: Sequence[int] = node.args[2]  # type: ignore[assignment]
                sent["all-to-all"] += (sum(splits) - splits[rank]) * x.element_size()
            else:
                sent["all-reduce"] += 2 * (ranks - 1) * x.nbytes // ranks
        return sent


def _part(x: Tensor, ranks: int, rank: int) -> Any:
    """A rank's part of a parameter as Dynamo would have made it a fake: with fixed sizes."""
    mode = torch._guards.TracingContext.get().fake_mode
    return mode.from_tensor(part_of(x.detach(), ranks, rank).requires_grad_(x.requires_grad), static_shapes=True)


class _Stop(BaseException):
    """Leaves Dynamo when the graphs are there; nothing is run."""


def trace(
    module: nn.Module,
    inputs: Mapping[str, Any],
    ranks: int,
    rank: int = 0,
    backward: bool = True,
    decide: Decide = PLANNER,
    **options: Any,
) -> Traced:
    """Compile `module` for one rank of `ranks` and stop before anything runs."""
    found: list[Traced] = []

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        traced = Traced(
            compile_graph(gm, example_inputs, Spread(rank, ranks, "nobody"), Settings(compiler="aot_eager", **options), decide)
        )
        found.append(traced)
        if backward:

            def keep(graph: fx.GraphModule, _: Any) -> Any:
                traced.graphs.append(graph)
                return make_boxed_func(graph.forward)

            if options.get("zero"):
                example_inputs = [_part(x, ranks, rank) if isinstance(x, nn.Parameter) else x for x in example_inputs]
            with fx.traceback.preserve_node_meta(), torch._functorch.config.patch(force_non_lazy_backward_lowering=True):
                aot_module_simplified(
                    traced.compiled.module,
                    example_inputs,
                    keep,
                    keep,
                    Partition(traced.compiled.module.graph),
                    inference_compiler=keep,
                )
        raise _Stop

    recognise.install()
    recognise.prepare(module._call_impl)
    torch._dynamo.reset()
    run = torch.compile(module, backend=backend, fullgraph=True, dynamic=False)
    try:
        with tracing():
            run(**inputs)
    except _Stop:
        return found[-1]
    raise AssertionError("the model did not compile")
