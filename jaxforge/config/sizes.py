"""Limits of counts in configs: far above real ones, and low enough for a loop over the items.

A config may come from a stranger. Any config is checked, or refused, within seconds.
"""

from typing import Annotated

from pydantic import Field

MOST_LAYERS = 10_000
"""Largest number of layers of a model."""
MOST_DEVICES = 1 << 20
"""Largest size of a mesh axis."""

AxisSize = Annotated[int, Field(gt=0, le=MOST_DEVICES)]
"""Type of a key with the size of a mesh axis."""
