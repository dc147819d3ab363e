"""Tools around training. The library imports none of them."""
