"""Checkpoints of MindSpeed-LLM's FSDP2 trainer: an engine around a Hugging Face model."""

import numpy as np
import pytest

from jaxforge.errors import UserError
from tests.helpers import cli
from tests.torch_compat.runs import assert_same, trained, values
from torch_compat.checkpoint import checkpoints, orbax_store
from torch_compat.checkpoint.train_state import read_train_state
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
transformers = pytest.importorskip("transformers")

state_dict = pytest.importorskip("torch.distributed.checkpoint.state_dict")
stateful = pytest.importorskip("torch.distributed.checkpoint.stateful")

GROUP = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def extra_state(step, tokens, logged):
    """Return the trainer's state of each rank."""
    return {
        "global_step": step,
        "_global_step_last_logged": 0,
        "_last_logged_step": logged,
        "lr_scheduler": {"base_lrs": [1e-3], "last_epoch": step, "lr_lambdas": [{}]},
        "train_metric": {"consume_tokens": tokens, "last_iteration": logged, "last_mfu": 0.0},
        "torch_rng_state": torch.get_rng_state(),
    }


def written(run, directory, step, **location):
    """Write a checkpoint like `get_model_state_dict` and MindSpeed's manager."""
    cli(["convert", str(run), str(run / "hf"), "--to=dcp", "--dialect=hf-llama"])
    tensors = open_dcp(Directory(run / "hf" / "step_2")).tensors
    model, state = {}, {}
    for key, tensor in tensors.items():
        value = torch.tensor(tensor.all())
        if key.startswith("optimizer.state."):
            owner, _, field = key.removeprefix("optimizer.state.").rpartition(".")
            state.setdefault(f"model.{owner}", {})[field] = value
        else:
            model["model." + key.removeprefix("model.")] = value
    optimizer = {"state": state, "param_groups": [{**GROUP, "params": list(state)}]}
    path = directory / "checkpoints" / f"global_step_{step}"
    both = {"model": model, "optimizer": optimizer}
    dcp.save(both, checkpoint_id=str(path), no_dist=True)
    (path / "extra_state").mkdir()
    for rank in range(2):
        torch.save(
            extra_state(step, **location), path / "extra_state" / f"extra_state_rank_{rank}.pt"
        )
    return path


def test_import_finds_newest_global_step(tmp_path):
    config = trained(tmp_path / "run")
    path = written(tmp_path / "run", tmp_path / "theirs", 2, tokens=512, logged=2)
    (path.parent / "global_step_1").mkdir()
    assert "model.model.model.layers.0.mlp.up_proj.weight" in open_dcp(Directory(path)).tensors
    assert checkpoints.find(tmp_path / "theirs").directory.name == "global_step_2"
    command = [
        "convert",
        "--to=jaxforge",
        str(tmp_path / "theirs"),
        str(tmp_path / "ours"),
        f"--config={config}",
    ]
    assert cli(command) == 0
    assert_same(values(tmp_path / "run"), values(tmp_path / "ours"))
    location = orbax_store.open_orbax(tmp_path / "ours")[0].progress
    assert (location.step, location.samples, location.tokens) == (2, 16, 512)


def test_tokens_of_another_step_are_ignored(tmp_path):
    """MindSpeed adds up tokens at log lines, which may be at other steps than the checkpoint."""
    for step, logged, tokens in ((10, 10, 2560), (25, 20, None)):
        path = tmp_path / str(step)
        state = {"norm.weight": torch.ones(4)}
        dcp.save(state, checkpoint_id=str(path), no_dist=True)
        (path / "extra_state").mkdir()
        location = extra_state(step, 256 * logged, logged)
        torch.save(location, path / "extra_state" / "extra_state_rank_0.pt")
        result = read_train_state(open_dcp(Directory(path)))
        assert (result.step, result.updates, result.tokens) == (step, step, tokens)


def test_newest_step_is_chosen_numerically(tmp_path):
    for step in (9, 10, 100):
        dcp.save(
            {"x": torch.ones(1)}, checkpoint_id=str(tmp_path / f"global_step_{step}"), no_dist=True
        )
    assert checkpoints.find(tmp_path).directory.name == "global_step_100"
    assert np.array_equal(checkpoints.find(tmp_path).raw()["x"].all(), [1])


class Engine(torch.nn.Module):
    """Engine that MindSpeed-LLM wraps a model of transformers in, without sharding."""

    def __init__(self, model):
        super().__init__()
        self.model = model


class ModelState(stateful.Stateful):
    """Wrapper of its `checkpoint_manager.py`."""

    def __init__(self, engine):
        self.engine = engine

    def state_dict(self):
        return state_dict.get_model_state_dict(self.engine)

    def load_state_dict(self, loaded):
        state_dict.set_model_state_dict(self.engine, loaded)


class OptimizerState(stateful.Stateful):
    """Wrapper of its `checkpoint_manager.py`."""

    def __init__(self, engine, optimizer):
        self.engine, self.optimizer = engine, optimizer

    def state_dict(self):
        return state_dict.get_optimizer_state_dict(self.engine, self.optimizer)

    def load_state_dict(self, loaded):
        state_dict.set_optimizer_state_dict(self.engine, self.optimizer, loaded)


