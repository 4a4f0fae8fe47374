"""State dicts of models and optimizers: into other layouts, in any form, all problems at once."""

from __future__ import annotations

import re
from typing import Any

import numpy
import pytest
from fsdp_training import VOCABULARY, Case, Net, build, full_value, shard, shard_last_dim

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.compat.shard_module import ShardingPlan, shard_module
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.parallelize_module import parallelize_module
from hp_dtensor.parallel.tensor_parallel import ColwiseParallel, RowwiseParallel
from hp_dtensor.spec.placements import Replicate, Shard
from hp_dtensor.tensor.dtensor import DTensor
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import (
    StateDictError,
    StateDictOptions,
    fully_shard,
    get_model_state_dict,
    get_optimizer_state_dict,
    init_optimizer_state,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True, rank0_only=True)
SHARES = 4


def make_optimizer(platform, model, kind):
    """An optimizer that users of the framework would take, and a function that steps it."""
    if platform.name == "torch":
        import torch

        choices = {
            "foreach": lambda: torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0, foreach=True),
            "fused": lambda: torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.0, fused=True),
            "sgd": lambda: torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9),
        }
        optimizer = choices[kind]()
        return optimizer, optimizer.step, optimizer.zero_grad
    from hp_platform_mindspore.trainer.optimizers import AdamW
    from hp_trainer.config import AdamWConfig

    optimizer = AdamW(platform.named_parameters(model), AdamWConfig(lr=0.02, weight_decay=0.0), platform)
    return optimizer, lambda: optimizer.step(0.02), optimizer.zero_grad


def laid_out(platform, layout):
    """A model in one of the layouts of the chain, and which shares of the data this rank has."""
    options = {"fsdp, last dim": {"shard_placement_fn": shard_last_dim, "zero_stage": 2}, "hsdp": {"zero_stage": 1}}
    case = Case((1,), tied=layout != "tp", num_blocks=1, options=options.get(layout, {}))
    model, rank = build(platform, case), current_world(platform).rank
    if layout == "plain":
        return model, range(SHARES)
    if layout == "tp":
        mesh = init_device_mesh(platform.device_types[0], (2, 2), mesh_dim_names=("shard", "tp"), platform=platform)
        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel(use_local_output=True)}
        parallelize_module(model, mesh["tp"], plan)
        return shard(model, mesh["shard"], case), range(rank // 2, SHARES, 2)
    sizes = (2, 2) if layout == "hsdp" else (2,)
    names = ("replicate", "shard")[-len(sizes) :]
    mesh = init_device_mesh(platform.device_types[0], sizes, mesh_dim_names=names, platform=platform)
    return shard(model, mesh, case), range(rank, SHARES, mesh.size())


def train_step(platform, model, shares, step, index):
    """One optimizer step on the same global batch whatever the layout."""
    for share in shares:
        rng = numpy.random.default_rng([share, index])
        ids = rng.integers(0, VOCABULARY, (2, 5))
        inputs, targets = (platform.from_numpy(numpy.ascontiguousarray(x)) for x in (ids[:, :-1], ids[:, 1:]))
        logits = platform.ops.reshape(model(inputs), (-1, VOCABULARY))
        loss = platform.ops.cross_entropy(logits, platform.ops.reshape(targets, (-1,)))
        platform.backward(platform.ops.div(loss, len(shares)))
    step()


def run_part(platform, layout, kind, state, first, last):
    """Load, train steps [first, last), and give the full states back from rank 0."""
    model, shares = laid_out(platform, layout)
    optimizer, step, zero_grad = make_optimizer(platform, model, kind)
    if state is not None:
        weights, slots = state
        if layout == "tp":  # untied there: the head has the table's values
            assert {"embed.weight", "head.weight"} <= weights.keys()
        only_first = StateDictOptions(broadcast_from_rank0=layout == "hsdp")
        mine = weights if layout != "hsdp" or current_world(platform).rank == 0 else {}
        set_model_state_dict(model, mine, options=only_first)
        set_optimizer_state_dict(model, optimizer, slots, options=only_first)
    for index in range(first, last):
        train_step(platform, model, shares, step, index)
        zero_grad()
    return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)


