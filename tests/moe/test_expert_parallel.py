"""Whatever the layout, outputs, gradients and trained weights are those of one rank with the global batch."""

from __future__ import annotations

import functools

import numpy
import pytest
from moe_layouts import BY_DISPATCHER, LAYOUTS, LENGTH, collectives_by_module, train

from hp_dtensor.testing import run_ranks
from hp_moe import AuxLosses, Capacity

NUM_SAMPLES = 7
# float32, sums in another order; weights after three steps of gradients of order one.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}
WITH_SHARED = {"num_shared_experts": 1, "route_norm": True, "load_balance_coeff": 0.01}
PARALLEL = [name for name in LAYOUTS if name != "one rank" and name not in BY_DISPATCHER]
ON_SLOW_PLATFORMS = ("ep", "ep and hidden", "sequence, ep over data, hidden sharded", "same tokens on ep, sequence")
ALL_TO_ALL = ["all_to_all"]


def on_ranks(name, *args, **kwargs):
    return run_ranks(functools.partial(train, name, *args, **kwargs), LAYOUTS[name].size)


@functools.cache
def single(key):
    (result,) = on_ranks("one rank", NUM_SAMPLES, **{k: dict(v) if k == "options" else v for k, v in key})
    return result


def reference(**kwargs):
    return single(tuple((k, tuple(v.items()) if k == "options" else v) for k, v in kwargs.items()))


def assert_same(results, expected):
    for rank, result in enumerate(results):
        where = f"rank {rank}"
        for step, (output, full) in enumerate(zip(result.outputs, expected.outputs, strict=True)):
            close(output, full[result.samples], f"{where}, output of step {step}")
        for step, (grad, full) in enumerate(zip(result.input_grads, expected.input_grads, strict=True)):
            close(grad, full[result.samples], f"{where}, gradient of the input of step {step}")
        for step, (grads, wanted) in enumerate(zip(result.grads, expected.grads, strict=True)):
            for name, grad in grads.items():
                close(grad, wanted[name], f"{where}, step {step}, gradient of {name}")
        for name, weight in result.weights.items():
            close(weight, expected.weights[name], f"{where}, {name}")
        if expected.bias is not None:
            close(result.bias, expected.bias, f"{where}, expert_bias")


def close(got, wanted, where):
    numpy.testing.assert_allclose(got, wanted, err_msg=where, **CLOSE)


@pytest.mark.parametrize("name", PARALLEL)
def test_training_equals_one_rank(torch_or, name):
    torch_or(name in ON_SLOW_PLATFORMS)
    assert_same(on_ranks(name, NUM_SAMPLES, options=WITH_SHARED), reference(options=WITH_SHARED))


@pytest.mark.parametrize("name", PARALLEL)
def test_adamw_without_shared_experts_equals_one_rank(torch_or, name):
    torch_or(False)
    kwargs = {"optimizer": "adamw", "steps": 3, "options": {"score_before_experts": True}}
    assert_same(on_ranks(name, NUM_SAMPLES, **kwargs), reference(**kwargs))


@pytest.mark.parametrize("name", ["ep", "ep of 4", "ep and hidden", "sequence, ep over data, hidden sharded"])
@pytest.mark.parametrize("num_experts", [3, 4, 6, 9])
def test_any_number_of_experts(torch_or, name, num_experts):
    """Chunk order: with 9 experts on 4 ranks they own 3, 3, 3 and none."""
    torch_or((name, num_experts) == ("ep of 4", 9))
    kwargs = {"num_experts": num_experts, "options": WITH_SHARED}
    assert_same(on_ranks(name, NUM_SAMPLES, **kwargs), reference(**kwargs))


@pytest.mark.parametrize("name", ["ep of 4", "ep beside data", "ep and hidden"])
def test_ranks_without_samples(name):
    (expected,) = on_ranks("one rank", 1)
    results = on_ranks(name, 1)
    assert any(len(result.outputs[0]) == 0 for result in results)
    assert_same(results, expected)


@pytest.mark.parametrize("name", ["ep", "ep of 4", "ep and hidden", "data and sequence, ep folded over both"])
def test_ranks_whose_experts_get_no_token(torch_or, name):
    """Their weights get gradients of exactly zero, and they take part in every collective."""
    torch_or(name in ("ep of 4", "ep and hidden"))
    kwargs = {"one_expert": True, "num_experts": 8, "steps": 1}
    expected = reference(**kwargs)
    results = on_ranks(name, NUM_SAMPLES, **kwargs)
    assert_same(results, expected)
    for weight in ("experts.w1", "experts.w2", "experts.w3"):
        assert expected.grads[0][weight][:2].any()
        assert not results[-1].grads[0][weight][2:].any()


