"""Commands import, export, inspect and verify, also if killed, resumed or on a full disk."""

import dataclasses
import itertools
import json
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.cli.running import run_main
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.optim.eight_bit import Packed, unpack
from jaxforge.state.progress import Progress
from tests.conftest import tiny_config
from tests.helpers import change_stored_config, cli, convert_to_run, random_batches, setup, underway
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT, environment
from tests.torch_compat.runs import assert_same, saved, trained, values
from torch_compat.checkpoint import checkpoints, inspection, orbax_store
from torch_compat.formats import ocdbt, safetensors
from torch_compat.formats.dcp_reader import METADATA, open_dcp
from torch_compat.formats.files import Directory


def checksums_of(run):
    """Return checksums of the arrays in the newest checkpoint of a run."""
    (path,) = run.glob("checkpoints/step_*/checksums/metadata")
    return json.loads(path.read_text())


@pytest.mark.parametrize("name", ["curve_dense_1rank", "curve_dense_fsdp2"])
def test_golden_run_roundtrip_is_bit_exact(golden, tmp_path, name, capsys):
    source = golden(name)
    settings = [f"--config={source / 'config.toml'}", "--data.shuffle=false"]
    assert cli(["convert", "--to=jaxforge", str(source), str(tmp_path / "run"), *settings]) == 0
    checkpoint, config = orbax_store.open_orbax(tmp_path / "run")
    assert (checkpoint.progress.step, checkpoint.progress.samples, checkpoint.progress.tokens) == (
        10,
        80,
        10240,
    )
    assert int(checkpoint.scalars["updates"]) == 10
    assert config.optimizer.lr == 3e-3
    ranks = 1 if name.endswith("1rank") else 2
    exporting = ["convert", str(tmp_path / "run"), str(tmp_path / "back"), "--to=dcp"]
    assert cli([*exporting, f"--ranks={ranks}"]) == 0
    assert cli(["verify", str(source), str(tmp_path / "back")]) == 0
    assert cli(["verify", str(source), str(tmp_path / "run"), *settings]) == 0
    assert "the same" in capsys.readouterr().out
    assert (tmp_path / "back" / "latest").readlink() == Path("step_10")
    metadata = json.loads((tmp_path / "back" / "latest" / "metadata.json").read_text())
    assert metadata == json.loads((source / "checkpoints/step_10/metadata.json").read_text())


@pytest.mark.parametrize("name", ["adamw", "lion", "muon", "schedule_free_adamw"])
@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_all_optimizers_roundtrip_through_torch(tmp_path, name, layout):
    scheduler = {"name": "none"} if name.startswith("schedule_free") else {}
    config = trained(tmp_path / "a", optimizer={"name": name}, scheduler=scheduler)
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp", f"--layout={layout}"])
    convert_to_run(tmp_path / "dcp", tmp_path / "b", config)
    assert_same(values(tmp_path / "a"), values(tmp_path / "b"))


def test_eight_bit_moments_are_exported_as_float32(tmp_path):
    retained = {"opt_state_dtype": "8bit", "param_dtype": "bfloat16", "param_rounding": "kahan"}
    native = setup(tiny_config(model={"n_layers": 1}, train=retained))
    rng = np.random.default_rng(0)
    narrow = lambda a: rng.integers(0, 127, a.shape).astype(a.dtype) if a.itemsize == 1 else a  # noqa: E731
    state = underway(native, 0)
    moments = jax.tree.map(lambda a: jnp.asarray(narrow(a)), state.opt_state)
    config = saved(tmp_path / "a", native, dataclasses.replace(state, opt_state=moments), steps=0)
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    name, (_, adam, *_) = "layers.0.mlp.up_proj.weight", moments
    result = open_dcp(Directory(tmp_path / "dcp" / "step_0")).tensors
    for field, theirs in {"mu": "exp_avg", "nu": "exp_avg_sq"}.items():
        q, scales = (getattr(adam, key)["layers"]["mlp"]["up_proj"]["weight"][0]
                     for key in (field, f"{field}_scales"))  # fmt: skip
        expected, tensor = unpack(Packed(q, scales)), result[f"optimizer.state.{name}.{theirs}"]
        np.testing.assert_allclose(tensor.all(), expected, rtol=1e-6, atol=1e-37)  # subnormal: 0
        rows = slice(17, 70), slice(3, 9)
        np.testing.assert_array_equal(tensor.read(rows), tensor.all()[rows])
    assert cli(["verify", str(tmp_path / "a"), str(tmp_path / "dcp"), f"--config={config}"]) == 0
    with pytest.raises(UserError, match=r"train.opt_state_dtype = .8bit.*--weights-only"):
        convert_to_run(tmp_path / "dcp", tmp_path / "b", config)
    again = ["convert", str(tmp_path / "a"), str(tmp_path / "b"), "--to=jaxforge"]
    with pytest.raises(UserError, match=r"train.opt_state_dtype = .8bit"):
        cli(again)
    assert cli([*again, "--train.opt_state_dtype=float32"]) == 0
    assert_same(values(tmp_path / "b"), values(tmp_path / "a"))


