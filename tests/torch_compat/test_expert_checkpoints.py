"""Conversion of models with experts to PyTorch and back."""

import shutil

import jax
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from jaxforge.model.transformer import Model
from tests.conftest import tiny_config
from tests.helpers import change_stored_config, cli, convert_to_run, setup
from tests.torch_compat.gauged import gone_on, restored
from tests.torch_compat.runs import (
    assert_same,
    trained,
    values,
)
from tests.torch_compat.tensors import of_torch, opened
from torch_compat.checkpoint import orbax_store
from torch_compat.checkpoint.restore import open_foreign
from torch_compat.checkpoint.stacking import Stacking, layer_of
from torch_compat.checkpoint.state import abstract_target
from torch_compat.formats.lazy import from_array
from torch_compat.names.kempnerforge import incompatibilities

MIXTURE = {"num_experts": 4, "moe_top_k": 2, "moe_expert_dim": 32}
SIGMOID = {**MIXTURE, "moe_router": "sigmoid_topk", "moe_shared_experts": 2, "n_layers": 3}
SOME = {"feed_forward_pattern": ("dense", "experts"), "n_layers": 4}
SIGN = {**SIGMOID, "moe_bias_update": "sign", "moe_first_dense_layers": 1}
PACKED = {"moe_packed_experts": True}
MODELS = {
    "softmax": MIXTURE,
    "softmax in some layers, packed": {**MIXTURE, **SOME, **PACKED},
    "sigmoid in some layers": {**SIGMOID, **SOME},
    "selection bias": SIGN,
}  # fmt: skip


def export(run, destination, *options):
    assert cli(["convert", str(run), str(destination), "--to=dcp", *options]) == 0
    return destination


def marked(names, slow):
    """Return names as parameters; those that another name covers are slow."""
    return [pytest.param(n, marks=pytest.mark.slow if n in slow else ()) for n in names]


@pytest.mark.parametrize(
    "name", marked(MODELS, ("softmax", "selection bias", "sigmoid in some layers"))
)
def test_dcp_round_trip_is_bit_exact(tmp_path, name):
    config = trained(tmp_path / "run", model=MODELS[name])
    dcp = export(tmp_path / "run", tmp_path / "dcp")
    again = convert_to_run(dcp, tmp_path / "again", config)
    assert_same(values(again), values(tmp_path / "run"))
    native = setup(load_config(config))
    of_both = (jax.device_get(restored(native, run)) for run in (again, tmp_path / "run"))
    jax.tree.map(np.testing.assert_array_equal, *of_both)
    if name == "sigmoid in some layers":  # one model is enough
        of_both = (gone_on(run, config) for run in (again, tmp_path / "run"))
        jax.tree.map(np.testing.assert_array_equal, *of_both)
    for path in (dcp, again):
        assert cli(["verify", str(tmp_path / "run"), str(path)]) == 0


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [("muon", ["--layout=flat"]), ("adamw", ["--dialect=kempnerforge-packed"])],
    ids=str,
)
def test_dcp_layouts_round_trip(tmp_path, optimizer, options):
    config = trained(tmp_path / "run", model={**SIGMOID, **SOME}, optimizer={"name": optimizer})
    dcp = export(tmp_path / "run", tmp_path / "dcp", *options)
    again = convert_to_run(dcp, tmp_path / "again", config, "--max-memory=1MB")
    assert_same(values(again), values(tmp_path / "run"))


def test_entries_match_stacked_arrays(tmp_path):
    """Entries are taken by hand from the arrays of the model."""
    config = trained(tmp_path / "run", model={**SIGMOID, **SOME})
    native = setup(load_config(config))
    state = restored(native, tmp_path / "run")
    result = values(tmp_path / "run")
    moe, dense = (jax.device_get(state.params[name]) for name in ("moe_layers", "dense_layers"))
    for row, layer in enumerate((1, 3)):
        block = f"params.layers.{layer}.mlp."
        for expert in range(4):
            for m in ("gate", "up", "down"):
                array = moe["mlp"]["experts"][f"{m}_proj"]["weight"][row, expert]
                entry = result[f"{block}experts.{expert}.{m}_proj.weight"]
                np.testing.assert_array_equal(entry, array)
        bias = moe["mlp"]["router"]["expert_bias"][row]
        np.testing.assert_array_equal(result[f"{block}router.expert_bias"], bias)
    for row, layer in enumerate((0, 2)):
        array = dense["mlp"]["up_proj"]["weight"][row]
        np.testing.assert_array_equal(result[f"params.layers.{layer}.mlp.up_proj.weight"], array)


