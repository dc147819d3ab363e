import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.model.experts import HEADROOM, filled_rows
from jaxforge.model.flops import visible_fraction
from jaxforge.parallel.hardware import CHIPS
from jaxforge.parallel.rates import EFFICIENCY
from jaxforge.tools.plan.cost import Cycles, Roofline, Workload
from jaxforge.tools.plan.hlo import HloProgram
from jaxforge.tools.plan.network import Network

PARAMETERS = """  %x = bf16[64,256]{1,0} parameter(0)
  %w = bf16[512,256]{1,0} parameter(1)
  %stack = f32[32,16,256]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %q = bf16[2,8,128,64]{3,2,1,0} parameter(4)
  %experts = bf16[4,256,128]{2,1,0} parameter(5)
"""
INNER = """%product (p0: bf16[64,256], p1: bf16[512,256]) -> bf16[64,512] {
  %p0 = bf16[64,256]{1,0} parameter(0)
  %p1 = bf16[512,256]{1,0} parameter(1)
  ROOT %dot = bf16[64,512]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
%product8 (p0: f8e4m3fn[64,256], p1: f8e5m2[512,256]) -> bf16[64,512] {
  %p0 = f8e4m3fn[64,256]{1,0} parameter(0)
  %p1 = f8e5m2[512,256]{1,0} parameter(1)
  ROOT %dot = bf16[64,512]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}
%cut (p0: f32[32,16,256], p1: s32[]) -> bf16[16,256] {
  %p0 = f32[32,16,256]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %b = f32[32,16,256]{2,1,0} bitcast(%p0)
  %one = f32[1,16,256]{2,1,0} dynamic-slice(%b, %p1, %p1, %p1), dynamic_slice_sizes={1,16,256}
  ROOT %out = bf16[16,256]{1,0} convert(%one)
}
%rows (p0: bf16[512,256], p1: s32[64]) -> bf16[64,256] {
  %p0 = bf16[512,256]{1,0} parameter(0)
  %p1 = s32[64]{0} parameter(1)
  ROOT %out = bf16[64,256]{1,0} gather(%p0, %p1), offset_dims={1}, slice_sizes={1,256}
}
%put (p0: f32[32,16,256], p1: f32[1,16,256], p2: s32[]) -> f32[32,16,256] {
  %p0 = f32[32,16,256]{2,1,0} parameter(0)
  %p1 = f32[1,16,256]{2,1,0} parameter(1)
  %p2 = s32[] parameter(2)
  ROOT %out = f32[32,16,256]{2,1,0} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)
}
"""
LINES = {
    "product": "%r = bf16[64,512]{1,0} fusion(%x, %w), kind=kCustom, calls=%product",
    "cut": "%r = bf16[16,256]{1,0} fusion(%stack, %i), kind=kLoop, calls=%cut",
    "put": "%r = f32[32,16,256]{2,1,0} fusion(%stack, %one, %i), kind=kLoop, calls=%put",
    "rows": "%r = bf16[64,256]{1,0} fusion(%w, %index), kind=kCustom, calls=%rows",
    "started cut": "%r = ((f32[32,16,256]{2,1,0}, s32[]), bf16[16,256]{1,0}, u32[]) "
                   "fusion-start(%stack, %i), kind=kLoop, calls=%cut",
    "started put": "%r = ((f32[32,16,256]{2,1,0}, f32[1,16,256]{2,1,0}, s32[]), "
                   "f32[32,16,256]{2,1,0}, u32[]) fusion-start(%stack, %one, %i), kind=kLoop, "
                   "calls=%put",
    "add": "%r = bf16[64,256]{1,0} add(%x, %x)",
    "cudnn": '%r = bf16[2,8,128,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target='
             '"__cudnn$fmhaSoftmax", backend_config={"intermediate_tensor_shape": '
             '{"dimensions": ["2", "8", "128", "128"]}}',
    "cudnn backward": '%r = bf16[2,8,128,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target='
             '"__cudnn$fmhaSoftmaxBackward", backend_config={"intermediate_tensor_shape": '
             '{"dimensions": ["2", "8", "128", "128"]}}',
    "masked": '%r = bf16[2,8,128,64]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target='
              '"__cudnn$fmhaScaleBiasSoftmax", backend_config={"intermediate_tensor_shape": '
              '{"dimensions": ["2", "8", "128", "128"]}}',
    "triton": '%pallas_call.1 = (f32[2,128,8,64]{3,2,1,0}, f32[2,128,8,64]{3,2,1,0}) custom-call('
              '%spans, %rows, %keys, %keys, %at, %rows), custom_call_target='
              '"__gpu$xla.gpu.triton", metadata={op_name="jit(step)/flash_dkv/pallas_call"}, '
              'backend_config={grid_x = 32 : i32, ir = "ML\\EFR(\\00", name = "flash_dkv"}',
    "splash": '%splash_mha_dkv = (f32[8,128]{1,0}, bf16[8,128,64]{2,1,0}) custom-call(%masks, '
              '%masks, %k, %k, %k), '
              'custom_call_target="tpu_custom_call"',
    "splash, narrow heads": '%splash_mha_fwd_residuals = (f32[64,128]{1,0}, f32[64,64]{1,0}, '
              'bf16[8,128,64]{2,1,0}, f32[8,128,128]{2,1,0}) custom-call(%masks, %masks, %k, %k, '
              '%k), custom_call_target="tpu_custom_call"',
    "splash, narrow values": '%splash_mha_fwd_residuals = (f32[64,128]{1,0}, bf16[8,128,64]{2,1,0},'
              ' f32[8,128,128]{2,1,0}) custom-call(%masks, %masks, %wide, %wide, %k), '
              'custom_call_target="tpu_custom_call"',
    "gmm": '%gmm = bf16[64,128]{1,0} custom-call(%x, %experts), '
           'custom_call_target="tpu_custom_call"',
    "cublas": '%r = bf16[64,512]{1,0} custom-call(%x, %w), custom_call_target="__cublas$gemm", '
              'backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}',
    "fp8": "%r = bf16[64,512]{1,0} fusion(%x8, %w8), kind=kCustom, calls=%product8",
    "fp8 dot": "%r = bf16[64,512]{1,0} dot(%x8, %w8), lhs_contracting_dims={1}, "
               "rhs_contracting_dims={1}",
    "fp8 cublas": '%r = bf16[64,512]{1,0} custom-call(%x8, %w8), custom_call_target='
           '"__cublas$lt$matmul$f8", backend_config={"dot_dimension_numbers":'
           '{"lhs_contracting_dimensions":["1"]}}',
    "mark": '%r = bf16[64,256]{1,0} custom-call(%x), custom_call_target="AllocateBuffer"',
}  # fmt: skip
MORE = """  %one = f32[1,16,256]{2,1,0} parameter(6)
  %k = bf16[8,128,64]{2,1,0} parameter(7)
  %spans = s32[2,1,4]{2,1,0} parameter(8)
  %rows = bf16[2,128,8,64]{3,2,1,0} parameter(9)
  %keys = bf16[2,96,2,64]{3,2,1,0} parameter(10)
  %at = s32[2,128]{1,0} parameter(11)
  %masks = s8[1,64,64]{2,1,0} parameter(12)
  %x8 = f8e4m3fn[64,256]{1,0} parameter(13)
  %w8 = f8e5m2[512,256]{1,0} parameter(14)
  %index = s32[64]{0} parameter(15)
  %wide = bf16[8,128,96]{2,1,0} parameter(16)
"""


