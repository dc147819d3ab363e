"""Config of the runs that are tested with buckets."""

CONFIG = """
[model]
dim = 32
n_layers = 1
n_heads = 2
vocab_size = 300
max_seq_len = 64
[train]
batch_size = 1
seq_len = 16
max_steps = 12
mixed_precision = "fp32"
[scheduler]
name = "constant"
warmup_steps = 2
[checkpoint]
interval = 4
[metrics]
log_interval = 1
[data]
dataset_type = "synthetic"
"""