BLOCK = [
    "attention.k_proj.weight", "attention.o_proj.weight", "attention.q_proj.weight",
    "attention.v_proj.weight", "attention_norm.weight", "mlp_norm.weight",
]  # fmt: skip
SHARED = [f"mlp.shared_expert.{m}_proj.weight" for m in ("down", "gate", "up")]


def keys_of_layers(experts):
    """Return KempnerForge's keys of layers 1 and 3 with experts, and 0 and 2 without."""
    dense = [f"mlp.{m}_proj.weight" for m in ("down", "gate", "up")]
    moe = [*experts, *SHARED, "mlp.router.gate.weight", "mlp.router.expert_bias"]
    return {f"layers.{i}.{n}" for i in range(4) for n in (*BLOCK, *(moe if i % 2 else dense))}


@pytest.mark.parametrize("packed", [False, True])
def test_exported_keys_match_kempnerforge(tmp_path, packed):
    model = {**SIGMOID, **SOME, "moe_packed_experts": packed}
    trained(tmp_path / "run", model=model)
    result = opened(export(tmp_path / "run", tmp_path / "dcp") / "step_2")
    experts = [f"mlp.experts.{j}.{m}_proj.weight" for j in range(4) for m in ("gate", "up", "down")]
    of_layers = keys_of_layers(
        [f"mlp.{m}_w" for m in ("up", "down", "gate")] if packed else experts
    )
    params = of_layers | {"norm.weight", "output_head.proj.weight",
                          "token_embedding.embedding.weight"}  # fmt: skip
    state = {f"layers.{i}.mlp.router.expert_ema" for i in (1, 3)}
    fields = ("step", "exp_avg", "exp_avg_sq")
    assert set(result.tensors) == {f"model.{key}" for key in params | state} | {
        f"optimizer.state.{key}.{field}" for key in params for field in fields
    }
    if packed:
        sizes = {
            m: result.tensors[f"model.layers.1.mlp.{m}_w"].shape for m in ("up", "gate", "down")
        }
        assert sizes == {"up": (4, 64, 32), "gate": (4, 64, 32), "down": (4, 32, 64)}
    groups = [set(result.objects(f"optimizer.param_groups.{g}.params")) for g in (0, 1)]
    still = {key for key in params if "norm" in key or key.endswith("expert_bias")}
    assert groups == [params - still, still]


@pytest.fixture(scope="module")
def kempnerforge(tmp_path_factory):
    """Directory of a run with sigmoid router, its export, and its config."""
    directory = tmp_path_factory.mktemp("kempnerforge")
    config = trained(directory / "run", model=SIGMOID)
    return directory, export(directory / "run", directory / "dcp"), config


def test_other_router_imports_bias_without_its_state(kempnerforge, tmp_path, capsys):
    directory, dcp, config = kempnerforge
    again = convert_to_run(dcp, tmp_path / "run", config, "--model.moe_bias_update=sign")
    said = " ".join(capsys.readouterr().err.split())
    assert "left out: the moments of layers.0.mlp.router.expert_bias" in said
    assert "left out: layers.0.mlp.router.expert_ema" in said
    assert "is within the sigmoid" in said
    result, had = values(again), values(directory / "run")
    biases = {n for n in had if n.endswith("router.expert_bias")}
    for name in {n for n in biases if n.startswith("params.")}:
        moved = name.replace("params.", "model_state.")
        np.testing.assert_array_equal(result.pop(moved), had[name])
    assert not {name for name in result if "expert_bias" in name or "expert_ema" in name}
    assert_same(result, {n: v for n, v in had.items() if n not in biases and "expert_ema" not in n})


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("--model.moe_bias_update=none", "left over: layers.0.mlp.router.expert_bias"),
        ("--model.num_experts=8", "4 rows in the checkpoint and model.num_experts is 8: set it"),
        ("--model.moe_frequency=2", "missing: layers.0.mlp.down_proj.weight"),
        ("--model.num_experts=0", "left over: layers.0.mlp.experts.0"),
    ],
)
def test_mismatched_experts_are_refused(kempnerforge, tmp_path, setting, message):
    _, dcp, config = kempnerforge
    with pytest.raises(UserError, match=message):
        convert_to_run(dcp, tmp_path / "run", config, setting)


