"""Optimizer state of Megatron-Core in flat buffers (`dp_reshardable`).

`tests/golden/megatron/buffers` was written by Megatron-Core. The other buffers are built here by
the rules of its `_ParamAndGradBuffer`, with the orders of TransformerEngine's layer spec.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

from jaxforge.errors import UserError
from tests.helpers import cli
from tests.torch_compat.megatron_golden import GOLDEN, assert_close, expected, logits_of, raw
from tests.torch_compat.runs import values
from torch_compat.checkpoint import megatron_buffers, orbax_store
from torch_compat.checkpoint.megatron_buffers import UnmappedBuffersError
from torch_compat.formats.dcp_reader import Dcp, LazyObjects
from torch_compat.formats.files import Directory
from torch_compat.formats.lazy import from_array

PREFIX = "optimizer.distributed.dp_group_idx_"
BUFFER = "gbuf_idx_0.dtype_(torch.float32, torch.float32)"
FIELDS = ("param", "exp_avg", "exp_avg_sq")
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
FINAL_NORM = "decoder.final_layernorm.weight"
ATTENTION = ("self_attention.linear_proj.weight", "self_attention.linear_proj.bias",
             "self_attention.linear_qkv.layer_norm_weight", "self_attention.linear_qkv.weight",
             "self_attention.linear_qkv.bias", "self_attention.q_layernorm.weight",
             "self_attention.k_layernorm.weight", "mlp.linear_fc1.layer_norm_weight")  # fmt: skip
FEED_FORWARD = ("mlp.linear_fc1.weight", "mlp.linear_fc2.weight")
GROUPED_EXPERTS = ("mlp.router.weight",
                   "mlp.experts.experts.0.linear_fc1.weight",
                   "mlp.experts.experts.1.linear_fc1.weight",
                   "mlp.experts.experts.0.linear_fc2.weight",
                   "mlp.experts.experts.1.linear_fc2.weight",
                   "mlp.shared_experts.gate_weight", "mlp.shared_experts.linear_fc1.weight",
                   "mlp.shared_experts.linear_fc2.weight")  # fmt: skip
SHAPES = {
    "linear_proj.weight": (12, 8), "linear_proj.bias": (12,), "layer_norm_weight": (12,),
    "linear_qkv.weight": (16, 12), "linear_qkv.bias": (16,), "q_layernorm.weight": (4,),
    "k_layernorm.weight": (4,), "linear_fc1.weight": (40, 12), "linear_fc2.weight": (12, 20),
    "router.weight": (2, 12), "gate_weight": (1, 12), EMBEDDING: (30, 12), HEAD: (30, 12),
    FINAL_NORM: (12,),
}  # fmt: skip


def shape_of(name):
    return next(shape for end, shape in SHAPES.items() if name.endswith(end))


def split(name, array, ranks):
    """Return the parts of a parameter on the ranks of tensor parallelism."""
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return np.split(array, ranks, axis=1)
    if name.endswith("linear_fc1.weight"):
        gate, up = np.split(array, 2)
        pairs = zip(np.split(gate, ranks), np.split(up, ranks), strict=True)
        return [np.concatenate(pair) for pair in pairs]
    if name in (EMBEDDING, HEAD) or ".linear_qkv.weight" in name or ".linear_qkv.bias" in name:
        return np.split(array, ranks)
    return [array] * ranks


def bucketed(arrays, size):
    """Return the buckets of arrays that are given in the order of registration."""
    buckets, current = [], np.zeros(0, np.float32)
    for array in reversed(arrays):
        current = np.concatenate([current, np.full(-len(current) % 64, 7.0), array.reshape(-1)])
        if len(current) >= size:
            buckets.append(current.astype(np.float32))
            current = current[:0]
    return [*buckets, *([current.astype(np.float32)] if len(current) else [])]


def job(layer, *, n_layers=2, ranks=1, stages=1, tied=False, bucket=10**9, dtype=np.float32):
    """Return the DCP of a job, its weights, and its optimizer state by field and parameter."""
    rng = np.random.default_rng(0)
    layers = [[f"decoder.layers.{i}.{name}" for name in layer] for i in range(n_layers)]
    per_stage = n_layers // stages
    orders = [
        list(itertools.chain(*layers[i * per_stage : (i + 1) * per_stage])) for i in range(stages)
    ]
    orders[0].insert(0, EMBEDDING)
    head = [EMBEDDING] * (stages > 1) if tied else [HEAD]
    orders[-1] += [FINAL_NORM, *head]
    state = {
        field: {
            n: rng.normal(size=shape_of(n)).astype(np.float32) for n in itertools.chain(*orders)
        }
        for field in FIELDS
    }
    tensors = {}
    for stage, names in enumerate(orders):
        for rank in range(ranks):
            for field in FIELDS:
                parts = [split(name, state[field][name], ranks)[rank] for name in names]
                for i, array in enumerate(bucketed(parts, bucket)):
                    key = f"{PREFIX}{stage * ranks + rank}.{BUFFER}.bucket_idx_{i}.{field}"
                    tensors[key] = array
    weights = {name: array.astype(dtype) for name, array in state["param"].items()}
    return tensors, weights, state


def read(tensors, weights):
    dcp = Dcp(Directory("/nowhere"), {k: from_array(t) for k, t in tensors.items()}, LazyObjects())
    return megatron_buffers.read(dcp, {k: from_array(w) for k, w in weights.items()})


@pytest.mark.parametrize(
    "settings",
    [
        {"layer": ATTENTION + FEED_FORWARD},
        {"layer": ATTENTION + FEED_FORWARD, "bucket": 500, "dtype": ml_dtypes.bfloat16},
        {"layer": ATTENTION + FEED_FORWARD, "ranks": 2, "bucket": 300},
        {"layer": ATTENTION + FEED_FORWARD, "stages": 2, "n_layers": 4},
        {"layer": ATTENTION + FEED_FORWARD, "stages": 2, "ranks": 2, "tied": True},
        {"layer": ATTENTION + GROUPED_EXPERTS, "tied": True},
        {"layer": ATTENTION + GROUPED_EXPERTS, "ranks": 2},
    ],
    ids=["one rank", "bfloat16", "tensor", "pipeline", "both", "experts", "tensor, experts"],
)
def test_flat_buffers_are_assigned_to_parameters(settings):
    tensors, weights, state = job(**settings)
    result = read(tensors, weights)
    assert result.keys() == state.keys()
    for field, arrays in state.items():
        assert result[field].keys() == arrays.keys()
        for name, array in arrays.items():
            np.testing.assert_array_equal(result[field][name].all(), array, f"{field} {name}")


def change(kind, tensors, weights):
    """Change buffers, so that no layout is known."""
    first = f"{PREFIX}0.{BUFFER}.bucket_idx_0"
    copy = tensors[f"{first}.param"]
    match kind:
        case "copies":
            copy[64] += 1
        case "sizes":
            for field in FIELDS:
                tensors[f"{first}.{field}"] = tensors[f"{first}.{field}"][:-1]
        case "no copies":
            del tensors[f"{first}.param"]
        case "several":
            tensors[f"{first.replace('gbuf_idx_0', 'gbuf_idx_1')}.param"] = copy
        case "ranks":
            for field in FIELDS:
                name = f"{first}.{field}"
                tensors[name.replace("idx_0", "idx_2", 1)] = tensors.pop(name)
        case "old":
            tensors[f"{PREFIX}0.param_state"] = copy
        case "experts":
            tensors[f"chained_1.{first}.param"] = copy
        case "unknown":
            weights["decoder.layers.0.mlp.extra.weight"] = copy


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("copies", "float32 copies differ from output_layer.weight"),
        ("sizes", "their sizes fit no order"),
        ("no copies", "lack float32 copies"),
        ("several", "several buffers"),
        ("ranks", "buckets are missing"),
        ("old", "or the layout is an old one"),
        ("experts", "experts have separate buffers"),
        ("unknown", r"the order of decoder\.layers\.0\.mlp\.extra\.weight is unknown"),
    ],
)
def test_buffers_of_unknown_layout_raise(kind, message):
    tensors, weights, _ = job(ATTENTION + FEED_FORWARD)
    change(kind, tensors, weights)
    with pytest.raises(UnmappedBuffersError, match=message):
        read(tensors, weights)


def test_import_reads_moments_from_flat_buffers(tmp_path):
    """Offsets follow from the sizes: each parameter starts at a multiple of 64 elements."""
    assert cli(["convert", "--to=jaxforge", str(GOLDEN / "buffers"), str(tmp_path / "run")]) == 0
    native, theirs = values(tmp_path / "run"), raw("buffers")
    for field, their_field in (("mu", "exp_avg"), ("nu", "exp_avg_sq")):
        flat = theirs[f"{PREFIX}0.{BUFFER}.bucket_idx_0.{their_field}"]
        qkv = flat[960:1088].reshape(16, 8)
        regions = {
            "output_head.proj.weight": flat[0:256].reshape(32, 8),
            "norm.weight": flat[256:264],
            "layers.0.mlp.down_proj.weight": flat[320:512].reshape(8, 24),
            "layers.0.mlp.gate_proj.weight": flat[512:704].reshape(24, 8),
            "layers.0.mlp.up_proj.weight": flat[704:896].reshape(24, 8),
            "layers.0.mlp_norm.weight": flat[896:904],
            "layers.0.attention.q_proj.weight": qkv[:8],
            "layers.0.attention.k_proj.weight": qkv[8:12],
            "layers.0.attention.v_proj.weight": qkv[12:],
            "layers.0.attention.o_proj.weight": flat[1088:1152].reshape(8, 8),
            "layers.0.attention_norm.weight": flat[1152:1160],
            "token_embedding.embedding.weight": flat[1216:1472].reshape(32, 8),
        }
        names = {
            key.removeprefix(f"optimizer.{field}.")
            for key in native
            if key.startswith(f"optimizer.{field}.")
        }
        assert names == regions.keys()
        for name, region in regions.items():
            np.testing.assert_array_equal(native[f"optimizer.{field}.{name}"], region, name)
            assert np.abs(region).max() > 0
    assert native["updates"] == orbax_store.open_orbax(tmp_path / "run")[0].progress.step == 2
    tokens, logits = expected("buffers")
    assert_close(logits_of(tmp_path / "run", tokens)[1], logits)


def test_import_refuses_unmapped_buffers_with_the_reason(tmp_path, monkeypatch):
    def refuse(*_):
        raise UnmappedBuffersError("experts have separate buffers")

    monkeypatch.setattr(megatron_buffers, "read", refuse)
    command = ["convert", "--to=jaxforge", str(GOLDEN / "buffers"), str(tmp_path / "run")]
    with pytest.raises(UserError, match=r"experts have separate buffers\. Import with --weights-o"):
        cli(command)
    assert cli([*command, "--weights-only"]) == 0
