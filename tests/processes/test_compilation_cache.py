"""The second start of a run finds its step compiled."""


def test_a_second_start_compiles_nothing(new_run, tmp_path):
    run = new_run()
    cache = f"--train.compilation_cache_dir={tmp_path / 'compiled'}"
    first = run.finish(cache, "--train.max_steps=5")
    second = run.finish(cache, "--train.max_steps=6")
    assert "(cached)" not in first
    assert "s (cached)" in second
    assert list((tmp_path / "compiled").glob("jit_train_step-*"))
    assert run.losses().keys() == set(range(1, 7))


def test_it_can_be_switched_off(new_run):
    """Even where `environment` names a cache that has the step."""
    run = new_run()
    run.finish("--train.max_steps=5")
    assert "(cached)" in run.finish("--train.max_steps=6")
    assert "(cached)" not in run.finish("--train.compilation_cache_dir=", "--train.max_steps=7")


def test_an_unknown_flag_ends_it_before_anything_is_written(new_run):
    run = new_run()
    output = run.finish("--train.xla_flags.xla_gpu_nope=true", code=2)
    assert "error: train.xla_flags.xla_gpu_nope = true: XLA for cpu" in output
    assert not run.directory.exists()
