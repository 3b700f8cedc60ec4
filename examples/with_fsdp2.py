"""FSDP2 around an autosp model: `fully_shard` splits parameters and averages gradients, autosp spreads each sequence.

    torchrun --nproc_per_node 2 examples/with_fsdp2.py                # dp=1, sp=2
    SP=2 torchrun --nproc_per_node 4 examples/with_fsdp2.py           # dp=2, sp=2

It goes around the whole model, once: parameters are whole while a step runs; between steps they are in parts, as gradients and
the optimizer's state always are. (Around single layers it would break the graph; `zero=3` does the same inside it.) With
`grad_sync="external"` autosp leaves the parameter gradients for FSDP, which must average them over every rank of the mesh. At
the end rank 0 compares with the same training in one process.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import autosp

VOCAB, HIDDEN, HEADS, SEQ_LEN, BATCH, STEPS = 64, 32, 4, 101, 2, 3


class Tiny(nn.Module):
    """One causal attention between an embedding and a head; gives the loss of predicting the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCAB)

    def forward(self, ids: Tensor) -> Tensor:
        """ids: [batch, seq]."""
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(x[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


def batch(step: int, group: int) -> Tensor:
    """The batch of one data-parallel group: [batch, seq], the same on each of its ranks."""
    generator = torch.Generator().manual_seed(1000 * step + group)
    return torch.randint(VOCAB, (BATCH, SEQ_LEN), generator=generator)


def train(model: nn.Module, groups: list[int], device: str) -> list[float]:
    """Some steps on the mean loss over the batches of `groups`; the norm of each step's gradient."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    norms = []
    for step in range(STEPS):
        for group in groups:
            (model(batch(step, group).to(device)) / len(groups)).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)  # of FSDP's parts: a DTensor
        norms.append(float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))
        optimizer.step()
        optimizer.zero_grad()
    return norms


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    sp = int(os.environ.get("SP", dist.get_world_size()))
    groups = dist.get_world_size() // sp
    mesh = init_device_mesh(device, (groups, sp), mesh_dim_names=("dp", "sp"))

    torch.manual_seed(0)
    model = Tiny().double().to(device)
    plain = copy.deepcopy(model).cpu()
    autosp.parallelize(model, mesh, compiler="aot_eager", grad_sync="external")
    fully_shard(model)  # over all ranks; with mesh=mesh parts over sp and copies over dp (HSDP)
    norms = train(model, [mesh.get_local_rank("dp")], device)

    whole = [p.full_tensor().detach().cpu() for p in model.parameters()]
    if dist.get_rank() == 0:
        expected = train(plain, list(range(groups)), "cpu")
        print("gradient norms:", ", ".join(f"{norm:.6f}" for norm in norms))
        worst = max(abs(a - b) / b for a, b in zip(norms, expected, strict=True))
        print(f"largest relative difference of a gradient norm: {worst:.1e}")
        worst = max(float((p - q.detach()).norm() / q.detach().norm()) for p, q in zip(whole, plain.parameters(), strict=True))
        print(f"largest relative difference of a parameter after {STEPS} steps: {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