@pytest.mark.parametrize("dialect", ["kempnerforge", "torchtitan", "torchtitan-2025", "hf-llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_all_dialects_roundtrip_bit_exactly(tmp_path, dialect, dtype):
    config = trained(tmp_path / "a", train={"param_dtype": dtype, "opt_state_dtype": dtype})
    arguments = ["--to=dcp", f"--dialect={dialect}"]
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), *arguments])
    reference = checkpoints.find(tmp_path / "dcp")
    assert reference.dcp().tensors  # complete checkpoint
    convert_to_run(tmp_path / "dcp", tmp_path / "b", config)
    assert_same(values(tmp_path / "a"), values(tmp_path / "b"))
    step = orbax_store.open_orbax(tmp_path / "b")[0].progress
    assert (step.step, step.tokens) == (2, 512)


def test_verify_names_differences(tmp_path, capsys):
    config = trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    tensor = open_dcp(Directory(tmp_path / "dcp" / "step_2")).tensors["model.norm.weight"]
    location = tensor.all().tobytes()
    file = tmp_path / "dcp" / "step_2" / "__0_0.distcp"
    data = file.read_bytes()
    assert data.count(location) == 1
    changed = np.frombuffer(location, np.float32).copy()
    changed[3] += 0.5
    sums = [zlib.crc32(values).to_bytes(4, "little") for values in (location, changed.tobytes())]
    file.write_bytes(data.replace(location, changed.tobytes()).replace(*sums))
    capsys.readouterr()
    arguments = ["verify", str(tmp_path / "a"), str(tmp_path / "dcp"), "--json"]
    assert cli([*arguments, f"--config={config}"]) == 1
    result = json.loads(capsys.readouterr().out)["differences"]
    assert [(d["name"], d["what"], d["largest"]) for d in result] == [
        ("params.norm.weight", "values", pytest.approx(0.5))
    ]


def test_inspect_opens_checkpoint_once(tmp_path, monkeypatch):
    """Opening takes most of the time if there are many tensors."""
    trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "hf"), "--to=hf"])
    opened = []
    tensor_of = safetensors.lazy_tensor
    monkeypatch.setattr(
        safetensors, "lazy_tensor", lambda *args_: opened.append(args_[2]) or tensor_of(*args_)
    )
    report = inspection.inspect(checkpoints.find(tmp_path / "hf"))
    assert opened == list(report["tensors"])
    assert json.loads(json.dumps(report)) == report


def test_inspect_describes_contents(tmp_path, capsys):
    trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp", "--ranks=2"])
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "hf"), "--to=hf"])
    reports = {}
    for name in ("a", "dcp", "hf"):
        capsys.readouterr()
        assert cli(["inspect", str(tmp_path / name), "--json"]) == 0
        reports[name] = json.loads(capsys.readouterr().out)
        assert cli(["inspect", str(tmp_path / name)]) == 0
        *_, table = capsys.readouterr().out.partition("\n\n")
        rows = {row.split()[0]: row for row in table.splitlines()[1:]}
        assert rows.keys() == reports[name]["tensors"].keys()
        assert all(str(tensor["shape"]) in rows[key]
                   for key, tensor in reports[name]["tensors"].items())  # fmt: skip
    assert {r["parameters"] for r in reports.values()} == {reports["a"]["parameters"]}
    assert [reports[n]["dialect"] for n in reports] == ["jaxforge", "kempnerforge", "hf-llama"]
    assert reports["dcp"]["optimizer"] == "adamw"
    assert reports["dcp"]["place"] == {
        "step": 2, "tokens": 512, "updates": 2, "epoch": 0, "batches": 1, "ranks": 2,
    }  # fmt: skip
    described = reports["dcp"]["tensors"]["model.layers.1.attention.q_proj.weight"]
    assert described == {"dtype": "float32", "shape": [64, 64], "chunks": 1}