@pytest.mark.parametrize("kind", ["foreach", "fused", "sgd"])
def test_training_goes_on_in_another_layout_and_number_of_ranks(hp_platform, kind):
    """FSDP on 2 ranks, HSDP in ZeRO stage 1 on 2 x 2, no sharding on one, and last dimensions sharded in stage 2."""
    if hp_platform.name != "torch" and kind != "foreach":
        pytest.skip("one optimizer")
    state = None
    for number, (layout, size) in enumerate([("fsdp", 2), ("hsdp", 4), ("plain", 1), ("fsdp, last dim", 2)]):
        results = run_ranks(run_part, size, hp_platform, hp_platform, layout, kind, state, 2 * number, 2 * number + 2)
        state = results[0]
        assert all(not any(rest) for rest in results[1:])
    expected, _ = run_part(hp_platform, "plain", kind, None, 0, 8)
    assert state[0].keys() == expected.keys()
    for name, value in expected.items():
        # float32 sums in another order, through AdamW's division by the root of the second moment.
        numpy.testing.assert_allclose(hp_platform.to_numpy(state[0][name]), hp_platform.to_numpy(value), atol=2e-4)


def test_training_goes_on_tensor_parallel(hp_platform):
    """From one rank to tensor parallel x FSDP and back: every layout has untied weights here."""

    def part(layout, state, first, last):
        case = Case((1,), num_blocks=1)
        if layout == "tp":
            model, shares = laid_out(hp_platform, "tp")
        else:
            model, shares = build(hp_platform, case), range(SHARES)
        optimizer, step, zero_grad = make_optimizer(hp_platform, model, "foreach")
        if state is not None:
            set_model_state_dict(model, state[0])
            set_optimizer_state_dict(model, optimizer, state[1])
        for index in range(first, last):
            train_step(hp_platform, model, shares, step, index)
            zero_grad()
        return get_model_state_dict(model, options=FULL), get_optimizer_state_dict(model, optimizer, options=FULL)

    full = StateDictOptions(full_state_dict=True)
    state = part("plain", None, 0, 2)
    state = run_ranks(part, 4, hp_platform, "tp", state, 2, 4)[0]
    state = part("plain", state, 4, 6)
    expected, _ = part("plain", None, 0, 6)
    assert full.strict
    for name, value in expected.items():
        numpy.testing.assert_allclose(hp_platform.to_numpy(state[0][name]), hp_platform.to_numpy(value), atol=2e-4)


# Loading in every form ------------------------------------------------------------------------------------


def _model(platform, tied=True):
    """Tied weights, an ignored parameter and a buffer."""
    with nn.building(platform):
        model = Net(1, tied, False, None)
    model.register_buffer("seen", platform.from_numpy(numpy.zeros(3, numpy.float32)))
    mesh = init_device_mesh(platform.device_types[0], (3,), mesh_dim_names=("shard",), platform=platform)
    init_parameters(model, lambda name, shape: Normal(1.0), seed=1)
    fully_shard(model.blocks[0], mesh, ignored_params=[model.blocks[0].norm.weight])
    return fully_shard(model, mesh)


