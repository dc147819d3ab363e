"""The order of events in a run and in the docs is that of the table."""

import dataclasses
import re
from pathlib import Path

import pytest

from jaxforge.training.callbacks import exports, host, progress_txt, speed, weight_hash
from jaxforge.training.callbacks.callback import Callback
from jaxforge.training.callbacks.order import ORDER
from jaxforge.training.loop import Trainer
from tests.training.looking import Looking
from tests.training.observers import Capture, Sampler, run

ROOT = Path(__file__).parents[3]


def acting(kind, name):
    """Return a subclass of a callback that only records that it acts."""

    class Acts(kind):
        every = 2
        checks_start = False

        def __init__(self, events):
            self.events = events

        def on_train_begin(self, config):
            pass

        def on_compiled(self, steps):
            pass

        def on_interval(self, context):
            self.events.append(name)

        def on_train_end(self, step, tokens_seen, reason):
            pass

        def close(self):
            pass

    return Acts


def saving(kind, name):
    """Return a subclass of a callback that records saves."""

    class Acts(acting(kind, name)):
        every = None

        def on_checkpoint_save(self, step, path):
            self.events.append(name)

        def on_eval_end(self, metrics, step):
            pass

    return Acts


class Begins(Callback):
    def __init__(self, events):
        self.events = events

    def on_epoch_begin(self, epoch):
        self.events.append(f"begin epoch {epoch}")

    def on_epoch_end(self, epoch, context):
        self.events.append(f"end epoch {epoch}")

    def on_step_begin(self, step):
        self.events.append(f"begin {step}")


HEALTH = {
    "memory": host.MemoryReport, "directory": host.DirectoryLock,
    "garbage": host.CollectGarbage, "synchronization": host.Synchronize,
    "collectives": speed.CollectiveHealth, "weights": weight_hash.WeightHashes,
    "stragglers": speed.Stragglers, "device speed": speed.DeviceSpeed,
}  # fmt: skip
FILES = {"exports": exports.Exporter, "`progress.txt`": progress_txt.ProgressTxt}
SEEN = {
    "begin epoch 2": "`on_epoch_begin`", "begin 2": "`on_step_begin`",
    "launch 2": "launch", "log 2 train": "metrics", "hook 2": "`on_step_end`",
    "end epoch 2": "`on_epoch_end`",
    "evaluate from 0": "evaluation", "sample 2": "samples", "capture 2": "activations",
    "look 2": "`on_interval`", "save 2": "save",
}  # fmt: skip


def test_step_follows_order_of_table():
    """The callbacks are given in the wrong order; a run sorts them by the table."""
    makers = [
        *(saving(kind, name) for name, kind in reversed(FILES.items())), Looking, Begins,
        *(acting(kind, name) for name, kind in reversed(HEALTH.items())), Capture, Sampler,
    ]  # fmt: skip
    events, *_ = run(
        steps=2, log=2, evaluate=2, save=2, callbacks=makers, epoch=8,
        sections={"checkpoint": {"keep_best_n": 1}},
    )  # fmt: skip
    second = events[events.index("begin epoch 2") : events.index("wait")]
    named = [SEEN.get(event, event) for event in second]
    table = [event.name for event in ORDER]
    assert [name for name in named if name in table] == table[
        :-1
    ]  # the last row has no event in this step
    assert table[-1] == "exits"


def test_every_callback_class_has_one_row():
    classes = [event.callback for event in ORDER if event.callback]
    assert len(set(classes)) == len(classes)
    files = {path.stem for path in (ROOT / "jaxforge/training/callbacks").glob("*.py")}
    homes = {kind.__module__.rpartition(".")[2] for kind in classes}
    assert files - homes == {
        "__init__",
        "control",
        "order",
        "runner",
    }
    assert Callback in classes


def test_docs_contain_the_table():
    text = (ROOT / "docs/loop.md").read_text()
    rows = (f"| {event.name} | {event.description} | {event.location} |\n" for event in ORDER)
    assert "| | what | where |\n|---|---|---|\n" + "".join(rows) in text


@pytest.mark.parametrize("event", ORDER, ids=lambda event: event.name)
def test_files_of_the_table_exist(event):
    for path in re.findall(r"`([a-z_/]+\.py)`", event.location):
        assert (ROOT / "jaxforge" / path).is_file()


def test_trainer_has_few_parts():
    assert len(dataclasses.fields(Trainer)) <= 8


@pytest.mark.parametrize(
    "path", sorted((ROOT / "jaxforge/training").rglob("*.py")), ids=lambda path: path.stem
)
def test_module_of_training_imports_few_modules(path):
    imports = re.findall(r"^\s*(?:from|import) jaxforge", path.read_text(), re.MULTILINE)
    assert len(imports) <= 20
