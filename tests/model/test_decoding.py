"""Tests of batched decoding, on any batch and mesh."""

import functools
import re

import jax
import numpy as np
import pytest

from jaxforge.errors import UserError
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


def generated(prompts, sampling=GREEDY, n=N_TOKENS, **options):
    """Return the continuation of each prompt as a list."""
    decoder = Decoder(*toy(), n, sampling, **options)
    return [list(row) for row in zip(*decoder.stream(prompts), strict=True)]


def completed(prompts=PROMPTS, numbers=NUMBERS, sampling=GREEDY, n=N_TOKENS, **options):
    return Decoder(*toy(), n, sampling, **options).complete(prompts, numbers)


@functools.cache
def greedy():
    return generated(PROMPTS)


@pytest.mark.parametrize("shape", [{}, {"n_layers": 2, "head_dim": 24, "qkv_bias": True}], ids=str)
def test_greedy_decoding_matches_full_forward(shape):
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
def test_prompts_of_batch_are_independent(row):
    assert generated([PROMPTS[row]]) == [greedy()[row]]


def test_end_of_text_ends_only_its_row():
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


def test_token_beyond_the_vocabulary_is_refused():
    with pytest.raises(UserError, match="token 64, and the model has only 64 tokens"):
        generated([[1, 63], [1, 64]])


@pytest.mark.parametrize(
    ("length", "is_warned"),
    [(16 - N_TOKENS, False), (17 - N_TOKENS, True), (16, True), (17, False)],
)
def test_text_that_outgrows_longrope_is_warned_about(monkeypatch, length, is_warned):
    warnings = []
    monkeypatch.setattr(decoding.log, "warning", lambda *texts: warnings.append(texts))
    factors = [1.0] * 4
    scaling = {"rope_type": "longrope", "original_max_seq_len": 16, "short_factor": factors,
               "long_factor": factors}  # fmt: skip
    model = Model(tiny_config(model={"dim": 32, "rope_scaling": scaling}).model)
    Decoder(model, {}, N_TOKENS, GREEDY)._warn_about_long_texts([1, length])
    assert bool(warnings) == is_warned


def test_max_tokens_limits_completion():
    assert generated(PROMPTS, n=1) == [row[:1] for row in greedy()]


def test_seed_determines_draws():
    sampling = DRAWN
    once, again, other = (generated(PROMPTS, sampling, seed=seed) for seed in (3, 3, 4))
    assert once == again
    assert once != other
    assert once != greedy()


def test_rows_and_turns_draw_independently():
    rows = generated([[5]] * 3, Sampling(temperature=1e6))  # almost uniform
    assert len({tuple(row) for row in rows}) == 3
    assert all(len(set(row)) > N_TOKENS / 2 for row in rows)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_complete_matches_stream(sampling):
    assert completed(sampling=sampling) == [
        Completion(row, "length") for row in generated(PROMPTS, sampling)
    ]


@pytest.mark.parametrize(
    "shape",
    [
        {"n_layers": 2},
        pytest.param(
            {"n_layers": 3, "num_experts": 4, "moe_first_dense_layers": 1, "sliding_window": 4,
             "attention_pattern": ("full", "sliding", "sliding")},
            marks=pytest.mark.slow,
        ),
    ],
    ids=["one kind of layer", "two stacks"],
)  # fmt: skip
def test_unstacked_layers_decode_like_scanned_layers(shape):
    model, params = toy(**shape)
    apart = Model(model.config, runtime=model.runtime._replace(unstacks=True))
    assert isinstance(apart.unstacked(params)["layers"], list)
    expected = Decoder(model, params, N_TOKENS, DRAWN).complete(PROMPTS, NUMBERS)
    assert Decoder(apart, params, N_TOKENS, DRAWN).complete(PROMPTS, NUMBERS) == expected


def test_completion_has_finish_reason():
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


def test_draws_do_not_depend_on_batch():
    together = completed(sampling=DRAWN)
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
def on_mesh(shape=(), **axes):
    config = tiny_config(distributed={"dp_shard": 1, **axes})
    mesh = make_mesh(config, jax.devices()[: int(np.prod(list(axes.values())))])
    model, params = toy(**dict(shape))
    return mesh, jax.device_put(params, param_shardings(model.abstract, model.axes, mesh))


@pytest.mark.parametrize(
    ("axes", "sampling"),
    [
        (MESHES[0], GREEDY),
        pytest.param(MESHES[1], DRAWN, marks=pytest.mark.slow),  # the next mesh has its axis
        (MESHES[2], DRAWN),
        (MESHES[3], GREEDY),
    ],
    ids=str,
)
def test_completions_do_not_depend_on_mesh(axes, sampling):
    """With three prompts on four groups of devices, one group has a row without a prompt."""
    mesh, params = on_mesh(**axes)
    decoder = Decoder(toy()[0], params, N_TOKENS, sampling, eos_ids=greedy()[0][3:4], mesh=mesh)
    expected = completed(sampling=sampling, eos_ids=decoder.eos_ids)
    with jax.set_mesh(mesh):
        assert decoder.complete(PROMPTS[:3], NUMBERS[:3]) == expected[:3]


