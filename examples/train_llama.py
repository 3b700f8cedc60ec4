"""Three training steps of a tiny Llama, sequence-parallel over all ranks that torchrun starts.

    torchrun --nproc_per_node 2 examples/train_llama.py

Runs on CPU with gloo, or with one GPU a rank and NCCL where CUDA is available. Needs transformers (`autosp[hf]`).
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autosp

VOCAB, SEQ_LEN, BATCH, STEPS = 256, 1021, 2, 3  # 1021 is prime: no number of ranks above 1 divides it


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("sp",))

    torch.manual_seed(0)  # the same weights and the same batches on every rank
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=SEQ_LEN,
            use_cache=False,
        )
    ).to(device)

    # aot_eager starts within seconds; the default compiler, "inductor", generates code.
    model = autosp.parallelize(model, mesh, compiler="aot_eager")

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        ids = torch.randint(VOCAB, (BATCH, SEQ_LEN)).to(device)  # the global batch, as on one device
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            if step == 0:
                print(model.autosp_plan)
            print(f"step {step}: loss {loss.item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
