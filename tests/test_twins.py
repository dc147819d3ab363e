"""PyTorch twins of `benchmarks/step.py`: they do the work of jaxforge's layers."""

import importlib
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.kernels.gated_delta import DeltaTokens, gated_delta_rule
from jaxforge.kernels.state_space import Inputs, state_space
from jaxforge.model.transformer import build_model, parameter_count

torch = pytest.importorskip("torch")
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def modules():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("step"), importlib.import_module("twins")


def close(x, y, tolerance=1e-4):
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    assert np.linalg.norm(x - y) < tolerance * np.linalg.norm(y)


WORDS = ("Qwen3-30B-A3B", "1B in fp8", "1B, packed", "latent attention", "Gated DeltaNet",
         "Mamba-2", "1B with LoRA", "1B, 4 x", "4 layers of 7B")  # fmt: skip


@pytest.mark.parametrize("is_small", [True, False])
@pytest.mark.parametrize("words", WORDS)
def test_twin_has_as_many_parameters(modules, words, is_small):
    step, twins = modules
    assert len(step.GPU_CASES) == len(WORDS)
    (case,) = (case for case in step.GPU_CASES if words in case.name)
    config = step.job(step.miniature(case) if is_small else case)
    with torch.device("meta"):
        twin = twins.Model(config, grouped=True)
    sizes = [param.numel() for param in twin.parameters()]
    assert sum(sizes) == parameter_count(build_model(config).abstract)
    if "LoRA" in words:
        trained = [name for name, p in twin.named_parameters() if p.requires_grad]
        assert trained
        assert all(re.search("lora_[ab]", name) for name in trained)


def test_twin_of_gated_delta_rule_matches_the_kernel(modules):
    rng = np.random.default_rng(0)
    b, s, keys, heads, d = 2, 128, 2, 4, 16
    q, k = (rng.standard_normal((b, s, keys, d), np.float32) for _ in "qk")
    v = rng.standard_normal((b, s, heads, d), np.float32)
    log_decay = -rng.random((b, s, heads), np.float32)
    beta = rng.random((b, s, heads), np.float32)
    arrays = (q, k, v, log_decay, beta)
    tokens = DeltaTokens(q, k, v, log_decay[..., None], beta)
    expected, _ = gated_delta_rule(jax.tree.map(jnp.asarray, tokens))
    close(modules[1].gated_delta_rule(*map(torch.tensor, arrays)), expected)


def test_twin_of_state_space_matches_the_kernel(modules):
    rng = np.random.default_rng(0)
    b, s, heads, p, groups, n = 2, 128, 4, 8, 2, 16
    x = rng.standard_normal((b, s, heads, p), np.float32)
    dt, a = rng.random((b, s, heads), np.float32), -rng.random(heads, np.float32)
    in_, out = (rng.standard_normal((b, s, groups, n), np.float32) for _ in "bc")
    arrays = (x, dt, a, in_, out)
    expected, _ = state_space(Inputs(*map(jnp.asarray, arrays)), jnp.zeros(heads), chunk_size=32)
    close(modules[1].state_space(*map(torch.tensor, arrays), 32), expected)


def test_grouped_experts_match_the_loop(modules):
    step, twins = modules
    (case,) = step.cases("Qwen3-30B-A3B", quick=True)
    model = step.job(case).model
    one_by_one, grouped = (twins.Experts(model, grouped=each) for each in (False, True))
    with torch.no_grad():
        grouped.router.weight.copy_(one_by_one.router.weight)
        for name in ("gate_up", "down"):
            getattr(grouped, name).copy_(torch.stack(list(getattr(one_by_one, name))))
        x = torch.randn(2, 32, model.dim)
        close(grouped(x), one_by_one(x), 2e-2)


def test_fp8_linear_layer_is_near_the_exact_one(modules):
    layer = modules[1].Fp8Linear(64, 32, 16)
    x = torch.randn(2, 32, 64, requires_grad=True)
    dy = torch.randn(2, 32, 48)
    results = []
    for y in (layer(x), x @ layer.weight.T):
        results.append((y, *torch.autograd.grad(y, (x, layer.weight), dy.to(y.dtype))))
    for eight_bit, exact in zip(*results, strict=True):
        close(eight_bit.detach().float(), exact.detach(), 0.1)


def test_packed_rows_are_masked_between_documents(modules):
    mask = modules[1].mask_of(torch.tensor([[0, 0, 1, 1]]))
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[0, 0].tolist() == np.array(expected, bool).tolist()


def test_failing_peer_is_reported_and_replaced_by_the_uncompiled_one(modules, monkeypatch):
    step, _ = modules
    case = step.GPU_CASES[0]

    def fail():
        raise RuntimeError("no kernel")

    names = "torch.compile, grouped_mm", "jaxforge in bf16"
    monkeypatch.setattr(step, "peer_steps", lambda *_, **__: dict.fromkeys(names, fail))
    monkeypatch.setattr(step, "torch_step", lambda *_, **__: list)
    peers, errors = step.working_peers(case, quick=False)
    assert list(peers) == ["torch eager, grouped_mm"]
    assert len(errors) == 2
    assert all("no kernel" in error for error in errors)