LENGTH = 1024


def work_of(name, visible=0.5, filled=1.0):
    text = f"{INNER}ENTRY %main (x: f32[]) -> f32[] {{\n{PARAMETERS}{MORE}  {LINES[name]}\n}}\n"
    program = HloProgram(text, 1)
    within = program.computations[program.entry]
    return Workload(program, visible, LENGTH, filled).of(list(within.values())[-1], within)


PRODUCT = 2 * 64 * 512 * 256
PAIRS = 2 * 8 * 128 * 128


@pytest.mark.parametrize(
    ("name", "kind", "flops"),
    [
        ("product", "products", PRODUCT),
        ("cublas", "products", PRODUCT),
        ("fp8", "products", PRODUCT),
        ("fp8 dot", "products", PRODUCT),
        ("fp8 cublas", "products", PRODUCT),
        ("add", "memory", 0),
        ("cudnn", "attention", 2 * 2 * PAIRS * 64 / 2),
        ("cudnn backward", "attention", 5 * 2 * PAIRS * 64 / 2),
        ("masked", "attention", 2 * 2 * PAIRS * 64 / 2),
        ("triton", "attention", 4 * 2 * 2 * 8 * 128 * 96 * 64 / 2),
        ("splash", "attention", 4 * 2 * 8 * 128 * 128 * 64 / 2),
        ("splash, narrow heads", "attention", 2 * 2 * 8 * 128 * 128 * 64 / 2),
        ("splash, narrow values", "attention", 2 * 8 * 128 * 128 * (96 + 64) / 2),
        ("gmm", "experts", 2 * 64 * 256 * 128),
        ("mark", "nothing", 0),
    ],
)
def test_flops_of_operations(name, kind, flops):
    task = work_of(name)
    assert (task.kind, task.flops) == (kind, flops)


