"""Import of PyTorch runs whose optimizer skipped experts without tokens."""

import dataclasses
import functools
import math
import re
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.commands import train
from jaxforge.config.job import JobConfig
from jaxforge.config.reading.load import load_config
from jaxforge.config.resolution import ResolvedRun
from jaxforge.errors import UserError
from jaxforge.training.resolution import with_idle_experts
from tests import torch_names
from tests.conftest import tiny_config
from tests.helpers import cli, drawn, random_batches, setup, underway
from tests.torch_compat.gauged import restored
from tests.torch_compat.runs import assert_same, saved, values
from torch_compat.formats.dcp_reader import open_dcp
from torch_compat.formats.files import Directory

torch = pytest.importorskip("torch")

from torch.distributed import checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint import state_dict as torch_state  # noqa: E402

from tests.model import moe_torch  # noqa: E402
from tests.torch_compat.torch_job import cosine  # noqa: E402

SAVED, END = 10, 30
NEVER, SHAPE = 3, {"n_layers": 2, "dim": 32, "vocab_size": 64, "max_seq_len": 8, "n_heads": 2,
                   "n_kv_heads": 2, "ffn_hidden_dim": 40, "init_std": 0.3}  # fmt: skip
EXPERTS = {"num_experts": 8, "moe_top_k": 1, "moe_expert_dim": 16}
ROUTERS = {
    "softmax": {**EXPERTS, "feed_forward_pattern": ("dense", "experts"),
                "moe_router_z_loss_weight": 1e-3},
    "sigmoid": {**EXPERTS, "moe_router": "sigmoid_topk", "moe_sequence_aux_loss_weight": 0.5,
                "moe_top_k": 2, "moe_bias_update_rate": 0.01},
}  # fmt: skip


def config_of(router, tmp_path=Path(), **distributed):
    dp = math.prod(distributed.get(axis, 1) for axis in ("dp_shard", "ep"))
    return tiny_config(
        model={**SHAPE, **ROUTERS[router]},
        train={
            "batch_size": 4 // dp, "seq_len": 8, "max_steps": END, "grad_accum_steps": 2,
            "loss_norm": "microbatch",
        },
        optimizer={"lr": 1e-2, "weight_decay": 0.1},
        data={"order": "torch"},
        scheduler={"name": "cosine", "warmup_steps": 4, "min_lr_ratio": 0.1},
        distributed={"dp_shard": 1, **distributed},
    )  # fmt: skip


def module_of(tensors, buffers):
    """Return a module whose state dict has these names."""
    root = torch.nn.Module()
    for name, tensor in {**tensors, **buffers}.items():
        *path, last = name.split(".")
        location = root
        for part in path:
            if part not in location._modules:
                location.add_module(part, torch.nn.Module())
            location = location._modules[part]
        if name in tensors:
            location.register_parameter(last, torch.nn.Parameter(tensor))
        else:
            location.register_buffer(last, tensor)
    return root


class Run(NamedTuple):
    directory: Path
    losses: np.ndarray
    steps: dict[str, float]
    final: dict[str, np.ndarray]


@functools.cache
def batches_of(router):
    """Return the loss over all labels, as in KempnerForge's text runs."""
    batches = random_batches(config_of(router), END)
    return [{**b, "labels": np.roll(b["input_ids"], -1, axis=-1)} for b in batches]


def initial(config):
    """Return weights that make one expert always idle in the last layer, and others sometimes."""
    named = {k: np.array(v) for k, v in torch_names.to_torch(drawn(config), config.model).items()}
    named["token_embedding.embedding.weight"][:, 0] += 4
    last = f"layers.{config.model.n_layers - 1}.mlp.router.gate.weight"
    named[last][NEVER, 0] = -30
    return {name: torch.tensor(array) for name, array in named.items()}


def begin(router):
    """Return a module with initial weights, its optimizer and its schedule."""
    config = config_of(router)
    retained = {
        f"layers.{i}.mlp.router.expert_ema": torch.full((8,), 1 / 8)
        for i in range(2)
        if router == "sigmoid"
    }
    module = module_of(initial(config), retained)
    training = moe_torch.Training(
        config, dict(module.named_parameters()), dict(module.named_buffers()), skips_idle=True
    )
    return module, training, torch.optim.lr_scheduler.LambdaLR(training.optimizer, cosine(4, END))


