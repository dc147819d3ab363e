"""The recipes of CONTRIBUTING.md for families and mixers, followed with files of their own."""

import json
import re
import runpy

import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.errors import UserError
from jaxforge.model import mixers
from torch_compat import families
from torch_compat.checkpoint import name_maps
from torch_compat.checkpoint.shapes import parameters
from torch_compat.families import FAMILIES

pytest.importorskip("torch")
pytest.importorskip("transformers")

from safetensors.numpy import save_file

from tests.torch_compat.huggingface import (
    ROOT,
    assert_same_bits,
    config_json,
    export,
    load,
    our_logits,
    params_of,
    tensors_of,
    tokens_of,
)

FAMILY = '''
"""Toy: Llama with other names, and a mixer that its files choose."""

from torch_compat.families import common
from torch_compat.families.common import COMMON
from torch_compat.families.family import GATED, NAME, OUTSIDE, PRE_NORMS, Family, name_map
from torch_compat.names.table import Rule

_LAYER = "model.layers.{i}.mixer."
_RULES = tuple(
    Rule(f"{NAME}{mixer}.{m}_proj.weight", f"{_LAYER}{m}.weight")
    for mixer, projections in (("attention", "qkvo"), ("decayed_sum", "vo"))
    for m in projections
)


def _read(c, where):
    return {**common.llama(c, where), "mixer_pattern": [c["token_mixer"]]}


def _write(model):
    return {**common.llama_keys(model), "token_mixer": model.mixers[0], "toy": True}


TOY_FAMILY = Family(
    "toy",
    name_map("hf-toy", "ToyForCausalLM", *OUTSIDE, *PRE_NORMS, *_RULES, *GATED),
    {**COMMON, "token_mixer": "attention", "toy_groups": 4},
    read=_read,
    write=_write,
    only={"toy": True},
)
'''
CONFIG = {"model_type": "toy", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
          "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 32,
          "initializer_range": 0.3}  # fmt: skip


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The family of a file that the package finds."""
    (tmp_path / "added").mkdir()
    (tmp_path / "added" / "toy.py").write_text(FAMILY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(tmp_path / "added")])
    family = families.discover()["toy"]
    monkeypatch.setitem(FAMILIES, "toy", family)
    monkeypatch.setitem(name_maps.NAME_MAPS, family.dialect.name, family.dialect)
    return family


def files_of(directory, family, **keys):
    """Write files of a random model."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({**CONFIG, **keys}))
    model = ModelConfig(**family.read({**family.defaults, **CONFIG, **keys}, "here"))
    rng = np.random.default_rng(0)
    save_file(
        {family.dialect.key_for(name): rng.standard_normal(shape).astype(np.float32)
         for name, shape in parameters(model).items()},
        directory / "model.safetensors",
    )  # fmt: skip
    return directory


def check_round_trip(directory, tmp_path, mixer):
    load(directory, tmp_path / "run")
    model, params = params_of(tmp_path / "run")
    assert model.mixers == (mixer,)
    assert np.isfinite(our_logits(model, params, tokens_of(model))).all()
    back = export(tmp_path / "run", tmp_path / "back")
    assert_same_bits(tensors_of(directory), tensors_of(back))
    assert config_json(back)["model_type"] == "toy"


def test_family_is_one_file(tmp_path, toy):
    check_round_trip(files_of(tmp_path / "hf", toy), tmp_path, "attention")
    for value in (0, -1, 1.5, None, "x"):  # the default tells the range
        (tmp_path / "hf" / "config.json").write_text(json.dumps({**CONFIG, "toy_groups": value}))
        with pytest.raises(UserError, match="toy_groups"):
            load(tmp_path / "hf", tmp_path / "other")


def test_mixer_is_one_file_and_its_family(tmp_path, toy, own_names, monkeypatch):
    page = (ROOT / "docs" / "library.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (code,) = (block for block in blocks if "register_mixer" in block)
    (tmp_path / "mixers").mkdir()
    (tmp_path / "mixers" / "decayed_sum.py").write_text(code)
    monkeypatch.setattr(mixers, "__path__", [*mixers.__path__, str(tmp_path / "mixers")])
    mixers.discover()
    assert mixers.mixer_class("decayed_sum").is_recurrent
    files = files_of(tmp_path / "hf", toy, token_mixer="decayed_sum")
    check_round_trip(files, tmp_path, "decayed_sum")


def test_table_of_families_is_generated():
    script = ROOT / "docs" / "families.py"
    page = runpy.run_path(str(script))["page"]()
    assert page == (ROOT / "docs" / "torch_compat.md").read_text(), "run `python docs/families.py`"
    assert all(": " in family.summary for family in FAMILIES.values())
