"""DistributedDataParallel around an autosp model: DDP averages the gradients, autosp spreads each sequence.

    torchrun --nproc_per_node 2 examples/with_ddp.py                  # dp=1, sp=2
    SP=2 torchrun --nproc_per_node 4 examples/with_ddp.py             # dp=2, sp=2

With `grad_sync="external"` autosp leaves the parameter gradients for DDP, which must average them over every rank
of the mesh: over dp and over sp. At the end rank 0 compares with the same training in one process.
"""

from __future__ import annotations

import copy
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

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


def train_alone(model: nn.Module, groups: int) -> None:
    """The same steps in one process, on the mean loss over all groups' batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        for group in range(groups):
            (model(batch(step, group)) / groups).backward()
        optimizer.step()


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
    wrapped = DistributedDataParallel(autosp.parallelize(model, mesh, compiler="aot_eager", grad_sync="external"))

    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    for step in range(STEPS):
        ids = batch(step, mesh.get_local_rank("dp")).to(device)
        optimizer.zero_grad()
        loss = wrapped(ids)
        loss.backward()
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}")

    if dist.get_rank() == 0:
        train_alone(plain, groups)
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        worst = max(float((p.detach().cpu() - q.detach()).norm() / q.detach().norm()) for p, q in pairs)
        print(f"largest relative difference of a parameter after {STEPS} steps: {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
