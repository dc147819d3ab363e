"""What docs/from_kempnerforge.md says of KempnerForge's TOML files: which load, which do not."""

import re
from pathlib import Path

import pytest

from jaxforge.config import JobConfig, load_config
from jaxforge.config.not_built import not_built_yet
from jaxforge.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs" / "from_kempnerforge.md").read_text()
REFUSED = re.findall(r"^\| (`.+) \| (.*refuse.*): (.+) \|$", PAGE, re.MULTILINE)

TEXT = [  # what its configs for text differ in
    "[train]\ncompile_model = true\nactivation_checkpointing = 'full'\n[optimizer]\nfused = true",
    "[optimizer]\nname = 'muon'\nmuon_momentum = 0.95\nmuon_ns_steps = 5",
    "[train]\nloss_fn = 'chunked_cross_entropy'\nce_chunk_size = 4096\nz_loss_weight = 1e-4",
    "[model]\ndim = 2048\nn_layers = 24\nnum_experts = 8\nmoe_top_k = 2\nmoe_frequency = 1\n"
    "moe_packed_experts = true\n[distributed]\ndp_shard = 4\ntp = 4\nep = 2",
    "[model]\nnum_experts = 64\nmoe_router = 'sigmoid_topk'\nmoe_shared_experts = 2\n"
    "moe_capacity_factor = 1.25\nmoe_sequence_aux_loss_weight = 1e-3\nmoe_gradient_scale = true\n"
    "moe_bias_schedule = 'cosine_decay'\nmoe_expert_ffn_multiplier = 0.25",
    "[train]\ngrad_accum_steps = 4\n[distributed]\ntp = 4\npp = 4\npp_schedule = '1f1b'\n"
    "nccl_timeout_sec = 1200\n[checkpoint]\nasync_mode = 'disabled'",
    "[data]\nhf_dataset_name = 'wikitext'\nhf_dataset_config = 'wikitext-103-raw-v1'\n"
    "hf_dataset_text_field = 'text'\nhf_streaming = true\ntokenizer_path = 'gpt2'\n"
    "pin_memory = true",
    "[data]\ndataset_path = '/tokens'\nfile_pattern = 'tokenized_*.bin'\nprefetch_factor = 2\n"
    "[checkpoint]\nasync_mode = 'async_with_pinned_mem'",
]


def load(tmp_path: Path, text: str) -> JobConfig:
    path = tmp_path / "theirs.toml"
    path.write_text(text)
    return load_config(path)


@pytest.mark.parametrize("text", TEXT)
def test_files_of_text_models_load(tmp_path, text):
    config = load(tmp_path, text)
    assert list(not_built_yet(config)) == []
    assert list(config.model.problems()) == []


@pytest.mark.parametrize(("keys", "verdict", "why"), REFUSED)
def test_what_the_page_calls_refused_is_refused_for_that_reason(tmp_path, keys, verdict, why):
    for written in re.findall("`(.+?)`", keys):
        if written.startswith("["):
            with pytest.raises(UserError, match=re.escape(f"{written} cannot be used: {why}")):
                load(tmp_path, f"{written}\narch = 'any'")
            continue
        (message,) = not_built_yet(load(tmp_path, written))
        assert message.startswith(f"{written}: {why}")
        assert verdict.startswith("loads")


def test_the_page_names_all_that_is_refused():
    assert [len(re.findall("`", keys)) // 2 for keys, _, _ in REFUSED] == [1, 4, 1]
