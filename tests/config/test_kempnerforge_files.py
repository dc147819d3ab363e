"""Forms of KempnerForge's config files that jaxforge rewrites."""

import sys

import pytest

from jaxforge.config.reading.load import load_config, load_unresolved
from jaxforge.errors import UserError


def load(tmp_path, text, *overrides):
    file = tmp_path / "x.toml"
    file.write_text(text)
    return load_config(file, overrides)


def test_file_without_tables_is_the_model(tmp_path):
    text = "dim = 64\nn_layers = 2\nn_heads = 4\nvocab_size = 256\nhead_dim_override = 32\n"
    config = load(tmp_path, text, "--train.max_steps=7")
    assert (config.model.dim, config.model.n_layers, config.model.head_dim) == (64, 2, 32)
    assert config.train.max_steps == 7


def test_errors_in_file_without_tables_name_the_line(tmp_path):
    with pytest.raises(UserError, match=r"x\.toml:2: model\.n_layers"):
        load(tmp_path, "dim = 64\nn_layers = -2\n")


def test_unknown_key_in_file_without_tables_is_refused(tmp_path):
    with pytest.raises(UserError, match="n_layer"):
        load(tmp_path, "dim = 64\nn_layer = 2\n")


def test_head_dim_override_is_head_dim(tmp_path):
    text = "[model]\ndim = 64\nn_heads = 4\nhead_dim_override = 32\n"
    assert load(tmp_path, text).model.head_dim == 32
    assert load(tmp_path, text, "--model.head_dim=8").model.head_dim == 8
    with pytest.raises(UserError, match=r"x\.toml:4: model\.head_dim"):
        load(tmp_path, text.replace("32", "-32"))
    with pytest.raises(UserError, match="two names of one key"):
        load(tmp_path, text + "head_dim = 16\n")


def test_flat_keys_of_optimizers_are_read_into_their_tables(tmp_path):
    text = (
        "[optimizer]\nmuon_momentum = 0.9\n"
        "schedule_free_warmup_steps = 7\nsoap_max_precond_dim = 8\n"
    )
    optimizer = load(tmp_path, text, "--optimizer.muon_adam_lr=0.5").optimizer
    assert (optimizer.muon.momentum, optimizer.muon.adam_lr) == (0.9, 0.5)
    assert (optimizer.schedule_free_adamw.warmup_steps, optimizer.soap.max_precond_dim) == (7, 8)
    assert load(tmp_path, text, "--optimizer.muon.momentum=0.8").optimizer.muon.momentum == 0.8
    with pytest.raises(UserError, match=r"x\.toml:2: optimizer\.muon\.momentum"):
        load(tmp_path, text.replace("0.9", "2"))
    with pytest.raises(UserError, match=r"unknown key optimizer\.muon\.momentun"):
        load(tmp_path, text.replace("momentum", "momentun"))
    with pytest.raises(UserError, match=r"momentum = 0\.8 and optimizer\.muon_momentum"):
        load(tmp_path, text + "[optimizer.muon]\nmomentum = 0.8\n")


def test_list_of_plugins_is_imported(tmp_path, monkeypatch):
    (tmp_path / "listed_plugin.py").write_text("IMPORTED = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "listed_plugin", raising=False)
    config = load(tmp_path, 'plugins = ["listed_plugin"]\n[model]\ndim = 64\nn_heads = 4\n')
    assert config.plugins.modules == ("listed_plugin",)
    assert sys.modules["listed_plugin"].IMPORTED
    with pytest.raises(UserError, match=r'x\.toml:1: \[plugins\] modules: module "absent_plugin"'):
        load(tmp_path, 'plugins = ["absent_plugin"]\n')


def test_attention_backend_is_accepted_and_said_to_have_no_effect(tmp_path):
    (tmp_path / "x.toml").write_text('[model]\nattention_backend = "flex"\n')
    notes = load_unresolved(tmp_path / "x.toml").notes
    assert any("model.attention_backend has no effect" in text for text in notes)