def test_layers_without_attention_do_not_lower_its_visible_fraction():
    layers = {
        "n_layers": 4,
        "sliding_window": 32,
        "attention_pattern": ["full", "full", "full", "sliding"],
    }
    pattern = ["mamba2", "mamba2", "attention", "attention"]
    assert visible_fraction(ModelConfig(n_layers=4), 64) == 0.5
    assert visible_fraction(ModelConfig(**layers, mixer_pattern=pattern), 64) == (1 / 2 + 3 / 8) / 2


def test_unmasked_attention_has_twice_the_flops():
    assert work_of("cudnn", visible=1.0).flops == 2 * work_of("cudnn").flops


def test_rows_without_tokens_have_no_flops():
    experts = ModelConfig(num_experts=8, moe_top_k=2)
    assert filled_rows(experts, 1) == 1
    assert work_of("gmm", filled=filled_rows(experts, 4)).flops == work_of("gmm").flops / HEADROOM
    assert filled_rows(ModelConfig(), 4) == 1


@pytest.mark.parametrize(
    ("name", "moved"),
    [
        ("product", 2 * (64 * 256 + 512 * 256 + 64 * 512)),
        ("cut", 4 * 16 * 256 + 4 + 2 * 16 * 256),  # a layer of the stack, its index, the result
        ("put", 4 * 16 * 256 + 4 + 4 * 16 * 256),  # the stack is not read
        ("started cut", 4 * 16 * 256 + 4 + 2 * 16 * 256),
        ("started put", 4 * 16 * 256 + 4 + 4 * 16 * 256),
        ("add", 3 * 2 * 64 * 256),
        ("rows", 2 * 2 * 64 * 256 + 4 * 64),  # the gathered rows alone, their indices, the result
    ],
)
def test_bytes_of_operations(name, moved):
    assert work_of(name).bytes == moved


def seconds(name, visible=0.5):
    text = f"{INNER}ENTRY %main (x: f32[]) -> f32[] {{\n{PARAMETERS}{MORE}  {LINES[name]}\n}}\n"
    program = HloProgram(text, 1)
    within = program.computations[program.entry]
    operation = list(within.values())[-1]
    return Roofline(Workload(program, visible, LENGTH), CHIPS["h100"]).seconds(operation, within)[1]


def test_gather_on_tpu_takes_the_time_of_its_rows():
    """XLA:TPU writes no cycles at a gather."""
    text = f"{INNER}ENTRY %main (x: f32[]) -> f32[] {{\n{PARAMETERS}{MORE}  {LINES['rows']}\n}}\n"
    program, chip = HloProgram(text, 1), CHIPS["v5p"]
    within = program.computations[program.entry]
    rates = Cycles(program, Workload(program, 0.5, LENGTH), chip)
    moved = work_of("rows").bytes / (chip.bandwidth * EFFICIENCY["tpu"].memory)
    assert rates.seconds(within["r"], within) == ("memory", pytest.approx(moved))
    assert rates.seconds(within["x"], within) == ("nothing", 0)


