"""Planning of a run before it starts, memory and speed: `python -m jaxforge.plan`."""