@pytest.mark.parametrize("name", ["ep of 4", "ep and hidden", "same tokens on ep, sequence, hidden sharded"])
def test_runs_repeat_bit_by_bit(torch_or, name):
    torch_or(name == "ep and hidden")
    first, second = (on_ranks(name, NUM_SAMPLES, options=WITH_SHARED) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        for a, b in zip(one.outputs, other.outputs, strict=True):
            numpy.testing.assert_array_equal(a, b)
        for key, weight in one.weights.items():
            numpy.testing.assert_array_equal(weight, other.weights[key], err_msg=key)


def test_four_exchanges_forward_and_three_backward():
    """Sizes, rows, choices and results; each but the sizes has its dual."""
    for result in on_ranks("ep of 4", NUM_SAMPLES, steps=1):
        assert result.forward == ALL_TO_ALL * 4
        assert result.backward == ALL_TO_ALL * 3


def test_exchanges_belong_to_the_experts_in_both_directions():
    for modules in run_ranks(functools.partial(collectives_by_module, "ep of 4", NUM_SAMPLES), 4):
        assert modules == {"experts": {"forward": ALL_TO_ALL * 4, "backward": ALL_TO_ALL * 3}}


def test_sharded_experts_reduce_once_each_way():
    for result in on_ranks("sequence, hidden sharded", NUM_SAMPLES, steps=1):
        assert sorted(result.forward) == ["all_gather", "reduce_scatter"]
        # Rows back to their sequence shards, results' gradients gathered, the gate's gradient summed.
        assert sorted(result.backward) == ["all_gather", "all_reduce", "reduce_scatter"]


def test_samples_differ_between_ranks():
    """The batch is split into unequal parts, or these tests would prove little."""
    sizes = [len(result.outputs[0]) for result in on_ranks("ep of 4", NUM_SAMPLES, steps=1)]
    assert sum(sizes) == NUM_SAMPLES
    assert len(set(sizes)) > 1
    assert LENGTH > 1


def test_a_token_is_sent_once_to_each_rank_that_has_experts_for_it():
    """Bytes on the wire: rows (8 floats), their two expert numbers and two scores, and the way back."""
    results = on_ranks("ep of 4", NUM_SAMPLES, num_experts=8, steps=1)
    experts = reference(num_experts=8, steps=1).experts
    owners = experts // 2
    for rank, result in enumerate(results):
        mine = owners[result.samples].reshape(-1, 2)
        rows_out = sum(len(set(token) - {rank}) for token in mine)
        rows_in = sum(
            (owners[other.samples].reshape(-1, 2) == rank).any(-1).sum() for other in results if other is not result
        )
        sizes = 3 * (1 + 2) * 8
        assert result.wire_bytes == sizes + rows_out * (8 + 2 + 2) * 4 + rows_in * 8 * 4


TWO = ["ep", "hidden sharded", "sequence, ep folded", "sequence, hidden sharded", "ep among ranks with the same tokens"]
FOUR = ["ep of 4", "ep and hidden", "data and sequence, ep folded over both", "same tokens on ep, sequence"]


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", TWO)
def test_two_processes(torch_or, rank_pool, name):
    torch_or(name == "ep")
    check(rank_pool, name, steps=3, options=WITH_SHARED)


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", FOUR)
def test_four_processes(torch_or, rank_pool, name):
    torch_or(name == "data and sequence, ep folded over both")
    check(rank_pool, name, steps=3, options=WITH_SHARED)


@pytest.mark.real_ranks
def test_a_process_whose_experts_get_no_token(rank_pool):
    check(rank_pool, "ep", one_expert=True, num_experts=8)


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", ["ep and hidden", "same tokens on ep, sequence"])
def test_losses_and_dropping_on_four_processes(torch_or, rank_pool, name):
    torch_or(name == "ep and hidden")
    options = {"aux_losses": AuxLosses(0.5, 0.4, 0.3, 0.2), "capacity": Capacity(0.8), "bias": True}
    check(rank_pool, name, steps=5, options=options)


@pytest.mark.real_ranks
@pytest.mark.parametrize("name", ["two_level", "all_gather"])
def test_other_dispatchers_on_four_processes(torch_or, rank_pool, name):
    torch_or(name == "two_level")
    check(rank_pool, name, steps=2, options=WITH_SHARED)


def check(rank_pool, name, **kwargs):
    pool = rank_pool(LAYOUTS[name].size)
    assert_same(pool.run(_train, name, NUM_SAMPLES, kwargs), reference(**kwargs))


def _train(name, num_samples, kwargs):
    return train(name, num_samples, **kwargs)