def test_dry_run_writes_nothing(tmp_path, capsys):
    config = trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    before = sorted(tmp_path.rglob("*"))
    arguments = [str(tmp_path / "dcp"), str(tmp_path / "b"), f"--config={config}"]
    assert cli(["convert", "--to=jaxforge", *arguments, "--dry-run"]) == 0
    assert "kempnerforge, step 2" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_exported_groups_decay_like_jaxforge(tmp_path):
    patterns = {"no_decay_patterns": ["token_embedding"], "decay_patterns": ["mlp_norm"]}
    trained(tmp_path / "run", optimizer=patterns)
    assert cli(["convert", str(tmp_path / "run"), str(tmp_path / "dcp"), "--to=dcp"]) == 0
    dcp = open_dcp(Directory(tmp_path / "dcp" / "latest"))
    decaying, still = (dcp.objects(f"optimizer.param_groups.{g}.params") for g in (0, 1))
    assert set(still) == {
        "token_embedding.embedding.weight", "norm.weight",
        "layers.0.attention_norm.weight", "layers.1.attention_norm.weight",
    }  # fmt: skip
    assert {"layers.0.mlp_norm.weight", "output_head.proj.weight"} < set(decaying)


@pytest.mark.parametrize("name", ["adamw", "muon", "schedule_free_adamw"])
def test_lr_patterns_and_frozen_parameters_roundtrip(tmp_path, name):
    optimizer = {"name": name, "lr_patterns": {"token_embedding": 0.1}, "freeze_patterns": ["head"]}
    config = trained(tmp_path / "a", optimizer=optimizer)
    assert cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"]) == 0
    dcp = open_dcp(Directory(tmp_path / "dcp" / "latest"))
    groups = range(3)
    rates = [dcp.objects(f"optimizer.param_groups.{g}.initial_lr") for g in groups]
    assert rates == pytest.approx([3e-3, 3e-3, 3e-4])
    members = [dcp.objects(f"optimizer.param_groups.{g}.params") for g in groups]
    assert members[2] == ["token_embedding.embedding.weight"]
    assert not [key for key in (*dcp.tensors, *dcp.objects, *itertools.chain(*members))
                if "output_head" in key and not key.startswith("model.")]  # fmt: skip
    arguments = [str(tmp_path / "dcp"), str(tmp_path / "b"), f"--config={config}"]
    assert cli(["convert", "--to=jaxforge", *arguments]) == 0
    assert_same(values(tmp_path / "a"), values(tmp_path / "b"))


def test_weights_only_import_starts_at_step_0(tmp_path):
    config = trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    arguments = [str(tmp_path / "dcp"), str(tmp_path / "b"), f"--config={config}"]
    cli(["convert", "--to=jaxforge", *arguments, "--weights-only", "--dtype=bfloat16"])
    checkpoint, _ = orbax_store.open_orbax(tmp_path / "b")
    assert checkpoint.moments is None
    assert checkpoint.progress.step == 0
    assert {t.dtype.name for t in checkpoint.params.values()} == {"bfloat16"}


def test_missing_optimizer_state_is_filled_on_request(tmp_path, capsys):
    config = trained(tmp_path / "a", optimizer={"name": "muon"})
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    result = open_dcp(Directory(tmp_path / "dcp" / "step_2"))
    without_inner_adam(tmp_path / "dcp" / "step_2")
    assert "optimizer.state.norm.weight.exp_avg" in result.tensors
    arguments = [str(tmp_path / "dcp"), str(tmp_path / "b"), f"--config={config}"]
    with pytest.raises(UserError, match=r"exp_avg of \d+ parameters is missing.*--fill-optimizer"):
        cli(["convert", "--to=jaxforge", *arguments])
    cli(["convert", "--to=jaxforge", *arguments, "--fill-optimizer"])
    assert "start from zero" in capsys.readouterr().err
    checkpoint, _ = orbax_store.open_orbax(tmp_path / "b")
    assert not checkpoint.moments["mu"]["norm.weight"].all().any()
    assert checkpoint.moments["momentum"]["layers.0.mlp.up_proj.weight"].all().any()


