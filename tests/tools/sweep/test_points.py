"""Points of a grid and a ladder from a command line."""

import pytest

from jaxforge.errors import UserError
from jaxforge.tools.sweep.runs import points

LADDER = """
[[point]]
model.dim = 128
model.n_heads = 2
optimizer.betas = [0.9, 0.95]
[[point]]
name = "wide"
[point.model]
dim = 256
tie_embeddings = true
rope_scaling.factor = 2.0
"""


def ladder(tmp_path, text=LADDER):
    (tmp_path / "sizes.toml").write_text(text)
    return tmp_path / "sizes.toml"


def test_grid_has_every_combination():
    result = points(["optimizer.lr=1e-3,3e-3", "model.dim=64,128"], None)
    assert [point.name for point in result] == [
        "lr=1e-3,dim=64", "lr=1e-3,dim=128", "lr=3e-3,dim=64", "lr=3e-3,dim=128",
    ]  # fmt: skip
    assert result[1].overrides == ["--optimizer.lr=1e-3", "--model.dim=128"]


def test_commas_inside_values_do_not_split():
    (item, other) = points(["optimizer.betas=[0.9,0.95],(0.9,0.99)"], None)
    assert item.values == {"optimizer.betas": "[0.9,0.95]"}
    assert other.name == "betas=_0.9,0.99_"
    assert [p.values["data.dataset_path"] for p in points(["data.dataset_path='a,b',c"], None)] == [
        "'a,b'", "c",
    ]  # fmt: skip


def test_ambiguous_keys_keep_their_section():
    (item,) = points(["optimizer.name=lion", "scheduler.name=linear"], None)
    assert item.name == "optimizer.name=lion,scheduler.name=linear"


def test_grid_multiplies_steps_of_a_ladder(tmp_path):
    result = points(["optimizer.lr=1,2"], ladder(tmp_path))
    assert [point.name for point in result] == [
        "dim=128,n_heads=2,betas=_0.9,_0.95_,lr=1", "dim=128,n_heads=2,betas=_0.9,_0.95_,lr=2",
        "wide,lr=1", "wide,lr=2",
    ]  # fmt: skip
    assert result[0].values["optimizer.betas"] == "[0.9, 0.95]"
    assert result[3].overrides == [
        "--model.dim=256", "--model.tie_embeddings=True", "--model.rope_scaling.factor=2.0",
        "--optimizer.lr=2",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "text", "message"),
    [
        (["model.dim"], LADDER, "expected section.key=value,value"),
        (["model.dim=64"], LADDER, "model.dim is given twice"),
        (["train.seed=1,1"], LADDER, "2 points are called"),
        (["checkpoint.dir=a,b"], LADDER, "checkpoint.dir holds all points"),
        ([], "[[point]]\ndim = 3", "point 1: dim has no section. Write for example model.dim"),
        ([], "[points]", r"expected tables \[\[point\]\]"),
        ([], "dim =", "sizes.toml: "),
    ],
)
def test_invalid_sweep_is_refused(grid, text, message, tmp_path):
    with pytest.raises(UserError, match=message):
        points(grid, ladder(tmp_path, text))
