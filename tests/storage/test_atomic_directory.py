"""Atomic directories after a kill."""

from jaxforge.storage.atomic_directory import atomic_directory, partial_of, write_json

PLAN = {"options": {"dtype": "uint16"}, "inputs": []}


def test_overwrite_starts_over_after_kill_following_final_rename(tmp_path):
    """The kill leaves the plan and the journal, but `out/` has already become the directory."""
    output = tmp_path / "data"
    output.mkdir()
    (output / "marker").touch()
    partial = partial_of(output)
    partial.mkdir()
    write_json(partial / "plan.json", PLAN)
    write_json(partial / "journal.json", {"shards": 3})
    messages = []
    with atomic_directory(
        output, PLAN, marker="marker", overwrite=True, say=messages.append
    ) as directory:
        assert directory.journal is None
        (directory.out / "new").touch()
    assert messages == []
    assert [path.name for path in output.iterdir()] == ["new"]
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
