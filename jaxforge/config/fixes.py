"""Changes of keys that may fix a broken rule between sections."""

import math

from pydantic import ValidationError

from jaxforge.config.job import JobConfig
from jaxforge.config.problems import Change, divisors, nearest


def changed(config: JobConfig, change: Change) -> JobConfig | None:
    """Return the config with other values; None if its sections do not accept them."""
    for key, value in change.items():
        name, _, field = key.partition(".")
        section = getattr(config, name)
        given = {key: getattr(section, key) for key in section.model_fields_set}
        try:
            section = type(section).model_validate({**given, field: value})
        except ValidationError:
            return None
        config = config.with_values({name: section})
    return config


def smaller_axis(config: JobConfig, axis: str, size: int) -> tuple[Change, ...]:
    """Return smaller sizes of a mesh axis, largest first; dp_shard takes the freed devices."""
    is_open = config.distributed.dp_shard == -1
    others = {} if is_open or axis == "dp_shard" else {"distributed.dp_shard": -1}
    return tuple({f"distributed.{axis}": new, **others} for new in list(divisors(size))[-2::-1])


def other_axes(sizes: dict[str, int], n_devices: int) -> tuple[tuple[Change, ...], ...]:
    """Return changes of one axis, or of all axes, after which the mesh may match the devices.

    Args:
        sizes: axis sizes, with 1 for dp_shard if it takes the remaining devices.
        n_devices: devices of the whole job.
    """
    shard = math.prod(sizes.values()) // sizes["dp_shard"]
    takes_all = {"distributed.dp_shard": -1}
    above_one = [axis for axis, size in sizes.items() if size > 1 and axis != "dp_shard"]
    none_else = {f"distributed.{axis}": 1 for axis in above_one} | takes_all
    if n_devices % shard == 0:
        return ((takes_all,),)
    alone = [nearest(f"distributed.{axis}", sizes[axis], divisors(n_devices)) for axis in above_one]
    return tuple(
        (*sizes_of, *({**each, **takes_all} for each in sizes_of), none_else) for sizes_of in alone
    )
