"""Outputs, engines and shares of `jaxforge prepare` with several units of work."""

import argparse
import functools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from jaxforge.data.corpus import local_units
from jaxforge.data.corpus.engines import Engine, local, run_units
from jaxforge.data.corpus.ingest import Options
from jaxforge.data.corpus.manifest import FILE_NAME
from jaxforge.data.corpus.progress import progress_shown
from jaxforge.data.corpus.repeats import RunUnits
from jaxforge.data.corpus.tokenizer import Tokenizer
from jaxforge.data.corpus.tokenizer_files import load_tokenizer
from jaxforge.data.corpus.unit_worker import Job
from jaxforge.data.corpus.units import Unit
from jaxforge.errors import InputChangedError, UserError
from jaxforge.storage import atomic_directory, locks, urls
from jaxforge.storage.atomic_directory import AtomicDirectory, Plan

_SHARE_LOCKS = "share_*.lock"


@contextmanager
def open_output(
    args: argparse.Namespace, plan: Plan, say: Callable[[str], None]
) -> Iterator[AtomicDirectory]:
    """Open the output, on a local disk or in a bucket.

    Raises:
        UserError: see `atomic_directory`; or tasks of a Slurm array are writing the output.
    """
    function: Callable[..., AbstractContextManager[AtomicDirectory | None]]
    function = atomic_directory.atomic_directory
    if urls.in_bucket(args.output):
        from jaxforge.storage.bucket_directory import bucket_directory

        function = bucket_directory
    marker = f"train/{FILE_NAME}"
    with function(args.output, plan, marker=marker, overwrite=args.overwrite, say=say) as opened:
        assert opened is not None
        _check_shares(opened)
        yield opened


def _check_shares(destination: AtomicDirectory) -> None:
    """Check that no task of a Slurm array works on a local output."""
    if urls.in_bucket(destination.state):
        return
    for path in destination.state.glob(_SHARE_LOCKS):
        with locks.hold(path) as is_held:
            if not is_held:
                raise UserError(
                    f"{locks.holder(path)} is preparing a share of the output: wait until the "
                    "Slurm array has ended"
                )


def new_job(
    destination: AtomicDirectory, n_units: int, tokenizer: Tokenizer, options: Options
) -> Job:
    """Return the job, and record that there are parts to resume from."""
    if "units" not in (destination.journal or {}):
        destination.commit({"units": n_units})
    return Job(
        destination.out,
        destination.state,
        options,
        tokenizer.fingerprint,
        is_single=n_units == 1,
    )


def engine_of(args: argparse.Namespace) -> Engine:
    """Return the engine of the command line."""
    if args.engine == "ray":
        from jaxforge.data.corpus.ray_engine import on_ray

        return functools.partial(on_ray, address=args.address or "auto", workers=args.workers)
    return functools.partial(local, workers=args.workers or os.cpu_count() or 1)


def map_of(args: argparse.Namespace) -> RunUnits:
    """Return the function that runs the passes of maps on the engine of the command line."""
    if args.engine == "ray":
        from jaxforge.data.corpus.ray_engine import map_on_ray

        return functools.partial(map_on_ray, address=args.address or "auto")
    return functools.partial(local_units.run_units, workers=args.workers or os.cpu_count() or 1)


def run_share(
    args: argparse.Namespace,
    plan: Plan,
    units: Sequence[Unit],
    options_for: Callable[[int], Options],
) -> int:
    """Prepare the units of a share of an output that `--slurm` has planned; return the exit code.

    Args:
        args: parsed command line.
        plan: the plan of this command, which must be that of the output.
        units: all units.
        options_for: returns the options for a vocabulary size.

    Raises:
        UserError: nothing is planned, or something else; or a unit fails.
    """
    share, n = args.share
    destination = _attach(args, plan)
    tokenizer = load_tokenizer(destination.out / "tokenizer", is_checked=True)
    job = new_job(destination, len(units), tokenizer, options_for(tokenizer.vocab_size))
    chosen = units[share::n]
    with (
        _locked(destination, share),
        progress_shown(sum(unit.files for unit in chosen)) as show,
    ):
        try:
            run_units(
                job,
                chosen,
                engine_of(args),
                vocab_size=tokenizer.vocab_size,
                share=share,
                show=show,
            )
        except InputChangedError as error:
            atomic_directory.discard(destination.state, error.source)
            raise
    print(f"share {share} of {n}: {len(chosen):,} of {len(units):,} units are finished")
    return 0


def _attach(args: argparse.Namespace, plan: Plan) -> AtomicDirectory:
    if not urls.in_bucket(args.output):
        return atomic_directory.attach(args.output, plan)
    from jaxforge.storage import bucket_directory

    return bucket_directory.attach(args.output, plan)


@contextmanager
def _locked(destination: AtomicDirectory, share: int) -> Iterator[None]:
    """Keep other commands from the output while a share is prepared, on a local disk."""
    if urls.in_bucket(destination.state):
        yield
        return
    path = destination.state / _SHARE_LOCKS.replace("*", str(share))
    with locks.hold(path) as is_held:
        if not is_held:
            raise UserError(f"share {share} is being prepared by {locks.holder(path)}")
        yield
