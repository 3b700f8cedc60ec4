"""A tiny Llama in parts (ZeRO-3), with a checkpoint after each step: interrupted, it goes on from the last, on any ranks.

    torchrun --nproc_per_node 4 examples/train_zero.py
    torchrun --nproc_per_node 2 examples/train_zero.py

Runs on CPU with gloo, or with one GPU a rank and NCCL where CUDA is available. Needs transformers (`autosp[hf]`).
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autosp

VOCAB, SEQ_LEN, BATCH, STEPS = 256, 1021, 2, 3
FOLDER = Path("zero-checkpoint")


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("sp",))

    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ_LEN, use_cache=False,
    )  # fmt: skip
    model = autosp.parallelize(LlamaForCausalLM(config).to(device), mesh, compiler="aot_eager", zero=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after parallelize: it is to see the parts

    # What is complete has its metadata, which is written last.
    first = max((int(path.parent.name) for path in FOLDER.glob("*/.metadata")), default=0)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=FOLDER / str(first))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    for step in range(first, first + STEPS):
        torch.manual_seed(step)
        ids = torch.randint(VOCAB, (BATCH, SEQ_LEN)).to(device)  # the global batch, as on one device
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.6f}")
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=FOLDER / str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
