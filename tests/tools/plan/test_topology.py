import pytest

from jaxforge.tools.plan.topology import Topology


@pytest.mark.parametrize(
    ("text", "chip", "lengths", "slices", "devices"),
    [
        ("v5e:16x16", "v5e", (16, 16), 1, 256),
        ("v5p:4x4x8*2", "v5p", (4, 4, 8), 2, 256),
        ("H100:8x8", "h100", (8, 8), 1, 64),
        ("cpu:8", "cpu", (8,), 1, 8),
        ("tpu7x:4x4x8*2", "tpu7x", (4, 4, 8), 2, 512),
        ("gb200:2x72", "gb200", (2, 72), 1, 144),
        ("gb300:1x2", "gb300", (1, 2), 1, 2),
    ],
)
def test_topology_round_trips_through_text(text, chip, lengths, slices, devices):
    topology = Topology.parse(text)
    assert topology == (chip, lengths, slices)
    assert topology.n_devices == devices
    assert str(topology) == text.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "expected one of the forms"),
        ("v5e:", "expected one of the forms"),
        ("v9:2x2", "expected one of v5e, v5p"),
        ("v5e:2x2x2", "v5e has 2 sides"),
        ("v5p:2x2", "v5p has 3 sides"),
        ("h100:8", "h100 has 2 nodes x GPUs"),
        ("cpu:2x2", "cpu has 1 number"),
        ("h100:2x8*2", "only TPUs have slices"),
        ("v5e:0x4", "every number must be at least 1"),
        ("v5e:4x4*0", "every number must be at least 1"),
        ("tpu7x:2x2", "tpu7x has 3 sides"),
        ("h100:2x16", "NVLink connects at most 8 h100 GPUs. Write h100:4x8"),
        ("gb200:1x128", "NVLink connects at most 72 gb200 GPUs. Write gb200:2x64"),
        ("gb300:3x6", "a host has 4 gb300 GPUs, and 6 is not a multiple of 4. Write gb300:3x8"),
    ],
)
def test_invalid_topology_is_explained(text, message):
    with pytest.raises(ValueError, match=message):
        Topology.parse(text)


def test_prepare_sets_compiler_environment():
    env = {"JAX_PLATFORMS": "tpu", "XLA_FLAGS": "--one"}
    Topology.parse("cpu:4").prepare(env)
    assert env["JAX_PLATFORMS"] == "cpu"
    assert env["JAX_ENABLE_COMPILATION_CACHE"] == "false"
    assert env["XLA_FLAGS"] == "--one --xla_force_host_platform_device_count=4"
    env = {}
    Topology.parse("v5e:2x2").prepare(env)
    assert env["TPU_SKIP_MDS_QUERY"] == "1"
    assert "XLA_FLAGS" not in env
