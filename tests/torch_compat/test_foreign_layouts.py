"""Layouts of state dicts that other trainers save as DCP checkpoints."""

import functools

import numpy as np
import pytest

from jaxforge.config.reading.load import load_config
from jaxforge.errors import UserError
from tests.conftest import tiny_config
from torch_compat.checkpoint import checkpoints, dcp_state
from torch_compat.checkpoint.name_maps import NAME_MAPS

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import torch.distributed.checkpoint as dcp  # noqa: E402 (needs torch)
from torch.distributed.checkpoint.state_dict import get_state_dict  # noqa: E402 (needs torch)

SIZES = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 48}  # fmt: skip
SHAPE_OF_MODEL = {"vocab_size": 96, "dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2,
        "ffn_hidden_dim": 48, "max_seq_len": 64, "norm_eps": 1e-6}  # fmt: skip


def in_one_group(model):
    return list(model.parameters())


def by_decay(model, *, vectors_first=False):
    parts = [[p for p in model.parameters() if (p.ndim > 1) is matrix] for matrix in (True, False)]
    return [{"params": part} for part in (parts[::-1] if vectors_first else parts)]


@functools.cache
def trained(groups=in_one_group, *, tied=False, frozen=()):
    """Return a model and its optimizer after two updates."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, max_position_embeddings=64, tie_word_embeddings=tied)
    model = transformers.LlamaForCausalLM(config)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    optimizer = torch.optim.AdamW(groups(model), lr=1e-3)
    for _ in range(2):
        tokens = torch.randint(0, 96, (2, 8))
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def read(path, state, *, tied=False, **options):
    dcp.save(state, checkpoint_id=str(path), no_dist=True)
    config = tiny_config(model={**SHAPE_OF_MODEL, "tie_embeddings": tied}, train={"seq_len": 8})
    options = dcp_state.ReadOptions(**options)
    return checkpoints.find(path).read(config, options)


def assert_state_of(checkpoint, model, optimizer=None):
    """Assert that weights and moments equal those of torch for each parameter."""
    key_for = NAME_MAPS["hf-llama"].key_for
    parameters = dict(model.named_parameters())
    assert {key_for(name) for name in checkpoint.params} == parameters.keys()
    for name, tensor in checkpoint.params.items():
        parameter = parameters[key_for(name)]
        np.testing.assert_array_equal(tensor.all(), parameter.detach().numpy())
        for field, theirs in {"mu": "exp_avg", "nu": "exp_avg_sq"}.items() if optimizer else ():
            moment = checkpoint.moments[field][name].all()
            np.testing.assert_array_equal(moment, optimizer.state[parameter][theirs].numpy())
    if optimizer:
        assert checkpoint.scalars["updates"] == checkpoint.progress.step == 2


def below_module(optimizer_state):
    """Return state with the prefix of Lightning, whose module holds the network as `model`."""
    return {**optimizer_state,
            "state": {f"model.{k}": v for k, v in optimizer_state["state"].items()}}  # fmt: skip


LAYOUTS = {
    "checkpoint of a tutorial": lambda m, o: {"model_state_dict": m, "optimizer_state_dict": o},
    "Lightning": lambda m, o: {
        "state_dict": {f"model.{k}": v for k, v in m.items()}, "optimizer_0": below_module(o),
        "epoch": 1, "global_step": 2,
    },
    "Lightning with FSDP": lambda m, o: {
        "model": {f"model.{k}": v for k, v in m.items()}, "optimizer_0": below_module(o),
    },
    "Composer": lambda m, o: {"state": {
        "model": m, "optimizers": {"AdamW": o}, "timestamp": {"batch": 2},
    }},
}  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trainer_layouts_are_read(tmp_path, layout):
    model, optimizer = trained()
    result = read(tmp_path / "dcp", LAYOUTS[layout](*get_state_dict(model, optimizer)))
    assert_state_of(result, model, optimizer)


@pytest.mark.parametrize("where", ["model", None], ids=["below a prefix", "at the root"])
@pytest.mark.parametrize("options", [{}, {"weights_only": True}, {"dialect": "hf-llama"}], ids=str)
def test_tensors_outside_model_are_noted(tmp_path, where, options):
    model, optimizer = trained()
    weights, state = get_state_dict(model, optimizer)
    beside = {"iter_num": torch.tensor(2), "best_val_loss": torch.tensor(2.5),
              "cpu_rng_state": torch.get_rng_state()}  # fmt: skip
    of_model = {where: weights} if where else weights
    result = read(tmp_path / "dcp", {**of_model, "optimizer": state, **beside}, **options)
    assert_state_of(result, model, None if "weights_only" in options else optimizer)
    (note,) = (note for note in result.notes if "left out" in note)
    assert all(key in note for key in beside)


def test_wrong_dialect_lists_keys(tmp_path):
    model, _ = trained()
    weights = {key.replace("layers", "blocks"): t for key, t in model.state_dict().items()}
    with pytest.raises(UserError, match=r"(?s)missing: .*left over: (model\.)+blocks\."):
        read(tmp_path / "dcp", {"model": weights}, dialect="hf-llama")


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize(
    "groups", [in_one_group, by_decay, functools.partial(by_decay, vectors_first=True)],
    ids=["one group", "matrices, vectors", "vectors, matrices"],
)  # fmt: skip
def test_numbered_state_follows_parameter_groups(tmp_path, groups, tied):
    model, optimizer = trained(groups, tied=tied)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    result = read(tmp_path / "dcp", state, tied=tied)
    assert_state_of(result, model, optimizer)


def first_layer_apart(model):
    layer = list(model.model.layers[0].parameters())
    undecayed = [p for p in model.parameters() if all(p is not item for item in layer)]
    return [{"params": layer}, {"params": undecayed}]


def unordered(state):
    return {**state, "state": dict(reversed(state["state"].items()))}


@pytest.mark.parametrize(
    ("groups", "frozen", "change", "why"),
    [
        (first_layer_apart, (), dict, "shapes do not tell which group"),
        (lambda m: [p for p in m.parameters() if p.requires_grad], ("model.norm.weight",), dict,
         "its groups have 20 parameters, the model 21"),
        (in_one_group, (), unordered, "the file does not keep their order"),
    ],
    ids=["groups of layers", "frozen", "unordered"],
)  # fmt: skip
def test_ambiguous_numbered_state_is_refused(tmp_path, groups, frozen, change, why):
    model, optimizer = trained(groups, frozen=frozen)
    state = {"model": model.state_dict(), "optimizer": change(optimizer.state_dict())}
    with pytest.raises(UserError, match=f"keyed by numbers .* {why}.*--weights-only"):
        read(tmp_path / "dcp", state)
    assert_state_of(read(tmp_path / "dcp", state, weights_only=True), model)


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ("", "torch"),
        ('order = "grain"', "grain"),
        ("shuffle = false", "grain"),
    ],
    ids=str,
)  # fmt: skip
def test_dcp_import_uses_torch_order_by_default(tmp_path, said, order):
    """KempnerForge uses PyTorch's sampler and has no key for the order."""
    model, _ = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    file = tmp_path / "config.toml"
    file.write_text(f'[data]\ndataset_path = "tokens"\n{said}\n')
    assert load_config(file).data.order == "grain"
    assert checkpoints.find(tmp_path / "dcp").config(file).data.order == order
    file.write_text("[train]\nseq_len = 8\n")  # random tokens have no order
    assert checkpoints.find(tmp_path / "dcp").config(file).data.order == "grain"
