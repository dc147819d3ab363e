"""The benchmarks' count of collectives that overlap with nothing, on a program written by hand."""

import runpy
from pathlib import Path

import pytest

from jaxforge.tools.plan.hlo import HloProgram

COST_OF = runpy.run_path(str(Path(__file__).parents[3] / "benchmarks" / "program_cost.py"))[
    "cost_of"
]
PROGRAM = """HloModule step, is_scheduled=true

%send (p.0: f32[9]) -> f32[9] {{
  %p.0 = f32[9] parameter(0)
  %s = (f32[9], f32[9]) collective-permute-start(%p.0), source_target_pairs={{{{0,1}},{{1,0}}}}
  ROOT %d = f32[9] collective-permute-done(%s)
}}

%keep (p.1: f32[9]) -> f32[9] {{
  ROOT %p.1 = f32[9] parameter(0)
}}

ENTRY %main (p.2: f32[9], p.3: pred[]) -> f32[9] {{
  %p.2 = f32[9] parameter(0)
  %p.3 = pred[] parameter(1)
  {first}
  {second}
  ROOT %last = f32[9] conditional(%p.3, %p.2, %p.2), branch_computations={{%send, %keep}}
}}
"""
GATHER = "%gather = f32[18] all-gather(%p.2), replica_groups={{0,1}}, dimensions={0}"
START = (
    "%start.1 = (f32[9], f32[9]) collective-permute-start(%p.2), source_target_pairs={{0,1},{1,0}}"
)
DONE = "%done.1 = f32[9] collective-permute-done(%start.1)"
ADDITION = '%add = f32[9] add(%p.2, %p.2), backend_config={"estimated_cycles":"70"}\n  '
KERNEL = '%kernel = f32[9] custom-call(%p.2), custom_call_target="tpu_custom_call"\n  '


@pytest.mark.parametrize(
    ("first", "second", "permutes", "cycles"),
    [
        (GATHER, DONE.replace("start.1", "p.2"), 1, 0),
        (START, DONE, 2, 0),
        (START, ADDITION + DONE, 1, 70),
        (START, KERNEL + DONE, 1, 0),
    ],
    ids=["in a branch", "halves side by side", "beside work", "beside a kernel"],
)
def test_collectives_without_work_beside_them_are_counted(first, second, permutes, cycles):
    cost = COST_OF(HloProgram(PROGRAM.format(first=first, second=second), 2))
    assert cost.cycles.total() == cycles
    assert cost.synchronous["collective-permute"] == permutes
    assert cost.sent["collective-permute"] == permutes * 9 * 4
    assert cost.sent["all-gather"] == (9 * 4 if first is GATHER else 0)
