"""`train --dry-run` describes a start, raises its errors and writes nothing."""

import re
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxforge.commands import init, train
from jaxforge.config import load_config
from jaxforge.errors import UserError
from jaxforge.model.transformer import build_model
from jaxforge.parallel.device_memory import bytes_per_device, gigabytes
from jaxforge.parallel.mesh import abstract_mesh
from jaxforge.program import Program
from jaxforge.step.execution import executions
from jaxforge.step.memory import step_memory
from jaxforge.tools.plan import dry_run_memory
from jaxforge.tools.plan.checks import checkpoint_bytes
from jaxforge.tools.plan.dry_run_memory import estimate_fit, with_batch_size
from tests.shipped_configs import CONFIGS

DEBUG = "configs/debug.toml"
DEBUG_FILE = Path(__file__).parents[3] / DEBUG


@pytest.fixture
def dry(capsys, tmp_path, request, monkeypatch):
    """Return a function that runs a dry run in an empty directory and parses its output."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")  # restored afterwards; the command sets it
    root = request.config.rootpath
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def of(path, *arguments):
        assert train.main(["--config", str(root / path), "--dry-run", *arguments]) == 0
        assert list((tmp_path / "here").iterdir()) == []
        blocks = re.findall(r"^(\S.*)\n((?:(?:  .*)?\n)+)", capsys.readouterr().out, re.M)
        return {title.partition(",")[0]: text for title, text in blocks}

    return of


def test_dry_run_describes_the_start_and_writes_nothing(dry):
    said = dry(DEBUG, "--train.max_steps=40")
    assert "train.max_steps = 40\n" in said["config"]
    assert "train.seed" not in said["config"]
    assert "40 updates" in said["schedule"]
    assert f"{jax.device_count()} device(s), mesh: " in said["machine"]
    assert "random tokens" in said["data"]
    assert "random" in said["warnings"]
    assert re.search(
        r"4 sequence\(s\) of a microbatch .* at most [\d,]+ fit", said["memory of a device"]
    )
    assert said["run"].endswith("here/runs/debug: a new run\n\n")


def test_dry_run_states_the_memory_of_replicas(dry):
    """One parameter in float32 with two moments takes 12 bytes."""
    said = dry(DEBUG, "--checkpoint.replica_interval=50")
    count = float(re.search(r"([\d.]+)K parameters", said["model"])[1])
    size = re.search(r"replicas: every 50 steps, 4 copies .* ([\d.]+) GB each", said["run"])[1]
    assert float(size) * 1e9 == pytest.approx(12e3 * count, rel=0.02)


def test_dry_run_opens_and_counts_data(dry, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(1000, dtype=np.uint16) % 256)
    shards = f"--data.dataset_path={tmp_path}"
    said = dry(DEBUG, shards, "--eval.enabled", f"--eval.dataset_path={tmp_path}",
               "--eval.interval=5", "--train.max_steps=2ep")  # fmt: skip
    assert f"training: {tmp_path}: 1,000 tokens in 1 file(s), 15 sequences" in said["data"]
    assert f"evaluation: {tmp_path}" in said["data"]
    assert "epochs of 15 sequences" in said["schedule"]
    assert "is also the training data" in said["warnings"]


def test_dry_run_counts_tokens_per_phase_and_epochs_per_dataset(dry, tmp_path):
    """Sequences of 16 tokens, 4 per update: 40 of the first phase, 60 of the second."""
    for name, count in {"web": 100, "code": 5}.items():
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "a.npy", np.arange(17 * count, dtype=np.uint16) % 256)
    (tmp_path / "mix.toml").write_text(
        f"[datasets]\nweb.path = '{tmp_path / 'web'}'\n"
        f"code = {{ path = '{tmp_path / 'code'}', max_epochs = 3 }}\n"
        "[[phases]]\ntokens = { web = 480, code = 160 }\n[[phases]]\nweights.web = 0\n"
    )
    mixture = [f"--data.mixture_file={tmp_path / 'mix.toml'}", "--train.seq_len=16",
               "--train.global_batch_size=4", "--train.grad_accum_steps=1"]  # fmt: skip
    said = dry(DEBUG, *mixture, "--devices=1", "--train.max_steps=10", "--data.order=grain")
    drawn = re.search(r"from step 0, tokens drawn: web (\d+) .*, code (\d+)", said["mixture"])
    web, code = (int(tokens) for tokens in drawn.groups())
    assert web + code == 640
    assert code <= 240
    assert (
        f"code: {code / 80:.4g} epochs, of at most 3 ({code // 16} sequences drawn, 5 there)"
        in (said["mixture"])
    )
    with pytest.raises(UserError, match="all datasets of the mixture reach max_epochs"):
        dry(DEBUG, *mixture, "--devices=1", "--train.max_steps=25")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data.dataset_path=nowhere"], r"data\.dataset_path: .*nowhere does not exist"),
        (["--distributed.tp=3"], r"distributed\.tp = 3 needs a multiple of 3 devices, not \d"),
        (["--devices=8", "--distributed.tp=3"], "needs a multiple of 3 devices, not 8"),
        (["--devices", "8", "--train.global_batch_size=12"], r"train\.global_batch_size = 12"),
        (["--plugins.callbacks=nowhere.Callback"], "nowhere"),
        (["--devices=many"], "--devices: expected a number, or a machine: topology 'many'"),
        (["--data.hf_dataset_name=x", "--data.tokenizer_path=byte", "--train.max_steps=1ep"],
         "--dry-run: the length of an epoch is unknown before a start tokenizes x"),
    ],
)  # fmt: skip
def test_dry_run_raises_errors_of_a_start(request, arguments, message):
    path = str(request.config.rootpath / DEBUG)
    with pytest.raises(UserError, match=message):
        train.main(["--config", path, "--dry-run", *arguments])


def test_devices_option_requires_dry_run(request):
    with pytest.raises(UserError, match="--devices 8 requires --dry-run"):
        train.main(["--config", str(request.config.rootpath / DEBUG), "--devices", "8"])


@pytest.mark.parametrize("name", ["70b_gpu_512", "8b_128k_gpu_16", "13b_tpu_v5p_128"])
def test_dry_run_of_cluster_configs_needs_no_cluster(dry, name):
    (path,) = (path for path in CONFIGS if path.stem == f"llama_{name}")
    devices = name.rpartition("_")[2]
    said = dry(path, "--devices", devices)
    assert said["machine"].startswith(f"  {devices} device(s)")
    assert all(f"  {kind}: " in said["memory of a device"] for kind in ("h100", "v5e", "v5p"))
    assert "data/tokens" in said["warnings"]
    assert "the step needs" not in said["warnings"]


def test_dry_run_warns_if_named_machine_is_small(dry, tmp_path):
    init.main(["--preset", "7b", "--output", str(tmp_path / "x.toml")])
    said = dry(tmp_path / "x.toml", "--devices", "h100:1x8")
    assert "h100" in said["memory of a device"]
    assert "v5e" not in said["memory of a device"]
    assert "the step needs" not in said["warnings"]
    more = dry(tmp_path / "x.toml", "--devices", "h100:1x8", "--train.grad_accum_steps=1")
    assert "h100 has 63.7 GB: not even one fits" in more["warnings"] or (
        "h100 has 63.7 GB: at most" in more["warnings"]
    )


@pytest.mark.parametrize(
    "setting",
    ["--train.opt_state_dtype=8bit --model.dim=1024", "--distributed.pp=2",
     *(pytest.param(setting, marks=pytest.mark.slow) for setting in (
         "--train.offload=optimizer", "--distributed.tp=2",
         "--model.num_experts=8 --distributed.ep=4"))],
)  # fmt: skip
def test_dry_run_supports_every_mesh_and_state(dry, setting):
    settings = ("--model.n_layers=4", "--model.max_seq_len=64", *setting.split())
    assert dry(DEBUG, "--devices", "8", *settings)["memory of a device"]


def test_average_is_part_of_the_state_and_of_checkpoints(dry):
    """The average has as many bytes as the parameters, which are float32 too."""
    settings = ("--devices=2", "--distributed.dp_shard=2", "--train.ema_decay=0.99")
    rows = dry(DEBUG, *settings)["memory of a device"]
    size = re.search(r"of the state, average of the parameters, decay 0.99, in float32: (.+ GB)",
                     rows)[1]  # fmt: skip
    with_average, without = (load_config(DEBUG_FILE, [f"--train.ema_decay={d}"]) for d in (0.99, 0))
    added = checkpoint_bytes(with_average) - checkpoint_bytes(without)
    assert added == sum(4 * leaf.size for leaf in leaves(with_average))
    state = state_of(with_average)
    parameters = bytes_per_device(state.params)
    assert size == gigabytes(parameters)
    assert bytes_per_device(state) - bytes_per_device(state_of(without)) == parameters


def leaves(config):
    return jax.tree.leaves(Program.without_devices(config).shapes.params)


def state_of(config):
    mesh = abstract_mesh(config, 2)
    return Program(config, mesh, model=build_model(config, "cpu")).abstract_state()


def test_most_rows_is_the_largest_batch_that_fits(request):
    config = load_config(request.config.rootpath / DEBUG)
    model, mesh = build_model(config, "gpu", "9.0"), abstract_mesh(config, 4)
    like, capacity = Program(config, mesh, model=model).abstract_state(), 50_000_000
    result = estimate_fit(config, model, like, mesh, capacity)
    state = bytes_per_device(like)

    def needs(rows):
        resized = with_batch_size(config, rows)
        variants = (option.applied_to(resized) for option in executions(config, mesh))
        return min(step_memory(variant, model, mesh, state).total for variant in variants)

    assert result.rows == 4
    assert result.most_rows > 4
    assert needs(result.most_rows) <= capacity < needs(result.most_rows + 1)
    assert estimate_fit(config, model, like, mesh, 1).most_rows == 0


def test_parse_devices_accepts_numbers_and_machines():
    assert dry_run_memory.parse_devices("") is None
    n, kinds = dry_run_memory.parse_devices("512")
    assert (n, len(kinds) > 3) == (512, True)
    n, (kind,) = dry_run_memory.parse_devices("v5e:4x4")
    assert (n, kind.platform) == (16, "tpu")
    n, (kind,) = dry_run_memory.parse_devices("cpu:4")
    assert (n, kind.platform) == (4, "cpu")