def _values(platform, model):
    """New full values of everything, as plain tensors."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    rng = numpy.random.default_rng(5)
    new = {name: rng.standard_normal(tuple(x.shape)).astype(numpy.float32) for name, x in sorted(state.items())}
    if "head.weight" in new:
        new["head.weight"] = new["embed.weight"]
    return new


def _in_form(platform, model, name, value, form):
    target = dict(platform.named_parameters(model, remove_duplicate=False)).get(name)
    if not isinstance(target, DTensor) or form == "full":
        return platform.from_numpy(value.copy())
    spec = target.spec
    if form == "local":
        start, size = spec.box()
        index = tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))
        return platform.from_numpy(numpy.ascontiguousarray(value[index]))
    from hp_dtensor.tensor.conversions import distribute_tensor

    return distribute_tensor(platform.from_numpy(value.copy()), spec.mesh, [Replicate()] * spec.mesh.ndim)


def _check_loaded(platform, model, new):
    found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in new.items():
        numpy.testing.assert_array_equal(platform.to_numpy(found[name]), value, err_msg=name)


def _forward(platform, model):
    ids = platform.from_numpy(numpy.arange(4).reshape(1, 4))
    return platform.to_numpy(model(ids)).copy()


@pytest.mark.parametrize("moment", ["first", "after a forward", "unsharded"])
def test_full_local_and_distributed_values_are_loaded(hp_platform, moment):
    def rank():
        model = _model(hp_platform)
        new = _values(hp_platform, model)
        if moment == "after a forward":
            before = _forward(hp_platform, model)
        if moment == "unsharded":
            model.unshard()
        forms = ("full", "local", "dtensor")
        state = {
            name: _in_form(hp_platform, model, name, value, forms[i % 3]) for i, (name, value) in enumerate(new.items())
        }
        result = model.load_state_dict(state)
        assert result.missing_keys == result.unexpected_keys == []
        _check_loaded(hp_platform, model, new)
        assert dict(model.state_dict()).keys() == new.keys()
        assert isinstance(model.state_dict()["embed.weight"], DTensor)
        if moment == "unsharded":
            assert not isinstance(model.embed.weight, DTensor)
            shown = hp_platform.to_numpy(hp_platform.ops.clone(model.embed.weight))
            numpy.testing.assert_array_equal(shown, new["embed.weight"])
            model.reshard()
        after = _forward(hp_platform, model)
        if moment == "after a forward":
            assert not numpy.array_equal(before, after)
        fresh = _model(hp_platform)
        fresh.load_state_dict(model.state_dict())
        numpy.testing.assert_array_equal(_forward(hp_platform, fresh), after)

    run_ranks(rank, 3, hp_platform)


def test_one_name_of_a_tied_parameter_is_enough_and_non_strict_loading_reports(hp_platform):
    def rank():
        model = _model(hp_platform)
        new = _values(hp_platform, model)
        state = {name: hp_platform.from_numpy(value) for name, value in new.items() if name != "head.weight"}
        assert model.load_state_dict(state) == ([], [])
        _check_loaded(hp_platform, model, new)
        some = {"head.weight": state["embed.weight"], "other": state["seen"]}
        missing, unexpected = model.load_state_dict(some, strict=False)
        assert unexpected == ["other"]
        assert "seen" in missing
        assert not {"embed.weight", "head.weight"} & set(missing)

    run_ranks(rank, 3, hp_platform)


class Counting(nn.Module):
    """A weight, an extra state, and two buffers, of which one has two names."""

    def __init__(self):
        super().__init__()
        self.norm, self.count = nn.RMSNorm(3), 0
        for name, persistent in (("seen", True), ("table", False)):
            zeros = self.platform.from_numpy(numpy.zeros(3, numpy.float32))
            self.register_buffer(name, zeros, persistent=persistent)
        self.register_buffer("again", self.seen)

    def forward(self, x):
        return self.norm(x)

    def get_extra_state(self):
        return self.count

    def set_extra_state(self, state):
        self.count = state


class Twice(nn.Module):
    """A norm of its own, and a module that is registered under two names."""

    def __init__(self):
        super().__init__()
        self.own, self.first = nn.RMSNorm(3), Counting()
        self.second = self.first

    def forward(self, x):
        return self.second(self.first(self.own(x)))


def test_a_shared_module_has_its_state_under_all_names(hp_platform):
    platform = hp_platform
    hooked = []

    def rank():
        with nn.building(platform):
            plain, model = Twice(), Twice()
        model.first._load_state_dict_pre_hooks[1] = lambda state_dict, prefix, *rest: hooked.append(prefix)
        fully_shard(model, init_device_mesh(platform.device_types[0], (2,), platform=platform))
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        shared = ["_extra_state", "again", "norm.weight", "seen"]
        names = [*(f"first.{name}" for name in shared), "own.weight", *(f"second.{name}" for name in shared)]
        assert sorted(full) == sorted(model.state_dict()) == sorted(plain.state_dict()) == names
        new = {name: numpy.full(3, 1 + int(name != "own.weight"), numpy.float32) for name in names}
        new |= {name: 7 for name in names if name.endswith("_extra_state")}
        given = {name: x if isinstance(x, int) else platform.from_numpy(x) for name, x in new.items()}
        assert model.load_state_dict(given) == ([], [])
        assert model.first.count == 7
        _check_loaded(platform, model, {name: x for name, x in new.items() if not isinstance(x, int)})
        # One of the names is enough.
        for name in ("first.seen", "first.again", "second.again", "second.norm.weight", "second._extra_state"):
            del given[name]
        assert model.load_state_dict(given) == ([], [])

    run_ranks(rank, 2, platform)
    assert sorted(hooked) == ["first."] * 4 + ["second."] * 4


def test_every_problem_is_reported_on_every_rank_and_nothing_is_changed(hp_platform):
    def rank():
        me = current_world(hp_platform).rank
        model = _model(hp_platform)
        before = {n: hp_platform.to_numpy(x).copy() for n, x in _full(model).items()}
        state: dict[str, Any] = {n: hp_platform.from_numpy(x + 1) for n, x in before.items()}
        del state["blocks.0.down.weight"]
        state["surplus"] = state["seen"]
        state["blocks.0.up.weight"] = hp_platform.from_numpy(numpy.zeros((4, 4), numpy.float32))
        state["blocks.0.norm.weight"] = [1.0]
        if me == 1:
            state["seen"] = hp_platform.from_numpy(numpy.zeros(2, numpy.float32))
        with pytest.raises(StateDictError) as caught:
            model.load_state_dict(state)
        reported = str(caught.value)
        for expected in (
            "missing keys: blocks.0.down.weight",
            "unexpected keys: surplus",
            "blocks.0.up.weight: expected the full shape [11, 5] or this rank's",
            "got [4, 4]",
            "blocks.0.norm.weight: expected a tensor, got list",
            "seen: expected the full shape [3], got [2] (on rank 1)",
            "nothing has been changed",
        ):
            assert expected in reported
        for name, value in _full(model).items():
            numpy.testing.assert_array_equal(hp_platform.to_numpy(value), before[name])

    run_ranks(rank, 3, hp_platform)


def test_ranks_that_pass_other_kinds_of_values_are_told(hp_platform):
    def rank():
        model = _model(hp_platform)
        state = _full(model)
        if current_world(hp_platform).rank == 2:
            state["embed.weight"] = model.embed.weight
        with pytest.raises(StateDictError, match="other DTensors, or plain tensors instead, on other ranks"):
            model.load_state_dict(state)

    run_ranks(rank, 3, hp_platform)


def test_load_hooks_are_run(hp_platform):
    """Before: an inner module's key is renamed on loading; after: one says which missing keys do not matter."""

    def rename(state_dict, prefix, *args):
        for key in list(state_dict):
            if key.startswith(prefix + "old_"):
                state_dict[prefix + key[len(prefix) + 4 :]] = state_dict.pop(key)

    def forgive(module, incompatible):
        incompatible.missing_keys[:] = [key for key in incompatible.missing_keys if key != "seen"]

    def rank():
        model = _model(hp_platform)
        up = model.blocks[0].up
        up._load_state_dict_pre_hooks[1] = rename
        new = _values(hp_platform, model)
        state = {name.replace("0.up.", "0.up.old_"): hp_platform.from_numpy(value) for name, value in new.items()}
        assert model.load_state_dict(state) == ([], [])
        assert "blocks.0.up.old_weight" in state
        _check_loaded(hp_platform, model, new)
        mine = state if current_world(hp_platform).rank == 0 else {}
        set_model_state_dict(model, mine, options=StateDictOptions(broadcast_from_rank0=True))
        model._load_state_dict_post_hooks[1] = forgive
        del state["seen"]
        assert model.load_state_dict(state) == ([], [])
        del state["embed.weight"], state["head.weight"]
        with pytest.raises(
            StateDictError, match=r"after its hooks; the rest has been loaded: missing keys: embed.weight"
        ):
            model.load_state_dict(state)

    run_ranks(rank, 3, hp_platform)