class Job:
    """A job of its trainer: matrices decay, vectors do not, and a linear warm-up of ten steps."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        config = transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
            initializer_range=0.1, tie_word_embeddings=False,
        )  # fmt: skip
        self.engine = Engine(transformers.LlamaForCausalLM(config))
        params = list(self.engine.parameters())
        groups = [
            {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim == 1], "weight_decay": 0.0},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, step / 10)
        )
        self.global_step = 0

    def state(self):
        return {
            "model": ModelState(self.engine),
            "optimizer": OptimizerState(self.engine, self.optimizer),
        }

    def train(self, steps):
        losses = []
        for _ in range(steps):
            loss = self.engine.model(input_ids=TOKENS, labels=TOKENS).loss
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()
            self.global_step += 1
            losses.append(loss.item())
        return losses

    def save(self, path):
        dcp.save(self.state(), checkpoint_id=str(path), no_dist=True)
        (path / "extra_state").mkdir()
        extra = extra_state(self.global_step, 256, self.global_step)
        extra["lr_scheduler"] = self.schedule.state_dict()
        torch.save(extra, path / "extra_state" / "extra_state_rank_0.pt")

    def load(self, path, rank):
        """Take the steps of `CheckpointManager.load` and of `Trainer.train` after it."""
        state = self.state()
        dcp.load(state, storage_reader=dcp.FileSystemReader(str(path)), no_dist=True)
        extra = torch.load(path / "extra_state" / f"extra_state_rank_{rank}.pt", weights_only=False)
        self.global_step = extra["global_step"]
        self.schedule.load_state_dict(extra["lr_scheduler"])
        torch.set_rng_state(extra["torch_rng_state"])
        return extra


def sorted_if_list(value):
    return sorted(value) if isinstance(value, list) else value


TOKENS = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
CONFIG = """
[model]
dim = 32
n_layers = 2
n_heads = 4
n_kv_heads = 2
ffn_hidden_dim = 48
vocab_size = 64
max_seq_len = 32
norm_eps = 1e-6
[train]
batch_size = 8
seq_len = 16
[optimizer]
lr = 1e-2
[scheduler]
name = "constant"
warmup_steps = 10
"""


@pytest.fixture
def exported(tmp_path):
    """A checkpoint of a job, the losses that the job has then, and the export of its import."""
    job = Job(seed=0)
    job.train(3)
    job.save(tmp_path / "theirs" / "checkpoints" / "global_step_3")
    (tmp_path / "run.toml").write_text(CONFIG)
    source, run, back = (str(tmp_path / name) for name in ("theirs", "run", "back"))
    assert cli(["convert", "--to=jaxforge", source, run, f"--config={tmp_path / 'run.toml'}"]) == 0
    assert cli(["convert", run, back, "--to=dcp", "--dialect=mindspeed", "--ranks=2"]) == 0
    return job.train(3), tmp_path / "theirs", tmp_path / "back"


def test_export_is_resumed_with_the_same_losses_by_every_rank(exported):
    losses, theirs, back = exported
    (path,) = (back / "checkpoints").iterdir()
    assert path.name == "global_step_3"
    for rank in range(2):
        job = Job(seed=5)
        job.train(1)
        extra = job.load(path, rank)
        assert job.global_step == extra["_global_step_last_logged"] == 3
        assert job.schedule.get_last_lr() == pytest.approx([3e-3, 3e-3])
        assert job.train(3) == pytest.approx(losses, rel=1e-6)
    first, other = (
        open_dcp(Directory(each / "checkpoints" / "global_step_3")) for each in (theirs, back)
    )
    assert_same(*({k: t.all() for k, t in each.tensors.items()} for each in (first, other)))
    for group in range(2):
        for key in ("params", "weight_decay", "betas", "eps"):
            name = f"optimizer.param_groups.{group}.{key}"
            assert sorted_if_list(first.objects(name)) == sorted_if_list(other.objects(name))


def test_export_is_found_and_imported_again(exported, tmp_path):
    _, theirs, back = exported
    assert read_train_state(open_dcp(checkpoints.find(back).directory)).tokens == 256
    command = ["verify", str(theirs), str(back), f"--config={tmp_path / 'run.toml'}"]
    assert cli(command) == 0


def test_weights_alone_have_no_state_of_ranks(exported, tmp_path):
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "weights"), "--to=dcp"]
    assert cli([*command, "--dialect=mindspeed", "--weights-only"]) == 0
    (path,) = (tmp_path / "weights" / "checkpoints").iterdir()
    keys = open_dcp(Directory(path)).tensors
    assert {key.split(".")[0] for key in keys} == {"model"}  # by which it decides what to load
    assert not (path / "extra_state").exists()


@pytest.mark.parametrize(
    ("sections", "options", "message"),
    [
        ({"model": {"num_experts": 4}}, [], "its own layouts for experts"),
        ({}, ["--layout=flat"], "loads nested optimizer state"),
        ({}, ["--stages=2"], "has no checkpoints per pipeline stage"),
    ],
)
def test_export_without_counterpart_in_mindspeed_raises(sections, options, message, tmp_path):
    trained(tmp_path / "run", **sections)
    command = ["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--to=dcp"]
    with pytest.raises(UserError, match=message):
        cli([*command, "--dialect=mindspeed", *options])
