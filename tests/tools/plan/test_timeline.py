"""Timelines of small programs with known durations."""

import re

import numpy as np
import pytest

from jaxforge.tools.plan.hlo import HloProgram, first_replica_group
from jaxforge.tools.plan.network import Collective
from jaxforge.tools.plan.timeline import CollectiveKey, Simulation

PRODUCT = "multiply(%a, %a)"


class Seconds:
    """Rates with a second per product."""

    def seconds(self, operation, within):
        return ("products", 1.0) if operation.kind == "multiply" else ("nothing", 0.0)


class Wires:
    """Links on which a collective takes a second per element."""

    def collective(self, operation, within):
        rows = within[operation.operands[0]].elements
        links = frozenset(re.findall(r"link \d", operation.line) or ["link 1", "link 2"])
        return Collective(operation.collective, ("dp_shard",), 10 * rows, rows, links)


def program(*lines, more=""):
    body = "\n".join(f"  {line}" for line in lines)
    return (
        f"{more}ENTRY %main (a: f32[3]) -> f32[3] {{\n  %a = f32[3]{{0}} parameter(0)\n{body}\n}}\n"
    )


def run(text, **options):
    return Simulation(HloProgram(text, 8), Seconds(), Wires(), **options).run()


GATHER = "%g = (f32[3]{0}, f32[24]{0}) all-gather-start(%a), channel_id=1"
DONE = "%d = f32[24]{0} all-gather-done(%g)"


def product(name):
    return f"%{name} = f32[3]{{0}} {PRODUCT}"


@pytest.mark.parametrize(("n_products", "waited"), [(0, 3), (1, 2), (2, 1), (3, 0), (4, 0)])
def test_operations_between_halves_hide_a_collective(n_products, waited):
    line = run(program(GATHER, *(product(f"p{i}") for i in range(n_products)), DONE))
    assert line.seconds == max(3, n_products)
    assert line.waited == waited
    assert line.busy["products"] == n_products
    (traffic,) = line.traffic.values()
    assert (traffic.count, traffic.bytes, traffic.seconds) == (1, 30, 3)


def test_synchronous_collective_is_exposed():
    line = run(program(product("p"), "%r = f32[3]{0} all-reduce(%a), channel_id=1", product("q")))
    assert line.seconds == 5
    assert line.traffic[CollectiveKey("all-reduce", ("dp_shard",), False, False)].waited == 3


SCATTER = """%scatter (x: f32[24]) -> f32[3] {
  %x = f32[24]{0} parameter(0)
  %sum = f32[24]{0} all-reduce(%x), channel_id=1
  ROOT %share = f32[3]{0} dynamic-slice(%sum), dynamic_slice_sizes={3}
}
"""


def test_reduce_scatter_fusion_is_exposed():
    whole, fused = "%w = f32[24]{0} broadcast(%a)", "%s = f32[3]{0} fusion(%w), calls=%scatter"
    line = run(program(product("p"), whole, fused, product("q"), more=SCATTER))
    assert line.seconds == 26
    assert line.traffic[CollectiveKey("reduce-scatter", ("dp_shard",), False, False)].waited == 24


def test_collectives_over_same_links_are_sequential():
    second = GATHER.replace("%g", "%h").replace("channel_id=1", "channel_id=2")
    line = run(
        program(GATHER, second, product("p"), DONE, DONE.replace("%g", "%h").replace("%d", "%e"))
    )
    assert line.seconds == 6
    assert line.waited == 5


@pytest.mark.parametrize(("second", "seconds"), [("link 1", 6), ("link 2", 3)])
def test_collectives_on_separate_links_are_simultaneous(second, seconds):
    pair = [GATHER + ' note="link 1"', GATHER.replace("%g", "%h") + f' note="{second}"']
    line = run(program(*pair, DONE, DONE.replace("%g", "%h").replace("%d", "%e")))
    assert line.seconds == line.waited == seconds


BODY = """%body (s: (s32[], f32[3])) -> (s32[], f32[3]) {
  %s = (s32[], f32[3]{0}) parameter(0)
  %a = f32[3]{0} get-tuple-element(%s), index=1
  %p = f32[3]{0} multiply(%a, %a)
  %r = f32[3]{0} all-reduce(%p), channel_id=3
}
%condition (s: (s32[], f32[3])) -> pred[] {
  %s = (s32[], f32[3]{0}) parameter(0)
}
"""
LOOP = (
    "%w = (s32[], f32[3]{0}) while(%a), condition=%condition, body=%body, "
    'backend_config={"known_trip_count":{"n":"7"}}'
)