def test_export_overrides_must_fit_weights(kempnerforge, tmp_path, capsys):
    directory = kempnerforge[0]
    for setting, message in {
        "--model.moe_router=softmax_topk": "model.moe_router is softmax_topk and the weights",
        "--model.moe_bias_update=sign": "left over: layers.0.mlp.router.expert_ema",
        "--model.moe_first_dense_layers=1": "missing: layers.0.mlp.down_proj",
    }.items():
        both = [setting, "--model.moe_bias_update=none"] if "softmax" in setting else [setting]
        with pytest.raises(UserError, match=message):
            export(directory / "run", tmp_path / "dcp", *both)
    changed = ["--dry-run", "--model.moe_top_k=1", "--model.moe_capacity_factor=2"]
    export(directory / "run", tmp_path / "dcp", *changed)
    said = " ".join(capsys.readouterr().err.split())
    assert "model.moe_top_k is 1 and the weights were trained with 2" in said
    assert "model.moe_capacity_factor is 2.0 and the weights were trained with 0.0" in said


def test_dcp_restores_directly_into_state(kempnerforge, tmp_path):
    directory, dcp, path = kempnerforge
    native = setup(load_config(path))
    like = native.abstract_state()
    expected = restored(native, directory / "run")
    with jax.set_mesh(native.mesh):
        result, progress = open_foreign(str(dcp), native.config).restore(like)
    assert progress.step == 2
    for part in ("variables", "opt_state"):
        of_both = (jax.device_get(getattr(state, part)) for state in (result, expected))
        jax.tree.map(np.testing.assert_array_equal, *of_both)


def torch_network(model):
    torch_job = pytest.importorskip("tests.torch_compat.torch_job")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    keys = {key: getattr(model, key) for key in ModelConfig.model_fields}
    keys |= {"n_kv_heads": model.kv_heads, "ffn_hidden_dim": model.ffn_dim,
             "moe_expert_dim": model.expert_dim}  # fmt: skip
    return torch, torch_job.Transformer(keys)


def our_logits(run, tokens):
    from jaxforge import inference

    trained = inference.open_run(run, devices=jax.devices()[:1])
    with trained.in_use() as params:
        model = Model(trained.config.model)
        run = jax.jit(lambda params: model.logits(params, model.hidden(params, tokens)))
        return np.asarray(run(params))


@pytest.mark.parametrize("name", marked([*MODELS][:-1], ("softmax",)))
def test_exported_model_equals_torch_logits(tmp_path, name):
    trained(tmp_path / "run", model=MODELS[name])
    model = tiny_config(model=MODELS[name]).model
    torch, network = torch_network(model)
    from torch.distributed import checkpoint as dcp

    state = {"model": {k: torch.full_like(v, torch.nan) for k, v in network.state_dict().items()}}
    dcp.load(
        state, checkpoint_id=export(tmp_path / "run", tmp_path / "dcp") / "step_2", no_dist=True
    )
    network.load_state_dict(state["model"])
    tokens = np.random.default_rng(0).integers(0, 256, (2, 24))
    with torch.no_grad():
        theirs = network(torch.from_numpy(tokens)).numpy()
    native = our_logits(tmp_path / "run", tokens)
    assert np.abs(native - theirs).max() < 1e-5 * np.abs(theirs).max()


