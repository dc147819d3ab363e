"""`[distributed]`: the device mesh and the parallelism strategies."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from jaxforge.config.section import MOST_DEVICES, MOST_LAYERS, AxisSize, Needs, Section


class DistributedConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices."""

    dp_shard: Annotated[int, Field(ge=-1, le=MOST_DEVICES)] = -1
    """Data parallelism with sharded parameters (FSDP); -1 uses all remaining devices.

    Parameters are sharded over the largest factor that divides model.dim, and replicated over the
    remaining factor."""
    dp_replicate: AxisSize = 1
    """Data parallelism with replicated parameters."""
    tp: AxisSize = 1
    """Tensor parallelism: heads, feed-forward columns and vocabulary are sharded."""
    pp: AxisSize = 1
    """Pipeline parallelism: each stage has consecutive blocks."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved_1f1b"] = "1f1b"
    """Schedule of the microbatches in the pipeline."""
    pp_chunks: Annotated[
        int, Field(ge=2, le=MOST_LAYERS), Needs("pp_schedule", "interleaved_1f1b")
    ] = 2
    """Virtual stages (groups of consecutive blocks) per stage."""
    cp: AxisSize = 1
    """Context parallelism: sequences are sharded."""
    cp_strategy: Literal["auto", "ulysses", "ring"] = "auto"
    """Communication of attention over sharded sequences.

    ulysses: an all-to-all gives each device all tokens for a share of the heads. ring: keys and
    values circulate around the devices. auto: ulysses if n_heads is a multiple of cp * tp, else
    ring."""
    ep: AxisSize = 1
    """Expert parallelism: experts are sharded; like dp_shard, this axis also shards the batch."""
    elastic_processes: AxisSize | None = None
    """Processes of the whole job. With fewer, dp shrinks and batches stay the same."""
    elastic_min_processes: Annotated[AxisSize, Needs("elastic_processes")] = 1
    """Smallest number of processes of an elastic job; checked when it starts."""
    heartbeat_timeout_sec: PositiveInt = 100
    """Seconds without a heartbeat after which a process is considered lost and the job ends."""

    @property
    def chunks(self) -> int:
        """Virtual stages (groups of consecutive blocks) per stage."""
        return self.pp_chunks if self.pp > 1 and self.pp_schedule == "interleaved_1f1b" else 1

    def _problems(self) -> Iterator[str]:
        if self.dp_shard == 0:
            yield "dp_shard = 0 must be at least 1, or -1 for all remaining devices"
        if self.elastic_processes and self.elastic_min_processes > self.elastic_processes:
            yield (
                f"elastic_min_processes = {self.elastic_min_processes} must be at most "
                f"elastic_processes = {self.elastic_processes}"
            )
