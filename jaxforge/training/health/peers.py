"""Watch over the other processes of a job: heartbeats, suspicion of a hang, autopsy.

    no progress for          reaction
    hang_timeout / 6         start to read the heartbeats of all processes
    hang_timeout             a process is silent, or has failed: report, the job ends (`Exit.HUNG`)
                             all live, and some wait for others: report, once
    limit of the watchdog    report, the job ends (`Exit.HUNG`)

A process that lives may have a reason: a slow callback or disk, a step that takes longer than
before. So only the limits of the watchdog end it. A silent process has no watchdog.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable

from jaxforge.cli.redaction import redacted
from jaxforge.errors import PeerLostError
from jaxforge.parallel.multihost import JoinedJob
from jaxforge.training.health.autopsy import Autopsy, Evidence, State, examine
from jaxforge.training.health.heartbeats import Beat, Ending, Heartbeats, Listener, Status, locate

log = logging.getLogger(__name__)

_LISTEN_AFTER = 1 / 6  # of the timeout
_SILENT_AFTER = 0.7  # of the timeout: the remaining time is for the first reading
_FRESH = 0.5  # of the timeout: a living process with later progress may still arrive
_LONGEST_PERIOD = 0.1  # of the timeout: time between two beats
_LATE_SEC = 2.0  # a report precedes the timeout by this, as polls and beats take time
_LOST_SEC = 3.0  # without a heartbeat, after a connection broke
_SEARCH_SEC = 6.0  # longest search for the process whose connection broke
_LINGER_SEC = 4.0  # process 0 runs the service, which the others need for their searches
_POLL_SEC = 0.1
_PUBLISH_POLLS = 10  # for an answer of the service
_LONGEST_REASON = 200  # characters


class PeerWatch:
    """Heartbeat of this process and watch over the others.

    Args:
        timeout: `train.hang_timeout` in seconds.
        status: returns the state of the training thread, which is the calling thread.
    """

    def __init__(self, timeout: float, job: JoinedJob, status: Callable[[], Status]) -> None:
        self._timeout, self._job, self._status = timeout, job, status
        self._thread, self._host = threading.get_ident(), socket.gethostname()
        self._ending: Ending = ""
        self._reason = ""
        self._is_searching = self._has_reported = False
        self._heartbeats = Heartbeats(job, self._beat, _LONGEST_PERIOD * timeout)
        self._listener = self._new_listener()

    def __enter__(self) -> "PeerWatch":
        self._heartbeats.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ending = self._ending or "finished"
        self._heartbeats.close()

    @property
    def is_coordinator(self) -> bool:
        """True in the process that runs the coordination service."""
        return self._job.index == 0

    def suspect(self, seconds: float) -> Autopsy | None:
        """Count seconds, and suspect a hang.

        Returns:
            The autopsy of a hang: again and again if a process is lost, otherwise once.
        """
        status = self._status()
        if status.section == "end":  # the others may have ended long ago
            return None
        # A healthy job does not read: n processes that read n beats would load process 0.
        should_listen = status.idle >= _LISTEN_AFTER * self._timeout
        self._heartbeats.is_listening = should_listen or self._is_searching
        self._listener.count(seconds)
        if status.idle < self._timeout - _LATE_SEC:
            self._note_progress()
            return None
        autopsy = self.examine()
        # A process that is gone will never arrive, so there is nothing to wait for.
        if autopsy.has_lost_process:
            return autopsy
        if self._has_reported or not (status.is_unusual and self._is_waited_for(autopsy)):
            return None
        self._has_reported = True
        return autopsy

    def examine(self) -> Autopsy:
        """Return the autopsy of the job, by the heartbeats read so far."""
        return self._examine(self._listener, _SILENT_AFTER * self._timeout)

    def note_hang(self) -> None:
        """Publish that this process ends because of a hang."""
        self._ending = "reported"
        self._heartbeats.wake()

    def note_failure(self, error: BaseException) -> None:
        """Publish the error that ends this process; log which process is lost, if one is."""
        if isinstance(error, PeerLostError):
            self._identify_lost()
            return
        first_line = next(iter(redacted(str(error)).splitlines()), "")
        self._reason = f"{type(error).__name__}: {first_line}"[:_LONGEST_REASON]
        self._ending = "failed"  # last: from now on the next beat is complete
        self._await_publication()

    def _identify_lost(self) -> None:
        self._reason = "another process is lost"
        self._ending = "victim"
        self._is_searching = self._heartbeats.is_listening = True
        self._await_publication()
        listener, seconds = self._new_listener(), 0.0
        autopsy = self._examine(listener, _LOST_SEC)
        while not autopsy.has_lost_process and seconds < _SEARCH_SEC:
            time.sleep(_POLL_SEC)
            seconds += _POLL_SEC
            listener.count(_POLL_SEC)
            autopsy = self._examine(listener, _LOST_SEC)
        if autopsy.has_lost_process:
            log.error("a connection broke; %s", autopsy.verdict())
        if self.is_coordinator:
            time.sleep(_LINGER_SEC)

    def _await_publication(self) -> None:
        self._heartbeats.wake()
        for _ in range(_PUBLISH_POLLS):
            published = self._heartbeats.published
            if published is not None and published.ending == self._ending:
                return
            time.sleep(_POLL_SEC)

    def _beat(self) -> Beat:
        is_in_jax, location = locate(self._thread)
        status = self._status()
        return Beat(self._host, status, is_in_jax, location, self._ending, self._reason)

    def _new_listener(self) -> Listener:
        peers = [i for i in range(self._job.count) if i != self._job.index]
        return Listener(self._heartbeats, peers)

    def _examine(self, listener: Listener, silent_after: float) -> Autopsy:
        beats = {i: beat for i, (_, beat) in self._heartbeats.received.items()}
        # The state of this process is known here and now; its published beat is older.
        beats[self._job.index] = self._beat()
        return examine(
            Evidence(
                self._job.index, self._job.count, beats, listener.quiet, listener.unanswered,
                silent_after, self._job.address,
            )
        )  # fmt: skip

    def _is_waited_for(self, autopsy: Autopsy) -> bool:
        """Return whether processes wait for others that live and should step."""
        if State.WAITING not in autopsy.states or State.BUSY in autopsy.states:
            return False
        beats = autopsy.evidence.beats.values()
        return all(beat.status.idle >= _FRESH * self._timeout for beat in beats)

    def _note_progress(self) -> None:
        if self._has_reported:
            self._has_reported = False
            log.info("the job makes progress again")