@pytest.mark.parametrize("packed", [pytest.param(False, marks=pytest.mark.slow), True])
def test_bfloat16_torch_checkpoint_is_imported(tmp_path, packed):
    """The mean load is a buffer, which torch casts with the model."""
    config = tiny_config(model={**SIGMOID, **SOME, "moe_packed_experts": packed})
    (tmp_path / "run.toml").write_text(config.to_toml())
    torch, network = torch_network(config.model)
    from torch.distributed import checkpoint as dcp

    network = network.to(torch.bfloat16)
    with torch.no_grad():
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.ndim == 1:
                tensor.uniform_(0.5, 1.5)
    dcp.save({"model": network.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    run = convert_to_run(tmp_path / "dcp", tmp_path / "run", tmp_path / "run.toml")
    tokens = np.random.default_rng(0).integers(0, 256, (2, 24))
    with torch.no_grad():
        theirs = network.float()(torch.from_numpy(tokens)).numpy()
    assert np.abs(our_logits(run, tokens) - theirs).max() < 1e-5 * np.abs(theirs).max()
    result = values(run)
    mean = result["model_state.layers.3.mlp.router.expert_ema"]
    assert mean.dtype == np.float32
    np.testing.assert_array_equal(mean, network.layers["3"].mlp.router.expert_ema.numpy())
    bias = of_torch(network.layers["3"].mlp.router.expert_bias.bfloat16())
    np.testing.assert_array_equal(result["params.layers.3.mlp.router.expert_bias"], bias)


@pytest.mark.parametrize("packed", [False, True])
def test_overwritten_expert_shards_are_refused(tmp_path, packed):
    """KempnerForge's ranks all number experts from 0, so only those of the last rank remain."""
    model = {**SIGMOID, **SOME, "moe_packed_experts": packed}
    config = tiny_config(model=model)
    (tmp_path / "run.toml").write_text(config.to_toml())
    network = torch_network(config.model.model_copy(update={"num_experts": 2}))[1]
    from torch.distributed import checkpoint as dcp

    state = network.state_dict()
    whole = torch_network(config.model)[1].state_dict()
    state |= {key: tensor for key, tensor in whole.items() if ".router." in key}
    dcp.save({"model": state}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    with pytest.raises(UserError, match=r"\[2, |experts are missing: .*distributed\.ep > 1"):
        convert_to_run(tmp_path / "dcp", tmp_path / "run", tmp_path / "run.toml")


def test_features_unknown_to_kempnerforge_are_listed():
    def said(**keys):
        model = tiny_config(model={"ffn_hidden_dim": 64, **MIXTURE, **keys}).model
        return [
            note.removeprefix("KempnerForge has no model.") for note in incompatibilities(model)
        ]

    router = {"moe_router": "sigmoid_topk", "moe_bias_update": "kempnerforge"}
    assert said() == ["moe_expert_dim: set model.moe_expert_ffn_multiplier = 0.5 in its config"]
    assert said(moe_expert_dim=None) == []
    assert said(moe_expert_dim=None, **router) == []
    (width,) = said(moe_expert_dim=24)
    assert "could not load" in width
    (width,) = said(moe_expert_dim=None, moe_shared_experts=1, moe_shared_expert_dim=16)
    assert width.startswith("moe_shared_expert_dim")
    for key, value in {"moe_norm_topk": False, "moe_routed_scaling": 2.5,
                       "moe_groups": 2, "moe_first_dense_layers": 1, "swiglu_limit": 7.0,
                       "attention_sinks": True}.items():  # fmt: skip
        (note,) = said(moe_expert_dim=None, **{key: value})
        assert note == f"{key}: it would load these weights and compute a different model"
    (note,) = said(moe_expert_dim=None, activation="swiglu_oai")
    assert note.startswith('activation = "swiglu_oai": it would')
    (note,) = said(moe_expert_dim=None, moe_router="sigmoid_topk", moe_bias_update="sign")
    assert note.startswith('moe_bias_update = "sign": it would')


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"num_experts": 3}, r"experts\.\S+ is \[3, 4, .*the model has \[3, 3\] entries"),
        ({"n_layers": 4}, r"is \[3, .*the model has \[4\] entries"),
        ({"num_experts": 10**9}, "3 layers of 1000000000 experts each exceed the limits"),
        ({"n_layers": 10**9}, "1000000000 layers of 4 experts each exceed the limits"),
        ({"n_layers": "1000000000"}, "1000000000 layers of 4 experts each"),
        ({"n_layers": "x"}, "n_layers"),
    ],
    ids=str,
)
def test_config_that_contradicts_arrays_is_refused(kempnerforge, tmp_path, keys, message):
    shutil.copytree(kempnerforge[0] / "run", tmp_path / "run")
    change_stored_config(tmp_path / "run", "model", **keys)
    with pytest.raises(UserError, match=message):
        cli(["inspect", str(tmp_path / "run")])


