"""Command `convert`: the result equals that of an import and an export."""

import json
import os
import shutil
import signal
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest

from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.config.reading.load import load_config
from jaxforge.config.train import COMPENSATION
from jaxforge.data.corpus.tokenizer import ByteTokenizer
from jaxforge.errors import UserError
from tests.helpers import cli, setup
from tests.processes.conftest import ROOT, environment
from tests.torch_compat.stage_runs import write_run
from tests.torch_compat.tensors import assert_same
from torch_compat.checkpoint import checkpoints, orbax_store
from torch_compat.checkpoint.train_state import TRAIN_STATE

MIXTURE = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 24}
SOURCES = {
    "run": None,
    "kempnerforge": ["--to=dcp", "--ranks=3"],
    "two stages": ["--to=dcp", "--stages=2"],
    "torchtitan": ["--to=dcp", "--dialect=torchtitan"],
    "torchtitan-2025": ["--to=dcp", "--dialect=torchtitan-2025", "--layout=nested"],
    "hf-llama in a DCP": ["--to=dcp", "--dialect=hf-llama", "--weights-only"],
    "hf": ["--to=hf"],
    "shards": ["--to=hf", "--max-shard-size=20KB", "--dtype=bfloat16"],
    "safetensors of a base class": ["--to=hf"],
}
TARGETS = {
    "jaxforge": ["--to=jaxforge"],
    "kempnerforge": ["--to=dcp", "--ranks=3", "--layout=flat"],
    "three stages": ["--to=dcp", "--stages=3"],
    "torchtitan": ["--to=dcp", "--dialect=torchtitan"],
    "hf": ["--to=hf", "--dtype=bfloat16", "--max-shard-size=30KB"],
}
# Each source and target is in a quick pair, and in two pairs or more: reading and writing share
# nothing but arrays.
QUICK_PAIRS = [
    ("run", "jaxforge"), ("run", "torchtitan"), ("kempnerforge", "jaxforge"),
    ("torchtitan", "kempnerforge"), ("hf-llama in a DCP", "three stages"), ("shards", "hf"),
    ("safetensors of a base class", "jaxforge"),
]  # fmt: skip
SLOW_PAIRS = [
    *((name, target) for name in ("run", "kempnerforge", "hf") for target in TARGETS
      if (name, target) not in QUICK_PAIRS),
    ("two stages", "torchtitan"), ("torchtitan-2025", "torchtitan"),
    ("two stages", "three stages"), ("torchtitan", "hf"), ("torchtitan-2025", "jaxforge"),
    ("hf-llama in a DCP", "hf"), ("shards", "kempnerforge"), ("safetensors of a base class", "hf"),
]  # fmt: skip
PAIRS = [*QUICK_PAIRS, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in SLOW_PAIRS)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def sources(run, tmp_path_factory):
    """Return sources by name, with the run of their import."""
    directory = tmp_path_factory.mktemp("sources")
    result = {}
    for name, options in SOURCES.items():
        source = directory / name.replace(" ", "_")
        if options is None:
            result[name] = run, run
            continue
        cli(["convert", str(run), str(source), *options])
        if name.endswith("base class"):
            without_prefix(source / "model.safetensors")
        imported = directory / f"{source.name}_imported"
        cli(["convert", "--to=jaxforge", str(source), str(imported), *config_for(source, run)])
        result[name] = source, imported
    return result


def without_prefix(path):
    """Rewrite a file like `LlamaModel.save_pretrained`."""
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = numpy.load_file(path)
    numpy.save_file({name.removeprefix("model."): x for name, x in tensors.items()}, path)


def config_for(source, run):
    is_dcp = checkpoints.find(source).format == "dcp"
    return [f"--config={run / 'config.toml'}"] if is_dcp else []


def contents(path):
    """Return tensors by their keys, and all other contents that readers use."""
    reference = checkpoints.find(path)
    tensors = {name: tensor.all() for name, tensor in reference.raw().items()}
    if reference.format == "jaxforge":
        checkpoint, config = orbax_store.open_orbax(path)
        progress = checkpoint.progress.to_json() | {"run_id": None}
        scalars = {n: x.tolist() for n, x in (checkpoint.scalars | checkpoint.guard).items()}
        return tensors, [progress, repr(scalars), config.model]
    if reference.format == "dcp":
        objects = reference.dcp().objects
        location = (
            reference.directory.read(TRAIN_STATE) if reference.directory.has(TRAIN_STATE) else b""
        )
        return tensors, [{key: repr(objects(key)) for key in objects}, location]
    names = (*reference.directory.names(), "config.json", "generation_config.json")
    return tensors, [names, *(reference.directory.read(n) for n in names if n.endswith("json"))]


