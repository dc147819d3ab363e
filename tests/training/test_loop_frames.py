"""The number of the project's own stack frames between the command and a train step."""

import sys
import traceback
from pathlib import Path

import jaxforge
from jaxforge.commands import train
from jaxforge.step.train_step import CompiledSteps

PACKAGE = Path(jaxforge.__file__).parent
DEBUG = PACKAGE.parent / "configs" / "debug.toml"
MOST = 5


def test_step_is_at_most_five_frames_below_the_command(tmp_path, monkeypatch):
    stacks, codes, lookup = [], [], CompiledSteps.__getitem__

    def recorded(steps, microbatches):
        def step(*arguments):
            stacks.append(traceback.extract_stack())
            return lookup(steps, microbatches)(*arguments)

        return step

    options = [f"--checkpoint.dir={tmp_path}", "--train.max_steps=2"]
    monkeypatch.setattr(sys, "argv", ["train", f"--config={DEBUG}", *options])
    monkeypatch.setattr(CompiledSteps, "__getitem__", recorded)
    monkeypatch.setattr(train, "leave", codes.append)  # would end the process
    monkeypatch.setenv("JAXFORGE_BEGAN", "0")  # set by the command
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # would be checked by a fork of this process
    train.entry()
    assert codes == [0]
    frames = [f for f in stacks[0] if Path(f.filename).is_relative_to(PACKAGE)]
    assert frames[-1].name == "train"
    assert len(stacks) == 2
    assert len(frames) <= MOST, [f"{frame.filename}:{frame.name}" for frame in frames]
