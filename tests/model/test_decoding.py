"""Decoding many prompts at once: whatever the batch, whatever the mesh."""

import functools

import jax
import numpy as np
import pytest

from jaxforge.model import decoding
from jaxforge.model.decoding import Completion, Decoder
from jaxforge.model.sampling import Sampling
from jaxforge.model.transformer import Model, build_model
from jaxforge.parallel.mesh import make_mesh
from jaxforge.parallel.sharding import param_shardings
from tests.conftest import tiny_config
from tests.helpers import drawn, with_random_biases

GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.5, top_k=40, top_p=0.95)
PROMPTS = [[5, 9, 33], [7, 1, 60, 2, 8, 44, 21], [50], list(range(20))]
NUMBERS = range(len(PROMPTS))
N_TOKENS = 8


@functools.cache
def toy(**shape):
    model = {"dim": 32, "n_layers": 1, "vocab_size": 64, "init_std": 0.3, **shape}
    config = tiny_config(model=model, train={"seed": 0})
    return Model(config.model), with_random_biases(drawn(config))


def generated(prompts, how=GREEDY, n=N_TOKENS, **options):
    """The continuation of each prompt, as a list a row."""
    decoder = Decoder(*toy(), n, how, **options)
    return [list(row) for row in zip(*decoder.stream(prompts), strict=True)]


def completed(prompts=PROMPTS, numbers=NUMBERS, how=GREEDY, n=N_TOKENS, **options):
    return Decoder(*toy(), n, how, **options).complete(prompts, numbers)


@functools.cache
def greedy():
    return generated(PROMPTS)


@pytest.mark.parametrize("shape", [{}, {"n_layers": 2, "head_dim": 24, "qkv_bias": True}], ids=str)
def test_greedy_decoding_takes_the_likeliest_by_the_full_forward(shape):
    model, params = toy(**shape)
    forward = jax.jit(lambda params, tokens: model.logits(params, model.hidden(params, tokens)))
    completions = Decoder(model, params, N_TOKENS, GREEDY).complete(PROMPTS, NUMBERS)
    for prompt, (continuation, _) in zip(PROMPTS, completions, strict=True):
        tokens = prompt + continuation
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(tokens)] = tokens
        best = np.asarray(forward(params, padded))[0].argmax(-1)
        assert best[len(prompt) - 1 : len(tokens) - 1].tolist() == continuation
    assert len({tuple(completion.tokens) for completion in completions}) == len(PROMPTS)


@pytest.mark.parametrize("row", range(len(PROMPTS)))
def test_prompt_does_not_feel_its_neighbours(row):
    assert generated([PROMPTS[row]]) == [greedy()[row]]


def test_end_of_text_ends_its_row_and_no_other():
    eos = greedy()[0][3]
    assert eos not in greedy()[0][:3]
    for row, plain in zip(generated(PROMPTS, eos_ids=(eos,)), greedy(), strict=True):
        end = plain.index(eos) if eos in plain else N_TOKENS
        assert row == plain[:end] + [None] * (N_TOKENS - end)
    assert any(eos not in plain for plain in greedy())


def test_decoding_stops_when_every_row_has_ended():
    eos = greedy()[0][3]
    (row,) = generated([PROMPTS[0]], eos_ids=(eos,))
    assert row == [*greedy()[0][:3], None]


def test_no_more_tokens_than_asked_for():
    assert generated(PROMPTS, n=1) == [row[:1] for row in greedy()]


def test_seeds_reproduce_and_differ():
    how = DRAWN
    once, again, other = (generated(PROMPTS, how, seed=seed) for seed in (3, 3, 4))
    assert once == again
    assert once != other
    assert once != greedy()


def test_rows_and_turns_draw_separately():
    rows = generated([[5]] * 3, Sampling(temperature=1e6))  # as good as uniform
    assert len({tuple(row) for row in rows}) == 3
    assert all(len(set(row)) > N_TOKENS / 2 for row in rows)