def test_keys_that_load_hooks_miss_are_an_error_only_where_that_is_strict(hp_platform):
    reported = []

    def object_(state_dict, prefix, metadata, strict, missing, unexpected, errors):
        reported.append(strict)
        missing.append(prefix + "beside")
        unexpected.append(prefix + "above")

    def rank():
        model = _model(hp_platform)
        model.blocks[0].up._load_state_dict_pre_hooks[1] = object_
        new = _values(hp_platform, model)
        state = {name: hp_platform.from_numpy(value) for name, value in new.items()}
        with pytest.raises(StateDictError, match=r"missing keys: blocks.0.up.beside; unexpected keys: blocks.0.up.abo"):
            model.load_state_dict(state)
        result = model.load_state_dict(state, strict=False)
        assert result == (["blocks.0.up.beside"], ["blocks.0.up.above"])
        _check_loaded(hp_platform, model, new)

    run_ranks(rank, 3, hp_platform)
    assert sorted(reported) == [False] * 3 + [True] * 3


def test_a_module_that_loads_by_itself_is_refused(hp_platform):
    def load(self, *args):
        pytest.fail("called")

    def rank():
        model = _model(hp_platform)
        up = model.blocks[0].up
        up.__class__ = type("Special", (type(up),), {"_load_from_state_dict": load, "__module__": "theirs"})
        with pytest.raises(
            StateDictError, match=r"blocks\.0\.up \(Special\) loads by .*register_load_state_dict_pre_hook"
        ):
            model.load_state_dict(_full(model))

    run_ranks(rank, 3, hp_platform)


