"""Experts move to other ranks with their weights and optimizer states, and training goes on as if they had not."""

from __future__ import annotations

import functools
import itertools
import weakref

import numpy
import pytest

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.parallel import nn
from hp_dtensor.platform.selection import get_platform
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_moe import (
    ExpertParallel,
    ExpertParallelError,
    ExpertTensorParallel,
    GroupSizes,
    LoadMetrics,
    MoE,
    ReplicatingDispatcher,
    expert_placement,
    grouped_matmul,
    move_experts,
    place_experts,
    return_experts,
    set_expert_placement,
    update_expert_bias,
    update_expert_copies,
)

DIM, EXPERTS, STEPS = 4, 6, 4


def busiest(loads, placements, num_ranks):
    totals, chunk = [0] * num_ranks, -(-len(loads) // num_ranks)
    for load, place in zip(loads, placements, strict=True):
        totals[place // chunk] += load
    return max(totals)


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(4, 2), (5, 2), (7, 3), (3, 4), (16, 4)])
def test_placements_leave_the_busiest_rank_with_less(num_experts, num_ranks):
    random = numpy.random.default_rng(num_experts)
    for _ in range(5):
        loads = (random.random(num_experts) ** 3 * 100).astype(int).tolist()
        placements = place_experts(loads, range(num_experts), num_ranks, max_swaps=50, min_gain=0.0)
        assert sorted(placements) == list(range(num_experts))
        least = busiest(loads, placements, num_ranks)
        for one, other in itertools.combinations(range(num_experts), 2):
            swapped = list(placements)
            swapped[one], swapped[other] = placements[other], placements[one]
            assert busiest(loads, swapped, num_ranks) >= least or len({*loads}) < num_experts, "no swap helps further"
        assert least <= busiest(loads, range(num_experts), num_ranks)


def test_a_swap_must_be_worth_it():
    assert place_experts([50, 40, 45, 44], range(4), 2) == (0, 1, 2, 3)
    assert place_experts([90, 80, 1, 2], range(4), 2) == (3, 1, 2, 0)
    assert place_experts([90, 80, 1, 2, 70, 60, 3, 4], range(8), 4, max_swaps=1).count(0) == 1


class OwnExperts(nn.Module):
    """Someone else's experts: `w2(w1(x))`."""

    def __init__(self):
        super().__init__()
        self.w1, self.w2 = self.parameter((EXPERTS, 4, DIM)), self.parameter((EXPERTS, DIM, 4))

    def forward(self, x, num_tokens_per_expert):
        sizes = GroupSizes(self.platform, num_tokens_per_expert)
        hidden = grouped_matmul(x, self.w1, sizes)
        return grouped_matmul(hidden, self.w2, sizes)


def made(style, shape, names, experts=None):
    platform = get_platform()
    with nn.building(platform):
        layer = MoE(DIM, 4, EXPERTS, 2, bias=True)
        if experts is not None:
            layer.experts = experts()
    mesh = init_device_mesh(platform.device_types[0], shape, mesh_dim_names=names, platform=platform)
    if style is not None:
        style.apply(layer, mesh)
        layer.token_mesh = mesh["ep"]
    init_parameters(layer, lambda name, shape: Normal(0.5), seed=2)
    gate = numpy.zeros((EXPERTS, DIM), numpy.float32)
    # The first experts win, which all live on the first rank.
    gate[:, 0] = -numpy.arange(EXPERTS) / 4
    gate[:, 1:] = numpy.random.default_rng(3).normal(size=(EXPERTS, DIM - 1)) / 8
    platform.copy_(platform.unwrap(layer.router.gate.weight), platform.from_numpy(gate))
    return platform, layer, mesh


def full_value(platform, x):
    with platform.no_grad():
        return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x).copy()