def without_inner_adam(directory):
    """Remove the moments that KempnerForge's Muon does not save."""
    import pickle

    pytest.importorskip("torch")
    path = directory / METADATA
    metadata = pickle.loads(path.read_bytes())
    for table in (metadata.state_dict_metadata, metadata.storage_data):
        for key in list(table):
            if str(getattr(key, "fqn", key)).endswith(("exp_avg", "exp_avg_sq")):
                del table[key]
    path.write_bytes(pickle.dumps(metadata))


@pytest.fixture(scope="module")
def run_and_export(tmp_path_factory):
    """Return a directory with a run `a`, its export `dcp` and another config."""
    directory = tmp_path_factory.mktemp("both")
    config = trained(directory / "a").read_text()
    cli(["convert", str(directory / "a"), str(directory / "dcp"), "--to=dcp"])
    other = config.replace("n_heads = 4", "n_heads = 2").replace("n_kv_heads = 2", "n_kv_heads = 1")
    (directory / "other.toml").write_text(other)
    return directory


IMPORT = ["convert", "--to=jaxforge", "dcp", "b"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["convert", "--to=jaxforge", "nowhere", "b"], "no checkpoint there"),
        ([*IMPORT], "give the run's config, --config FILE"),
        ([*IMPORT, "--config=a/config.toml", "--model.n_layers=3"],
         "missing: layers.2"),
        ([*IMPORT, "--config=a/config.toml", "--model.n_layers=1"],
         "left over: layers.1"),
        ([*IMPORT, "--config=a/config.toml", "--optimizer.name=lion",
          "--from-dialect=torchtitan"], "missing: "),
        ([*IMPORT, "--config=a/config.toml", "--model.vocab_size=250"],
         "--resize-vocab"),
        ([*IMPORT, "--config=a/config.toml", "--optimizer.name=lion"],
         "has exp_avg, exp_avg_sq; that of .*lion.* has exp_avg:"),
        ([*IMPORT, "--config=a/config.toml", "--optimizer.name=muon"],
         "has momentum_buffer"),
        ([*IMPORT, "--config=a/config.toml", "--model.num_experts=4"],
         "missing: layers.0.mlp.experts.0.down_proj"),
        (["convert", "a", "s3:/bucket/b", "--to=dcp"], "write s3://bucket/b"),
        (["convert", "a", "dcp", "--to=dcp"], "is there already"),
        (["convert", "a", "b", "--to=hf", "--dialect=torchtitan"], "torchtitan"),
        (["convert", "a", "b", "--to=hf", "--model.n_layers=1"],
         "does not match this config; .*\n  left over: layers.1"),
        (["convert", "a", "b", "--to=hf", "--model.n_layers=3"], "missing: layers.2"),
        (["convert", "a", "b", "--to=dcp", "--model.vocab_size=64"],
         r"token_embedding.embedding.weight is \[256, 64\], but \[64, 64\] in the model"),
        (["convert", "a", "b", "--to=hf", "--model.n_heads=2", "--model.n_kv_heads=1"],
         "model.n_heads is 2 and the weights were trained with 4"),
        (["convert", "a", "b", "--to=dcp", "--model.n_heads=8"], "model.n_heads is 8"),
        (["convert", "a", "b", "--to=hf", "--config=other.toml"], "model.n_heads is 2"),
        (["convert", "a", "b", "--to=dcp", "--optimizer.name=lion"],
         'its optimizer has mu, nu; optimizer.name = "lion" has mu'),
        (["convert", "a", "b", "--to=dcp", "--ranks=3"], "not a multiple of"),
        (["convert", "a", "b", "--to=dcp", "--ranks=3", "--dry-run"], "not a multiple of"),
        (["convert", "a", "b", "--to=dcp", "--train.batch_size=some"], "train.batch_size"),
        (["convert", "a", "b", "--to=dcp", "--train.batch_size=3"], "not a multiple of"),
    ],
)  # fmt: skip
def test_invalid_command_raises(run_and_export, monkeypatch, arguments, message):
    monkeypatch.chdir(run_and_export)
    with pytest.raises(UserError, match=message):
        cli(arguments)
    assert not Path("b").exists() or not list(Path("b").glob("step*"))


def test_other_optimizer_constants_are_noted(tmp_path, capsys):
    trained(tmp_path / "a")
    arguments = ["convert", str(tmp_path / "a"), str(tmp_path / "hf"), "--to=hf"]
    assert cli([*arguments, "--model.rope_theta=5e5", "--dry-run"]) == 0
    assert "model.rope_theta is 500000.0 and the weights were trained with 10000.0" in (
        capsys.readouterr().err.replace("\n", " ")
    )


