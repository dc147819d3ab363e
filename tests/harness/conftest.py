"""Text on which the runs of these tests are trained, prepared once."""

import pytest

from jaxforge.commands import prepare
from tests.processes.conftest import BASE

SENTENCE = "the quick brown fox jumps over the lazy dog. Is it red? no\nIs it brown? yes\n"


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A directory with tokens of a BPE in `data/train`, and the config of a small run."""
    path = tmp_path_factory.mktemp("corpus")
    for i in range(20):
        (path / f"{i:02}.txt").write_text(SENTENCE * 8)
    data = ["--output", str(path / "data"), "--tokenizer", "bpe", "--vocab-size", "300"]
    prepare.main([*map(str, sorted(path.glob("*.txt"))), *data])
    (path / "run.toml").write_text(BASE)
    return path


def train_command(corpus, run, *settings):
    """Return the arguments of `train` for a run on the corpus."""
    return ["--config", str(corpus / "run.toml"), "--model.vocab_size=304", "--optimizer.lr=1e-2",
            f"--checkpoint.dir={run}", f"--data.dataset_path={corpus / 'data' / 'train'}",
            *settings]  # fmt: skip
