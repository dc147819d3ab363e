"""Whole runs on a Hugging Face dataset, by one process and by two."""

import json

import numpy as np
import pytest

from tests.processes.conftest import Run
from tests.processes.launching import finish_both, start_both

pytestmark = pytest.mark.processes


@pytest.mark.slow
def test_stream_resumes_on_fewer_processes(tmp_path):
    """Each of the two reads half of the files."""
    (tmp_path / "set").mkdir()
    for file in range(4):
        lines = (json.dumps({"text": f"{file} {i} text " * (i % 9)}) + "\n" for i in range(99))
        (tmp_path / "set" / f"{file}.jsonl").write_text("".join(lines))
    overrides = [
        f"--data.hf_dataset_name={tmp_path / 'set'}", "--data.hf_streaming=true",
        "--data.tokenizer_path=byte", "--model.vocab_size=258", "--train.max_steps=20",
        "--optimizer.lr=1e-6",  # a loss tells its batch, not how roundings grew on the way to it
    ]  # fmt: skip
    alone, both = Run(tmp_path, "alone"), Run(tmp_path, "both")
    alone.finish_here(*overrides)
    finish_both(start_both(both, *overrides, "--train.max_steps=10"))
    both.finish_here(*overrides)
    expected = list(alone.losses().values())
    np.testing.assert_allclose(list(both.losses().values()), expected, rtol=1e-6)
    assert np.min(np.diff(sorted(expected))) > 2e-5  # no two batches alike
    assert len(expected) == 20
