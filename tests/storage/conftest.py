"""A bucket of each kind, on a server of its own."""

import atexit
import contextlib
import functools
import os

import emulators
import pytest


@functools.cache  # a client keeps the address; the fixture ends where files change places
def running(kind):
    """The emulator of this process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context({"s3": emulators.s3, "gs": emulators.gcs}[kind]())


@pytest.fixture(scope="session", params=["s3", "gs"])
def server(request):
    """The emulator; this process and those that it starts talk to it."""
    before = dict(os.environ)
    os.environ.update(running(request.param).env)
    yield running(request.param)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def bucket(server, request):
    """A directory of the bucket for each test."""
    yield server.url(request.node.name.replace("[", "-").replace("]", ""))
    server.throttle(0)
