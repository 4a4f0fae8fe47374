"""Inputs that do not fit are refused by name before a rank waits for another, and no memory is used as it comes."""

from __future__ import annotations

import contextlib
import functools

import numpy
import pytest
from moe_layouts import LAYOUTS, VOCABULARY, train
from test_expert_parallel import NUM_SAMPLES

import hp_moe.experts
import hp_moe.routing
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.parallel import nn
from hp_dtensor.spec.placements import Replicate
from hp_dtensor.tensor.conversions import distribute_tensor
from hp_dtensor.testing import run_ranks
from hp_moe import (
    AllToAllDispatcher,
    AuxLosses,
    Capacity,
    ExpertParallel,
    ExpertParallelError,
    GroupedExperts,
    MoE,
    ReplicatingDispatcher,
    Routing,
    TwoLevelDispatcher,
    moe_layers,
    update_expert_bias,
)

DIM, EXPERTS = 8, 4
GOOD = {
    "experts": numpy.array([[0, 1], [2, 3], [0, 3]]),
    "counts": numpy.array([2, 1, 1, 2]),
    "scores": numpy.full((3, 2), 0.5, numpy.float32),
}
FAULTS = {
    "number too large": (
        {"experts": numpy.array([[0, 1], [2, 4], [0, 3]])},
        "routing.experts: expected numbers from 0 to 3, got 4 for token 1, slot 1",
    ),
    "number below 0": (
        {"experts": numpy.array([[0, 1], [2, 3], [-1, 3]])},
        "expected numbers from 0 to 3, got -1 for token 2, slot 0",
    ),
    "counts": (
        {"counts": numpy.array([2, 1, 1, 1])},
        r"which sum to 6, got \[2, 1, 1, 1\], which sum to 5",
    ),
    "a score": (
        {"scores": numpy.array([[0.5, 0.5], [0.5, numpy.nan], [0.5, numpy.inf]], numpy.float32)},
        r"routing.scores: expected finite numbers, got nan for token 1, slot 1 \(2 in all\)",
    ),
    "counts of others": ({"counts": numpy.array([2, 1, 2, 1])}, "routing.counts: expected the number of choices"),
}
SHAPES = {
    "tokens": ({"experts": GOOD["experts"][:2]}, r"routing.experts: expected \[3, top_k\], .* got shape \[2, 2\]"),
    "scores": (
        {"scores": GOOD["scores"][:, :1]},
        r"expected the shape of experts, \[3, 2\], got \[3, 1\]",
    ),
    "counts": ({"counts": GOOD["counts"][:3]}, r"routing.counts: expected one for each of 4 experts, got shape \[3\]"),
    "dtypes": (
        {"experts": GOOD["experts"].astype(numpy.float32)},
        "routing.experts: expected int64, got float32",
    ),
    "integer scores": ({"scores": GOOD["experts"]}, "routing.scores: expected float32, got int64"),
}


def routing_of(platform, change=None):
    return Routing(**{name: platform.from_numpy(array) for name, array in {**GOOD, **(change or {})}.items()})


def built(platform):
    with nn.building(platform):
        experts = GroupedExperts(DIM, 6, EXPERTS)
    return experts


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(("change", "message"), [*FAULTS.values(), *SHAPES.values()], ids=[*FAULTS, *SHAPES])
@pytest.mark.parametrize("parallel", [False, True], ids=["one rank", "ep"])
def test_a_routing_that_does_not_fit_is_refused_before_any_row_is_sent(platform, change, message, parallel):
    def rank():
        experts = built(platform)
        if parallel:
            ExpertParallel().apply(experts, init_device_mesh(platform.device_types[0], (2,), platform=platform))
        x = platform.ops.ones((3, DIM), platform.dtype("float32"))
        with record_collectives() as log, pytest.raises(ExpertParallelError, match=message):
            experts(x, routing_of(platform, change))
        assert [each.name for each in log.records] == ["all_to_all"] * parallel, "of the fault, in place of sizes"
        assert experts(x, routing_of(platform)).shape == (3, DIM)

    run_ranks(rank, 2 if parallel else 1, platform)


# Which expert was counted wrongly shows on the host alone.
@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize("name", [name for name in FAULTS if name != "counts of others"])
def test_where_looking_would_wait_all_ranks_raise_together(platform, name, monkeypatch):
    """As on an accelerator: nothing is looked at before the sizes are exchanged."""
    change, _ = FAULTS[name]
    monkeypatch.setattr(hp_moe.experts, "check_inputs", lambda *args: None)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        experts = ExpertParallel().apply(built(platform), mesh)
        x = platform.ops.ones((3, DIM), platform.dtype("float32"))
        expected_message = f"routing of rank 1: {'scores' if name == 'a score' else 'expert numbers'}"
        with record_collectives() as log, pytest.raises(ExpertParallelError, match=expected_message):
            experts(x, routing_of(platform, change if mesh.get_local_rank() else None))
        assert [each.name for each in log.records] == ["all_to_all"]
        return True

    assert run_ranks(rank, 2, platform) == [True, True]


