"""Points of a grid from a command line."""

import pytest

from jaxforge.errors import UserError
from jaxforge.tools.sweep.runs import points


def test_grid_has_every_combination():
    result = points(["optimizer.lr=1e-3,3e-3", "model.dim=64,128"])
    assert [point.name for point in result] == [
        "lr=1e-3,dim=64", "lr=1e-3,dim=128", "lr=3e-3,dim=64", "lr=3e-3,dim=128",
    ]  # fmt: skip
    assert result[1].overrides == ["--optimizer.lr=1e-3", "--model.dim=128"]


def test_commas_inside_values_do_not_split():
    (first, second) = points(["optimizer.betas=[0.9,0.95],(0.9,0.99)"])
    assert first.values == {"optimizer.betas": "[0.9,0.95]"}
    assert second.name == "betas=_0.9,0.99_"
    assert [p.values["data.dataset_path"] for p in points(["data.dataset_path='a,b',c"])] == [
        "'a,b'", "c",
    ]  # fmt: skip


def test_ambiguous_keys_keep_their_section():
    (item,) = points(["optimizer.name=lion", "scheduler.name=linear"])
    assert item.name == "optimizer.name=lion,scheduler.name=linear"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["model.dim"], "expected section.key=value,value"),
        (["model.dim=64", "model.dim=32"], "model.dim is given twice"),
        (["train.seed=1,1"], "2 points are called"),
        (["checkpoint.dir=a,b"], "checkpoint.dir holds all points"),
    ],
)
def test_invalid_sweep_is_refused(grid, message):
    with pytest.raises(UserError, match=message):
        points(grid)
