"""What a run will need and how fast it will be, before it starts: `python -m jaxforge.plan`."""