@pytest.mark.parametrize("how", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_whole_batches_and_turns_give_the_same(how):
    assert completed(how=how) == [Completion(row, "length") for row in generated(PROMPTS, how)]


def test_completion_says_why_it_ended():
    eos = greedy()[0][3]
    results = completed(eos_ids=(eos,))
    assert results[0] == Completion(greedy()[0][:3], "stop")
    for result, plain in zip(results, greedy(), strict=True):
        assert (result.finish_reason == "stop") == (eos in plain)


def test_decoding_stops_at_any_of_several_eos_ids():
    ends = (greedy()[0][3], greedy()[1][1])
    first = [next((i for i, token in enumerate(row) if token in ends), None) for row in greedy()]
    assert completed(eos_ids=ends) == [
        Completion(row, "length") if end is None else Completion(row[:end], "stop")
        for row, end in zip(greedy(), first, strict=True)
    ]
    assert {first[0], first[1]} == {3, 1}


def test_draws_of_a_prompt_do_not_depend_on_its_batch():
    together = completed(how=DRAWN)
    assert completed(PROMPTS[::-1], NUMBERS[::-1], DRAWN, rows=5) == together[::-1]
    for number in (0, 3):
        assert completed([PROMPTS[number]], [number], DRAWN) == [together[number]]
    assert completed([PROMPTS[0]], [1], DRAWN) != together[:1]


MESHES = [
    {"dp_shard": 2},
    {"tp": 2},
    {"dp_shard": 3, "tp": 2},  # 3 does not divide the width
    {"cp": 2, "tp": 2},
    {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
]


@functools.cache
def on_mesh(**axes):
    config = tiny_config(distributed={"dp_shard": 1, **axes})
    mesh = make_mesh(config, jax.devices()[: int(np.prod(list(axes.values())))])
    model, params = toy()
    return mesh, jax.device_put(params, param_shardings(model.abstract, model.axes, mesh))


@pytest.mark.parametrize(
    ("axes", "how"),
    [(MESHES[0], GREEDY), (MESHES[1], DRAWN), (MESHES[2], DRAWN), (MESHES[3], GREEDY)],
    ids=str,
)
def test_mesh_does_not_matter(axes, how):
    """Three prompts on four groups of devices leave one of them a row without a prompt."""
    mesh, params = on_mesh(**axes)
    decoder = Decoder(toy()[0], params, N_TOKENS, how, eos_ids=greedy()[0][3:4], mesh=mesh)
    alone = completed(how=how, eos_ids=decoder.eos_ids)
    with jax.set_mesh(mesh):
        assert decoder.complete(PROMPTS[:3], NUMBERS[:3]) == alone[:3]


def test_cache_is_split_over_rows_and_heads():
    mesh, params = on_mesh(**MESHES[-1])
    decoder = Decoder(toy()[0], params, N_TOKENS, GREEDY, mesh=mesh)
    with jax.set_mesh(mesh):
        cache = decoder._advance(decoder._start(PROMPTS, NUMBERS), 3).cache
    layers, rows, length, heads, head_size = cache.k.shape
    assert (rows, heads) == (4, 2)
    for leaf in cache:
        shards = {shard.data.shape for shard in leaf.addressable_shards}
        assert shards == {(layers, rows // 4, length, heads // 2, head_size)}


def test_rows_without_a_prompt_do_not_hold_up_a_batch():
    eos = greedy()[0][3]
    decoder = Decoder(*toy(), N_TOKENS, GREEDY, (eos,), rows=4)
    batch = decoder._advance(decoder._start(PROMPTS[:1], [0]), N_TOKENS)
    assert int(batch.turn) == 4


def test_few_programs_are_compiled():
    """One pair for each padded length, whatever the number and the lengths of prompts."""
    jitted = (decoding._start, decoding._advance)
    before = [function._cache_size() for function in jitted]
    decoder = Decoder(*toy(), 5, GREEDY, rows=3)  # a limit of its own: nothing compiled yet
    for length in (1, 7, 15, 16, 17, 20, 31, 32, 2):
        for n in (1, 3):
            decoder.complete([[1] * length] * n, range(n))
    assert [function._cache_size() - n for function, n in zip(jitted, before, strict=True)] == [
        2,
        2,
    ]


def test_prompts_are_padded_no_further_than_the_model_goes():
    lengths = [decoding.padded_length(n, 64, None) for n in (1, 16, 17, 33, 64, 70)]
    assert lengths == [16, 16, 32, 64, 64, 70]


def test_batch_ends_where_all_have_enough(monkeypatch):
    monkeypatch.setattr(decoding, "_TURNS", 3)
    result, looked_at = generated(PROMPTS, n=12), []

    def is_enough(tokens):
        looked_at.append(len(tokens))
        return len(tokens) >= 6 or tokens[0] == result[0][0]  # one row has before the others

    output = Decoder(*toy(), 12, GREEDY).complete(PROMPTS, NUMBERS, is_enough)
    assert output == [Completion(row[:7], "length") for row in result]  # turns 1, 4, 7
    assert max(looked_at) == 7
    eos = result[0][1]  # what has ended needs no more
    output = Decoder(*toy(), 12, GREEDY, (eos,)).complete(PROMPTS[:1], [0], lambda tokens: False)
    assert output == [Completion(result[0][:1], "stop")]


@pytest.mark.slow
def test_stages_take_turns():
    """Each keeps its part of the cache; chunks of two stages, and rows over two devices.

    No two stages have the same kinds of layers.
    """
    axes = {"pp": 2, "dp_shard": 2, "pp_schedule": "interleaved_1f1b"}
    layers = {"n_layers": 5, "sliding_window": 3, "attention_chunk_size": 6,
              "attention_pattern": ("full", "sliding", "chunked", "sliding"),
              "rope_pattern": (True, True, False)}  # fmt: skip
    plain = build_model(tiny_config(model=layers))
    staged = build_model(tiny_config(model=layers, distributed=axes))
    params = drawn(tiny_config(model=layers))
    alone = Decoder(plain, params, N_TOKENS, DRAWN).complete(PROMPTS, NUMBERS)
    mesh = make_mesh(tiny_config(distributed=axes), jax.devices()[:4])
    shardings = param_shardings(staged.abstract, staged.axes, mesh)
    stacked = jax.tree.map(staged.stack.stack, params["layers"])
    placed = jax.device_put({**params, "layers": stacked}, shardings)
    with jax.set_mesh(mesh):
        decoder = Decoder(staged, placed, N_TOKENS, DRAWN, mesh=mesh)
        assert decoder.complete(PROMPTS, NUMBERS) == alone
        cache = decoder._start(PROMPTS, NUMBERS).cache
    assert {shard.data.shape[:2] for shard in cache.k.addressable_shards} == {(4, 2)}
