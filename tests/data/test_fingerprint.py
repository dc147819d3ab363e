"""Data of a run that are no longer what they were are found before anything is trained on them."""

import numpy as np
import pytest

from jaxforge.data import sources
from jaxforge.data.fingerprint import changes, fingerprints
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.training import launch
from tests.conftest import tiny_config
from tests.data.manifest_writer import ShardWriter

pytestmark = pytest.mark.usefixtures("one_device")


def write(directory, tokens, tokenizer="a" * 64, shard_tokens=2000) -> str:
    options = {"vocab_size": 256, "dtype": "uint16", "shard_tokens": shard_tokens}
    with ShardWriter(directory, **options) as writer:
        writer.add(tokens)
        writer.finish(eos_id=None, tokenizer="byte", tokenizer_sha256=tokenizer)
    return str(directory)


def tokens(n=6000, seed=0):
    return np.random.default_rng(seed).integers(0, 256, n)


def identity(**data):
    config = tiny_config(data=data)
    return fingerprints(config.data, sources.open_training_data(config), {})


def of(path):
    return {"data: x": identity(dataset_path=path)[f"data: {path}"]}


def test_copies_have_one_fingerprint_and_changes_are_named(tmp_path):
    whole = of(write(tmp_path / "a", tokens()))
    assert whole == of(write(tmp_path / "b", tokens()))
    changed = tokens()
    changed[5000] ^= 1
    for name, other, expected in [
        ("c", {"tokens": changed}, ["x had other contents"]),
        ("d", {"tokens": tokens(), "tokenizer": "b" * 64}, ["x had tokens of another tok"]),
        ("e", {"tokens": tokens(8000)}, ["x had 3 files, and has 4", "x had 6000 to"]),
        ("f", {"tokens": tokens(), "shard_tokens": 3000}, ["x had 3 files, and has 2"]),
    ]:
        lines = changes(whole, of(write(tmp_path / name, **other)))
        assert [line[: len(start)] for line, start in zip(lines, expected, strict=True)] == expected
        assert not changes({}, whole), "checkpoints of older versions have none"


def test_replaced_file_without_manifest_is_detected(tmp_path):
    np.save(tmp_path / "a.npy", tokens().astype(np.uint16))
    then = of(str(tmp_path))
    assert then == of(str(tmp_path))
    np.save(tmp_path / "a.npy", tokens(seed=1).astype(np.uint16))
    assert changes(then, of(str(tmp_path))) == ["x had other contents"]


def test_mixture_sources_may_be_added_and_removed(tmp_path):
    paths = [write(tmp_path / name, tokens(seed=i)) for i, name in enumerate("abc")]
    then, now = (
        identity(datasets=[{"path": path, "name": path[-1]} for path in some])
        for some in (paths[:2], paths[1:])
    )
    assert then.keys() == {"data: a", "data: b"}
    assert not changes(then, now)
    swapped = identity(datasets=[{"path": paths[2], "name": "b"}])
    assert changes(then, swapped) == ["b had other contents"]


def test_changed_tokenizer_is_detected_under_new_path(tmp_path):
    then = identity(dataset_path=write(tmp_path / "a", tokens()))
    assert not changes(then, identity(dataset_path=write(tmp_path / "b", tokens(9000))))
    other = identity(dataset_path=write(tmp_path / "c", tokens(), tokenizer="b" * 64))
    assert changes(then, other) == ["the data were tokenized by another tokenizer"]


def test_resume_on_changed_data_needs_option(tmp_path, capsys):
    data = tmp_path / "data"

    def run(steps, **keys):
        return launch.fit(
            tiny_config(
                data={"dataset_path": str(data), **keys},
                train={"max_steps": steps},
                checkpoint={"dir": str(tmp_path / "run"), "interval": 2},
            )
        )

    write(data, tokens())
    assert run(2) is Exit.COMPLETED
    data.rename(tmp_path / "before")
    write(data, tokens(8000))
    metrics = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"changed since step 2 .*had 3 files, and has 4;"):
        run(4)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == metrics
    assert run(4, on_change="continue") is Exit.COMPLETED
    assert "the data changed since step 2: " in capsys.readouterr().err
    assert run(6) is Exit.COMPLETED