def _full(model):
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def test_a_full_state_dict_is_a_copy_and_a_sharded_one_is_not(hp_platform):
    def rank(size):
        mesh = init_device_mesh(hp_platform.device_types[0], (size,), mesh_dim_names=("shard",), platform=hp_platform)
        with nn.building(hp_platform):
            model = nn.Linear(3, 2, bias=True)
        init_parameters(model, lambda name, shape: Normal(1.0), seed=1)
        fully_shard(model, mesh)
        full, sharded = _full(model), get_model_state_dict(model)
        hp_platform.copy_(
            hp_platform.unwrap(model.weight), hp_platform.ops.zeros(model.weight.spec.local_shape, model.weight.dtype)
        )
        if size == 1:
            assert numpy.abs(hp_platform.to_numpy(full["weight"])).sum() > 0
        assert not numpy.abs(full_value(hp_platform, sharded["weight"])).sum()

    for size in (1, 2):
        run_ranks(rank, size, hp_platform, size)


def test_slots_of_an_optimizer_that_has_stepped_are_all_there_and_no_others(hp_platform):
    def rank():
        model = _model(hp_platform, tied=False)
        optimizer, step, _ = make_optimizer(hp_platform, model, "foreach")
        full_options = StateDictOptions(full_state_dict=True)
        train_step(hp_platform, model, [current_world(hp_platform).rank], step, 0)
        state = get_optimizer_state_dict(model, optimizer, options=full_options)
        wrong = {**state, "state": {n: dict(slots) for n, slots in state["state"].items()}}
        lost, first = "head.weight", "blocks.0.up.weight"
        del wrong["state"][lost], wrong["state"][first]["exp_avg"]
        wrong["state"][first]["elsewhere"] = state["state"][first]["exp_avg"]
        with pytest.raises(StateDictError) as caught:
            set_optimizer_state_dict(model, optimizer, wrong)
        for part in (rf"missing keys: .*{first}\.exp_avg(,|$|;)", rf"missing keys: .*{lost}\.exp_avg(,|$|;)"):
            assert re.search(part, str(caught.value), re.MULTILINE), str(caught.value)
        assert f"unexpected keys: {first}.elsewhere" in str(caught.value)
        if hp_platform.name == "torch":
            import torch

            # Without state, and of another choice that brings slots: what is loaded says which there are.
            empty = {**state, "state": {}}
            with pytest.raises(StateDictError, match="all of its state"):
                set_optimizer_state_dict(model, optimizer, empty)
            set_optimizer_state_dict(model, optimizer, empty, options=StateDictOptions(strict=False))
            assert not optimizer.state
            set_optimizer_state_dict(model, optimizer, state)
            other = torch.optim.AdamW(model.parameters(), lr=0.02, amsgrad=True)
            train_step(hp_platform, model, [current_world(hp_platform).rank], other.step, 0)
            set_optimizer_state_dict(model, other, state)
            assert all("max_exp_avg_sq" not in slots for slots in other.state.values())

    run_ranks(rank, 3, hp_platform)


