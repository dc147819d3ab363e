"""Parameter names of code bases for the parameters that `jaxforge.model` declares."""
