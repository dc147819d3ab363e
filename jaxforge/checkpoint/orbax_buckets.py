"""Two patches of Orbax for buckets.

Orbax 0.12 creates kvstores only for gs:// (https://github.com/google/orbax/pull/2739). Its spec for
gs:// also works for s3:// with another driver. Orbax also needs another client library to determine
whether a bucket has folders (hierarchical namespaces), in order to delete empty ones. These are
invisible here and harmless, so the query is disabled.
"""

import os
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxforge.storage.requests import endpoint

_DRIVERS = {"gs": "gcs", "s3": "s3"}
_RETRIES = {"max_retries": 12, "initial_delay": "100ms", "max_delay": "16s"}  # about 90 seconds


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
