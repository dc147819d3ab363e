"""Evaluation of a run's model on tasks of EleutherAI's lm-evaluation-harness (`lm_eval`).

`adapter` registers the model "jaxforge" with lm_eval. It is the only module that imports `lm_eval`.
The command is `python -m jaxforge.lm_eval`.
"""