def test_roofline_is_the_maximum_of_compute_and_memory():
    chip, reached = CHIPS["h100"], EFFICIENCY["gpu"]
    moved = work_of("add").bytes / (chip.bandwidth * reached.memory)
    assert seconds("add") == pytest.approx(moved + reached.launch)
    computed = work_of("cudnn").flops / (chip.peak_flops * reached.by_kind["attention"])
    moved = work_of("cudnn").bytes / (chip.bandwidth * reached.memory)
    assert seconds("cudnn") == pytest.approx(max(computed, moved) + reached.launch)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("cudnn", "attention"),
        ("cudnn backward", "cudnn backward"),
        ("masked", "masked cudnn"),
        ("triton", "triton"),
    ],
)
def test_each_attention_kernel_has_an_efficiency(name, part):
    reached, much = EFFICIENCY["gpu"], 100  # enough FLOPs to be compute-bound
    computed = work_of(name, much).flops / (CHIPS["h100"].peak_flops * reached.by_kind[part])
    assert seconds(name, much) == pytest.approx(computed + reached.launch)


@pytest.mark.parametrize("name", ["fp8", "fp8 dot", "fp8 cublas"])
def test_8_bit_products_use_the_peak_of_fp8(name):
    assert (work_of(name).by, work_of("product").by) == ("fp8", "")
    text = f"{INNER}ENTRY %main (x: f32[]) -> f32[] {{\n{PARAMETERS}{MORE}  {LINES[name]}\n}}\n"
    program = HloProgram(text, 1)
    within = program.computations[program.entry]
    chip = CHIPS["gb300"]._replace(bandwidth=1e30)
    taken = Roofline(Workload(program, 0.5, LENGTH), chip).seconds(
        list(within.values())[-1], within
    )[1]
    reached = EFFICIENCY["gpu"]
    assert taken == pytest.approx(PRODUCT / (5000e12 * reached.by_kind["fp8"]) + reached.launch)


class Device:
    def __init__(self, coords, slice_index=0):
        self.coords, self.slice_index = coords, slice_index


class Mesh:
    axis_names = ("dp_replicate", "dp_shard", "tp")

    def __init__(self, devices, shape):
        self.devices = np.empty(len(devices), object)
        self.devices[:] = devices
        self.devices = self.devices.reshape(shape)


def gather(mesh, chip, group, rows=1000):
    members = ",".join(map(str, group))
    return collective(mesh, chip, f"all-gather(%x), replica_groups={{{{{members}}}}}", rows)


def permute(mesh, chip, pairs, rows=1000):
    text = ",".join(f"{{{source},{target}}}" for source, target in pairs)
    return collective(mesh, chip, f"collective-permute(%x), source_target_pairs={{{text}}}", rows)


def collective(mesh, chip, text, rows):
    program = HloProgram(
        f"""ENTRY %main (x: f32[]) -> f32[] {{
  %x = f32[{rows}]{{0}} parameter(0)
  %g = f32[{rows}]{{0}} {text}
}}
""",
        8,
    )
    within = program.computations[program.entry]
    return Network(mesh, CHIPS[chip]).collective(within["g"], within)


def seconds_to_send(nbytes, rate, platform):
    reached = EFFICIENCY[platform]
    return reached.latency + nbytes / (reached.links * rate)


NODES = Mesh([Device([node, 0, i], node) for node in range(2) for i in range(8)], (2, 4, 2))


@pytest.mark.parametrize(
    ("group", "axes", "rate"),
    [
        ([0, 2, 4, 6], ("dp_shard",), 450e9),  # within a node: NVLink
        (list(range(16)), ("dp_replicate", "dp_shard", "tp"), 400e9),  # eight adapters of a node
        ([0, 8], ("dp_replicate",), 50e9),  # one adapter
    ],
)
def test_gpu_collectives_use_nvlink_or_network_adapters(group, axes, rate):
    result = gather(NODES, "h100", group)
    assert result.axes == axes
    assert result.sent == 4000 * (len(group) - 1)
    assert result.seconds == pytest.approx(seconds_to_send(result.sent, rate, "gpu"))


