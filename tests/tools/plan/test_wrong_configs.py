"""Wrong configs: a plan's message names key and value."""

import copy
import json
import re
from typing import Any, NamedTuple

import numpy as np
import pytest

from jaxforge.commands.plan import topology_of
from jaxforge.config import load_config
from jaxforge.config.ineffective_settings import ineffective_settings
from jaxforge.config.job import JobConfig, toml
from jaxforge.errors import UserError
from jaxforge.parallel import targets
from jaxforge.parallel.mesh import make_mesh
from jaxforge.tools.plan import plan_report
from jaxforge.tools.plan.checks import checkpoint_bytes
from jaxforge.tools.plan.compiled import devices_of
from jaxforge.tools.plan.plan import Plan, plan
from jaxforge.tools.plan.topology import Topology
from tests.conftest import TINY

RIGHT = {
    **TINY,
    "model": {**TINY["model"], "n_layers": 4},
    "train": {**TINY["train"], "max_steps": 100},
    "scheduler": {"warmup_steps": 10},
    "checkpoint": {"interval": 50},
    "distributed": {},
}
"""A valid config."""

needs_tpu = pytest.mark.skipif(
    not targets.has_tpu_compiler(), reason="needs XLA's compiler for TPUs: pip install .[tpu]"
)

Values = dict[str, dict[str, Any]]


class Wrong(NamedTuple):
    """Wrong config.

    Attributes:
        values: wrong settings, on top of `RIGHT`.
        key: key in the message.
        value: value in the message.
        topology: topology of the plan.
        is_compiled: the mistake is detected when the step is built or compiled.
    """

    values: Values
    key: str
    value: str
    topology: str = "cpu:8"
    is_compiled: bool = False


