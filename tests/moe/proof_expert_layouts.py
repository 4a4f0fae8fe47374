"""Five steps of training equal one rank's in every layout, dispatcher, size and option; `nox -s proof` runs it.

Forced uniform routing is not among them: it counts the tokens of a rank. Each case draws its sizes by its own name:
1 to 512 tokens, 1 to 8 experts a token, recomputation, the optimizer. The batch is uneven over the ranks. Every case is
run twice, for the same bits.
"""

from __future__ import annotations

import functools
import zlib

import numpy
import pytest
from moe_layouts import LAYOUTS, VOCABULARY, train
from test_expert_parallel import assert_same

from hp_dtensor.testing import run_ranks
from hp_moe import AuxLosses, Capacity

EXACT = [name for name in LAYOUTS if name != "one rank" and not name.startswith("all_to_all_")]
OPTIONS = {
    "plain": {},
    "shared": {"num_shared_experts": 1, "shared_gate": True, "load_balance_coeff": 0.01},
    "sigmoid": {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
    # Scores that are not bounded by one make the steps below run away, and rounding with them: they are made smaller.
    "root of softplus": {"score_func": "sqrt_softplus", "score_before_experts": True, "route_scale": 0.2},
    "hashed": {"hash_vocab_size": VOCABULARY},
    "dropped": {"capacity": Capacity(0.6), "bias": True},
    "squared": {"activation": "relu_squared", "bias": True, "score_position": "inside"},
    "geglu": {"activation": "geglu", "gate_bias": True},
    "jittered": {"jitter": 0.2, "num_shared_experts": 1},
    "losses": {"aux_losses": AuxLosses(sequence=0.4, global_batch=0.3, z=0.2)},
    "balanced": {"selection": "sinkhorn", "num_shared_experts": 1},
    "experts choose": {"selection": "expert_choice", "aux_losses": AuxLosses(z=0.2)},
}
CASES = [(layout, option, index) for layout in EXACT for option in OPTIONS for index in range(2)]


@pytest.mark.parametrize(("layout", "option", "index"), CASES)
def test_five_steps_in_any_size(layout, option, index):
    random = numpy.random.default_rng(zlib.crc32(f"{layout} {option} {index}".encode()))
    # Sequences are sharded over the ranks of a layout: there may be fewer tokens than ranks.
    tokens = int(random.choice([1, 2, 3, 7, 16, 61, 128, 512]))
    length = int(random.choice([each for each in (1, 2, 3, 7, 8) if tokens % each == 0]))
    # Scores that add up to one leave nothing to learn with one expert a token.
    top_k = int(random.integers(2 if option == "sigmoid" else 1, 9))
    options = OPTIONS[option]
    kwargs = {
        "steps": 5,
        "options": options,
        "num_experts": int(random.integers(max(2, top_k), 17)),
        "top_k": top_k,
        "length": length,
        "optimizer": str(random.choice(["sgd", "adamw"])),
    }
    recompute = bool(random.integers(2))
    (expected,) = run_ranks(functools.partial(train, "one rank", tokens // length, **kwargs), 1)
    assert all(numpy.abs(output).max(initial=0.0) < 100 for output in expected.outputs), "it does not run away"
    program = functools.partial(train, layout, tokens // length, recompute=recompute, **kwargs)
    results = run_ranks(program, LAYOUTS[layout].size)
    assert_same(results, expected)
    for one, other in zip(results, run_ranks(program, LAYOUTS[layout].size), strict=True):
        for key, weight in one.weights.items():
            numpy.testing.assert_array_equal(weight, other.weights[key], err_msg=key)
