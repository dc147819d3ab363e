"""Run as a program: four processes of PyTorch write DCP checkpoints in every layout that jobs have.

`python write_layouts.py OUT` leaves OUT/<layout>/ and OUT/<layout>.npz with the full tensors, which
the processes gather themselves.
"""

import logging
import os
import sys
import warnings

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

RANKS = 4


class Net(nn.Module):
    """6 rows over 4 ranks leave the last one empty; 50 become 13, 13, 13 and 11."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 50)
        self.down = nn.Linear(50, 6, bias=False)
        self.norm = nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.down(self.up(x)))


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.column = nn.Linear(6, 10, bias=False)
        self.row = nn.Linear(10, 7, bias=False)

    def forward(self, x):
        return self.row(self.column(x))


def run_rank(rank, out):
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=RANKS)
    net, optimizer = trained(fully_shard(random(Net()), mesh=init_device_mesh("cpu", (RANKS,))))
    model = get_model_state_dict(net)
    for layout, flat in (("nested", False), ("flat", True)):
        options = StateDictOptions(flatten_optimizer_state_dict=flat)
        state = get_optimizer_state_dict(net, optimizer, options=options)
        write(out, layout, {"model": model, "optimizer": state})
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"column": ColwiseParallel(), "row": RowwiseParallel()}
    net = parallelize_module(random(Parallel()).bfloat16(), mesh["tp"], plan)
    write(out, "strided", get_model_state_dict(fully_shard(net, mesh=mesh["dp"])))
    write(out, "replicated", {
        "everywhere": torch.arange(12.0).reshape(3, 4),
        "split": model["up.weight"],
        f"dataloader.dp_rank_{rank}": {"batches": rank},
    })  # fmt: skip
    dist.destroy_process_group()


def random(net):
    """Return values that are equal in all processes and distinct within a tensor."""
    generator = torch.Generator().manual_seed(1)
    for parameter in net.parameters():
        nn.init.normal_(parameter, generator=generator)
    return net


def trained(net):
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    net(torch.randn(5, 6, generator=torch.Generator().manual_seed(2))).square().sum().backward()
    optimizer.step()
    return net, optimizer


def write(out, layout, state):
    full = dict(gathered(state))
    if dist.get_rank() == 0:
        np.savez(f"{out}/{layout}.npz", **full)
    dcp.save(state, checkpoint_id=f"{out}/{layout}")


def gathered(value, path=""):
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, torch.Tensor):
        yield path, value.detach().float().numpy()
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from gathered(item, f"{path}.{key}" if path else key)


if __name__ == "__main__":
    out = os.path.abspath(sys.argv[1])
    torch.multiprocessing.start_processes(run_rank, (out,), nprocs=RANKS, start_method="fork")