EXPERTS = {"num_experts": 4}
PP = {"pp": 2}
FOUR = {"grad_accum_steps": 4, "batch_size": 1}
WRONG = {
    "typo in a key": Wrong({"train": {"batchsize": 4}}, "train.batchsize", ""),
    "typo in a section": Wrong({"optimiser": {"lr": 0.1}}, "optimiser", ""),
    "key of another section": Wrong({"model": {"lr": 0.1}}, "model.lr", ""),
    "text for a number": Wrong({"train": {"batch_size": "many"}}, "train.batch_size", '"many"'),
    "half an update": Wrong({"train": {"max_steps": 99.5}}, "train.max_steps", "99.5"),
    "unit of a duration": Wrong(
        {"train": {"max_steps": "2 moons"}}, "train.max_steps", '"2 moons"'
    ),
    "out of range": Wrong({"scheduler": {"min_lr_ratio": 2}}, "scheduler.min_lr_ratio", "2"),
    "short list": Wrong({"optimizer": {"betas": [0.9]}}, "optimizer.betas", "[0.9]"),
    "typo in a choice": Wrong({"scheduler": {"name": "cosin"}}, "scheduler.name", '"cosin"'),
    "unknown dtype": Wrong({"train": {"param_dtype": "fp12"}}, "train.param_dtype", '"fp12"'),
    "unknown optimizer": Wrong({"optimizer": {"name": "adam"}}, "optimizer.name", '"adam"'),
    "too many devices": Wrong(
        {"distributed": {"dp_shard": 8, "tp": 2}}, "distributed.dp_shard", "8"
    ),
    "too few devices": Wrong(
        {"distributed": {"dp_shard": 2}}, "distributed.dp_shard", "2"
    ),
    "axis that does not divide devices": Wrong(
        {"distributed": {"dp_replicate": 3}}, "distributed.dp_replicate", "3"
    ),
    "heads and width": Wrong({"model": {"n_heads": 6}}, "n_heads", "6"),
    "heads and key/value heads": Wrong({"model": {"n_kv_heads": 3}}, "n_kv_heads", "3"),
    "heads and tp": Wrong({"distributed": {"tp": 8}}, "model.n_heads", "4"),
    "key/value heads and tp": Wrong({"distributed": {"tp": 4}}, "model.n_kv_heads", "2"),
    "vocabulary and tp": Wrong(
        {"model": {"vocab_size": 255}, "distributed": {"tp": 2}}, "model.vocab_size", "255"
    ),
    "feed-forward and tp": Wrong(
        {"model": {"ffn_hidden_dim": 97}, "distributed": {"tp": 2}}, "model.ffn_hidden_dim", "97"
    ),
    "sequence and tp": Wrong(
        {"train": {"seq_len": 31}, "distributed": {"tp": 2}}, "train.seq_len", "31"
    ),
    "sequence and positions": Wrong({"train": {"seq_len": 65}}, "train.seq_len", "65"),
    "stages without layers": Wrong(
        {"distributed": {"pp": 8}, "train": {"grad_accum_steps": 8, "batch_size": 1}},
        "model.n_layers", "4",
    ),
    "too few microbatches": Wrong({"distributed": PP}, "train.grad_accum_steps", "1"),
    "microbatches of interleaved stages": Wrong(
        {"distributed": {**PP, "pp_schedule": "interleaved_1f1b"},
         "train": {"grad_accum_steps": 3, "batch_size": 1}},
        "train.grad_accum_steps", "3",
    ),
    "layers of stages with biases": Wrong(
        {"model": {"n_layers": 3, "o_bias": True}, "distributed": PP, "train": FOUR},
        "model.n_layers", "3",
    ),
    "ring in stages of two kinds of layers": Wrong(
        {"model": {**EXPERTS, "moe_first_dense_layers": 1}, "train": FOUR,
         "distributed": {**PP, "cp": 2, "cp_strategy": "ring"}},
        "distributed.cp_strategy", "ring",
    ),
    "ep without experts": Wrong({"distributed": {"ep": 2}}, "distributed.ep", "2"),
    "experts and ep": Wrong(
        {"model": {"num_experts": 3}, "distributed": {"ep": 2}}, "model.num_experts", "3"
    ),
    "top_k above experts": Wrong(
        {"model": {**EXPERTS, "moe_top_k": 5}}, "moe_top_k", "5"
    ),
    "groups of experts": Wrong({"model": {**EXPERTS, "moe_groups": 3}}, "moe_groups", "3"),
    "batch and devices": Wrong(
        {"train": {"batch_size": None, "global_batch_size": 12}}, "train.global_batch_size", "12"
    ),
    "two batch sizes": Wrong(
        {"train": {"global_batch_size": 32}}, "train.global_batch_size", "32"
    ),
    "8-bit training of no layer": Wrong(
        {"model": {"n_layers": 2}, "train": {"mixed_precision": "fp8"}},
        "train.num_layers_at_start_in_bf16", "2",
    ),
    "half precision of parameters": Wrong(
        {"train": {"mixed_precision": "fp16", "param_dtype": "float16"}}, "param_dtype", "float16"
    ),
    "heads over devices of a sequence": Wrong(
        {"distributed": {"cp": 8, "cp_strategy": "ulysses"}}, "distributed.cp_strategy", '"ulysses"'
    ),
    "ring of uneven parts": Wrong(
        {"train": {"seq_len": 36}, "distributed": {"cp": 4, "cp_strategy": "ring"}},
        "train.seq_len", "36",
    ),
    "sequence and cp": Wrong(
        {"train": {"seq_len": 30}, "distributed": {"cp": 4}}, "train.seq_len", "30"
    ),
    "schedule without effect": Wrong(
        {"optimizer": {"name": "schedule_free_adamw"}}, "scheduler.name", '"cosine"'
    ),
    "learning rate without batch": Wrong(
        {"optimizer": {"lr_scale_rule": "sqrt"}}, "lr_scale_rule", '"sqrt"'
    ),
    "evaluation without data": Wrong({"eval": {"enabled": True}}, "eval.enabled", "true"),
    "typo in a metric": Wrong(
        {"eval": {"enabled": True, "datasets": {"dataset_path": "x"}},
         "checkpoint": {"best_metric": "eval/los"}},
        "checkpoint.best_metric", '"eval/los"',
    ),
    "streaming of files": Wrong({"data": {"hf_streaming": True}}, "data.hf_streaming", "true"),
    "kernel of another machine": Wrong(
        {"model": {"sdpa_backend": "splash"}}, "model.sdpa_backend", '"splash"', is_compiled=True
    ),
    "a flag that XLA does not know": Wrong(
        {"train": {"xla_flags": {"xla_nope": "true"}}}, "train.xla_flags.xla_nope", "true",
        "cpu:1", is_compiled=True,
    ),
    "unknown level": Wrong(
        {"train": {"xla_flags": {"optimization_level": "9"}}}, "train.xla_flags.optimization_level",
        "9", "cpu:1", is_compiled=True,
    ),
    "warm-up past the end": Wrong(
        {"scheduler": {"warmup_steps": 2000}}, "scheduler.warmup_steps", "2,000"
    ),
    "plateau past the end": Wrong(
        {"scheduler": {"name": "wsd", "stable_steps": 90}}, "scheduler.stable_steps", "90"
    ),
    "missing plateau": Wrong({"scheduler": {"name": "wsd"}}, "scheduler.name", '"wsd"'),
    "phase past the end": Wrong(
        {"data": {"phases": [{"start_step": 50}, {"start_step": 100, "lr_scale": 0.5}]}},
        "data.phases[1].start_step", "100",
    ),
    "evaluation past the end": Wrong(
        {"eval": {"enabled": True, "datasets": {"dataset_path": "x"}}}, "eval.interval", "1,000"
    ),
    "checkpoints past the end": Wrong(
        {"checkpoint": {"interval": 1000}}, "checkpoint.interval", "1,000"
    ),
    "typo in a path": Wrong(
        {"data": {"dataset_path": "data/wbe"}}, "data.dataset_path", '"data/wbe"'
    ),
}  # fmt: skip


