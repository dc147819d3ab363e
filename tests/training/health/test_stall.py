"""Time since the last progress of a process."""

import jax.numpy as jnp

from jaxforge.training.health.watchdog import Stall


class Step:
    """A step on the devices."""

    def __init__(self, has_ended=False) -> None:
        self.has_ended = has_ended

    def is_ready(self):
        return self.has_ended

    def is_deleted(self):
        return False


def test_launch_and_progress_end_stall():
    stall = Stall()
    stall.count(5.0)
    assert stall.seconds == 5.0
    stall.launch()
    assert stall.seconds == 0.0
    stall.count(3.0)
    stall.progress()
    assert stall.seconds == 0.0


def test_finished_step_ends_stall_while_host_waits():
    stall, steps = Stall(), [Step() for _ in range(4)]
    for step in steps:
        stall.launch(step)
    stall.count(9.0)
    assert stall.seconds == 9.0
    steps[0].has_ended = True
    stall.count(9.0)
    assert stall.seconds == 0.0
    steps[2].has_ended = True  # steps end in order
    stall.count(9.0)
    assert stall.seconds == 9.0
    steps[1].has_ended = True
    stall.count(9.0)
    assert stall.seconds == 0.0


def test_stall_is_unusual_if_longer_than_three_times_the_longest_step():
    stall = Stall()
    for seconds in (100.0, 20.0, 10.0):
        stall.launch(Step(has_ended=True))
        stall.count(seconds)
    stall.launch()
    stall.count(299.0)
    assert not stall.is_unusual()
    stall.count(1.0)
    assert stall.is_unusual()


def test_stall_of_first_steps_is_not_unusual():
    stall = Stall()
    for _ in range(2):
        assert not stall.is_unusual()
        stall.launch(Step(has_ended=True))
        stall.count(1e9)
    assert not stall.is_unusual()


def test_step_whose_metrics_were_deleted_counts_as_finished():
    result = jnp.zeros(())
    result.delete()
    stall = Stall()
    stall.launch(result)
    stall.count(9.0)
    assert stall.seconds == 0.0
