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

from jaxforge.storage import buckets


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


def _with_clients(spec: Any, scheme: str) -> Any:  # noqa: ANN401
    """Return a spec in which every gcs driver is replaced by the client of our settings."""
    if isinstance(spec, list):
        return [_with_clients(part, scheme) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") == "gcs":
        return buckets.spec(f"{scheme}://{spec['bucket']}/{spec['path']}")
    return {key: _with_clients(value, scheme) for key, value in spec.items()}


_patch_orbax()