def test_experts_decode_with_shared_sequences():
    """Devices that share prompts all have each generated token, which uses capacity once."""
    shape = {"num_experts": 4, "moe_expert_dim": 16, "moe_capacity_factor": 0.6}
    mesh, params = on_mesh((*shape.items(),), cp=2)
    model, alone = toy(**shape)
    expected = Decoder(model, alone, N_TOKENS, GREEDY).complete(PROMPTS, NUMBERS)
    with jax.set_mesh(mesh):
        decoder = Decoder(model, params, N_TOKENS, GREEDY, mesh=mesh)
        assert decoder.complete(PROMPTS, NUMBERS) == expected


@pytest.mark.parametrize("axes", [{"dp_shard": 4}, {"dp_shard": 2, "tp": 2}], ids=str)
def test_loop_over_tokens_gathers_no_matrix(axes):
    mesh, params = on_mesh(**axes)
    with jax.set_mesh(mesh):
        program = decoding.lower_decoding(toy()[0], params, 4, 16, N_TOKENS).compile().as_text()
    gathers = re.findall(r"= \(?\w+\[([\d,]+)\]\S* all-gather", program)
    assert gathers
    for dims in gathers:  # activations of four rows; a shard of a matrix has two longer dimensions
        assert sorted(map(int, dims.split(",")))[-2:][0] <= 4


def test_cache_is_split_over_rows_and_heads():
    mesh, params = on_mesh(**MESHES[-1])
    decoder = Decoder(toy()[0], params, N_TOKENS, GREEDY, mesh=mesh)
    with jax.set_mesh(mesh):
        cache = decoder._advance(decoder._start(PROMPTS, NUMBERS), 3).cache["layers"]
    layers, rows, heads, length, head_size = cache.k.shape
    assert (rows, heads) == (4, 2)
    for leaf in cache:
        shards = {shard.data.shape for shard in leaf.addressable_shards}
        assert shards == {(layers, rows // 4, heads // 2, length, head_size)}


def test_rows_without_prompt_do_not_delay_batch():
    eos = greedy()[0][3]
    decoder = Decoder(*toy(), N_TOKENS, GREEDY, (eos,), rows=4)
    batch = decoder._advance(decoder._start(PROMPTS[:1], [0]), N_TOKENS)
    assert int(batch.turn) == 4


def test_one_program_per_padded_length_is_compiled():
    """Each padded length compiles one pair of programs, for any number and lengths of prompts."""
    jitted = (decoding._start, decoding._advance)
    before = [function._cache_size() for function in jitted]
    decoder = Decoder(*toy(), 5, GREEDY, rows=3)  # a new limit, for which nothing is compiled yet
    for length in (1, 7, 15, 16, 17, 20, 31, 32, 2):
        for n in (1, 3):
            decoder.complete([[1] * length] * n, range(n))
    assert [function._cache_size() - n for function, n in zip(jitted, before, strict=True)] == [
        2,
        2,
    ]


def test_padding_is_limited_to_max_seq_len():
    lengths = [decoding.padded_length(n, 64, None) for n in (1, 16, 17, 33, 64, 70)]
    assert lengths == [16, 16, 32, 64, 64, 70]


def test_batch_ends_when_all_rows_have_enough(monkeypatch):
    monkeypatch.setattr(decoding, "TURNS", 3)
    result, checked_lengths = generated(PROMPTS, n=12), []

    def is_enough(tokens):
        checked_lengths.append(len(tokens))
        return len(tokens) >= 6 or tokens[0] == result[0][0]  # row 0 has enough before the others

    output = Decoder(*toy(), 12, GREEDY).complete(PROMPTS, NUMBERS, is_enough)
    assert output == [Completion(row[:7], "length") for row in result]  # turns 1, 4, 7
    assert max(checked_lengths) == 7
    eos = result[0][1]  # an ended row needs no more tokens
    output = Decoder(*toy(), 12, GREEDY, (eos,)).complete(PROMPTS[:1], [0], lambda tokens: False)
    assert output == [Completion(result[0][:1], "stop")]


@pytest.mark.slow
def test_pipeline_stages_decode_like_single_device():
    """Stages keep their shares of the cache, with two chunks each, and rows over two devices.

    No two stages have the same kinds of layers.
    """
    axes = {"pp": 2, "dp_shard": 2, "pp_schedule": "interleaved_1f1b"}
    layers = {"n_layers": 5, "sliding_window": 3, "attention_chunk_size": 6,
              "attention_pattern": ("full", "sliding", "chunked", "sliding"),
              "rope_pattern": (True, True, False)}  # fmt: skip
    plain = build_model(tiny_config(model=layers))
    staged = build_model(tiny_config(model=layers, distributed=axes))
    params = drawn(tiny_config(model=layers))
    expected = Decoder(plain, params, N_TOKENS, DRAWN).complete(PROMPTS, NUMBERS)
    mesh = make_mesh(tiny_config(distributed=axes), jax.devices()[:4])
    shardings = param_shardings(staged.abstract, staged.axes, mesh)
    stacked = jax.tree.map(staged.stack.stack, params["layers"])
    placed = jax.device_put({**params, "layers": stacked}, shardings)
    with jax.set_mesh(mesh):
        decoder = Decoder(staged, placed, N_TOKENS, DRAWN, mesh=mesh)
        assert decoder.complete(PROMPTS, NUMBERS) == expected
        cache = decoder._start(PROMPTS, NUMBERS).cache["layers"]
    assert {shard.data.shape[:2] for shard in cache.k.addressable_shards} == {(4, 2)}