def test_problems_of_an_optimizers_state_dict(hp_platform):
    def rank():
        model = _model(hp_platform, tied=False)
        optimizer, step, _ = make_optimizer(hp_platform, model, "foreach")
        train_step(hp_platform, model, [current_world(hp_platform).rank], step, 0)
        state = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        name = "blocks.0.up.weight"
        before = hp_platform.to_numpy(state["state"][name]["exp_avg"]).copy()
        wrong = {**state, "state": {n: dict(slots) for n, slots in state["state"].items()}}
        wrong["state"][name]["exp_avg"] = hp_platform.from_numpy(numpy.zeros((2, 2), numpy.float32))
        wrong["state"]["elsewhere"] = wrong["state"].pop("head.weight")
        with pytest.raises(
            StateDictError, match=r"(?s)elsewhere.*blocks\.0\.up\.weight\.exp_avg: expected the full shape"
        ):
            set_optimizer_state_dict(model, optimizer, wrong)
        again = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
        numpy.testing.assert_array_equal(hp_platform.to_numpy(again["state"][name]["exp_avg"]), before)
        with pytest.raises(StateDictError, match="expected an optimizer with param_groups"):
            get_optimizer_state_dict(model, object())

    run_ranks(rank, 3, hp_platform)


def test_full_tensors_go_into_a_module_of_shard_module(hp_platform):
    """The refusal of a plain tensor by `load_state_dict` says to do this."""

    def run():
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), platform=hp_platform)
        with nn.building(hp_platform):
            model = nn.Linear(3, 5, bias=True)
        shard_module(model, mesh, ShardingPlan({"weight": (Shard(0),), "bias": (Shard(0),)}))
        rng = numpy.random.default_rng(0)
        values = {"weight": rng.normal(size=(5, 3)), "bias": rng.normal(size=5)}
        full = {name: hp_platform.from_numpy(value.astype(numpy.float32)) for name, value in values.items()}
        set_model_state_dict(model, full)
        for name, value in values.items():
            parameter = getattr(model, name)
            assert parameter.placements == (Shard(0),)
            numpy.testing.assert_array_equal(full_value(hp_platform, parameter), value.astype(numpy.float32))

    run_ranks(run, 2, hp_platform)


NEW_OPTIMIZERS = {
    "sgd": lambda torch, parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda torch, parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.5),
    "adam": lambda torch, parameters: torch.optim.Adam(parameters, lr=0.1, weight_decay=0.5),
    "fused": lambda torch, parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1), fused=True),
    "rmsprop": lambda torch, parameters: torch.optim.RMSprop(parameters, lr=0.1, centered=True),
    "rprop": lambda torch, parameters: torch.optim.Rprop(parameters, lr=0.1),
    "asgd": lambda torch, parameters: torch.optim.ASGD(parameters, lr=0.1),
    "nadam": lambda torch, parameters: torch.optim.NAdam(parameters, lr=0.1),
}