def test_inspect_and_verify_import_no_plugins(tmp_path, capsys):
    trained(tmp_path / "run")
    stored = change_stored_config(tmp_path / "run", "plugins", modules=["gone.losses"])
    run, copy = str(tmp_path / "run"), str(tmp_path / "copy")
    assert cli(["inspect", run]) == 0
    shutil.copytree(run, copy)
    assert cli(["verify", run, copy]) == 0
    capsys.readouterr()
    export = ["convert", run, str(tmp_path / "hf"), "--to=hf"]
    assert run_main(lambda: cli([*export, "--trust-plugins"])) == 2
    assert capsys.readouterr().err == (
        f'error: {stored}: [plugins] modules: module "gone.losses" does not exist; is its '
        "directory in PYTHONPATH?\n"
    )
    assert cli(export) == 0  # the plugin is not needed
    stored.write_text("[1]")
    with pytest.raises(UserError, match="step_2 is damaged"):
        cli(["inspect", str(tmp_path / "run")])


def test_mistake_has_exit_code_2_and_no_traceback(tmp_path):
    done = compat("convert", "--to=jaxforge", tmp_path / "nothing", tmp_path / "b")
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "Traceback" not in done.stderr


BIG = {"dim": 256, "n_layers": 4, "n_heads": 4, "vocab_size": 4096, "max_seq_len": 64}


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """Export a run of 80 MB."""
    directory = tmp_path_factory.mktemp("big")
    config = trained(directory / "run", model=BIG)
    cli(["convert", str(directory / "run"), str(directory / "dcp"), "--to=dcp"])
    return directory, config


@pytest.mark.processes
def test_export_and_inspect_do_not_import_jax(big, tmp_path):
    """Importing JAX takes as long as copying a gigabyte."""
    run, dcp = str(big[0] / "run"), str(big[0] / "dcp")
    commands = [
        ["convert", run, str(tmp_path / "dcp"), "--to=dcp"],
        ["convert", run, str(tmp_path / "hf"), "--to=hf"],
        ["verify", run, str(tmp_path / "dcp")],
        ["inspect", dcp],
    ]
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from torch_compat.commands import convert, inspect, verify\n"
        "named = {'convert': convert, 'inspect': inspect, 'verify': verify}\n"
        f"assert not any(named[name].main(options) for name, *options in {commands})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)


SMALL_BLOCKS = "--max-memory=1MB"  # many units, so that a conversion can be stopped between them


@pytest.mark.processes
@pytest.mark.parametrize("command", ["import", "export"])
def test_killed_conversion_resumes(big, tmp_path, command, monkeypatch):
    from torch_compat.formats import dcp_writer

    directory, config = big
    if command == "import":
        arguments = [
            "convert",
            "--to=jaxforge",
            directory / "dcp",
            tmp_path / "b",
            f"--config={config}",
        ]
        destination = tmp_path / "b/checkpoints/step_2"
    else:
        arguments = [
            "convert",
            directory / "run",
            tmp_path / "b",
            "--to=hf",
            "--max-shard-size=2MB",
        ]
        destination = tmp_path / "b"
    marks = destination.with_name(f".{destination.name}.partial") / "marks"
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxforge", *map(str, arguments), SMALL_BLOCKS],
        cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while len(list(marks.glob("*.json"))) < 4 and process.poll() is None:
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not destination.exists()
    done_before = {path.name: path.stat().st_mtime_ns for path in marks.glob("*.json")}
    assert len(done_before) >= 4
    source = orbax_store if command == "import" else dcp_writer  # an unpatched rerun
    assert source is not None
    seen = []
    keep = shutil.rmtree

    def watching(path, *args, **kwargs):
        if Path(path).name == "marks" or Path(path).name.endswith(".partial"):
            result = Path(path) / "marks" if Path(path).name.endswith(".partial") else Path(path)
            seen.append({p.name: p.stat().st_mtime_ns for p in result.glob("*.json")})
        return keep(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watching)
    cli([*map(str, arguments), SMALL_BLOCKS])
    assert seen[0].items() >= done_before.items()  # done units keep their timestamps
    assert destination.exists()
    assert not marks.parent.exists()
    assert cli(["verify", str(tmp_path / "b"), str(directory / "run")]) == 0
    if command == "import":
        assert checksums_of(tmp_path / "b") == checksums_of(directory / "run")


