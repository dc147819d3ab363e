"""Compiles the train step: with the flags of `xla_flags`, through the cache of compiled programs.

The cache is JAX's. Its keys hold program, flags, versions of JAX and XLA, and the kind of devices
(a CPU's instruction set): no machine gets a program that was made for another. The first process of
a job writes; an entry that cannot be read counts as a miss.
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
from jaxforge.config.problems import describe_change
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
    """Sets where JAX keeps compiled programs; must run before the first of them is compiled.

    Raises:
        UserError: the directory cannot be made.
    """
    directory = cache_directory(config)
    if directory and "://" not in directory:
        try:
            Path(directory).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"train.compilation_cache_dir: no directory {directory} ({error.strerror}): name "
                'another, or "" to compile at every start'
            ) from None
    jax.config.update("jax_compilation_cache_dir", directory or None)


def cache_directory(config: TrainConfig) -> str:
    """`train.compilation_cache_dir`, `$JAX_COMPILATION_CACHE_DIR` or `~/.cache/jaxforge/xla`.

    Empty for none, the default on CPUs: some of them refuse every entry that they wrote themselves,
    loudly (https://github.com/jax-ml/jax/issues/38445), and compiling for them takes seconds.
    """
    if config.compilation_cache_dir is not None:
        return config.compilation_cache_dir
    if of_jax := os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        return of_jax
    if jax.default_backend() == "cpu":
        return ""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(home, "jaxforge", "xla")


def accepted_flags(config: JobConfig) -> dict[str, Option]:
    """The flags to compile the step with, tried on an empty program, and logs them.

    Args:
        config: the run's.

    Raises:
        UserError: `train.xla_flags` names a flag that this XLA does not have, or a wrong value.
    """
    device = jax.devices()[0]
    own = config.train.xla_flags
    flags = compiler_options(device, own, has=traits(config))
    while flags and (name := _refused(flags)) is not None:
        if name in own:
            raise UserError(flag_error_message(name, own[name], jax.default_backend()))
        # Flags come and go with the versions of XLA; a run must not depend on those of our table.
        log.warning("this XLA does not take %s=%s; going on without", name, flags.pop(name))
    if flags:
        log.info("XLA flags: %s", " ".join(f"{name}={value}" for name, value in flags.items()))
    return flags


def compile_step(lowered: jax.stages.Lowered, flags: dict[str, Option]) -> jax.stages.Compiled:
    """Compiles the step; logs how long it took and whether the cache had it."""
    started = time.perf_counter()
    with _counting_hits() as hits:
        compiled = lowered.compile(compiler_options=flags)
    seconds = time.perf_counter() - started
    log.info("train step compiled in %.1f s%s", seconds, " (cached)" if hits else "")
    return compiled


def _refused(flags: dict[str, Option]) -> str | None:
    """The first flag that the compiler does not take."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options=flags)
    except jax.errors.JaxRuntimeError as error:
        if name := refused_flag(error):
            return name
        raise
    return None


def refused_flag(error: jax.errors.JaxRuntimeError) -> str | None:
    """The flag that the compiler did not take; None where it gave up for something else."""
    match = _REFUSED.search(str(error))
    return next(filter(None, match.groups())) if match else None


def flag_error_message(name: str, value: str, platform: str) -> str:
    """About a flag of the user's.

    Args:
        name: of a flag that was refused.
        value: in `train.xla_flags`.
        platform: that is compiled for.
    """
    key = f"train.xla_flags.{name}"
    return (
        f"{key} = {value}: XLA for {platform} in jaxlib {version('jaxlib')} has no such flag, or "
        f"not this value for it; correct it, or remove it: change {describe_change({key: DEFAULT})}"
    )


@contextlib.contextmanager
def _counting_hits() -> Iterator[list[str]]:
    hits: list[str] = []

    def listen(event: str, **_: str | int) -> None:
        hits.extend([event] if event == _HIT else [])

    jax.monitoring.register_event_listener(listen)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(listen)
