"""Orbax in buckets: what it lacks, in the two places where it asks.

Orbax 0.12 makes kvstores of gs:// alone (https://github.com/google/orbax/pull/2739). What it makes
of such a directory serves s3:// once the driver is exchanged. And it wants another client to find
out whether a bucket has folders (hierarchical namespaces), to remove them; empty ones are not seen
here, and do no harm.
"""

import os
from typing import Any

from orbax.checkpoint._src.path import gcs_utils
from orbax.checkpoint._src.serialization import tensorstore_utils

from jaxforge.storage import buckets


def _teach() -> None:
    of_gcs = tensorstore_utils.build_kvstore_tspec

    def build_kvstore_tspec(directory: str, *args: Any, **kwargs: Any) -> dict:  # noqa: ANN401
        url = os.fspath(directory)
        if not url.startswith(("gs://", "s3://")):
            return of_gcs(directory, *args, **kwargs)
        spec = of_gcs("gs://" + url.partition("://")[2], *args, **kwargs)
        return _with_clients(spec, url.partition("://")[0])

    tensorstore_utils.build_kvstore_tspec = build_kvstore_tspec
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False


def _with_clients(spec: Any, scheme: str) -> Any:  # noqa: ANN401
    """The spec with our settings of the client wherever it names one."""
    if isinstance(spec, list):
        return [_with_clients(part, scheme) for part in spec]
    if not isinstance(spec, dict):
        return spec
    if spec.get("driver") == "gcs":
        return buckets.spec(f"{scheme}://{spec['bucket']}/{spec['path']}")
    return {key: _with_clients(value, scheme) for key, value in spec.items()}


_teach()