NODES = functools.partial(TwoLevelDispatcher, inner_size=2)
CHUNKS = functools.partial(AllToAllDispatcher, num_chunks=3)


def with_copies(group, num_experts):
    """In chunks: the weights of the copies are sent too."""
    dispatcher = ReplicatingDispatcher(group, num_experts, slots=1, num_chunks=2)
    assert any(dispatcher.place_copies([9, 1, 1, 1]))
    return dispatcher


@pytest.mark.parametrize(
    "dispatcher", ["all_to_all", "copy_per_expert", "all_gather", "auto", NODES, CHUNKS, with_copies]
)
@pytest.mark.parametrize("seen_at", ["once", "the exchange"])
def test_ranks_raise_together_for_the_scores_of_one(torch_or, platform, dispatcher, seen_at, monkeypatch):
    """By layer and rank, at the first call and later; where scores are not looked at, as on an accelerator, too."""
    torch_or(dispatcher == "all_to_all")
    if seen_at == "the exchange":
        monkeypatch.setattr(hp_moe.routing, "check_values", lambda *args: None)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (4,), platform=platform)
        with nn.building(platform):
            model = nn.ModuleList([MoE(DIM, 6, EXPERTS, 2)])
        ExpertParallel(dispatcher).apply(model[0], mesh)
        moe_layers(model)
        me, good = mesh.get_local_rank(), platform.ops.ones((3, DIM), platform.dtype("float32"))
        nan = platform.from_numpy(numpy.full((3, DIM), numpy.nan, numpy.float32))
        own = me == 1 and seen_at == "once"
        expected_message = "routing.scores: expected finite numbers, got nan" if own else "routing of rank 1: "
        for _ in range(2):
            with pytest.raises(ExpertParallelError, match=f"^0, rank {me}: {expected_message}"):
                model[0](nan if me == 1 else good)
            assert numpy.isfinite(platform.to_numpy(platform.detach(model[0](good)))).all()
        model[0].allow_nonfinite = True
        found = platform.to_numpy(platform.detach(model[0](nan if me == 1 else good)))
        assert numpy.isnan(found).all() == (me == 1)
        return True

    assert run_ranks(rank, 4, platform) == [True] * 4


@pytest.mark.usefixtures("torch_suffices")
@pytest.mark.parametrize(("fault", "num_chunks"), [("counts", None), ("scores", None), ("scores", 2)])
def test_experts_of_others_are_refused_as_ours(platform, fault, num_chunks):
    class Doubled(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1, self.w2 = self.parameter((EXPERTS, DIM, DIM)), self.parameter((EXPERTS, DIM, DIM))

        def forward(self, rows, counts):
            return self.ops.mul(rows, 2.0)

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        with nn.building(platform):
            experts = Doubled()
        ExpertParallel(num_chunks=num_chunks).apply(experts, mesh)
        x = platform.ops.ones((3, DIM), platform.dtype("float32"))
        good, bad = (platform.from_numpy(numpy.array(each)) for each in ([3, 0, 0, 0], [2, 0, 0, 0]))
        if fault == "scores":
            good, bad = routing_of(platform), routing_of(platform, FAULTS["a score"][0])
        expected_message = (
            ("add up to 2, but there are 3", "expected finite")[fault == "scores"] if mesh.get_local_rank() else ""
        )
        with pytest.raises(ExpertParallelError, match=expected_message or "routing of rank 1: invalid inputs"):
            experts(x, bad if mesh.get_local_rank() else good)
        assert experts(x, good).shape == (3, DIM)

    run_ranks(rank, 2, platform)


@pytest.mark.parametrize(
    "options",
    [{}, {"capacity": Capacity(1.0)}, {"aux_losses": AuxLosses(micro_batch=0.1)}],
    ids=["alone", "capacity", "losses"],
)
def test_token_ids_of_one_rank_are_refused_on_all(platform, options):
    """Capacity and losses ask all ranks before tokens are sent, also the one at fault."""

    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        with nn.building(platform):
            layer = MoE(DIM, 6, EXPERTS, 2, hash_vocab_size=5, **options)
        ExpertParallel().apply(layer, mesh)
        layer.token_mesh = mesh
        x, me = platform.ops.ones((3, DIM), platform.dtype("float32")), mesh.get_local_rank()
        expected_message = "ids: expected numbers from 0 to .* 4, got 5" if me else "routing of rank 1: invalid inputs"
        with pytest.raises(ExpertParallelError, match=expected_message):
            layer(x, platform.from_numpy(numpy.array([0, 1, 4 + me])))

    run_ranks(rank, 2, platform)


def test_errors_name_layer_and_rank(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), platform=platform)
        with nn.building(platform):
            model = nn.ModuleList([MoE(DIM, 6, EXPERTS, 2)])
        ExpertParallel().apply(model[0], mesh)
        moe_layers(model)
        with pytest.raises(
            ExpertParallelError,
            match=rf"^0, rank {mesh.get_local_rank()}: expected an input \[..., 8\], got shape \[3, 7\]",
        ):
            model[0](platform.ops.ones((3, 7), platform.dtype("float32")))

    run_ranks(rank, 2, platform)


