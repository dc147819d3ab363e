"""HTML page of runs, from their directories alone: `jaxforge report RUN`."""
