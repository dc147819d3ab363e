"""HTML page of runs, from their directories alone: `python -m jaxforge.report RUN`."""
