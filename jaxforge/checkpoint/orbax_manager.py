"""Orbax as `manager.Checkpoints` uses it: manager, handlers of the items, retention and buckets.

Two patches of Orbax for buckets have no public option (docs/upstream.md). Orbax 0.12 creates
kvstores only for gs:// (https://github.com/google/orbax/pull/2739); its spec for gs:// also works
for s3:// with another driver. And it needs another client library to determine whether a bucket has
folders (hierarchical namespaces), in order to delete empty ones. These are invisible here and
harmless, so the query is disabled.
"""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree
from orbax.checkpoint import checkpoint_managers as policies
from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxforge.checkpoint.checksums import ChecksumsHandler, ChecksumsSave
from jaxforge.checkpoint.failures import summary
from jaxforge.checkpoint.paths import PREFIX
from jaxforge.checkpoint.save_policy import milestones
from jaxforge.config.checkpoint import CheckpointConfig
from jaxforge.errors import UserError
from jaxforge.storage import urls
from jaxforge.storage.requests import endpoint
from jaxforge.storage.seals import check_seal

_COMMIT_FILE = ocp.options.AtomicityOptions(mode=ocp.options.AtomicityMode.COMMIT_FILE)
_DRIVERS = {"gs": "gcs", "s3": "s3"}
_RETRIES = {"max_retries": 12, "initial_delay": "100ms", "max_delay": "16s"}  # about 90 seconds

# The watchdog limits saves. Orbax's limit of 20 minutes ends those of large states on slow storage,
# and counts by a clock that may be set (docs/upstream.md).
_NO_LIMIT_SEC = 100_000_000


class OrbaxManager(ocp.CheckpointManager):
    """Checkpoint manager that verifies metrics and does not query JAX's preemption service.

    The service counts queries, and `training.preemption` makes them. Orbax would query with the
    saved step, also from its background thread while training continues. One process might then
    stop at a step that another has passed (docs/upstream.md).
    """

    def metrics(self, step: int) -> PyTree | None:
        """Return the metrics of a step, which rank it for `keep_best_n`.

        Orbax reads the metrics of all steps when the manager is created.

        Raises:
            UserError: the file is damaged.
        """
        try:
            metrics = super().metrics(step)
            check_seal(metrics or {}, "metrics/metrics")
        except ValueError as error:
            path = Path(self.directory) / f"{PREFIX}_{step}"
            raise UserError(
                f"{path} is damaged ({summary(error)}): its rank among the best is unknown. "
                "Restore metrics/metrics from a copy, or remove that file: then the checkpoint "
                "counts as never evaluated"
            ) from error
        return metrics

    def reached_preemption(self, step: int) -> bool:
        """Return False: `training.preemption` decides about saves."""
        return False


def restore_args(tree: PyTree, *, partial: bool) -> ocp.args.PyTreeRestore:
    """Return the arguments that restore a tree with its shapes, dtypes and shardings."""
    leaf_args = ocp.checkpoint_utils.construct_restore_args(tree)
    return ocp.args.PyTreeRestore(tree, restore_args=leaf_args, partial_restore=partial)


def handlers(
    arrays: ocp.PyTreeCheckpointHandler | None,
) -> ocp.handlers.DefaultCheckpointHandlerRegistry:
    """Register the handler of each item up front, so that metadata can be read first."""
    registry = ocp.handlers.DefaultCheckpointHandlerRegistry()
    # Weights hardly compress (8 % in float32), and zstd would use cores of the training loop.
    arrays = arrays or ocp.PyTreeCheckpointHandler(use_compression=False)
    json = ocp.JsonCheckpointHandler()
    for args in (ocp.args.PyTreeSave, ocp.args.PyTreeRestore):
        registry.add("state", args, arrays)
    for args in (ocp.args.JsonSave, ocp.args.JsonRestore):
        for item in ("progress", "config"):
            registry.add(item, args, json)
    checksums = ChecksumsHandler()
    for args in (ChecksumsSave, ocp.args.JsonRestore):
        registry.add("checksums", args, checksums)
    return registry


