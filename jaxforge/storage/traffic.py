"""Counters of the data that this process reads from buckets."""

import threading
from typing import NamedTuple

_RETRIES = "/tensorstore/kvstore/{}/retries"


class Traffic(NamedTuple):
    """Counts since the process started.

    Attributes:
        requests: range requests for data.
        bytes_fetched: bytes of their answers.
        retries: repeated requests to buckets, also those for checkpoints.
        hits: blocks found in the cache.
        misses: blocks looked up in the cache and then fetched.
    """

    requests: int = 0
    bytes_fetched: int = 0
    retries: int = 0
    hits: int = 0
    misses: int = 0

    @property
    def reads(self) -> int:
        """Reads of data of buckets, from the cache or not."""
        return self.requests + self.hits

    def since(self, before: "Traffic") -> dict[str, float]:
        """Return `bucket/*` of the interval since an earlier count."""
        requests, fetched, retries, hits, misses = (
            now - then for now, then in zip(self, before, strict=True)
        )
        metrics = {
            "bucket/requests": float(requests),
            "bucket/bytes_fetched": float(fetched),
            "bucket/retries": float(retries),
        }
        looked_up = hits + misses
        return metrics | ({"bucket/cache_hit_rate": hits / looked_up} if looked_up else {})


_lock = threading.Lock()
_counts = Traffic()


def count(**amounts: int) -> None:
    """Add to the counts of the named fields."""
    global _counts
    with _lock:
        _counts = _counts._replace(
            **{name: getattr(_counts, name) + amount for name, amount in amounts.items()}
        )


def traffic() -> Traffic:
    """Return the counts, including the retries of the client."""
    counts = _counts
    if counts == Traffic():
        return counts
    import tensorstore as ts  # the client is in use

    for driver in ("gcs", "s3"):
        for metric in ts.experimental_collect_matching_metrics(_RETRIES.format(driver)):
            of_client = sum(int(value["value"]) for value in metric["values"])
            counts = counts._replace(retries=counts.retries + of_client)
    return counts
