"""Saves or loads a checkpoint with the code of the torchtitan that is on the path.

    titan_job.py save|load FOLDER SETTINGS.json

The checkpoint manager, the containers of optimizers and schedules, and the data loader are
torchtitan's. The model has its names alone, and what `Trainer` adds to the checkpoint, its step and
its tokens, is repeated here: both would want a GPU's packages.
"""

import inspect
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

# What torchtitan imports and a checkpoint does not need.
for unneeded in ("torchtitan.models.moe.kernels", "tiktoken", "tiktoken.load",
                 "torch.utils.tensorboard"):  # fmt: skip
    sys.modules[unneeded] = mock.MagicMock()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchtitan.components import checkpoint, dataloader, optimizer  # noqa: E402

try:
    from torchtitan.components.lr_scheduler import LRSchedulersContainer
except ImportError:  # since 0.3
    from torchtitan.components.optimizer import LRSchedulersContainer


def model_of(shapes):
    model = nn.Module()
    for name, shape in shapes.items():
        *parents, leaf = name.split(".")
        module = model
        for parent in parents:
            if not hasattr(module, parent):
                module.add_module(parent, nn.Module())
            module = getattr(module, parent)
        module.register_parameter(leaf, nn.Parameter(torch.randn(shape) * 0.02))
    return model


class Progress:
    """Saved numbers of `Trainer`; version 0.1 has the step only."""

    def __init__(self, names):
        self.values = dict.fromkeys(names, 0)

    def state_dict(self):
        return dict(self.values)

    def load_state_dict(self, state):
        self.values = {name: state[name] for name in self.values}


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(100))


def optimizers_of(model, lr):
    if hasattr(optimizer, "default_adamw"):
        config = optimizer.default_adamw(lr=lr)
        config.implementation = "for-loop"
        return optimizer.OptimizersContainer(config, model_parts=[model])
    settings = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1,
                "fused": False, "foreach": False}  # fmt: skip
    return optimizer.OptimizersContainer([model], torch.optim.AdamW, settings)


def manager(folder, excluded, **parts):
    settings = {"folder": ".", "keep_latest_k": 0, "exclude_from_loading": excluded,
                "async_mode": "disabled", "last_save_model_only": False}  # fmt: skip
    takes = inspect.signature(checkpoint.CheckpointManager).parameters
    if "config" in takes:  # 0.3
        config = checkpoint.CheckpointManager.Config(enable=True, **settings)
        config.load_only = False
        return checkpoint.CheckpointManager(config, sd_adapter=None, base_folder=folder, **parts)
    if "checkpoint_config" in takes:  # 0.2
        from torchtitan.config import Checkpoint

        return checkpoint.CheckpointManager(
            checkpoint_config=Checkpoint(enable=True, **settings), sd_adapter=None,
            base_folder=folder, **parts,
        )  # fmt: skip
    from torchtitan.config_manager import JobConfig

    job = JobConfig()
    job.job.dump_folder = folder
    old = {"enable_checkpoint": True, "last_save_model_weights_only": False}
    for name, value in {**settings, **old}.items():
        setattr(job.checkpoint, name, value)
    return checkpoint.CheckpointManager(
        job_config=job, ft_manager=SimpleNamespace(enabled=False), **parts
    )


def main(what, folder, settings):
    torch.manual_seed(0)
    is_old = hasattr(checkpoint, "excluded_parameters_for_model_only")  # 0.1
    model = model_of(settings["shapes"])
    if is_old:  # it keeps this table
        angles = torch.rand(16, 8)
        model.register_buffer("freqs_cis", torch.polar(torch.ones_like(angles), angles))
    optimizers = optimizers_of(model, settings["lr"])
    schedulers = LRSchedulersContainer(optimizers, lambda n: 1 / (1 + n))
    loader = dataloader.ParallelAwareDataloader(Numbers(), 0, 1, batch_size=1)
    progress = Progress(["step"] if is_old else ["step", "ntokens_seen"])
    checkpoints = manager(
        folder, settings["excluded"], dataloader=loader, model_parts=[model],
        optimizers=optimizers, lr_schedulers=schedulers, states={"train_state": progress},
    )  # fmt: skip
    if what == "save":
        for _ in range(3):
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            optimizers.step()
            schedulers.step()
        progress.values = dict.fromkeys(progress.values, 3)
        if not is_old:
            progress.values["ntokens_seen"] = settings["tokens"]
        checkpoints.save(3, True)
    else:
        assert checkpoints.load()
    (torch_optimizer,) = optimizers
    moments = {
        f"{field}.{name}": value
        for name, parameter in model.named_parameters()
        for field, value in torch_optimizer.state[parameter].items()
    }
    (group,) = torch_optimizer.param_groups
    torch.save(dict(model.named_parameters()) | moments, settings["out"])
    schedule = schedulers.schedulers[0]
    report = {**progress.values, "updates": schedule.last_epoch, "lr": group["lr"]}
    schedulers.step()  # goes on
    report |= {"next": group["lr"], "decay": group["weight_decay"]}
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], json.loads(Path(sys.argv[3]).read_text()))
