"""URLs are never interpreted as local files."""

from pathlib import Path

import pytest

from jaxforge.cli.running import run_main
from jaxforge.commands import evaluate, generate, prepare, train
from jaxforge.commands import report as report
from jaxforge.config.reading.load import load_config
from jaxforge.config.rules import check
from jaxforge.errors import UserError
from jaxforge.storage import urls
from tests.helpers import cli

KEYS = [
    "checkpoint.dir", "checkpoint.load_path", "checkpoint.non_persistent_dir",
    "checkpoint.replica_dir", "data.dataset_path", "data.tokenizer_path",
    "profiling.trace_dir", "train.compilation_cache_dir",
]  # fmt: skip
TABLES = {
    "data.datasets[0].path": "--data.datasets=[{'path': 'gs:/b/r'}]",
    "eval.datasets[0].dataset_path": "--eval.datasets=[{'name': 'a', 'dataset_path': 'gs:/b/r'}]",
}


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gs:/bucket/run", "a URL has two slashes; write gs://bucket/run"),
        (Path("s3://bucket/run"), "a URL has two slashes; write s3://bucket/run"),
        ("gs:///run", "two slashes"),
        ("gs://bucket", "has no directory in the bucket"),
        ("s3://bucket/", "has no directory in the bucket"),
        ("az://bucket/run", "az:// is not supported; use a gs:// or s3:// URL"),
        ("https://host/run", "https:// is not supported"),
        ("GS://bucket/run", "GS:// is not supported"),
    ],
)
def test_unsupported_urls_are_refused(text, what):
    with pytest.raises(UserError, match=what):
        urls.path(text)


@pytest.mark.parametrize("text", ["run", "/a/b", "a:b", "c:", "12:/a", "runs/s3:/x", "./gs:/x"])
def test_local_paths_are_unchanged(text):
    assert urls.path(text) == Path(text)
    assert not urls.in_bucket(text)


@pytest.mark.parametrize("key", KEYS)
def test_collapsed_url_is_refused_with_key(key):
    with pytest.raises(UserError, match=rf"^{key} = .*gs:/bucket/r"):
        check(load_config(None, [f"--{key}=gs:/bucket/r", "--eval.enabled=false"]), 1)


@pytest.mark.parametrize("key", TABLES)
def test_urls_in_tables_are_refused(key):
    with pytest.raises(UserError) as error:
        check(load_config(None, [TABLES[key]]), 1)
    assert f"{key} = gs:/b/r: a URL has two slashes" in str(error.value)


@pytest.mark.parametrize(
    ("override", "what"),
    [
        ("--checkpoint.non_persistent_dir=gs://b/r", "is not local: name a fast disk"),
        ("--data.cache_dir=gs://b/r", "is not local: name a fast disk"),
        (
            "--metrics.writers={'name': 'tensorboard', 'location': 's3://b/r'}",
            "is not local: name a directory in the run",
        ),
        ("--profiling.trace_dir=s3://b/r", "is not local: name a directory in the run"),
        ("--data.dataset_path=hf://b/r", "hf:// is not supported"),
        ("--checkpoint.export_last=true", "jaxforge convert"),
        ("--data.hf_streaming=true", "stores its position in local files"),
    ],
)
def test_local_only_settings_refuse_buckets(override, what):
    with pytest.raises(UserError, match=what):
        check(load_config(None, ["--checkpoint.dir=gs://bucket/run", override]), 1)


@pytest.mark.parametrize(
    ("main", "arguments"),
    [
        (train.main, ["--config=gs:/b/c.toml"]),
        (evaluate.main, ["gs:/b/r"]),
        (evaluate.main, ["run", "--set=a=s3:/b/r"]),
        (evaluate.main, ["run", "--json=s3://b/r"]),
        (generate.main, ["s3:/b/r"]),
        (generate.main, ["run", "--prompts=s3://b/r"]),
        (generate.main, ["run", "--output=s3:/b/r"]),
        (report.main, ["s3:/b/r"]),
        (report.main, ["run", "--output=az://b/r"]),
        (prepare.main, ["s3:/b/r.jsonl", "--output=out"]),
        (prepare.main, ["in.jsonl", "--output=s3:/b/r"]),
        (prepare.main, ["in.jsonl", "--output=out", "--tokenizer=s3:/b/r"]),
        (cli, ["convert", "--to=jaxforge", "s3:/b/r", "out"]),
        (cli, ["convert", "--to=jaxforge", "in", "s3:/b/r"]),
        (cli, ["convert", "gs:/b/r", "out", "--to=hf"]),
        (cli, ["convert", "run", "gs:/b/r", "--to=dcp"]),
        (cli, ["convert", "run", "az://b/r", "--to=hf"]),
        (cli, ["inspect", "gs:/b/r"]),
        (cli, ["verify", "gs:/b/r", "s3:/b/r"]),
    ],
)
def test_commands_refuse_urls_with_exit_code_2(main, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n')
    assert run_main(lambda: main(arguments)) == 2
    message = capsys.readouterr().err
    assert any(f"{scheme}:/" in message for scheme in ("gs", "s3", "az")), message
    assert [path.name for path in tmp_path.rglob("*")] == ["in.jsonl"]
