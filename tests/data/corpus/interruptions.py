"""Interrupted preparations, and what they leave on disk."""

import time


class Interrupted(BaseException):
    """Interruption as sudden as Ctrl-C."""


def snapshot(directory):
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != "train.toml"  # which has the paths of this one
    }


def wait_for(path, process):
    while not path.exists():
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.002)