def test_loop_time_is_the_sum_of_its_iterations():
    line = run(program(LOOP, more=BODY))
    assert line.seconds == 7 * 4
    assert line.busy["products"] == 7
    traffic = line.traffic[CollectiveKey("all-reduce", ("dp_shard",), True, False)]
    assert (traffic.count, traffic.waited) == (7, 21)


BRANCHES = """%short (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  %p = f32[3]{0} multiply(%x, %x)
}
%long (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  %p = f32[3]{0} multiply(%x, %x)
  %q = f32[3]{0} multiply(%p, %p)
}
"""


@pytest.mark.parametrize(("longest", "seconds"), [(False, 1), (True, 2)])
def test_conditional_takes_longest_or_shortest_branch(longest, seconds):
    choice = "%c = f32[3]{0} conditional(%a, %a, %a), branch_computations={%short, %long}"
    assert run(program(choice, more=BRANCHES), longest=longest).seconds == seconds


def test_conditional_of_a_ring_sends():
    ring = "  %p = f32[3]{0} collective-permute(%x), channel_id=1\n}\n%long"
    branches = BRANCHES.replace("  %p = f32[3]{0} multiply(%x, %x)\n}\n%long", ring)
    choice = "%c = f32[3]{0} conditional(%a, %a, %a), branch_computations={%short, %long}"
    assert run(program(choice, more=branches)).seconds == 3


FUSED = """%begin (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  %g = f32[24]{0} all-gather(%x), channel_id=5
  ROOT %s = f32[3]{0} custom-call(%g), custom_call_target="AsyncCollectiveStart"
}
%end (x: f32[3]) -> f32[3] {
  %x = f32[3]{0} parameter(0)
  %g = f32[24]{0} all-gather(%x), channel_id=5
  ROOT %s = f32[24]{0} custom-call(%g), custom_call_target="AsyncCollectiveDone"
}
"""


def test_fused_collective_halves_match_by_channel():
    start = "%f = f32[3]{0} fusion(%a), kind=kCustom, calls=%begin"
    done = "%e = f32[24]{0} fusion(%f), kind=kCustom, calls=%end"
    line = run(program(start, product("p"), done, more=FUSED))
    assert (line.seconds, line.waited) == (3, 2)


ON_SPARSECORE = """%gather (x: f32[3], t: token[]) -> f32[24] {
  %x = f32[3]{0} parameter(0)
  %t = token[] parameter(1)
  ROOT %g = f32[24]{0} all-gather(%x), channel_id=5
}, execution_thread="sparsecore"
"""


def test_collective_on_sparsecore_overlaps_with_operations():
    start = (
        "%c = ((f32[3]{0}, token[]), f32[24]{0}) call-start(%a), "
        'async_execution_thread="sparsecore", to_apply=%gather'
    )
    line = run(program(start, product("p"), "%e = f32[24]{0} call-done(%c)", more=ON_SPARSECORE))
    assert (line.seconds, line.waited) == (3, 2)
    assert line.traffic[CollectiveKey("all-gather", ("dp_shard",), False, True)].count == 1


@pytest.mark.parametrize(
    ("text", "group"),
    [
        ("replica_groups={{0,2},{1,3}}", [0, 2]),
        ("replica_groups=[2,4]<=[8]", [0, 1, 2, 3]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [0, 4]),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'a','c'}", [0, 1, 4, 5]),
        ("replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", [0, 2, 4, 6]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [3, 2]),
        ("source_target_pairs={{0,1},{1,2}}", [0, 1]),
        ("replica_groups={}", list(range(8))),
    ],
)
def test_first_replica_group_parses_every_form(text, group):
    assert first_replica_group(text, 8) == group


def test_transposed_iota_groups_match_numpy():
    text = "replica_groups=[6,4]<=[2,3,4]T(2,0,1)"
    expected = np.arange(24).reshape(2, 3, 4).transpose(2, 0, 1).reshape(6, 4)[0]
    assert first_replica_group(text, 24) == expected.tolist()