def update(training, schedule, batch):
    loss, *_ = training.update(*(torch.from_numpy(batch[k]) for k in ("input_ids", "labels")))
    schedule.step()
    return loss


def state_of(module, training):
    return {
        "model": torch_state.get_model_state_dict(module),
        "optimizer": torch_state.get_optimizer_state_dict(module, training.optimizer),
    }


def steps_of(module, training):
    state = training.optimizer.state
    return {n: float(state[p]["step"]) if p in state else 0.0 for n, p in module.named_parameters()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Run 30 updates of torch.optim.AdamW with a router, with a checkpoint after the tenth."""

    @functools.cache
    def of(router):
        directory = tmp_path_factory.mktemp(router)
        module, training, schedule = begin(router)
        losses = []
        for n, batch in enumerate(batches_of(router), 1):
            losses.append(update(training, schedule, batch))
            if n == SAVED:
                location = {"step": n, "tokens_seen": n * 64, "scheduler": schedule.state_dict()}
                state = state_of(module, training)
                dcp.save(state, checkpoint_id=directory / f"step_{n}", no_dist=True)
                torch.save(location, directory / f"step_{n}" / "train_state.pt")
        (directory / "run.toml").write_text(config_of(router).to_toml())
        final = {name: p.detach().numpy() for name, p in module.named_parameters()}
        return Run(directory, np.array(losses), steps_of(module, training), final)

    return of


@pytest.fixture
def torchs(runs):
    return runs("softmax")


@pytest.mark.parametrize("router", ROUTERS)
def test_checkpoint_has_counts_per_expert(runs, router):
    """Other tests rely on this: some experts are sometimes idle, and one always."""
    torchs = runs(router)
    saved = open_dcp(Directory(torchs.directory / f"step_{SAVED}")).tensors
    counts = {key: float(t.all()) for key, t in saved.items() if key.endswith(".step")}
    assert len(set(counts.values())) > 3
    never = f"optimizer.state.layers.1.mlp.experts.{NEVER}.up_proj.weight.step"
    assert never not in counts
    assert torchs.steps[f"layers.1.mlp.experts.{NEVER}.up_proj.weight"] == 0


def imported(torchs, tmp_path, *options):
    config = torchs.directory / "run.toml"
    directory = tmp_path / "run"
    assert (
        cli(
            [
                "convert",
                "--to=jaxforge",
                str(torchs.directory),
                str(directory),
                f"--config={config}",
                *options,
            ]
        )
        == 0
    )
    return directory


@pytest.mark.parametrize(
    ("router", "mesh"),
    [
        ("softmax", {}),
        pytest.param("sigmoid", {"dp_shard": 2, "ep": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_continued_run_follows_torch(runs, tmp_path, router, mesh):
    torchs = runs(router)
    directory = imported(torchs, tmp_path)
    config = load_config(directory / "config.toml")
    assert config.optimizer.skip_idle_experts
    dp = math.prod(mesh.values())
    distributed = config.distributed.model_copy(update=mesh)
    train = config.train.model_copy(update={"batch_size": 4 // dp})
    native = setup(config.model_copy(update={"distributed": distributed, "train": train}))
    state = restored(native, directory, SAVED)
    state, metrics = native.run(state, batches_of(router)[SAVED:])
    np.testing.assert_allclose(metrics["loss"], torchs.losses[SAVED:], rtol=1e-5)
    counts = torch_names.to_torch(state.opt_state[1].expert_updates, config.model)
    experts = {name: n for name, n in torchs.steps.items() if ".experts." in name}
    assert {name: int(n) for name, n in counts.items()} == experts
    assert int(state.opt_state[1].updates) == END
    for name, result in torch_names.to_torch(state.params, config.model).items():
        np.testing.assert_allclose(result, torchs.final[name], atol=2e-4, err_msg=name)


@pytest.mark.parametrize("router", ROUTERS)
def test_import_and_export_preserve_counts(runs, tmp_path, capsys, router):
    torchs = runs(router)
    directory = imported(torchs, tmp_path)
    assert "optimizer.skip_idle_experts is set to true" in " ".join(capsys.readouterr().err.split())
    assert cli(["convert", str(directory), str(tmp_path / "back"), "--to=dcp"]) == 0
    theirs, native = (
        open_dcp(Directory(at / f"step_{SAVED}")).tensors
        for at in (torchs.directory, tmp_path / "back")
    )
    for key, tensor in theirs.items():
        np.testing.assert_array_equal(native[key].all(), tensor.all(), err_msg=key)
    for key in native.keys() - theirs.keys():  # PyTorch requires them
        assert ".experts." in key
        assert not native[key].all().any()
    config = f"--config={torchs.directory / 'run.toml'}"
    for path in (directory, tmp_path / "back"):
        assert cli(["verify", str(torchs.directory), str(path), config]) == 0
    again = tmp_path / "again"
    assert cli(["convert", "--to=jaxforge", str(tmp_path / "back"), str(again), config]) == 0
    assert_same(values(again), values(directory))


@pytest.mark.parametrize("router", ROUTERS)
def test_torch_resumes_export_with_counts(runs, tmp_path, router):
    torchs = runs(router)
    directory = imported(torchs, tmp_path)
    assert cli(["convert", str(directory), str(tmp_path / "back"), "--to=dcp"]) == 0
    module, training, schedule = begin(router)
    state = state_of(module, training)
    dcp.load(state, checkpoint_id=tmp_path / "back" / f"step_{SAVED}", no_dist=True)
    torch_state.set_model_state_dict(module, state["model"])
    torch_state.set_optimizer_state_dict(module, training.optimizer, state["optimizer"])
    location = torch.load(tmp_path / "back/latest/train_state.pt", weights_only=False)
    schedule.load_state_dict(location["scheduler"])
    training.step = SAVED
    losses = [update(training, schedule, batch) for batch in batches_of(router)[SAVED:]]
    np.testing.assert_allclose(losses, torchs.losses[SAVED:], rtol=1e-6)
    assert steps_of(module, training) == torchs.steps


def test_config_without_skipping_raises(torchs, tmp_path):
    with pytest.raises(
        UserError, match=r"experts\.\d.* fewer updates .*skip_idle_experts is false"
    ):
        imported(torchs, tmp_path, "--optimizer.skip_idle_experts=false")


def test_different_counts_of_packed_experts_raise(torchs, tmp_path):
    directory = imported(torchs, tmp_path)
    options = ["--to=dcp", "--dialect=kempnerforge-packed"]
    with pytest.raises(UserError, match=r"_w holds several experts"):
        cli(["convert", str(directory), str(tmp_path / "packed"), *options])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["schedule_free_adamw", "lion", "muon"])
def test_other_optimizers_roundtrip_with_counts(tmp_path, name):
    """Schedule-free AdamW has a sum of weights per parameter; Lion and Muon have no counts."""
    sections = config_of("softmax").model_dump(mode="json")
    sections["optimizer"] |= {"name": name, "skip_idle_experts": True}
    sections["scheduler"] |= {"name": "none"}
    config = JobConfig.model_validate(sections)
    native, rng = setup(config), np.random.default_rng(0)
    state = underway(native, SAVED)
    clip, fields, *remaining = state.opt_state
    item = rng.integers(0, 11, (1, 8), np.int32)
    counts = jax.tree.map(lambda _: item, fields.expert_updates)
    of_experts = {"expert_updates": counts}
    if name.startswith("schedule"):
        weight = np.float32(config.optimizer.lr * (1 - config.optimizer.betas[0]))
        of_experts["expert_weight_sum"] = jax.tree.map(lambda n: n * weight, counts)
    opt_state = clip, fields._replace(**jax.tree.map(jnp.asarray, of_experts)), *remaining
    path = saved(tmp_path / "a", native, dataclasses.replace(state, opt_state=opt_state), SAVED)
    assert cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"]) == 0
    options = [f"--config={path}", "--fill-optimizer"]  # for parameters that Muon leaves to AdamW
    assert (
        cli(["convert", "--to=jaxforge", str(tmp_path / "dcp"), str(tmp_path / "b"), *options]) == 0
    )
    expected, result = values(tmp_path / "a"), values(tmp_path / "b")
    if "expert_weight_sum" not in of_experts:
        expected |= {key: 0 * n + SAVED for key, n in expected.items() if "expert_updates" in key}
    assert_same(result, expected)


UP = r"layers\.1\.mlp\.experts\.\d\.up_proj\.weight"
DAMAGE = {
    "no whole number": ({"step": 2.5}, r"step of the optimizer is not a count \(2\.5"),
    "another than that of its expert": (
        {"step": 1.0},
        r"for one expert.*experts\.\d\.up_proj\.weight: 1\.",
    ),
    "more than the run made": ({"step": 11.0}, r"or more than the run made \(10\)"),
    "gone with the moments": (None, r"exp_avg of 1 parameters is missing \(layers\.1.*up_proj"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_impossible_counts_raise(torchs, tmp_path, damage):
    tensors = open_dcp(Directory(torchs.directory / f"step_{SAVED}")).tensors
    state = {key: torch.tensor(tensor.all()) for key, tensor in tensors.items()}
    steps = {key: float(t) for key, t in state.items() if re.search(f"{UP}.step", key)}
    parameter = max(steps, key=lambda key: steps[key]).removesuffix(".step")
    changed, message = DAMAGE[damage]
    if changed:
        state[f"{parameter}.step"] = torch.tensor(changed["step"])
    else:
        state = {key: t for key, t in state.items() if not key.startswith(parameter)}
    dcp.save(state, checkpoint_id=tmp_path / "odd" / f"step_{SAVED}", no_dist=True)
    config = f"--config={torchs.directory / 'run.toml'}"
    with pytest.raises(UserError, match=message):
        cli(["convert", "--to=jaxforge", str(tmp_path / "odd"), str(tmp_path / "run"), config])


def test_direct_start_skips_like_checkpoint(torchs, tmp_path):
    """A run starts from PyTorch's checkpoint, from its import, and from its own checkpoint."""
    config = load_config(torchs.directory / "run.toml")

    def started(**checkpoint):
        section = config.checkpoint.with_values(checkpoint)
        run = with_idle_experts(ResolvedRun(config.with_values({"checkpoint": section})))
        return run.config.optimizer.skip_idle_experts

    new, foreign = str(tmp_path / "new"), str(torchs.directory)
    assert started(dir=new) is None
    assert started(dir=new, load_path=foreign) is True
    assert started(dir=new, load_path=foreign, exclude_from_loading=("optimizer",)) is None
    directory = str(imported(torchs, tmp_path))
    assert started(dir=new, load_path=directory) is True
    assert started(dir=directory) is True


@pytest.mark.slow
def test_dry_run_shows_skipping_of_checkpoint(torchs, tmp_path, capsys):
    command = ["--config", str(torchs.directory / "run.toml"), "--dry-run", "--devices=1"]
    key, new = "optimizer.skip_idle_experts", f"--checkpoint.dir={tmp_path / 'new'}"
    directory = imported(torchs, tmp_path)
    starts = {
        new: False,
        f"--checkpoint.load_path={torchs.directory}": True,
        f"--checkpoint.load_path={directory}": True,
        f"--checkpoint.dir={directory}": True,
    }
    for option, skips in starts.items():
        capsys.readouterr()
        assert train.main([*command, new, option]) == 0
        out = capsys.readouterr().out
        assert (f"  {key} = true\n" in out) is skips, out
        assert (f"  {key} = true: as in " in out) is skips
    assert train.main([*command, new, "--checkpoint.load_path=gs://bucket/run"]) == 0
    assert f"{key}: a start takes it from gs://bucket/run" in capsys.readouterr().out


def test_restore_without_option_names_option(torchs, tmp_path):
    directory = imported(torchs, tmp_path)
    native = setup(config_of("softmax"))
    with pytest.raises(
        UserError, match=r"another optimizer than optimizer\.skip_idle_experts asks"
    ):
        restored(native, directory, SAVED)
