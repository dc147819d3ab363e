"""Planning of a run's memory and speed before it starts: `jaxforge plan`."""
