"""Claims of docs/from_kempnerforge.md about KempnerForge's TOML files."""

import re
from pathlib import Path

import pytest

from jaxforge.config import JobConfig, axes, check, load_config, mesh_shape
from jaxforge.errors import UserError

PAGE = (Path(__file__).parents[2] / "docs" / "from_kempnerforge.md").read_text()
REFUSED = re.findall(r"^\| (`.+) \| (refused): (.+) \|$", PAGE, re.MULTILINE)

TEXT = [  # differences between its text configs
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
def test_text_model_files_load(tmp_path, text):
    config = load(tmp_path, text)
    assert list(config.model.problems()) == []


LLAMA_3 = "n_kv_heads = 8\nvocab_size = 128256\nffn_dim_multiplier = 1.3\nrope_theta = 500000.0"
ODD = {  # models and meshes of its configs for 12 and 24 GPUs
    "7b_12gpu_tp4": (
        12,
        f"[model]\ndim = 4096\nn_layers = 32\nn_heads = 32\nmax_seq_len = 4096\n{LLAMA_3}\n"
        "[train]\nbatch_size = 4\nseq_len = 4096\ngrad_accum_steps = 8\n"
        "[distributed]\ndp_shard = 3\ndp_replicate = 1\ntp = 4\npp = 1",
    ),
    "13b_24gpu_validation": (
        24,
        f"[model]\ndim = 5120\nn_layers = 40\nn_heads = 40\nmax_seq_len = 4096\n{LLAMA_3}\n"
        "[train]\nbatch_size = 2\nseq_len = 4096\ngrad_accum_steps = 4\n"
        "[distributed]\ndp_shard = 6\ndp_replicate = 1\ntp = 4\npp = 1",
    ),
    "moe_24gpu": (
        24,
        f"[model]\ndim = 2048\nn_layers = 24\nn_heads = 16\nmax_seq_len = 4096\n{LLAMA_3}\n"
        "num_experts = 8\nmoe_top_k = 2\nmoe_frequency = 1\n"
        "[train]\nbatch_size = 2\nseq_len = 4096\ngrad_accum_steps = 32\n"
        "[distributed]\ntp = 4\ndp_shard = 6",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_files_for_12_and_24_gpus_use_three_replicas(tmp_path, name):
    n_devices, text = ODD[name]
    config = load(tmp_path, text)
    check(config, n_devices)
    mesh = axes.with_equal_shards(config, mesh_shape(config, n_devices))
    assert (mesh["dp_replicate"], mesh["dp_shard"] * mesh["tp"]) == (3, n_devices // 3)
    assert "parameters are [copied 3 times]" in PAGE


@pytest.mark.parametrize(("keys", "verdict", "why"), REFUSED)
def test_files_are_refused_for_the_documented_reason(tmp_path, keys, verdict, why):
    assert verdict == "refused"
    for written in re.findall("`(.+?)`", keys):
        with pytest.raises(UserError, match=re.escape(f"{written} cannot be used: {why}")):
            load(tmp_path, f"{written}\narch = 'any'")


def test_fp8_file_runs(tmp_path):
    text = f"[model]\ndim = 4096\nn_layers = 32\nn_heads = 32\nmax_seq_len = 4096\n{LLAMA_3}\n"
    config = load(tmp_path, f'{text}[train]\nmixed_precision = "fp8"\nseq_len = 4096')
    check(config, 16)
    assert config.train.fp8_scaling == "tensor"


def test_page_lists_all_refused_files():
    assert [len(re.findall("`", keys)) // 2 for keys, _, _ in REFUSED] == [4, 1]
