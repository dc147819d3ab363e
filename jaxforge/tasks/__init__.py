"""Downstream tasks: questions whose answers are scored, during training and by `jaxforge lm_eval`.

`lm_eval_model` and `lm_eval_tasks` import `lm_eval`, which is optional. `core` needs no other
package.
"""
