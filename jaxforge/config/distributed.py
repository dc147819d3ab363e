"""`[distributed]`: how the devices share the work."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from jaxforge.config.section import Section


class DistributedConfig(Section):
    """Sizes of the mesh axes; their product is the number of devices."""

    dp_shard: Annotated[int, Field(ge=-1)] = -1
    """Data parallel with sharded parameters (FSDP); -1 takes the devices that are left.

    They are split over its largest factor that divides model.dim, and copied over the rest."""
    dp_replicate: PositiveInt = 1
    """Data parallel with replicated parameters."""
    tp: PositiveInt = 1
    """Tensor parallel: heads, feed-forward and vocabulary are cut."""
    pp: PositiveInt = 1
    """Pipeline parallel: consecutive blocks are stages."""
    pp_schedule: Literal["1f1b", "gpipe", "interleaved_1f1b"] = "1f1b"
    """Order of microbatches in the pipeline."""
    pp_chunks: Annotated[int, Field(ge=2)] = 2
    """Runs of consecutive blocks that a stage of interleaved_1f1b has."""
    cp: PositiveInt = 1
    """Context parallel: sequences are cut."""
    cp_strategy: Literal["auto", "ulysses", "ring"] = "auto"
    """How attention goes over cut sequences.

    ulysses: an all-to-all gives each device all tokens for a share of the heads. ring: keys and
    values go round. auto: ulysses, where n_heads is a multiple of cp * tp."""
    ep: PositiveInt = 1
    """Expert parallel: experts are spread; as the batch is, as over dp_shard."""
    heartbeat_timeout_sec: PositiveInt = 100
    """Seconds of silence after which a process of the job is given up, and the others end too."""
    nccl_timeout_sec: PositiveInt = 1800
    """Without effect: the runtime has its own time-outs."""
    backend: str = "cpu:gloo,cuda:nccl"
    """Without effect: XLA brings its collectives."""

    @property
    def chunks(self) -> int:
        """Runs of consecutive blocks that a stage has."""
        return self.pp_chunks if self.pp > 1 and self.pp_schedule == "interleaved_1f1b" else 1

    def problems(self) -> Iterator[str]:
        """Yields the broken rules between the keys of this section."""
        if self.dp_shard == 0:
            yield "dp_shard = 0 must be at least 1, or -1 for the devices that are left"
