"""Hugging Face models for tests: exports, imports and logits of both libraries."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict, unflatten_dict

from jaxforge import inference
from jaxforge.checkpoint.manager import Checkpoints
from jaxforge.data.corpus.tokenizer import train_bpe
from jaxforge.model.transformer import Model
from jaxforge.runs import run_directory
from jaxforge.state.progress import Progress
from jaxforge.state.train_state import init_train_state
from tests.conftest import tiny_config
from tests.helpers import placed, setup
from torch_compat.checkpoint import checkpoints
from torch_compat.convert import conversion
from torch_compat.convert.source import Request

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from transformers import conversion_mapping  # noqa: E402 (needs torch)


class KimiK2Config(transformers.DeepseekV3Config):
    """Config of Kimi K2's files, whose code is that of DeepSeek-V3."""

    model_type = "kimi_k2"


class DeepseekV3ForCausalLM(transformers.DeepseekV3ForCausalLM):
    """Model of Kimi K2's files, which name this class."""

    config_class = KimiK2Config


transformers.AutoConfig.register("kimi_k2", KimiK2Config)
transformers.AutoModelForCausalLM.register(KimiK2Config, DeepseekV3ForCausalLM)
conversion_mapping.register_checkpoint_conversion_mapping(
    "kimi_k2", conversion_mapping.get_checkpoint_conversion_mapping("deepseek_v3")
)

ROOT = Path(__file__).parents[2]
TEXTS = ["the quick brown fox jumps over the lazy dog. " * 8, "Ein Käse, zwei Käse – 3 €  ?\n"]


def config_of(model, **sections):
    keys = {"model": model.model_dump(exclude_unset=True), "train": {"mixed_precision": "fp32"}}
    return tiny_config(**{**keys, **sections})


def random_params(model):
    """Norms and biases too: at 1 and 0, as they are made, they could be swapped unnoticed."""
    rng = np.random.default_rng(0)

    def leaf(path, like):
        names = [part.key for part in path]
        if any("norm" in name for name in names):
            return rng.uniform(0.5, 1.5, like.shape).astype(np.float32)
        scale = 0.5 if names[-1] == "bias" else 0.1
        return (scale * rng.standard_normal(like.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, Model(model).abstract)


def _empty(path, like):
    """Return zeros; ones for the constants of layers, which would end the residual stream."""
    fill = 1 if "multiplier" in jax.tree_util.keystr(path) else 0
    return np.full(like.shape, fill, like.dtype)


def save_run(path, config, params=None, state=None):
    """A run directory of jaxforge at step 3; by default its moments are 0: nothing is compiled."""
    native, params = setup(config), params or random_params(config.model)
    if state is None:
        like = jax.eval_shape(
            lambda arrays: init_train_state(native.model, arrays, native.optimizer), params
        )
        state = jax.tree_util.tree_map_with_path(_empty, like)
        state = jax.device_put(dataclasses.replace(state, params=params))
    run_directory.prepare(path, config)
    section = config.checkpoint.model_copy(update={"async_mode": "disabled"})
    saved = Checkpoints(path, section, native.model.axes, config.model_dump(mode="json"))
    saved.save(Progress(step=3), state)
    saved.close()
    return path


def export(run, directory, **options):
    convert(Request(checkpoints.find(run), directory, "hf", **options), directory)
    return directory


def load(source, run, *overrides, dtype=None):
    """Imports; the plan's notes."""
    request = Request(checkpoints.find(source), run, "jaxforge", overrides=overrides, dtype=dtype)
    return convert(request, run / "checkpoints" / "step_0").notes


def convert(request, expected):
    """Convert to an expected path; the plan."""
    plan = conversion.plan(request)
    assert conversion.run(request, plan, lambda _: None) == expected
    return plan


def params_of(run):
    trained = inference.open_run(run, devices=jax.devices()[:1])
    with trained.in_use() as params:
        return trained.config.model, jax.device_get(params)


def state_of(native, variables):
    """Return a state with these parameters, including untrained ones."""
    values = flatten_dict(variables)
    params, model_state = (
        unflatten_dict({path: values[path] for path in flatten_dict(like)})
        for like in (native.model.abstract, native.model.state.abstract)
    )
    make = jax.jit(
        lambda *values: init_train_state(native.model, values[0], native.optimizer, values[1])
    )
    state = jax.device_get(make(params, model_state))
    return jax.tree.map(placed, state, native.shardings)


@functools.lru_cache(16)  # programs take memory
def compiled(model):
    network = Model(model)
    return jax.jit(lambda params, tokens: network.logits(params, network.hidden(params, tokens)))


def our_logits(model, params, tokens):
    return np.asarray(compiled(model)(params, tokens))


def tokens_of(model, n=24):
    return np.random.default_rng(1).integers(0, model.vocab_size, (2, n))


def their_logits(network, tokens):
    with torch.no_grad():
        logits = network.float()(torch.from_numpy(tokens)).logits.numpy()
    assert logits.std() > 0.1
    return logits


def open_theirs(directory, **options):
    """Return the network; every weight must come from the files."""
    network, info = transformers.AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, attn_implementation="eager",
        **{"dtype": torch.float32, **options},
    )  # fmt: skip
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return network


def tensors_of(directory):
    return {k: t.all() for k, t in checkpoints.find(directory).raw().items()}


def assert_same_bits(first, other):
    assert first.keys() == other.keys()
    for name in first:
        assert first[name].dtype == other[name].dtype
        assert first[name].tobytes() == other[name].tobytes(), name


def config_json(directory):
    return json.loads((directory / "config.json").read_text())


def bpe(path):
    tokenizer = train_bpe(TEXTS, 300)
    tokenizer.save(path)
    return tokenizer
