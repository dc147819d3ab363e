"""Heartbeats of the processes of a job.

A thread of each process publishes a `Beat` in the key-value store of JAX's coordination service,
which process 0 runs:

    process i:  jaxforge/heartbeats/i = [sequence number, Beat]     about once per second

Other processes read the beats only if they suspect a hang. They never compare clocks of two hosts:
a process lives if its sequence number advances, by the reader's own count of seconds.

The service may stop answering. Calls then block for minutes, without Python's global lock, so no
other thread waits for this one: readers look at the attributes of `Heartbeats`.
"""

import dataclasses
import json
import sys
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

import jax

from jaxforge.parallel.multihost import JoinedJob

_PREFIX = "jaxforge/heartbeats/"
_RATE = 250  # beats per second of a large job
_CLOSE_SEC = 2.0  # longest wait for the last beat

_JAX = str(Path(jax.__file__).parent)
_PACKAGE = str(Path(__file__).parents[2])
_STANDARD_LIBRARY = sysconfig.get_path("stdlib")
_PACKAGES = ("/site-packages/", "/dist-packages/")


@dataclasses.dataclass(frozen=True)
class Status:
    """State of the training thread, as the watchdog knows it.

    Attributes:
        step: the step launched last; None before the first.
        section: section of the watchdog: "training", "checkpoint", ...
        activity: activity within the section; empty while the loop steps.
        has_own_limit: True if the section or activity may take long, such as compiling and saving;
            the watchdog has a limit for it.
        idle: seconds without progress.
        is_unusual: True if no earlier step took as long.
    """

    step: int | None
    section: str
    activity: str
    has_own_limit: bool
    idle: float
    is_unusual: bool = False


Ending = Literal["", "finished", "failed", "victim", "reported"]


@dataclasses.dataclass(frozen=True)
class Beat:
    """State of a process, as its heartbeat publishes it.

    Attributes:
        host: name of the host.
        status: state of the training thread.
        is_in_jax: True if the training thread is in a call of JAX, such as a step.
        location: line of the training thread's innermost call outside of libraries.
        ending: how the process is about to end: "victim" after it lost another process, "reported"
            after it reported a hang.
        reason: why it is about to end.
    """

    host: str
    status: Status
    is_in_jax: bool
    location: str
    ending: Ending = ""
    reason: str = ""


Received = Mapping[int, tuple[int, Beat]]
"""Index of a process -> sequence number and content of its last beat."""


class Heartbeats:
    """Thread that publishes beats, and reads those of all processes while it listens.

    Args:
        beat: returns the beat to publish.
        longest_period: most seconds between two beats.

    Attributes:
        is_listening: set to read the beats of all processes from now on.
        answers: number of answered calls; it stands still while the service does not answer.
        readings: number of times that all beats were read.
        received: the beats of the last reading.
        published: the last published beat; None before the first.
    """

    def __init__(self, job: JoinedJob, beat: Callable[[], Beat], longest_period: float) -> None:
        self._job, self._beat = job, beat
        self._period = min(max(1.0, job.count / _RATE), longest_period)
        self.is_listening = False
        self.answers = self.readings = 0
        self.received: Received = {}
        self.published: Beat | None = None
        self._wake, self._stopped = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Publish the next beat at once."""
        self._wake.set()

    def close(self) -> None:
        """Publish a last beat and end the thread, unless the service does not answer."""
        self._stopped.set()
        self._wake.set()
        self._thread.join(_CLOSE_SEC)

    def _run(self) -> None:
        sequence = 0
        while True:
            is_last = self._stopped.is_set()
            self._wake.clear()
            # The number proves life: a beat with the same content is news, an old one is not.
            sequence += 1
            try:
                self._exchange(sequence)
            except jax.errors.JaxRuntimeError:  # `answers` stands still
                self._stopped.wait(self._period)
            if is_last:
                return
            self._wake.wait(self._period)

    def _exchange(self, sequence: int) -> None:
        client, beat = self._job.client, self._beat()
        text = json.dumps([sequence, dataclasses.asdict(beat)])
        client.key_value_set(f"{_PREFIX}{self._job.index}", text, allow_overwrite=True)
        self.published = beat
        self.answers += 1
        if not self.is_listening:
            self.received = {}
            return
        self.received = {  # before `readings`, which announces it
            int(key.removeprefix(_PREFIX)): _parse(value)
            for key, value in client.key_value_dir_get(_PREFIX)
        }
        self.readings += 1


class Listener:
    """Seconds of silence of the service and of each process.

    Args:
        heartbeats: read while they listen.
        peers: indices of the other processes.

    Attributes:
        quiet: seconds in which a process had no new beat; empty unless the heartbeats listen.
        unanswered: seconds in which the service answered no call.
    """

    def __init__(self, heartbeats: Heartbeats, peers: Sequence[int]) -> None:
        self._heartbeats, self._peers = heartbeats, peers
        self._answers, self._readings = heartbeats.answers, heartbeats.readings
        self._since_reading = 0.0
        self._sequences: dict[int, int] = {}
        self.quiet: dict[int, float] = {}
        self.unanswered = 0.0

    def count(self, seconds: float) -> None:
        """Count seconds. Only seconds between two readings are evidence against a process."""
        heartbeats = self._heartbeats
        answers, readings, received = heartbeats.answers, heartbeats.readings, heartbeats.received
        self.unanswered = self.unanswered + seconds if answers == self._answers else 0.0
        self._answers = answers
        if not heartbeats.is_listening:
            self._sequences, self.quiet, self._since_reading = {}, {}, 0.0
            return
        self._since_reading += seconds
        if readings == self._readings:
            return
        sequences = {i: received[i][0] for i in self._peers if i in received}
        # Silence counts from the first reading on: a process may be slower to start.
        self.quiet = {
            i: self.quiet[i] + self._since_reading
            if i in self.quiet and sequences.get(i) == self._sequences.get(i)
            else 0.0
            for i in self._peers
        }
        self._sequences, self._readings, self._since_reading = sequences, readings, 0.0


def _parse(text: str) -> tuple[int, Beat]:
    sequence, fields = json.loads(text)
    return sequence, Beat(**{**fields, "status": Status(**fields["status"])})


def locate(thread: int) -> tuple[bool, str]:
    """Return where a thread is.

    Returns:
        Whether its innermost call is one of JAX, and the innermost line outside of libraries.
    """
    frame: FrameType | None = sys._current_frames().get(thread)
    if frame is None:
        return False, ""
    is_in_jax = frame.f_code.co_filename.startswith(_JAX)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    file = "/".join(Path(frame.f_code.co_filename).parts[-2:])
    return is_in_jax, f"{file}:{frame.f_lineno} ({frame.f_code.co_name})"


def _is_library(file: str) -> bool:
    if file.startswith(_PACKAGE):
        return False
    is_installed = any(folder in file for folder in _PACKAGES)
    return is_installed or file.startswith((_STANDARD_LIBRARY, "<"))