def assert_same_checkpoint(result, expected):
    (tensors, objects), (expected_tensors, expected_objects) = contents(result), contents(expected)
    assert tensors.keys() == expected_tensors.keys()
    for name, array in tensors.items():
        assert_same(array, expected_tensors[name])
    assert objects == expected_objects


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_convert_equals_import_and_export(sources, run, tmp_path, name, target):
    source, imported = sources[name]
    config = config_for(source, run)
    direct = tmp_path / "direct"
    assert cli(["convert", str(source), str(direct), *TARGETS[target], *config]) == 0
    if target != "jaxforge":
        cli(["convert", str(imported), str(tmp_path / "steps"), *TARGETS[target]])
    elif name == "run":
        cli(["convert", str(run), str(tmp_path / "dcp"), "--to=dcp"])
        arguments = [str(tmp_path / "dcp"), str(tmp_path / "steps")]
        cli(["convert", "--to=jaxforge", *arguments, f"--config={run / 'config.toml'}"])
    else:
        shutil.copytree(imported, tmp_path / "steps")
    assert_same_checkpoint(direct, tmp_path / "steps")
    result = {"direct", "steps", "dcp"} if (name, target) == ("run", "jaxforge") else None
    assert {path.name for path in tmp_path.iterdir()} == (result or {"direct", "steps"})


def test_convert_changes_layout_of_experts(tmp_path):
    run = write_run(tmp_path / "run", model=MIXTURE)
    config = f"--config={run / 'config.toml'}"
    cli(["convert", str(run), str(tmp_path / "dcp"), "--to=dcp"])
    packed = ["--to=dcp", "--dialect=kempnerforge-packed", "--from-dialect=kempnerforge"]
    assert cli(["convert", str(tmp_path / "dcp"), str(tmp_path / "packed"), *packed, config]) == 0
    names = checkpoints.find(tmp_path / "packed").raw()
    assert names["model.layers.0.mlp.up_w"].shape[0] == 4
    assert cli(["verify", str(run), str(tmp_path / "packed"), config]) == 0
    mixtral = ["convert", str(tmp_path / "packed"), str(tmp_path / "hf"), "--to=hf", config]
    assert cli([*mixtral, "--dialect=hf-mixtral"]) == 0
    assert cli(["verify", str(run), str(tmp_path / "hf")]) == 0


def test_rounding_compensation_starts_at_zero(sources, run, tmp_path):
    options = ["--train.param_rounding=kahan", "--train.param_dtype=bfloat16", "--dtype=bfloat16"]
    source, config = sources["kempnerforge"][0], f"--config={run / 'config.toml'}"
    assert (
        cli(["convert", "--to=jaxforge", str(source), str(tmp_path / "b"), config, *options]) == 0
    )
    assert cli(["convert", str(tmp_path / "b"), str(tmp_path / "c"), "--to=jaxforge"]) == 0
    assert_same_checkpoint(tmp_path / "c", tmp_path / "b")
    config = load_config(tmp_path / "c" / "config.toml")
    assert config.train.param_rounding == "kahan"
    native = setup(config)
    saved = Checkpoints(tmp_path / "c", config.checkpoint, read_only=True)
    with jax.set_mesh(native.mesh):
        state, _ = saved.restore(native.abstract_state(), 3)
    saved.close()
    lost = optax.tree.get(state.opt_state, COMPENSATION)
    assert all(not leaf.any() for leaf in jax.tree.leaves(jax.device_get(lost)))


def test_weights_only_dcp_keeps_step_and_run_starts_at_0(sources, run, tmp_path):
    source, config = str(sources["kempnerforge"][0]), f"--config={run / 'config.toml'}"
    for to in ("dcp", "jaxforge", "hf"):
        arguments = ["convert", source, str(tmp_path / to), f"--to={to}", "--weights-only", config]
        assert cli(arguments) == 0
    assert (tmp_path / "dcp" / "latest").readlink().name == "step_3"
    assert not (tmp_path / "dcp" / "latest" / TRAIN_STATE).exists()
    assert "trained for 3 steps" in (tmp_path / "hf" / "README.md").read_text()
    checkpoint, _ = orbax_store.open_orbax(tmp_path / "jaxforge")
    assert (checkpoint.progress.step, checkpoint.moments, checkpoint.scalars) == (0, None, {})


