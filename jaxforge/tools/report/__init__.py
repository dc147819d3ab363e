"""A run as one HTML page, from its directory alone: `python -m jaxforge.report RUN`."""