def torus(*edges, slices=1):
    x, y, z = (*edges, 1)[:3]
    coords = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
    devices = [Device(at, s) for s in range(slices) for at in coords]
    return Mesh(devices, (slices, len(coords), 1))


@pytest.mark.parametrize(
    ("mesh", "chip", "group", "links"),
    [
        (torus(4, 4), "v5e", list(range(4)), 1),  # a line of four is not a ring
        (torus(4, 4), "v5e", list(range(16)), 2),  # both dimensions
        (torus(16, 1), "v5e", list(range(16)), 2),  # a ring
        (torus(2, 1), "v5e", [0, 1], 1),  # one neighbour
        (torus(4, 4, 4), "v5p", list(range(64)), 6),  # rings in all three dimensions
    ],
)
def test_tpu_collectives_use_torus_links(mesh, chip, group, links):
    result = gather(mesh, chip, group)
    rate = links * CHIPS[chip].link
    assert result.seconds == pytest.approx(seconds_to_send(result.sent, rate, "tpu"))


def shifts(devices, by=1):
    return [(device, devices[(i + by) % len(devices)]) for i, device in enumerate(devices)]


# The 16 chips of a square as a ring of neighbours, (0, 0), (1, 0), ..., (0, 1), by their number.
RING_OF_16 = [0, 1, 2, 3, 7, 6, 5, 9, 10, 11, 15, 14, 13, 12, 8, 4]


@pytest.mark.parametrize(
    ("mesh", "chip", "pairs", "messages"),
    [
        (torus(4, 4), "v5e", shifts(RING_OF_16), 1),
        (torus(16, 1), "v5e", shifts(range(16)), 1),  # the ends of a long side are connected
        (torus(4, 4), "v5e", shifts(range(16)), 1),  # ends of rows: back along the row, then up
        (torus(4, 1), "v5e", shifts(range(4)), 1),  # the last goes back along the line
        (torus(16, 1), "v5e", shifts(range(16), 3), 3),
    ],
)
def test_permute_takes_the_time_of_its_busiest_link(mesh, chip, pairs, messages):
    result = permute(mesh, chip, pairs)
    rate = CHIPS[chip].link / messages
    assert result.seconds == pytest.approx(seconds_to_send(4000, rate, "tpu"))


def test_opposite_directions_of_a_link_are_separate():
    mesh, whole = torus(4, 4), gather(torus(4, 4), "v5e", list(range(16)))
    ahead, back = (permute(mesh, "v5e", shifts(RING_OF_16, by)) for by in (1, -1))
    assert not ahead.links & back.links
    by_rows = [permute(mesh, "v5e", shifts(range(16), by)) for by in (1, -1)]
    assert by_rows[0].links & by_rows[1].links  # the way back along a row
    assert ahead.links < whole.links
    assert back.links < whole.links
    row, column = (gather(mesh, "v5e", group) for group in ([0, 1, 2, 3], [0, 4, 8, 12]))
    assert not row.links & column.links


def chiplets(*edges):
    """Return a mesh of TPU7x devices, two of each chip in succession."""
    chips = [device.coords for device in torus(*edges).devices.flat]
    return Mesh([Device(coords) for coords in chips for _ in range(2)], (len(chips), 2, 1))


@pytest.mark.parametrize(
    ("group", "axes", "rate"),
    [
        ([0, 1], ("dp_shard",), 600e9),  # the chiplets of a chip
        (list(range(8)), ("dp_replicate", "dp_shard"), 2 * 100e9),  # one link along x, one along y
        ([0, 2, 4, 6], ("dp_replicate",), 2 * 50e9),  # a chiplet of each, which share these links
    ],
)
def test_devices_of_a_chip_share_its_links(group, axes, rate):
    result = gather(chiplets(2, 2), "tpu7x", group)
    assert result.axes == axes
    assert result.seconds == pytest.approx(seconds_to_send(result.sent, rate, "tpu"))


def test_collectives_between_slices_use_the_network():
    result = gather(torus(2, 2, slices=2), "v5e", [0, 4])
    rate = CHIPS["v5e"].network
    assert result.axes == ("dp_replicate",)
    assert result.seconds == pytest.approx(seconds_to_send(result.sent, rate, "tpu"))
