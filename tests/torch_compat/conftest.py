"""Fixtures of tests that read hostile checkpoints."""

import resource
import shutil
import signal
from pathlib import Path

import pytest

from tests.torch_compat.hostile import intact_state


@pytest.fixture
def limits():
    """Limit time and memory, so that hangs fail."""

    def late(*_):
        pytest.fail("it hangs")  # not an Exception, so that no reader catches it

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + (2 << 30), hard))
    yield
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def original(tmp_path_factory):
    """An intact checkpoint."""
    torch = pytest.importorskip("torch")
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path = tmp_path_factory.mktemp("hostile") / "step_1"
    dcp.save(intact_state(), checkpoint_id=path, no_dist=True)
    torch.save({"step": 3, "tokens_seen": 96}, path / "train_state.pt")
    return path


@pytest.fixture
def broken(original, tmp_path):
    """A copy of the intact checkpoint to damage."""
    return Path(shutil.copytree(original, tmp_path / "step_1"))