def steps_with_momentum(style, shape=(1,), names=("ep",), moving=True, copying=False):
    """Train with momentum; experts move after each step but the last, and return at the end."""
    platform, layer, mesh = made(style, shape, names)
    ops, experts = platform.ops, dict(platform.named_parameters(layer.experts))
    momenta = {id(p): ops.zeros_like(p) for p in experts.values()}
    rank, num_ranks = mesh.get_local_rank("ep"), mesh["ep"].size()
    seen, placements, copies = [], [], []
    for step in range(STEPS):
        x = numpy.abs(numpy.random.default_rng(step).normal(size=(8, DIM))).astype(numpy.float32)
        y = layer(platform.from_numpy(numpy.array_split(x, num_ranks)[rank]))
        platform.backward(ops.sum(ops.mul(y, y)))
        with platform.no_grad():
            for p in experts.values():
                momentum = momenta[id(p)]
                new = ops.add(ops.mul(platform.unwrap(momentum), 0.9), platform.unwrap(platform.get_grad(p)))
                platform.copy_(platform.unwrap(momentum), new)
                platform.copy_(platform.unwrap(p), ops.sub(platform.detach(platform.unwrap(p)), ops.mul(new, 0.02)))
                platform.set_grad(p, None)
        platform.set_grad(layer.router.gate.weight, None)
        seen.append(full_value(platform, platform.detach(y)))
        loads = update_expert_bias(layer)
        if moving and step < STEPS - 1:
            placements.extend(move_experts(layer, loads, lambda p: [momenta[id(p)]], min_gain=0.0).values())
            copies.extend(update_expert_copies(layer, loads).values() if copying else [])
    assert not copying or any(any(each) for each in copies)
    if moving:
        away = full_value(platform, layer.experts.w1)
        return_experts(layer, lambda p: [momenta[id(p)]])
        assert placements[-1] == tuple(range(EXPERTS)) or (away != full_value(platform, layer.experts.w1)).any()
    results = {name: (full_value(platform, p), full_value(platform, momenta[id(p)])) for name, p in experts.items()}
    return seen, placements, results


COPYING = functools.partial(ReplicatingDispatcher, slots=1)
CASES = {
    "ep": (ExpertParallel(COPYING), (2,), ("ep",), False),
    "ep of 4, uneven": (ExpertParallel(COPYING), (4,), ("ep",), False),
    "with copies": (ExpertParallel(COPYING), (2,), ("ep",), True),
    "in chunks": (
        ExpertParallel(functools.partial(ReplicatingDispatcher, slots=1, num_chunks=2)),
        (2,),
        ("ep",),
        False,
    ),
    "hidden dimension sharded": (ExpertTensorParallel(COPYING), (2, 2), ("ep", "etp"), False),
}


