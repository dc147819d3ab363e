"""Writing in directories with planted links."""

import json
import os
import shutil
import time

import pytest

from jaxforge.commands import report as report
from jaxforge.commands import train
from jaxforge.errors import UserError
from jaxforge.runs import run_directory, starts
from jaxforge.storage import mirror, safe_files, urls
from jaxforge.storage.run_lock import RunLock
from jaxforge.telemetry.progress_log import ProgressLog
from jaxforge.training import summary
from tests.conftest import tiny_config

pytestmark = pytest.mark.usefixtures("one_device")


@pytest.fixture
def victim(tmp_path):
    """Return a file outside of the run that must not change."""
    path = tmp_path / "victim"
    path.write_text("mine\n")
    yield path
    assert path.read_text() == "mine\n"


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_file_is_replaced_atomically(run, victim):
    (run / "a.txt").symlink_to(victim)
    safe_files.replace_text(run / "a.txt", "new é")
    assert not (run / "a.txt").is_symlink()
    assert (run / "a.txt").read_text(encoding="utf-8") == "new é"
    with pytest.raises(TypeError), safe_files.replacing(run / "a.txt") as file:
        file.writelines([b"half", None])
    assert [path.name for path in run.iterdir()] == ["a.txt"]
    assert (run / "a.txt").read_text(encoding="utf-8") == "new é"
    umask = os.umask(0o022)
    os.umask(umask)
    assert (run / "a.txt").stat().st_mode & 0o777 == 0o666 & ~umask


def test_links_and_pipes_are_not_appended_to(run, victim):
    (run / "link").symlink_to(victim)
    (run / "dangling").symlink_to(run / "nothing")
    os.mkfifo(run / "pipe")
    for name in ("link", "dangling", "pipe"):
        with pytest.raises(OSError, match="a link or not a regular file"):
            safe_files.open_to_append(run / name)
    assert not (run / "nothing").exists()
    for text in (b"1", b"2"):
        with safe_files.open_to_append(run / "log") as file:
            file.write(text)
    assert (run / "log").read_bytes() == b"12"


def test_run_writers_do_not_follow_links(run, victim, tmp_path):
    config = tiny_config(checkpoint={"dir": str(run)})
    for name in ("report.html", "report.html.partial", "starts.jsonl.partial", "config.partial",
                 "schedule_summary.partial", "schedule_summary.txt", "config.toml",
                 "progress.txt"):  # fmt: skip
        (run / name).symlink_to(victim)
    (run / f".run.lock.{os.getpid()}").symlink_to(victim)
    (run / "run.lock").symlink_to(tmp_path / "nowhere")
    (tmp_path / "outside").mkdir()
    (run / ".tokenizer.partial").symlink_to(tmp_path / "outside")
    run_directory.prepare(run, tiny_config(data={"tokenizer_path": "byte"}))
    starts.note(run, 0, parameters=1)
    summary.write_summary(run, "text")
    ProgressLog(tmp_path / "run" / "progress.txt", 1, 0.0)
    lines = [
        {
            "step": 1,
            "time": 1.0,
            "train/loss": 2.0,
            "train/tokens": 1.0,
            "train/step_time_sec": 0.1,
            "train/skipped_steps": 0.0,
        }
    ]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert report.main([str(run)]) == 0
    with pytest.raises(UserError, match="a link, which cannot be locked"):
        RunLock(run).take()
    for name in ("report.html", "starts.jsonl", "schedule_summary.txt", "config.toml"):
        assert (run / name).is_file()
        assert not (run / name).is_symlink()
    assert (run / "tokenizer" / "tokenizer.json").is_file()
    assert list((tmp_path / "outside").iterdir()) == []
    assert not (tmp_path / "nowhere").exists()
    (run / "configs").symlink_to(tmp_path / "outside")
    with pytest.raises(UserError, match="this is a link"):
        run_directory.record_start(run, config, 0)
    assert list((tmp_path / "outside").iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "logs/process_0.log", "logs"])
def test_training_refuses_links_among_its_files(name, run, victim, tmp_path):
    (run / name).parent.mkdir(exist_ok=True)
    (tmp_path / "outside").mkdir()
    (run / name).symlink_to(tmp_path / "outside" if name == "logs" else victim)
    with pytest.raises(UserError, match=f"{name}.* link"):
        train.main(["--config=configs/debug.toml", f"--checkpoint.dir={run}"])
    assert list((tmp_path / "outside").iterdir()) == []


def test_mirror_refuses_directory_of_other_user(tmp_path, monkeypatch):
    monkeypatch.setattr(mirror.tempfile, "gettempdir", lambda: str(tmp_path))
    local = mirror.directory(urls.path("s3://bucket/run"), 0)
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    local.symlink_to(foreign)
    with pytest.raises(
        UserError, match="a private directory of this user; remove it, or set another TMP"
    ):
        mirror.claim(local)
    local.unlink()
    local.mkdir()
    local.chmod(0o777)
    with pytest.raises(UserError, match="a private directory of this user"):
        mirror.claim(local)
    local.chmod(0o755)  # an older version; not writable by others
    mirror.claim(local)
    assert local.stat().st_mode & 0o777 == 0o700
    (local / "left").symlink_to(foreign)
    (foreign / "kept").touch()
    mirror.clear(local)
    assert list(local.iterdir()) == []
    assert (foreign / "kept").exists()
    shutil.rmtree(local)
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)  # as if created by another user
    with pytest.raises(UserError, match="a private directory of this user"):
        mirror.claim(local)


def test_mirror_rests_after_a_long_copy(tmp_path, monkeypatch):
    """Files grow and are copied whole: otherwise the copies of a long run would never end."""
    monkeypatch.setattr(mirror.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(mirror, "INTERVAL", 0.01)
    copies = []

    def publish(_: mirror.Mirror) -> bool:
        copies.append(time.sleep(0.05))
        return True

    monkeypatch.setattr(mirror.Mirror, "publish", publish)
    copy = mirror.Mirror(urls.path("s3://bucket/run"), 0, [])
    time.sleep(0.6)
    assert len(copies) <= 1
    copy.close()
