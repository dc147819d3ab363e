"""The second start of a run finds its step compiled."""

import pytest


@pytest.mark.slow
def test_second_start_compiles_nothing_unless_it_is_switched_off(new_run, tmp_path):
    """The first start is told the directory by the environment, the second by the config."""
    run, compiled = new_run(), tmp_path / "compiled"
    named = {"JAX_COMPILATION_CACHE_DIR": str(compiled)}
    assert "(cached)" not in run.finish("--train.max_steps=5", **named)
    assert list(compiled.glob("jit_train_step-*"))
    given = f"--train.compilation_cache_dir={compiled}"
    assert "s (cached)" in run.finish(given, "--train.max_steps=6")
    off = ["--train.compilation_cache_dir=", "--train.max_steps=7"]
    assert "(cached)" not in run.finish(*off, **named)
    assert run.losses().keys() == set(range(1, 8))


def test_unknown_flag_ends_it_before_anything_is_written(new_run):
    run = new_run()
    output = run.finish("--train.xla_flags.xla_gpu_nope=true", code=2)
    assert "error: train.xla_flags.xla_gpu_nope = true: XLA for cpu" in output
    assert not run.directory.exists()
