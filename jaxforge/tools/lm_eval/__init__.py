"""Tasks of EleutherAI's lm-evaluation-harness (`lm_eval`), answered by a run's model.

`adapter` registers the model "jaxforge" there, and is the only module that imports `lm_eval`;
`python -m jaxforge.lm_eval` is its command.
"""
