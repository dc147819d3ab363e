"""One table per dialect: how a code base names the parameters that `jaxforge.model` declares."""