def test_dtypes_are_not_mixed(platform):
    experts = built(platform)
    x = platform.ops.ones((3, DIM), platform.dtype("bfloat16"))
    expected_message = "x is bfloat16, but the weights are not: w1 float32, w2 float32, w3 float32; cast one of them"
    with pytest.raises(ExpertParallelError, match=expected_message):
        experts(x, routing_of(platform))


def test_meshes_that_do_not_fit(platform):
    def rank():
        mesh = init_device_mesh(platform.device_types[0], (2,), mesh_dim_names=("ep",), platform=platform)
        with nn.building(platform):
            layers = nn.ModuleList([MoE(DIM, 6, EXPERTS, 2), MoE(DIM, 6, EXPERTS, 2)])
        x = platform.ops.ones((4, DIM), platform.dtype("float32"))
        ExpertParallel(split_tokens=True).apply(layers[0], mesh)
        placed = distribute_tensor(x, mesh, [Replicate()], src_data_rank=None)
        with pytest.raises(ExpertParallelError, match=r"shares ranks with the mesh .* without split_tokens"):
            layers[0](placed)
        layers[1].token_mesh = mesh
        with pytest.raises(ExpertParallelError, match=r"token_mesh is None for '0', but .* for '1'"):
            update_expert_bias(layers)

    run_ranks(rank, 2, platform)


@contextlib.contextmanager
def poisoned(platform, monkeypatch):
    """Fresh memory holds numbers that no result survives: not a number, or far out of range."""

    def empty(shape, dtype, device=None):
        if platform.is_floating(dtype):
            return platform.ops.full(tuple(shape), float("nan"), dtype)
        return platform.ops.full(tuple(shape), -77, dtype)

    monkeypatch.setattr(type(platform), "empty", lambda self, *args, **kwargs: empty(*args, **kwargs))
    if platform.name != "torch":
        yield
        return
    import torch

    # It fills whatever torch itself allocates without writing.
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ("ep of 4", {"bias": True, "capacity": Capacity(0.5)}),
        ("ep and hidden", {"aux_losses": AuxLosses(0.1, 0.1, 0.1, 0.1), "num_shared_experts": 1}),
        ("sequence over three, uneven", {}),
        ("two_level", {"hash_vocab_size": VOCABULARY}),
        ("copies, in chunks", {"jitter": 0.1}),
    ],
)
def test_no_memory_is_used_as_it_comes(torch_or, platform, monkeypatch, layout, options):
    torch_or(layout == "ep and hidden")
    program = functools.partial(train, layout, NUM_SAMPLES, steps=2, num_experts=9, one_expert=True, options=options)
    clean = run_ranks(program, LAYOUTS[layout].size)
    with poisoned(platform, monkeypatch):
        dirty = run_ranks(program, LAYOUTS[layout].size)
    for one, other in zip(clean, dirty, strict=True):
        for name, weight in one.weights.items():
            assert numpy.isfinite(weight).all()
            numpy.testing.assert_allclose(weight, other.weights[name], rtol=1e-6, atol=1e-7, err_msg=name)
        for a, b in zip(one.grads, other.grads, strict=True):
            for name, grad in a.items():
                # MindSpore's sums depend on the alignment of memory in the last bit.
                numpy.testing.assert_allclose(grad, b[name], rtol=1e-6, atol=1e-7, err_msg=name)
                if name.startswith("experts.") and not options.get("hash_vocab_size"):
                    assert not grad[2:].any(), f"{name} of experts without tokens"


def test_the_poison_is_seen(platform, monkeypatch):
    with poisoned(platform, monkeypatch):
        fresh = platform.to_numpy(platform.empty((5,), platform.dtype("float32")))
    assert numpy.isnan(fresh).all()
