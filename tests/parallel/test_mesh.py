"""Arrangement of devices in meshes over several slices and nodes, with descriptions of devices."""

import dataclasses
import importlib.util
import itertools
import math
import os
import subprocess
import sys
import types

import numpy as np
import pytest

from jaxforge.config.axes import AXES
from jaxforge.errors import UserError
from jaxforge.parallel import targets
from jaxforge.parallel.mesh import arrange, make_mesh
from tests.conftest import tiny_config
from tests.machine import PATIENCE
from tests.processes.conftest import ROOT


@dataclasses.dataclass(frozen=True)
class Device:
    """Description of a device with the attributes of JAX's devices."""

    id: int
    platform: str
    device_kind: str
    process_index: int
    slice_index: int
    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0
    client: types.SimpleNamespace | None = None


def slices_of_tpus(n, lengths, kind="TPU v5p"):
    """Return the chips of n slices in the order of their ids: tori with four chips per host."""
    coords = [xyz[::-1] for xyz in itertools.product(*(range(length) for length in lengths[::-1]))]
    each = len(coords)
    return [
        Device(part * each + i, "tpu", kind, (part * each + i) // 4, part, xyz)
        for part in range(n)
        for i, xyz in enumerate(coords)
    ]


def without_slice_index(device):
    """Return the description of a chip by a compiler, for a single slice."""
    reported = {key: value for key, value in vars(device).items() if key != "slice_index"}
    return types.SimpleNamespace(**reported)


def nodes_of_gpus(n, each=8, processes=1):
    """Return the GPUs of n nodes, which JAX reports as slices, in another order than their ids."""
    devices = [
        Device(i, "gpu", "NVIDIA H100", i * processes // each, i // each) for i in range(n * each)
    ]
    return devices[::2] + devices[1::2]


def mesh_shape(**axes):
    return {axis: axes.get(axis, 1) for axis in AXES}


def spread(arranged, axis):
    """Return the slices of each line of devices along an axis."""
    lines = np.moveaxis(arranged, AXES.index(axis), -1).reshape(
        -1, arranged.shape[AXES.index(axis)]
    )
    return {tuple(dict.fromkeys(device.slice_index for device in line)) for line in lines}


@pytest.mark.parametrize(
    ("n", "axes", "over"),
    [
        (2, {"dp_replicate": 2, "dp_shard": 16}, "dp_replicate"),
        (2, {"pp": 2, "dp_replicate": 2, "dp_shard": 8}, "pp"),
        (2, {"pp": 4, "dp_replicate": 4, "tp": 2}, "pp"),
        (2, {"pp": 3, "dp_replicate": 2, "dp_shard": 16}, "dp_replicate"),
        (3, {"dp_replicate": 6, "dp_shard": 2, "tp": 4}, "dp_replicate"),
        (2, {"dp_shard": 32}, "dp_shard"),
        (2, {"dp_replicate": 2, "ep": 4, "tp": 4}, "dp_replicate"),
    ],
    ids=str,
)
def test_slices_are_arranged_along_outer_axes(n, axes, over, caplog):
    shape = mesh_shape(**axes)
    lengths = (4, 2, math.prod(axes.values()) // n // 8)
    devices = slices_of_tpus(n, lengths, "TPU v5 lite")
    arranged = arrange(shape, devices)
    assert arranged.shape == tuple(shape.values())
    assert {d.id for d in arranged.flat} == {d.id for d in devices}
    for axis in AXES:
        whole = {tuple(range(n))} if axis == over else {(i,) for i in range(n)}
        assert spread(arranged, axis) == whole, axis
    warned = [r.getMessage() for r in caplog.records if "goes over" in r.getMessage()]
    assert len(warned) == (over == "dp_shard")
    assert all("set dp_replicate = 2" in item for item in warned)


def test_slices_are_split_over_several_axes():
    arranged = arrange(mesh_shape(pp=2, dp_replicate=4, tp=4), slices_of_tpus(4, (2, 2, 2)))
    assert spread(arranged, "tp") == {(i,) for i in range(4)}
    assert spread(arranged, "pp") == {(0, 2), (1, 3)}
    assert spread(arranged, "dp_replicate") == {(0, 1), (2, 3)}


@pytest.mark.parametrize("described", [lambda device: device, without_slice_index])
def test_single_slice_follows_its_torus(described):
    devices = [described(device) for device in slices_of_tpus(1, (4, 4, 2))]
    arranged = arrange(mesh_shape(dp_shard=8, tp=4), devices)
    assert {d.id for d in arranged.flat} == set(range(32))
    for line in arranged.reshape(8, 4):  # a side, or a whole face
        assert sum(len({d.coords[i] for d in line}) > 1 for i in range(3)) == 1


@pytest.mark.parametrize(
    ("n", "axes", "message"),
    [
        (
            2,
            {"tp": 16},
            r"distributed\.tp = 16 must divide the 8 devices of each of the 2 slices.*\. Lower "
            r"distributed\.tp",
        ),
        (
            3,
            {"ep": 3, "tp": 8},
            r"distributed\.ep = 3 \* distributed\.tp = 8 must divide the 8 devices of each of the "
            r"3 slices.*\. Lower distributed\.ep or distributed\.tp",
        ),
    ],
)
def test_inner_axes_over_slices_raise(n, axes, message):
    with pytest.raises(UserError, match=message):
        arrange(mesh_shape(**axes), slices_of_tpus(n, (2, 2, 2)))


def test_slices_of_different_sizes_raise():
    devices = slices_of_tpus(2, (2, 2, 1))[:6]
    with pytest.raises(UserError, match=r"differ in size: they have 4, 2 devices"):
        arrange(mesh_shape(dp_shard=6), devices)


@pytest.mark.parametrize("n", [1, 2])
def test_axis_can_be_part_of_torus_side(n):
    shape = mesh_shape(dp_replicate=n, dp_shard=32, tp=2)
    arranged = arrange(shape, slices_of_tpus(n, (4, 4, 4)))
    pairs = arranged.reshape(-1, 2)
    apart = [np.abs(np.subtract(a.coords, b.coords)) for a, b in pairs]
    assert len(pairs) == 32 * n
    assert all(sorted(item) == [0, 0, 1] for item in apart)  # tp's two are neighbours


@pytest.mark.parametrize(
    ("n", "axes", "leave"),
    [
        (2, {"dp_shard": 2, "tp": 8}, []),
        (2, {"dp_replicate": 2, "dp_shard": 2, "tp": 4}, []),
        (2, {"dp_shard": 2, "ep": 4, "tp": 2}, []),
        (3, {"dp_shard": 6, "tp": 4}, []),
        (3, {"pp": 2, "dp_shard": 12}, []),
        (2, {"tp": 16}, ["distributed.tp = 16 goes over several nodes of 8 GPUs"]),
        (2, {"ep": 16}, ["distributed.ep = 16 goes over several nodes of 8 GPUs"]),
        (3, {"dp_shard": 8, "tp": 3}, ["distributed.tp = 3 goes over several nodes of 8 GPUs"]),
    ],
    ids=str,
)
@pytest.mark.parametrize("processes", [1, 8])
def test_gpus_are_arranged_by_node(n, axes, leave, processes, caplog):
    """`tp` stays within a node if it divides the node's GPUs, in any order of processes."""
    arranged = arrange(mesh_shape(**axes), nodes_of_gpus(n, processes=processes))
    assert [d.id for d in arranged.flat] == list(range(8 * n))
    warned = [r.getMessage() for r in caplog.records]
    assert [item.partition(",")[0] for item in warned] == leave
    if not leave:
        assert spread(arranged, "tp") == {(i,) for i in range(n)}


def test_warning_suggests_size_within_node(caplog):
    arrange(mesh_shape(tp=24), nodes_of_gpus(3))
    assert caplog.records[0].getMessage().endswith("; 8 would stay within a node")


def test_warning_counts_nvlink_domains_of_target_gpus(caplog):
    """Hosts of GB200 NVL72 have four GPUs; a compiler's GPUs are all of slice 0."""
    compiler = types.SimpleNamespace(runtime_type="compile_only_runtime")
    gpus = [
        Device(i, "gpu", "NVIDIA GB200", i // 4, 0, (i // 8, i // 4 % 2, i % 4), client=compiler)
        for i in range(16)
    ]
    arrange(mesh_shape(dp_shard=2, tp=8), gpus)
    assert not caplog.records
    arrange(mesh_shape(tp=16), gpus)
    message = caplog.records[0].getMessage()
    assert message.startswith("distributed.tp = 16 goes over several nodes of 8 GPUs")


PROGRAM = """
import jax
from jaxforge.config.job import JobConfig
from jaxforge.parallel import targets
from jaxforge.parallel.mesh import arrange, make_mesh
from jaxforge.program import Program

sizes = {"pp": 1, "dp_replicate": 1, "dp_shard": 4, "cp": 1, "ep": 1, "tp": 4}
for topology in ("v5e:4x4", "v5p:2x2x4"):
    devices = list(targets.tpus(topology))
    expected = jax.make_mesh(tuple(sizes.values()), tuple(sizes), devices=devices)
    assert (arrange(sizes, devices) == expected.devices).all(), topology

model = {"dim": 512, "n_layers": 2, "n_heads": 4, "vocab_size": 4096, "max_seq_len": 512}
for grad_sync in ("update", "microbatch"):
    config = JobConfig.model_validate({
        "model": model, "distributed": {"dp_replicate": 2, "dp_shard": 16},
        "train": {"batch_size": 1, "seq_len": 512, "grad_sync": grad_sync},
    })
    mesh = make_mesh(config, targets.tpus("v5e:4x4", 2))
    of_slice = [{d.slice_index for d in part.flat} for part in mesh.devices[0]]
    assert of_slice == [{0}, {1}], of_slice
    text = Program(config, mesh).lower().compile().as_text()
    print(grad_sync, "compiled", len(text) > 1000)
"""


@pytest.mark.skipif(not targets.has_tpu_compiler(), reason="needs XLA's compiler for TPUs")
def test_step_compiles_for_two_real_slices():
    env = {**os.environ, "TPU_SKIP_MDS_QUERY": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", PROGRAM]
    result = subprocess.run(
        command, cwd=ROOT, env=env, text=True, capture_output=True, timeout=PATIENCE
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == "update compiled True\nmicrobatch compiled True\n"


@pytest.mark.parametrize(
    ("lengths", "axes"),
    [
        ((4, 4, 1), {"dp_shard": 16}),
        ((4, 8, 1), {"dp_shard": 32}),
        ((8, 8, 1), {"dp_shard": 64}),
        ((8, 8, 1), {"pp": 2, "dp_shard": 32}),
        ((2, 4, 1), {"dp_shard": 8}),
    ],
)
def test_axes_over_rectangles_are_rings_of_neighbours(lengths, axes):
    arranged = arrange(mesh_shape(**axes), slices_of_tpus(1, lengths, "TPU v6 lite"))
    lines = np.moveaxis(arranged, AXES.index("dp_shard"), 0).reshape(axes["dp_shard"], -1).T
    for line in lines:
        steps = [np.abs(np.subtract(a.coords, line[i - 1].coords)) for i, a in enumerate(line)]
        assert {sum(step) for step in steps} == {1}


def test_missing_tpu_compiler_and_unknown_slice_raise(monkeypatch):
    if importlib.util.find_spec("libtpu") is not None:
        with pytest.raises(UserError, match='no TPU slice "v5e:3x5"'):
            targets.tpus("v5e:3x5")
        assert len(targets.tpus("v5e:1x1")) == len(targets.tpus("v5p:1x1x1")) == 1
    monkeypatch.setattr(targets, "has_tpu_compiler", lambda: False)
    with pytest.raises(UserError, match="plan-tpu"):
        targets.tpus("v5e:4x4")


def test_mesh_has_axes_of_config():
    mesh = make_mesh(tiny_config(distributed={"dp_shard": 4, "tp": 2}))
    assert dict(mesh.shape) == mesh_shape(dp_shard=4, tp=2)