def test_copied_run_has_new_id_and_same_documents(run, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(run, source)
    ByteTokenizer().save(source / "tokenizer")
    (source / "huggingface").mkdir()
    (source / "huggingface" / "config.json").write_text('{"model_type": "llama"}')
    options = ["--to=jaxforge", "--dtype=bfloat16", "--optimizer.lr=1e-4"]
    assert cli(["convert", str(source), str(tmp_path / "b"), *options]) == 0
    assert load_config(tmp_path / "b" / "config.toml").optimizer.lr == 1e-4
    assert load_config(tmp_path / "b" / "config.toml").checkpoint.dir == str(tmp_path / "b")
    for name in ("tokenizer/tokenizer.json", "huggingface/config.json"):
        assert (tmp_path / "b" / name).read_bytes() == (source / name).read_bytes()
    native, theirs = (orbax_store.open_orbax(path)[0] for path in (tmp_path / "b", source))
    assert native.progress.run_id != theirs.progress.run_id
    for name, tensor in theirs.params.items():
        assert_same(native.params[name].all(), tensor.all().astype(native.params[name].dtype))
    assert {tensor.dtype.name for tensor in native.params.values()} == {"bfloat16"}
    moved = {"n_heads": "2", "n_kv_heads": "1"}
    wrong = [f"--model.{key}={value}" for key, value in moved.items()]
    with pytest.raises(UserError, match=r"model\.n_heads is 2 and the weights were trained"):
        cli(["convert", str(source), str(tmp_path / "c"), "--to=jaxforge", *wrong])


def test_mup_run_is_standard_in_other_formats(tmp_path):
    run = write_run(tmp_path / "run", model={"mup_base_width": 16})
    assert cli(["convert", str(run), str(tmp_path / "b"), "--to=jaxforge"]) == 0
    assert load_config(tmp_path / "b" / "config.toml").model.mup_base_width == 16
    assert_same_checkpoint(tmp_path / "b", run)
    with pytest.raises(UserError, match="other learning rates and multipliers"):
        cli(["convert", str(run), str(tmp_path / "dcp"), "--to=dcp"])
    assert cli(["convert", str(run), str(tmp_path / "hf"), "--to=hf"]) == 0
    head = [checkpoints.find(path).raw() for path in (tmp_path / "hf", run)]
    halved = head[1]["params.output_head.proj.weight"].all() / 2  # 32 is twice the base
    np.testing.assert_array_equal(head[0]["lm_head.weight"].all(), halved)


def test_hugging_face_documents_are_kept(run, tmp_path):
    """Family, tokenizer and end-of-text ids are kept; the card does not mention data."""
    tokenizers = pytest.importorskip("tokenizers")
    hf, dst = tmp_path / "mine", tmp_path / "dst"
    cli(["convert", str(run), str(hf), "--to=hf", "--dialect=hf-mistral"])
    words = {f"w{i}": i for i in range(47)} | {"</s>": 47}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words)).save(str(hf / "tokenizer.json"))
    (hf / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    for name, changes in {
        "config.json": {"eos_token_id": 47, "initializer_range": 0.017},
        "generation_config.json": {"eos_token_id": [47, 46], "top_p": 0.7},
    }.items():
        (hf / name).write_text(json.dumps(json.loads((hf / name).read_text()) | changes))
    assert cli(["convert", str(hf), str(dst), "--to=hf", "--dtype=bfloat16"]) == 0
    config = json.loads((dst / "config.json").read_text())
    assert (config["model_type"], config["initializer_range"]) == ("mistral", 0.017)
    assert json.loads((dst / "generation_config.json").read_text())["top_p"] == 0.7
    assert (dst / "tokenizer.json").read_bytes() == (hf / "tokenizer.json").read_bytes()
    card = (dst / "README.md").read_text()
    assert "# mine\n" in card
    assert "converted with jaxforge" in card
    assert not {"## Data", "## Training"} & set(card.splitlines())
    outside = tmp_path / "secret"
    outside.write_text("secret")
    (hf / "tokenizer_config.json").unlink()
    (hf / "tokenizer_config.json").symlink_to(outside)
    with pytest.raises(UserError, match="link out of the checkpoint"):
        cli(["convert", str(hf), str(tmp_path / "stolen"), "--to=hf"])


def test_tokenizer_of_data_is_imported_with_dcp(sources, run, tmp_path):
    ByteTokenizer().save(tmp_path / "tokenizer")
    options = [f"--config={run / 'config.toml'}", f"--data.tokenizer_path={tmp_path}/tokenizer"]
    source = str(sources["kempnerforge"][0])
    assert cli(["convert", source, str(tmp_path / "hf"), "--to=hf", *options]) == 0
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["eos_token_id"] == 256


@pytest.mark.parametrize(
    ("source", "arguments", "message"),
    [
        ("kempnerforge", ["--to=hf"], "give the run's config, --config FILE"),
        (
            "hf",
            ["--to=hf", "--ranks=2"],
            "--ranks only applies to --to dcp. Remove it",
        ),
        ("hf", ["--to=dcp", "--max-shard-size=1GB"], "--max-shard-size only applies to --to hf"),
        ("hf", ["--to=jaxforge", "--stages=2"], "--stages only applies to --to dcp"),
        (
            "hf",
            ["--to=jaxforge", "--dialect=hf-llama"],
            "run always has jaxforge's names. Remove it",
        ),
        ("run", ["--to=hf", "--from-dialect=hf-llama"], "--from-dialect: .*is a run of jaxforge"),
        ("run", ["--to=hf", "--resize-vocab"], "--resize-vocab: .*is a run of jaxforge"),
        ("hf", ["--to=dcp", "--fill-optimizer"], "no optimizer state is converted"),
        ("hf", ["--to=dcp", "--stages=9"], "model.n_layers = 5"),
        ("hf", ["--to=hf", "--dialect=torchtitan"], "not torchtitan"),
        ("hf", ["--to=jaxforge", "--model.n_layers=4"], "left over: model.layers.4"),
    ],
)
def test_ineffective_option_raises(sources, tmp_path, source, arguments, message):
    with pytest.raises(UserError, match=message):
        cli(["convert", str(sources[source][0]), str(tmp_path / "b"), *arguments])
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """Write a DCP checkpoint of 30 MB and its config."""
    directory = tmp_path_factory.mktemp("large")
    model = {"dim": 192, "ffn_hidden_dim": 576, "vocab_size": 2048, "n_kv_heads": 4}
    run = write_run(directory / "run", model=model)
    cli(["convert", str(run), str(directory / "dcp"), "--to=dcp"])
    return directory / "dcp", run / "config.toml"


@pytest.mark.processes
def test_killed_conversion_resumes(large, tmp_path, monkeypatch):
    source, config = large
    destination = tmp_path / "hf"
    arguments = [str(source), str(destination), "--to=hf", f"--config={config}"]
    arguments = ["convert", *arguments, "--max-memory=200KB", "--max-shard-size=1MB"]
    marks = destination.with_name(f".{destination.name}.partial") / "marks"
    process = subprocess.Popen(
        [sys.executable, "-m", "jaxforge", *arguments],
        cwd=ROOT, env=environment(), stderr=subprocess.DEVNULL,
    )  # fmt: skip
    while len(list(marks.glob("*.json"))) < 4 and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not destination.exists()
    before = {path.name: path.stat().st_mtime_ns for path in marks.glob("*.json")}
    seen, remove = {}, shutil.rmtree

    def watch(path, *args, **kwargs):
        seen.update({p.name: p.stat().st_mtime_ns for p in marks.glob("*.json")})
        return remove(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", watch)
    assert cli(arguments) == 0
    assert seen.items() >= before.items()  # done units keep their timestamps
    assert cli(["verify", str(source), str(destination), f"--config={config}"]) == 0


@pytest.mark.processes
def test_dcp_to_safetensors_does_not_import_jax(large, tmp_path):
    source, config = large
    arguments = [str(source), str(tmp_path / "hf"), "--to=hf", f"--config={config}"]
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from torch_compat.commands import convert\n"
        f"assert not convert.main({arguments})"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment(), check=True)