@pytest.fixture
def plan_messages(tmp_path, monkeypatch):
    """Return errors and warnings of a plan that do not appear for `RIGHT`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "web").mkdir(parents=True)
    np.save(tmp_path / "data" / "web" / "a.npy", (np.arange(1_000_000) % 256).astype("uint16"))

    def of(values: Values, topology: str, *, is_compiled: bool = False) -> list[str]:
        return [
            message
            for message in messages(planned(values, topology, is_compiled))
            if message != NO_DATA
        ]

    def planned(values: Values, topology: str, is_compiled: bool) -> Plan:
        (tmp_path / "run.toml").write_text(written(values))
        with monkeypatch.context() as patched:
            if not is_compiled:
                patched.setattr("jaxforge.tools.plan.plan.compile_step", stop)
            return plan_report.plan_devices("run.toml", [], Topology.parse(topology))

    return of


(NO_DATA,) = ineffective_settings(JobConfig.model_validate(RIGHT), "gpu")
VALID = "a run would start"


def stop(*_: object, **__: object) -> None:
    raise UserError(VALID)


def messages(result: Plan) -> list[str]:
    return [item for item in (*result.errors, *result.warnings) if item != VALID]


def written(values: Values) -> str:
    return "\n".join(
        f"[{name}]\n"
        + "".join(f"{key} = {toml(value)}\n" for key, value in keys.items() if value is not None)
        for name, keys in values.items()
    )


def merged(values: Values) -> Values:
    merge = copy.deepcopy(RIGHT)
    for name, keys in values.items():
        merge.setdefault(name, {}).update(copy.deepcopy(keys))
    return merge


Change = dict[str, Any]
"""New values by key."""


KEY = r"[a-z_]+(?:\.[a-z_0-9]+|\[\d+\])*"
VALUE = r"-?\d[\d.]*|true|false|\"[^\"]*\""


def applied(values: Values, change: Change) -> Values:
    new = copy.deepcopy(values)
    for key, value in change.items():
        section, name = key.split(".")
        new.setdefault(section, {})[name] = value
    return new


def test_valid_config_has_no_messages(plan_messages):
    assert plan_messages(RIGHT, "cpu:8") == []


@pytest.mark.parametrize("wrong", WRONG.values(), ids=WRONG)
def test_message_names_key_and_value(plan_messages, wrong):
    result = plan_messages(merged(wrong.values), wrong.topology, is_compiled=wrong.is_compiled)
    (message,) = (
        item for item in result if re.search(rf"(^|[^\w.]){re.escape(wrong.key)}\b", item)
    )
    assert wrong.value in message


TOPOLOGIES = ("v7:2x2", "h200:8", "cpu:8x1", "h100:2x8*2", "v5e-16", "v5p:4x0x4")
SAID = r"\b[a-z]\w*:\d+(?:x\d+)*(?:\*\d+)?\b"


@pytest.mark.parametrize("text", TOPOLOGIES)
def test_invalid_topology_message_names_valid_forms(text):
    with pytest.raises(UserError) as caught:
        topology_of(text)
    message = str(caught.value)
    assert message.startswith(f"--topology: topology {text!r}: ")
    forms = re.findall(SAID, message.partition(text)[2])
    assert forms, message
    for form in forms:
        assert str(topology_of(form)) == form


@needs_tpu
def test_unknown_slice_message_suggests_existing_slice():
    with pytest.raises(UserError) as caught:
        devices_of(Topology.parse("v5e:3x5"))
    message = str(caught.value)
    assert '"v5e:3x5"' in message
    (near,) = re.findall(rf'did you mean "({SAID})"', message)
    assert len(devices_of(Topology.parse(near))) == 32


@needs_tpu
def test_axis_wider_than_slice_is_refused(plan_messages):
    values = merged({"distributed": {"tp": 8}, "model": {"n_heads": 8, "n_kv_heads": 8}})
    (message,) = plan_messages(values, "v5e:2x2*2", is_compiled=True)
    assert "distributed.tp = 8 must divide the 4 devices" in message
    assert plan_messages(applied(values, {"distributed.tp": 4}), "v5e:2x2*2") == []
    mesh = make_mesh(load_config("run.toml"), devices_of(Topology.parse("v5e:2x2*2")))
    assert mesh.shape["tp"] == 4


def test_small_disk_message_suggests_fewer_checkpoints(plan_messages, monkeypatch):
    values = merged({"checkpoint": {"interval": 1, "keep_last_n": 50}})
    size = checkpoint_bytes(JobConfig.model_validate(RIGHT))
    disk = Disk(20 * size + 1)
    monkeypatch.setattr("jaxforge.tools.plan.checks.shutil.disk_usage", lambda _: disk)
    (message,) = plan_messages(values, "cpu:8")
    assert "checkpoint.keep_last_n = 50" in message
    assert 'checkpoint.dir = "checkpoints"' in message
    fewer = 19  # and a checkpoint being written
    assert message.endswith(f"change checkpoint.keep_last_n to {fewer} or checkpoint.dir")
    assert plan_messages(applied(values, {"checkpoint.keep_last_n": fewer}), "cpu:8") == []


class Disk(NamedTuple):
    """Result of `shutil.disk_usage`."""

    free: int


LARGE = merged(
    {"train": {"batch_size": 32, "seq_len": 64}, "model": {"vocab_size": 2048, "n_layers": 1}}
)


@pytest.mark.slow
def test_advice_for_oversized_step_makes_it_fit(monkeypatch):
    values, of = LARGE, on_cpus(2)
    peak = of(values).step.memory.peak
    monkeypatch.setattr("jaxforge.tools.plan.compiled.capacity_per_device", lambda: peak // 2)
    result = of(values)
    tried = []
    while not result.fits:
        assert "does not fit" in plan_report.verdict(result)
        change = next(item for item in map(settings, result.advice) if item and item not in tried)
        tried.append(change)
        values = applied(values, change)
        result = of(values)
    assert 1 <= len(tried) <= 4
    config = JobConfig.model_validate(values)
    assert config.train.ramp(2).rows * config.train.grad_accum_steps == 64  # the same update


@pytest.mark.slow
def test_advice_for_oversized_state_names_needed_devices(monkeypatch):
    small, wide = {"batch_size": 1, "seq_len": 8}, {"ffn_hidden_dim": 2048, "n_layers": 2}
    values = merged({"train": small, "model": wide})
    memory = on_cpus(1)(values).step.memory
    state = memory.parameters + memory.gradients + memory.optimizer
    monkeypatch.setattr(
        "jaxforge.tools.plan.compiled.capacity_per_device", lambda: int(0.95 * state)
    )
    result = on_cpus(1)(values)
    assert not result.fits
    (times,) = re.findall(r"(\d+) times as many devices", " ".join(result.advice))
    assert on_cpus(int(times))(values).fits


@pytest.mark.parametrize("backend", [{"sdpa_backend": "cudnn"}, {"moe_backend": "mosaic_gpu"}])
def test_checkpoint_bytes_do_not_depend_on_kernels(backend):
    experts = {"num_experts": 4, "moe_top_k": 2}
    plain, other = (
        JobConfig.model_validate({"model": {**experts, **more}}) for more in ({}, backend)
    )
    assert checkpoint_bytes(other) == checkpoint_bytes(plain)


def on_cpus(n: int):
    """Return a function that plans for `n` CPU devices."""
    return lambda values: plan(JobConfig.model_validate(values), Topology("cpu", (n,)))


def settings(advice: str) -> Change:
    """Return the settings at the beginning of an advice."""
    pairs = re.findall(rf"({KEY}) = ({VALUE})", advice.partition(": ")[0])
    return {key: json.loads(value) for key, value in pairs}