# Memory


def test_written_blocks_are_at_most_one_expert(tmp_path):
    """This bounds chunks on disk and the memory of an import."""
    config = trained(tmp_path / "run", model={**SIGMOID, **SOME})
    dcp = export(tmp_path / "run", tmp_path / "dcp", "--max-memory=48KB")
    again = convert_to_run(dcp, tmp_path / "again", config, "--max-memory=48KB")
    leaf = from_array(np.zeros((2, 4, 64, 32), np.float32))
    sizes = [leaf.read(index).nbytes for index in orbax_store.split_blocks(leaf, 2048)]
    assert (max(sizes), sum(sizes)) == (2048, leaf.nbytes)
    whole = [leaf.read(index).shape for index in orbax_store.split_blocks(leaf, 1 << 20)]
    assert whole == [(1, 4, 64, 32)] * 2
    assert_same(values(again), values(tmp_path / "run"))


# Names


def stacking(**model):
    return Stacking(tiny_config(model=model).model)


def test_entries_are_numbered_by_model_layer():
    some = stacking(**{**SIGMOID, **SOME})
    assert list(some.entries("moe_layers.mlp.experts.up_proj.weight", (2, 4, 32, 64)))[3:5] == [
        ("layers.1.mlp.experts.3.up_proj.weight", (0, 3)),
        ("layers.3.mlp.experts.0.up_proj.weight", (1, 0)),
    ]
    assert list(some.entries("dense_layers.mlp.up_proj.weight", (2, 64, 64))) == [
        ("layers.0.mlp.up_proj.weight", (0,)), ("layers.2.mlp.up_proj.weight", (1,)),
    ]  # fmt: skip
    assert list(some.entries("norm.weight", (64,))) == [("norm.weight", ())]
    assert some.array_of("layers.2.attention.q_proj.weight").startswith("dense_layers.attention")
    assert (
        some.array_of("layers.3.mlp.experts.2.up_proj.bias")
        == "moe_layers.mlp.experts.up_proj.bias"
    )
    assert layer_of("layers.3.mlp.experts.2.up_proj.bias") == 3
    every = stacking(**MIXTURE)
    assert every.array_of("layers.1.mlp.router.gate.weight") == "layers.mlp.router.gate.weight"
    assert (
        every.array_of("layers.1.mlp.experts.2.up_proj.weight")
        == "layers.mlp.experts.up_proj.weight"
    )


def test_array_with_wrong_entry_count_is_refused():
    some = stacking(**{**SIGMOID, **SOME})
    for name, shape in (("moe_layers.norm.weight", (3, 64)), ("dense_layers.x", ()),
                        ("moe_layers.mlp.experts.up_proj.weight", (2, 5, 32, 64))):  # fmt: skip
        with pytest.raises(UserError, match=f"{name} is .* but the model has "):
            list(some.entries(name, shape))


def test_registered_model_may_name_its_own_experts():
    dense = stacking()
    assert dense.array_of("layers.1.mlp.experts.2.x") == "layers.mlp.experts.2.x"
    assert len(list(dense.entries("layers.mlp.experts.x", (2, 7)))) == 2


def test_optimizer_patterns_match_array_names(tmp_path):
    """Patterns match names of arrays: `moe_layers...`."""
    patterns = {"no_decay_patterns": [r"^moe_layers\.mlp\.experts"]}
    trained(tmp_path / "run", model={**SIGMOID, **SOME}, optimizer=patterns)
    result = opened(export(tmp_path / "run", tmp_path / "dcp") / "step_2")
    decaying, still = (result.objects(f"optimizer.param_groups.{g}.params") for g in (0, 1))
    assert sum(".experts." in key for key in still) == 2 * 4 * 3
    assert not any(".experts." in key for key in decaying)
    config = tiny_config(model=MIXTURE, optimizer=patterns)
    with pytest.raises(UserError, match="matches no parameter"):
        abstract_target(config)
