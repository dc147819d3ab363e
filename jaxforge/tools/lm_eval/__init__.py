"""Evaluation of a run's model on tasks of EleutherAI's lm-evaluation-harness (`lm_eval`).

`adapter` registers the model "jaxforge" with lm_eval (`tasks.lm_eval_model`). The command is
`jaxforge lm_eval`.
"""
