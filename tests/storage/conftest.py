"""Bucket fixtures on local servers."""

import atexit
import contextlib
import functools
import os

import emulators
import pytest


@functools.cache  # clients cache the address, so servers live as long as the process
def emulator_of(kind):
    """Return the emulator of this process."""
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context({"s3": emulators.s3, "gs": emulators.gcs}[kind]())


@pytest.fixture(scope="session", params=["s3", "gs"])
def server(request):
    """Return the emulator, which this process and its children use."""
    before = dict(os.environ)
    os.environ.update(emulator_of(request.param).env)
    yield emulator_of(request.param)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def bucket(server, request):
    """Return a directory of the bucket for each test."""
    yield server.url(request.node.name.replace("[", "-").replace("]", ""))
    server.throttle(0)
