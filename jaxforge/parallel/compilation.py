"""Compilation of the train step with the flags of `xla_flags` and JAX's compilation cache.

Keys of the cache include the program, flags, versions of JAX and XLA, and the kind of devices (for
CPUs, the instruction set). So no machine loads a program that was compiled for another. The first
process of a job writes entries. An unreadable entry counts as a miss.
"""

import contextlib
import logging
import os
import re
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import jax

from jaxforge.config.job import JobConfig
from jaxforge.config.train import TrainConfig
from jaxforge.errors import UserError
from jaxforge.parallel.xla_flags import DEFAULT, Option, compiler_options, traits

log = logging.getLogger(__name__)

_HIT = "/jax/compilation_cache/cache_hits"
_REFUSED = re.compile(
    r"No such compile option: '(\w+)'"
    r"|While setting option (\w+), "
    r"|Failed to parse .* into flag (\w+)"
)


def use_cache(config: TrainConfig) -> None:
    """Set JAX's directory for compiled programs. Must run before the first compilation.

    Raises:
        UserError: the directory cannot be created.
    """
    directory = cache_directory(config)
    if directory and "://" not in directory:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"train.compilation_cache_dir: cannot create {directory} ({error.strerror}). Set "
                'another directory, or "" to compile at every start'
            ) from None
    jax.config.update("jax_compilation_cache_dir", directory or None)


def cache_directory(config: TrainConfig) -> str:
    """Return the directory of compiled programs; "": no cache.

    It is the first of `train.compilation_cache_dir`, `$JAX_COMPILATION_CACHE_DIR` and
    `~/.cache/jaxforge/xla`. On CPUs, the default is no cache: some CPUs reject the entries that
    they wrote, with many warnings (https://github.com/jax-ml/jax/issues/38445), and compilation
    takes seconds only.
    """
    if config.compilation_cache_dir is not None:
        return config.compilation_cache_dir
    if jax_directory := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return jax_directory
    if jax.default_backend() == "cpu":
        return ""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "jaxforge", "xla")


def accepted_flags(config: JobConfig, unroll: int = 1) -> dict[str, Option]:
    """Return and log the flags of the step that this XLA accepts for an empty program.

    Args:
        config: config of the run.
        unroll: layers per iteration of the loop over layers.

    Raises:
        UserError: XLA rejects a flag of `train.xla_flags`, or its value.
    """
    device = jax.devices()[0]
    user_flags = config.train.xla_flags
    flags = compiler_options(device, user_flags, has=traits(config, unroll))
    # XLA names one flag at a time: an empty program is compiled until none is refused.
    while flags and (name := _first_refused_flag(flags)) is not None:
        if name in user_flags:
            raise UserError(flag_error_message(name, user_flags[name], jax.default_backend()))
        # Flags change with the version of XLA. A run must not fail because of our defaults.
        log.warning("XLA does not accept %s=%s: the flag is ignored", name, flags.pop(name))
    if flags:
        log.info("XLA flags: %s", " ".join(f"{name}={value}" for name, value in flags.items()))
    return flags


def compile_step(lowered: jax.stages.Lowered, flags: dict[str, Option]) -> jax.stages.Compiled:
    """Compile the step, and log the time and whether the program was cached."""
    started = time.perf_counter()
    with _record_cache_hits() as hits:
        compiled = lowered.compile(compiler_options=flags)
    seconds = time.perf_counter() - started
    log.info("train step compiled in %.1f s%s", seconds, " (cached)" if hits else "")
    return compiled


def _first_refused_flag(flags: dict[str, Option]) -> str | None:
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=flags)
    except jax.errors.JaxRuntimeError as error:
        if name := refused_flag(error):
            return name
        raise
    return None


def refused_flag(error: jax.errors.JaxRuntimeError) -> str | None:
    """Return the name of the flag that the compiler rejected; None for other errors."""
    match = _REFUSED.search(str(error))
    return next(filter(None, match.groups())) if match else None


def flag_error_message(name: str, value: str, platform: str) -> str:
    """Return the error message for a rejected flag of `train.xla_flags`.

    Args:
        name: name of the flag.
        value: value in `train.xla_flags`.
        platform: target platform of the compilation.
    """
    key = f"train.xla_flags.{name}"
    return (
        f"{key} = {value}: XLA for {platform} in jaxlib {version('jaxlib')} does not "
        "have this flag, or not this value. Correct it, or remove it: change "
        f'{key} to "{DEFAULT}"'
    )


@contextlib.contextmanager
def _record_cache_hits() -> Iterator[list[str]]:
    hits: list[str] = []

    def listen(event: str, **_: str | int) -> None:
        hits.extend([event] if event == _HIT else [])

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)
