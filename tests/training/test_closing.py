"""Messages at the end of a run."""

import logging

import pytest

from jaxforge.exit_codes import Exit
from jaxforge.state.progress import Progress
from jaxforge.training.closing import log_exit_reason
from tests.conftest import tiny_config


@pytest.mark.parametrize(
    ("tokenizer", "last_saved", "is_named"),
    [("data/tokenizer", 3, True), ("data/tokenizer", None, False), ("", 3, False)],
)
def test_completed_run_on_text_names_the_next_commands(caplog, tokenizer, last_saved, is_named):
    config = tiny_config(data={"tokenizer_path": tokenizer}, checkpoint={"dir": "runs/my run"})
    with caplog.at_level(logging.INFO):
        log_exit_reason(Exit.COMPLETED, config, Progress(step=3), last_saved)
    message = "jaxforge generate 'runs/my run'; its curves: jaxforge report 'runs/my run'"
    assert (message in caplog.text) == is_named
    assert "Training complete: 3 steps" in caplog.text
