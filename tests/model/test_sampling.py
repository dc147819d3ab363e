"""Drawing tokens, and decoding many prompts at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxforge.config.model import ModelConfig
from jaxforge.model.sampling import Sampling, generate, sample
from jaxforge.model.transformer import Model

GREEDY = Sampling(temperature=0.0)
VOCAB = 64
PROMPTS = [[5, 9, 33], [7, 1, 60, 2, 8, 44, 21], [50]]
N_TOKENS = 8


def draws(probabilities, how, n=4000):
    """n draws from one distribution."""
    logits = np.log(np.broadcast_to(np.array(probabilities, np.float32), (n, len(probabilities))))
    return np.asarray(sample(jnp.asarray(logits), how, jax.random.key(0)))


def drawn(probabilities, **how):
    return {int(token) for token in draws(probabilities, Sampling(**how))}


def test_temperature_zero_takes_the_likeliest():
    logits = np.random.default_rng(0).standard_normal((16, 10)).astype(np.float32)
    tokens = sample(jnp.asarray(logits), Sampling(0.0, top_k=3, top_p=0.1), jax.random.key(0))
    np.testing.assert_array_equal(tokens, logits.argmax(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_divides_the_logits(temperature):
    probabilities = np.array([0.5, 0.3, 0.15, 0.05])
    tokens = draws(probabilities, Sampling(temperature))
    expected = probabilities ** (1 / temperature)
    expected /= expected.sum()
    seen = np.bincount(tokens, minlength=4) / len(tokens)
    standard_error = np.sqrt(expected * (1 - expected) / len(tokens))
    assert (np.abs(seen - expected) < 5 * standard_error).all()


@pytest.mark.parametrize(
    ("k", "kept"),
    [(0, {0, 1, 2, 3, 4}), (1, {0}), (2, {0, 1, 2}), (3, {0, 1, 2}), (4, {0, 1, 2, 3}),
     (5, {0, 1, 2, 3, 4}), (99, {0, 1, 2, 3, 4})],
)  # fmt: skip
def test_top_k_keeps_tokens_as_likely_as_the_last(k, kept):
    assert drawn([0.4, 0.2, 0.2, 0.15, 0.05], top_k=k) == kept


@pytest.mark.parametrize(
    ("p", "kept"),
    [(0.0, {2}), (0.49, {2}), (0.51, {0, 2}), (0.79, {0, 2}), (0.81, {0, 2, 3}),
     (0.94, {0, 2, 3}), (0.96, {0, 1, 2, 3}), (1.0, {0, 1, 2, 3})],
)  # fmt: skip
def test_top_p_drops_tokens_after_p_is_reached(p, kept):
    assert drawn([0.3, 0.05, 0.5, 0.15], top_p=p) == kept


def test_top_p_counts_equally_likely_tokens_one_by_one():
    assert len(drawn([0.25, 0.25, 0.25, 0.25], top_p=0.6)) == 3


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 0.3}], ids=str)
def test_each_row_has_its_own_threshold(how):
    logits = np.log(np.array([[0.9, 0.05, 0.05], [0.2, 0.3, 0.5]] * 100, np.float32))
    tokens = sample(jnp.asarray(logits), Sampling(**how), jax.random.key(0))
    np.testing.assert_array_equal(tokens, [0, 2] * 100)


def test_top_p_looks_at_the_distribution_after_the_temperature():
    probabilities = [0.5, 0.3, 0.15, 0.05]
    assert drawn(probabilities, top_p=0.55) == {0, 1}
    # The same at temperature 4: .31 .28 .23 .18
    assert drawn(probabilities, top_p=0.55, temperature=4.0) == {0, 1}
    assert drawn(probabilities, top_p=0.7, temperature=4.0) == {0, 1, 2}
    assert drawn(probabilities, top_p=0.7) == {0, 1}


def test_top_p_looks_at_what_top_k_has_left():
    probabilities = [0.4, 0.3, 0.2, 0.1]
    assert drawn(probabilities, top_p=0.5) == {0, 1}
    assert drawn(probabilities, top_p=0.5, top_k=2) == {0}


@functools.cache
def toy():
    config = ModelConfig(
        dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=VOCAB, ffn_hidden_dim=32,
        init_std=0.3,
    )  # fmt: skip
    model = Model(config)
    return model, model.init(jax.random.key(0))


def generated(prompts, how=GREEDY, n=N_TOKENS, **options):
    """The continuation of each prompt, as a list a row."""
    return [list(row) for row in zip(*generate(*toy(), prompts, n, how, **options), strict=True)]


@functools.cache
def greedy():
    return generated(PROMPTS)


@functools.cache
def forward():
    model, _ = toy()
    return jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))


def test_greedy_decoding_takes_the_likeliest_by_the_full_forward():
    _, params = toy()
    for prompt, continuation in zip(PROMPTS, greedy(), strict=True):
        tokens = prompt + continuation
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(tokens)] = tokens
        best = np.asarray(forward()(params, padded))[0].argmax(-1)
        assert best[len(prompt) - 1 : len(tokens) - 1].tolist() == continuation
    assert len({tuple(row) for row in greedy()}) == len(PROMPTS)


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_a_prompt_does_not_feel_its_neighbours(row):
    assert generated([PROMPTS[row]]) == [greedy()[row]]


def test_end_of_text_ends_its_row_and_no_other():
    eos = greedy()[0][3]
    assert eos not in greedy()[0][:3]
    for row, plain in zip(generated(PROMPTS, eos_id=eos), greedy(), strict=True):
        end = plain.index(eos) if eos in plain else N_TOKENS
        assert row == plain[:end] + [None] * (N_TOKENS - end)
    assert any(eos not in plain for plain in greedy())


def test_decoding_stops_when_every_row_has_ended():
    eos = greedy()[0][3]
    (row,) = generated([PROMPTS[0]], eos_id=eos)
    assert row == [*greedy()[0][:3], None]


@pytest.mark.parametrize("n", [0, 1])
def test_no_more_tokens_than_asked_for(n):
    assert generated(PROMPTS, n=n) == [row[:n] for row in greedy() if n]


def test_seeds_reproduce_and_differ():
    how = Sampling(temperature=1.5)
    once, again, other = (generated(PROMPTS, how, seed=seed) for seed in (3, 3, 4))
    assert once == again
    assert once != other
    assert once != greedy()


def test_rows_and_turns_draw_separately():
    rows = generated([[5]] * 3, Sampling(temperature=1e6))  # as good as uniform
    assert len({tuple(row) for row in rows}) == 3
    assert all(len(set(row)) > N_TOKENS / 2 for row in rows)
