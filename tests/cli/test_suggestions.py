"""Suggestions in messages about unknown names and paths."""

from jaxforge.cli.suggestions import hint, path_hint


def test_similar_name_is_suggested():
    assert hint("cosin", ["linear", "cosine"]) == '; did you mean "cosine"?'
    assert hint("trian", ["train"], quote="") == "; did you mean train?"
    assert hint("xyzzy", ["linear", "cosine"]) == ""


def test_similar_path_is_suggested(tmp_path):
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "quickstart.toml").touch()
    meant = f"; did you mean {tmp_path / 'configs/quickstart.toml'}?"
    assert path_hint(tmp_path / "configs/quikstart.toml") == meant
    assert path_hint(tmp_path / "config/quickstart.toml") == meant


def test_path_hint_prefers_the_path_that_exists(tmp_path):
    (tmp_path / "runs").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").touch()
    assert path_hint(tmp_path / "runz/a") == f"; did you mean {tmp_path / 'run/a'}?"


def test_distant_names_and_buckets_get_no_suggestion(tmp_path):
    (tmp_path / "configs").mkdir()
    assert path_hint(tmp_path / "xyzzy") == ""
    assert path_hint(tmp_path / "xyzzy" / "deeper") == ""
    (tmp_path / "twice.toml").touch()
    assert path_hint(tmp_path / "nowhere.toml") == "", "the suffix alone is not a likeness"
    assert path_hint(tmp_path / "configs") == ""
    assert path_hint("gs://bucket/run") == ""
