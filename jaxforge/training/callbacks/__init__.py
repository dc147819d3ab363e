"""Callbacks: everything that acts between the steps of a run. `order.ORDER` lists them."""