@pytest.mark.parametrize("kind", NEW_OPTIMIZERS)
def test_a_new_optimizer_has_state_to_read_into_and_goes_on_as_without_it(hp_platform, kind):
    """Momentum and the counter of steps are those of an optimizer that has not stepped."""
    torch = pytest.importorskip("torch")

    def trained(asked):
        model = _model(hp_platform, tied=False)
        frozen = model.embed.weight
        frozen.requires_grad_(False)
        before = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        optimizer = NEW_OPTIMIZERS[kind](torch, model.parameters())
        options = dict(optimizer.param_groups[0])
        if asked:
            hooked = []
            optimizer.register_step_post_hook(lambda *_: hooked.append(1))
            state = get_optimizer_state_dict(model, optimizer)
            assert not hooked
            trainable = {name for name, x in model.named_parameters() if x is not frozen}
            assert state["state"].keys() == (set() if kind == "sgd" else trainable)
            assert optimizer.param_groups[0] == options
            assert all(x.grad is None for x in model.parameters())
            _check_loaded(hp_platform, model, {name: hp_platform.to_numpy(x) for name, x in before.items()})
            optimizer = NEW_OPTIMIZERS[kind](torch, options["params"])
            set_optimizer_state_dict(model, optimizer, state)
        for index in range(2):
            train_step(hp_platform, model, [current_world(hp_platform).rank], optimizer.step, index)
            optimizer.zero_grad()
        values = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return {name: hp_platform.to_numpy(x) for name, x in values.items()}

    for without, asked in zip(
        run_ranks(trained, 3, hp_platform, False), run_ranks(trained, 3, hp_platform, True), strict=True
    ):
        for name, value in without.items():
            numpy.testing.assert_array_equal(asked[name], value, err_msg=name)


def test_gradients_of_an_optimizer_without_state_are_left_alone(hp_platform):
    """As in torch: no step is taken with gradients, which may be pending, nor where it needs a closure."""
    torch = pytest.importorskip("torch")

    def rank():
        model = _model(hp_platform, tied=False)
        optimizer = torch.optim.AdamW(model.parameters())
        train_step(hp_platform, model, [current_world(hp_platform).rank], lambda: None, 0)
        grads = [x.grad for x in model.parameters()]
        assert not get_optimizer_state_dict(model, optimizer)["state"]
        init_optimizer_state(model, optimizer)
        assert get_optimizer_state_dict(model, optimizer)["state"]
        assert all(x.grad is grad for x, grad in zip(model.parameters(), grads, strict=True))
        other = _model(hp_platform, tied=False)
        assert not get_optimizer_state_dict(other, torch.optim.LBFGS(other.parameters()))["state"]

    run_ranks(rank, 3, hp_platform)


EXTRA = [f"part_{letter}" for letter in "abcdefgh"]


def set_extra_states_that_communicate():
    """Return the extra states that each part of a model has exchanged with the other rank, in one call."""
    import torch

    mesh = init_device_mesh("cpu", (2,), platform="torch")
    group = mesh.group_along(0)

    class Part(torch.nn.Linear):
        def get_extra_state(self):
            return b""

        def set_extra_state(self, state):
            self.exchanged = group.all_gather_bytes(state)

    model = torch.nn.ModuleDict({name: Part(2, 2) for name in EXTRA})
    fully_shard(list(model.values()), mesh)
    state = get_model_state_dict(model)
    names = [f"{name}._extra_state" for name in EXTRA]
    given = {name: name.encode() for name in (reversed(names) if mesh.world.rank else names)}
    set_model_state_dict(model, given | {name: value for name, value in state.items() if name not in given})
    return {name: model[name].exchanged for name in EXTRA}


def test_extra_states_are_set_in_one_order(hp_platform, rank_pool):
    """In processes, where sets of names have different orders."""
    if hp_platform.name != "torch":
        pytest.skip("modules of torch have extra states")
    expected = {name: [f"{name}._extra_state".encode()] * 2 for name in EXTRA}
    assert rank_pool(2).run(f"{__file__}:set_extra_states_that_communicate") == [expected, expected]