@pytest.mark.processes
@pytest.mark.parametrize("command", ["import", "export"])
def test_full_disk_leaves_no_checkpoint(big, tmp_path, command):
    directory, config = big
    arguments = {
        "import": [
            "convert",
            "--to=jaxforge",
            directory / "dcp",
            tmp_path / "b",
            f"--config={config}",
        ],
        "export": ["convert", directory / "run", tmp_path / "b", "--to=dcp"],
    }[command]
    done = compat(*arguments, largest_file=3_000_000)  # fails in the middle, as on a full disk
    assert done.returncode == 74, done.stderr
    assert "could not be written" in done.stderr
    assert "Traceback" not in done.stderr
    with pytest.raises(UserError, match="no checkpoint"):
        checkpoints.find(tmp_path / "b")
    assert cli([str(a) for a in arguments]) == 0
    assert cli(["verify", str(tmp_path / "b"), str(directory / "run"), f"--config={config}"]) == 0
    assert not list(tmp_path.rglob("*.partial"))


def test_partial_conversion_of_other_source_is_discarded(tmp_path):
    config = trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    partial = tmp_path / "b/checkpoints/.step_2.partial"
    (partial / "marks").mkdir(parents=True)
    (partial / "marks" / "plan.json").write_text('{"fingerprint": "another"}')
    (partial / "marks" / "params.norm.weight-0.json").write_text("null")
    convert_to_run(tmp_path / "dcp", tmp_path / "b", config)
    assert_same(values(tmp_path / "a"), values(tmp_path / "b"))


def test_imported_run_resumes_bit_exactly(tmp_path):
    config_path = trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    convert_to_run(tmp_path / "dcp", tmp_path / "b", config_path)
    native = setup(load_config(config_path))
    like = native.abstract_state()
    batches = random_batches(native.config, 3, seed=1)
    losses = []
    for name in ("a", "b"):
        saved = Checkpoints(tmp_path / name, native.config.checkpoint, read_only=True)
        with jax.set_mesh(native.mesh):
            state, progress = saved.restore(like, 2)
        saved.close()
        assert dataclasses.replace(progress, run_id="") == Progress(2, 16, 512, run_id="")
        losses.append(native.run(state, batches)[1]["loss"])
    np.testing.assert_array_equal(*losses)


def test_bit_flip_in_imported_run_raises_and_names_the_array(tmp_path):
    config_path = trained(tmp_path / "a")
    cli(["convert", str(tmp_path / "a"), str(tmp_path / "dcp"), "--to=dcp"])
    convert_to_run(tmp_path / "dcp", tmp_path / "b", config_path)
    assert checksums_of(tmp_path / "b") == checksums_of(tmp_path / "a")
    native = setup(load_config(config_path))
    like = native.abstract_state()
    imported = Checkpoints(tmp_path / "b", native.config.checkpoint, read_only=True)
    state = tmp_path / "b/checkpoints/step_2/state"
    locations = ocdbt.tensor_locations(state)
    names = "params.norm.weight", "optimizer.nu.layers.mlp.up_proj.weight"
    for name, byte in itertools.product(names, (0, -1)):
        chunks = [location for location in locations[name].values() if isinstance(location, tuple)]
        file, start, length = chunks[byte]
        flip(state / file, start + byte % length)
        with pytest.raises(UserError, match=rf"step_2 is damaged \(not what was saved: {name}\)"):
            imported.restore(like, 2)
        flip(state / file, start + byte % length)
    imported.restore(like, 2)
    imported.close()


def flip(path, location):
    """Flip the lowest bit of a byte of a file."""
    content = bytearray(path.read_bytes())
    content[location] ^= 1
    path.write_bytes(content)


_LIMITED = """
import os, resource, sys
limit = int(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
os.execv(sys.executable, [sys.executable, "-m", "jaxforge", *sys.argv[2:]])
"""


def compat(*arguments, largest_file=None):
    limited = ["-c", _LIMITED, str(largest_file)]
    start = ["-m", "jaxforge"] if largest_file is None else limited
    return subprocess.run(
        [sys.executable, *start, *map(str, arguments)],
        cwd=ROOT, env=environment(), capture_output=True, text=True, check=False, timeout=PATIENCE,
    )  # fmt: skip