def manager_options(
    directory: Path,
    config: CheckpointConfig,
    rank: Callable[[Mapping[str, float]], float],
    *,
    read_only: bool,
) -> ocp.CheckpointManagerOptions:
    """Return the options of Orbax's manager of a directory.

    Args:
        directory: the checkpoints.
        config: the `[checkpoint]` section.
        rank: returns the rank of a checkpoint by its metrics; the lowest is the best.
        read_only: do not create, change or delete files.
    """
    is_shared = not read_only and jax.process_count() > 1
    return ocp.CheckpointManagerOptions(
        step_prefix=PREFIX,
        # Left by killed processes. Readers must not remove what another process is writing.
        cleanup_tmp_directories=not read_only,
        create=not read_only and not is_shared,
        read_only=read_only,
        save_interval_steps=0 if read_only else 1,
        preservation_policy=_preservation(config, rank),
        # Unused with a policy, but without it Orbax writes no metrics.
        best_fn=(lambda metrics: metrics[config.best_metric]) if config.keep_best_n else None,
        enable_async_checkpointing=config.async_mode != "disabled",
        async_options=ocp.options.AsyncOptions(timeout_secs=_NO_LIMIT_SEC),
        # Orbax knows by itself that gs:// has no atomic rename, but not that s3:// has none.
        atomicity_options=_COMMIT_FILE if urls.in_bucket(directory) else None,
        # By default, Orbax uses device collectives, which would have to keep the order of the
        # training loop's collectives. Any thread may use these barriers, one set per directory.
        multiprocessing_options=ocp.options.MultiprocessingOptions(
            active_processes=set(range(jax.process_count())) if is_shared else None,
            barrier_sync_key_prefix=str(directory) if is_shared else None,
        ),
    )


def _preservation(
    config: CheckpointConfig, rank: Callable[[Mapping[str, float]], float]
) -> policies.PreservationPolicy:
    """Return the policy: `keep_last_n` newest (0: all), `keep_best_n`, and those of the window."""
    if config.keep_last_n <= 0:
        return policies.LatestN(n=None)
    permanent = [
        policies.LatestN(config.keep_last_n),
        policies.CustomSteps(list(milestones(config.dyn_ckpt_window))),
    ]
    if config.keep_best_n:
        permanent.append(
            policies.BestN(
                get_metric_fn=rank,
                reverse=True,  # Orbax keeps the end of the list: the lowest
                n=config.keep_best_n,
                keep_checkpoints_without_metrics=False,
            )
        )
    return policies.AnyPreservationPolicy(permanent)


def spec(url: str | os.PathLike) -> dict[str, Any]:
    """Return the tensorstore spec of the objects with the key prefix of a URL."""
    scheme, _, path = os.fspath(url).partition("://")
    bucket, _, key = path.partition("/")
    driver = _DRIVERS[scheme]
    spec_: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": key}
    spec_[f"{driver}_request_retries"] = _RETRIES
    if driver == "s3":
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec_ |= {"aws_region": region} if region else {}
        if "AWS_ACCESS_KEY_ID" in os.environ:
            spec_["aws_credentials"] = {"type": "environment"}
        address = endpoint(scheme)
        spec_ |= {"endpoint": address} if address else {}
    return spec_


def _patch_orbax() -> None:
    build_gcs_tspec = tensorstore_utils.build_kvstore_tspec

    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any) -> dict:  # noqa: ANN401
        url = os.fspath(directory)
        if not url.startswith(("gs://", "s3://")):
            return build_gcs_tspec(directory, *args, **kwargs)
        spec = build_gcs_tspec("gs://" + url.partition("://")[2], *args, **kwargs)
        return _with_clients(spec, url.partition("://")[0])

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False


def _with_clients(part: Any, scheme: str) -> Any:  # noqa: ANN401
    """Return a spec in which every gcs driver is replaced by the client of our settings."""
    if isinstance(part, list):
        return [_with_clients(item, scheme) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("driver") == "gcs":
        return spec(f"{scheme}://{part['bucket']}/{part['path']}")
    return {key: _with_clients(value, scheme) for key, value in part.items()}


_patch_orbax()