@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_as_if_experts_had_not_moved(torch_or, case):
    torch_or(case in ("with copies", "hidden dimension sharded"))
    style, shape, names, copying = CASES[case]
    ((outputs, _, expected),) = run_ranks(functools.partial(steps_with_momentum, None, moving=False), 1)
    program = functools.partial(steps_with_momentum, style, shape, names, copying=copying)
    for rank, (seen, placements, results) in enumerate(run_ranks(program, int(numpy.prod(shape)))):
        assert placements[0] != tuple(range(EXPERTS)), "busy experts part"
        for step, y in enumerate(seen):
            part = numpy.array_split(outputs[step], shape[0])[rank // ((len(shape) > 1 and shape[1]) or 1)]
            numpy.testing.assert_allclose(y, part, rtol=2e-5, atol=2e-6)
        for name, pair in results.items():
            for got, wanted in zip(pair, expected[name], strict=True):
                numpy.testing.assert_allclose(got, wanted, rtol=2e-5, atol=2e-6, err_msg=name)


def test_there_and_back_changes_no_bit_and_no_name(platform):
    def rank():
        _, layer, _ = made(ExpertParallel(COPYING), (2,), ("ep",))
        before = {name: full_value(platform, p) for name, p in platform.named_parameters(layer)}
        loads = {"": LoadMetrics.of([9, 9, 0, 0, 0, 0])}
        assert move_experts(layer, loads, lambda p: []) == {"": (3, 1, 2, 0, 4, 5)}
        there = {name: full_value(platform, p) for name, p in platform.named_parameters(layer)}
        numpy.testing.assert_array_equal(there["experts.w1"], before["experts.w1"][[3, 1, 2, 0, 4, 5]])
        placements = expert_placement(layer)
        assert placements == {"": (3, 1, 2, 0, 4, 5)}
        return_experts(layer, lambda p: [])
        assert expert_placement(layer) == {}
        set_expert_placement(layer, placements, lambda p: [])
        again = {name: full_value(platform, p) for name, p in platform.named_parameters(layer)}
        with pytest.raises(ExpertParallelError, match=r"experts of 'other' cannot be moved; those of \[''\] can"):
            set_expert_placement(layer, {"other": range(EXPERTS)}, lambda p: [])
        return_experts(layer, lambda p: [])
        after = {name: full_value(platform, p) for name, p in platform.named_parameters(layer)}
        assert [*before] == [*there] == [*after]
        for name, weight in before.items():
            numpy.testing.assert_array_equal(weight, after[name])
            numpy.testing.assert_array_equal(there[name], again[name])

    run_ranks(rank, 2, platform)


def test_what_cannot_move_is_refused_and_nothing_has_moved(platform):
    def rank():
        _, layer, _ = made(ExpertParallel(COPYING), (2,), ("ep",))
        loads = {"": LoadMetrics.of([9, 9, 0, 0, 0, 0])}
        before = full_value(platform, layer.experts.w1)
        plain = platform.zeros((EXPERTS, 4, DIM), platform.dtype("float32"))
        with pytest.raises(
            ExpertParallelError, match=r"^MoE\.experts\.w1: expected .* got shape \[6, 4, 4\] with placements none"
        ):
            move_experts(layer, loads, lambda p: [plain])
        with pytest.raises(ExpertParallelError, match=r"got shape \[6\] with placements"):
            move_experts(layer, loads, lambda p: [platform.zeros((6,), platform.dtype("float32"))])
        with pytest.raises(
            ExpertParallelError, match=r"expert placement: expected each position from 0 to 5 once, got \[0, 0"
        ):
            layer.experts.dispatcher.set_placement([0, 0, 1, 2, 3, 4])
        assert layer.experts.dispatcher.expert_placement == tuple(range(EXPERTS))
        numpy.testing.assert_array_equal(full_value(platform, layer.experts.w1), before)

    run_ranks(rank, 2, platform)


def moved(style=None):
    platform, layer, _ = made(style or ExpertParallel(COPYING), (2,), ("ep",))
    move_experts(layer, {"": LoadMetrics.of([9, 9, 0, 0, 0, 0])}, lambda p: [])
    return platform, layer


def test_states_are_neither_given_nor_taken_while_experts_are_away(platform):
    """Rows would have other experts' names."""
    state = pytest.importorskip("hp_fsdp")

    def rank():
        _, layer = moved()
        parent = nn.ModuleList([layer])
        saved = {name: platform.detach(p) for name, p in platform.named_parameters(parent)}
        for call in (
            lambda: state.get_model_state_dict(parent),
            lambda: state.set_model_state_dict(parent, saved),
            lambda: state.summon_full_params(parent).__enter__(),
            parent.state_dict,
            lambda: parent.load_state_dict(saved),
        ):
            with pytest.raises(ExpertParallelError, match=r"2 of its 6 experts are moved .*return_experts"):
                call()
        return_experts(parent, lambda p: [])
        full = state.get_model_state_dict(parent)
        state.set_model_state_dict(parent, full)
        assert {*parent.state_dict()} == {*full}

    def built():
        with nn.building(platform):
            rank()

    run_ranks(built, 2, platform)


def test_gradients_move_with_their_experts_also_of_ranks_without_experts_or_tokens(platform):
    def rank():
        _, layer, mesh = made(ExpertParallel(COPYING), (4,), ("ep",))
        # The last rank has no experts, and only the first has tokens.
        x = numpy.abs(numpy.random.default_rng(0).normal(size=(8 if mesh.get_local_rank() == 0 else 0, DIM)))
        y = layer(platform.from_numpy(x.astype(numpy.float32)))
        platform.backward(platform.ops.sum(platform.ops.mul(y, y)))
        before = {
            name: full_value(platform, platform.get_grad(p)) for name, p in platform.named_parameters(layer.experts)
        }
        loads = {"": LoadMetrics.of([9, 9, 9, 0, 0, 0])}
        (placements,) = move_experts(layer, loads, lambda p: [], min_gain=0.0).values()
        assert placements != tuple(range(EXPERTS))
        for name, p in platform.named_parameters(layer.experts):
            there = full_value(platform, platform.get_grad(p))
            numpy.testing.assert_array_equal(there[list(placements)], before[name], err_msg=name)

    run_ranks(rank, 4, platform)


def test_ranks_that_would_move_other_things_all_raise(platform):
    def rank():
        _, layer, mesh = made(ExpertParallel(COPYING), (2,), ("ep",))
        loads, first = {"": LoadMetrics.of([9, 9, 0, 0, 0, 0])}, mesh.get_local_rank() == 0
        with pytest.raises(ExpertParallelError, match="expected the same gradients and states on all ranks"):
            move_experts(layer, loads, lambda p: [platform.ops.zeros_like(p)] if first else [])

        def states(parameter):
            if first:
                raise KeyError("no state of this parameter")
            return []

        expected_message = (
            (KeyError, "no state") if first else (ExpertParallelError, "rank 0 cannot move experts: 'no state of")
        )
        with pytest.raises(expected_message[0], match=expected_message[1]):
            move_experts(layer, loads, states)
        assert layer.experts.dispatcher.is_initial_placement

    run_ranks(rank, 2, platform)


def test_expert_groups_that_would_decide_otherwise_all_raise(platform):
    """Two groups have halves of the same experts: were one of them to move, the halves would no longer fit."""

    def rank():
        _, layer, mesh = made(ExpertTensorParallel(COPYING), (2, 2), ("ep", "etp"))
        loads = [9, 9, 0, 0, 0, 0] if mesh.get_local_rank("etp") == 0 else [1] * 6
        with pytest.raises(ExpertParallelError, match=r"or another placement, on rank [0-3]"):
            move_experts(layer, {"": LoadMetrics.of(loads)}, lambda p: [])
        assert layer.experts.dispatcher.is_initial_placement

    run_ranks(rank, 4, platform)


class TwoLayers(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.first, self.second = layers


def test_ranks_that_are_told_of_other_layers_do_not_exchange_their_experts(platform):
    def rank():
        layers = [made(ExpertParallel(COPYING), (2,), ("ep",))[1:] for _ in range(2)]
        with nn.building(platform):
            model = TwoLayers(*(layer for layer, _ in layers))
        is_first, away = layers[0][1].get_local_rank() == 0, (3, 1, 2, 0, 4, 5)
        # The same layers in another order are the same request.
        names = ("first", "second") if is_first else ("second", "first")
        set_expert_placement(model, dict.fromkeys(names, away), lambda p: [])
        assert expert_placement(model) == {"first": away, "second": away}
        with pytest.raises(
            ExpertParallelError, match=r"got one for \['(first|second)'\] here and for \['(first|second)'\], or"
        ):
            set_expert_placement(model, {names[0]: range(EXPERTS)}, lambda p: [])
        assert expert_placement(model) == {"first": away, "second": away}

    run_ranks(rank, 2, platform)


def test_placements_that_one_rank_alone_cannot_take_are_refused_on_all_and_no_layer_moves(platform):
    away = (3, 1, 2, 0, 4, 5)
    wrong = {
        r"expert placement: expected each position from 0 to 5 once, got \[0, 0, 1": {
            "first": away,
            "second": (0, 0, 1, 2, 3, 4),
        },
        r"experts of 'third' cannot be moved; those of \['first', 'second'\] can": {"first": away, "third": away},
        r"or another placement, on rank": {"first": away},
        "'second'": None,
    }

    def rank():
        layers = [made(ExpertParallel(COPYING), (2,), ("ep",))[1:] for _ in range(2)]
        with nn.building(platform):
            model = TwoLayers(*(layer for layer, _ in layers))
        is_first = layers[0][1].get_local_rank() == 0
        before = [full_value(platform, layer.experts.w1) for layer, _ in layers]
        loads = {"first": LoadMetrics.of([9, 9, 0, 0, 0, 0]), "second": LoadMetrics.of([9, 9, 0, 0, 0, 0])}
        for expected_message, placements in wrong.items():
            expected = KeyError if is_first and placements is None else ExpertParallelError
            message = (
                expected_message
                if is_first or "on rank" in expected_message
                else f"^experts: rank 0 cannot move experts: .*{expected_message}"
            )
            if placements is None:
                known = {"first": loads["first"]} if is_first else loads
                move = functools.partial(move_experts, model, known, lambda p: [])
            else:
                given = placements if is_first else dict.fromkeys(loads, away)
                move = functools.partial(set_expert_placement, model, given, lambda p: [])
            with pytest.raises(expected, match=message):
                move()
            assert expert_placement(model) == {}
        for (layer, _), expected in zip(layers, before, strict=True):
            numpy.testing.assert_array_equal(full_value(platform, layer.experts.w1), expected)

    run_ranks(rank, 2, platform)


def test_layers_move_one_after_another_and_what_has_moved_is_let_go(platform):
    def rank():
        layers = [made(ExpertParallel(COPYING), (2,), ("ep",))[1] for _ in range(2)]
        with nn.building(platform):
            model = TwoLayers(*layers)
        names = {id(p): name.split(".")[0] for name, p in platform.named_parameters(model)}
        events, made_states = [], []

        def states(parameter):
            name = names[id(parameter)]
            assert all(state() is None for of, state in made_states if of != name), "the layer before is held"
            with platform.no_grad():
                state = platform.ops.zeros_like(parameter)
            made_states.append((name, weakref.ref(state)))
            events.append(name)
            return [state]

        set_expert_placement(
            model,
            dict.fromkeys(("first", "second"), (3, 1, 2, 0, 4, 5)),
            states,
            after_layer=lambda name: events.append(f"{name} has moved"),
        )
        assert [*dict.fromkeys(events)] == ["first", "first has moved", "second", "second has moved"]

    run_ranks(rank, 2, platform)


def test_experts_move_without_room_for_copies(platform):
    def rank():
        style = ExpertParallel(functools.partial(ReplicatingDispatcher, slots=0))
        _, layer, _ = made(style, (2,), ("ep",))
        loads = {"": LoadMetrics.of([9, 9, 0, 0, 0, 0])}
        assert move_experts(layer, loads, lambda p: []) == {"": (3, 1, 2, 0, 4, 5)}
        assert update_expert_copies(layer, loads) == {"": ((), ())}

    run_ranks(rank, 2, platform)


def test_own_experts_move_and_have_copies_too(platform):
    def rank(style, change):
        _, layer, mesh = made(style, (2,), ("ep",), experts=OwnExperts)
        change(layer, {"": LoadMetrics.of([9, 9, 0, 0, 0, 0])})
        x = numpy.random.default_rng(mesh.get_local_rank()).normal(size=(8, DIM)).astype(numpy.float32)
        return platform.to_numpy(platform.detach(layer(platform.from_numpy(x)))).copy()

    def copy(layer, loads):
        assert any(update_expert_copies(layer, loads)[""])

    still = run_ranks(functools.partial(rank, ExpertParallel(), lambda layer, loads: None), 2, platform)
    for change in (copy, lambda layer, loads: move_experts(layer, loads, lambda p: [])):
        changed = run_ranks(functools.partial(rank, ExpertParallel(COPYING), change), 2, platform)
        for one, other in zip(still, changed, strict=True):
            numpy.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
