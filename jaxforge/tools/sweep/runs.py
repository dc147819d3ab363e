"""The runs of a sweep: each a process of `jaxforge.train`, and what became of it.

<checkpoint.dir>/<name>/                run directories, as of any run
<checkpoint.dir>/<name>/output.log      what the processes said, of all starts
<checkpoint.dir>/<name>/finished.json   there once the run is over, and never before
"""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxforge import exit_codes
from jaxforge.cli.process import listening, new_command_env
from jaxforge.config.job import JobConfig
from jaxforge.errors import UserError
from jaxforge.exit_codes import Exit
from jaxforge.runs.run_directory import changes, shown_config
from jaxforge.storage import run_lock, safe_files
from jaxforge.tools.sweep.points import Point

_OUTPUT, _FINISHED = "output.log", "finished.json"
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_POLL_SEC = 0.5
_WITH_PARENT = """
import os, sys
from jaxforge.cli.process import stop_with_parent
stop_with_parent()
if os.getppid() == int(sys.argv[1]):  # else it was gone before
    os.execv(sys.argv[2], sys.argv[2:])
"""
"""Makes a process end with the sweep; not between fork and exec, as threads of JAX run here."""
_FREE = ("checkpoint.", "metrics.", "profiling.", "distributed.", "train.watchdog_")
"""Keys that may be other ones when a run goes on: they do not decide what it comes to."""


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """A point, checked.

    Attributes:
        point: of the sweep.
        directory: its run directory.
        config: what it trains, resolved.
        command: the process that does.
    """

    point: Point
    directory: Path
    config: JobConfig
    command: Sequence[str]

    @property
    def is_finished(self) -> bool:
        """True if the run needs no other start."""
        return (self.directory / _FINISHED).exists()

    @property
    def state(self) -> str:
        """In a word."""
        if self.is_finished:
            return "finished"
        return "begun" if (self.directory / "config.toml").exists() else "new"

    def check_directory(self) -> None:
        """Looks whether what is there is of this config.

        Raises:
            UserError: it was begun with another one, and would go on with both.
        """
        if not (self.directory / "config.toml").exists():
            return
        changed = [
            change
            for change in changes(shown_config(self.directory), self.config)
            if not change.startswith(_FREE)
        ]
        if changed:
            raise UserError(
                f"{self.directory} was begun with another config ({', '.join(changed[:3])}): "
                "remove it, or give another checkpoint.dir"
            )

    def last_output_line(self) -> str:
        """The last line that its process said."""
        path = self.directory / _OUTPUT
        said = path.read_text(errors="replace").strip().splitlines() if path.exists() else []
        return said[-1] if said else ""

    def finish(self) -> None:
        """Says that it is over."""
        text = json.dumps({"time": time.time(), **self.point.values}) + "\n"
        safe_files.replace_text(self.directory / _FINISHED, text)


def _say(line: str) -> None:
    print(line, flush=True)


class Runner:
    """Runs points one after another; signals go to the one that runs, which saves and ends.

    Args:
        say: where progress is told.
    """

    def __init__(self, say: Callable[[str], None] = _say) -> None:
        self._say = say
        self._process: subprocess.Popen[bytes] | None = None
        self._stopping: signal.Signals | None = None

    def run(self, runs: Sequence[PlannedRun]) -> int:
        """Runs all that are not finished, in order; a failed one does not stop the others.

        Returns:
            0, the exit code of the first that failed or was stopped, or that of a stop.
        """
        codes = []
        with listening(_STOPS, self._receive):
            for i, item in enumerate(runs, 1):
                at = f"[{i}/{len(runs)}] {item.point.name}"
                codes.append(self._run_point(item, at))
                if self._stopping is not None:
                    return Exit.SIGNAL.code if codes[-1] == 0 else codes[-1]
        return next((code for code in codes if code), 0)

    def _run_point(self, planned_run: PlannedRun, at: str) -> int:
        self._await_others(planned_run)
        if planned_run.is_finished:
            self._say(f"{at}: finished before")
            return 0
        if self._stopping is not None:
            return Exit.SIGNAL.code
        self._say(f"{at}: {'goes on' if planned_run.state == 'begun' else 'begins'}")
        began = time.monotonic()
        code = self._train(planned_run)
        took = f"after {time.monotonic() - began:.0f} s"
        if code == 0:
            planned_run.finish()
            self._say(f"{at}: finished {took}")
        else:
            what = f"code {code}, {exit_codes.meaning(code)}"
            self._say(f"{at}: not finished {took}: {what}\n    {planned_run.last_output_line()}")
            self._say(f"    all of it: {planned_run.directory / _OUTPUT}")
        return code

    def _await_others(self, planned_run: PlannedRun) -> None:
        """Until nobody trains there: a process of a sweep that was killed is saving, say."""
        last_message = None
        while self._stopping is None and (holder := run_lock.holder(planned_run.directory)):
            if last_message != holder:
                self._say(f"{planned_run.point.name}: waiting for {holder}")
            last_message = holder
            time.sleep(_POLL_SEC)

    def _train(self, planned_run: PlannedRun) -> int:
        planned_run.directory.mkdir(parents=True, exist_ok=True)
        with safe_files.open_to_append(planned_run.directory / _OUTPUT) as output:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _WITH_PARENT, str(os.getpid()), *planned_run.command],
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, process_group=0,
                env=new_command_env(),
            )  # fmt: skip
            if self._stopping is not None:  # it came before there was a process to tell
                self._process.send_signal(self._stopping)
            code = exit_codes.exit_code(self._process.wait())
        self._process = None
        return code

    def _receive(self, sig: signal.Signals) -> None:
        self._stopping = sig
        if self._process is not None:
            self._process.send_signal(sig)
