"""How code bases name the parameters that `jaxforge.model` declares."""
