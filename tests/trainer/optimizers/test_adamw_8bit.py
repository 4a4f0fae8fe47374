"""AdamW with 8-bit moments: its codes, its memory, checkpoints that plain AdamW shares, and the loss beside AdamW's."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from training_runs import Lab, losses, tensors

from hp_dtensor import Shard
from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.world import current_world
from hp_dtensor.parallel import nn
from hp_dtensor.tensor.conversions import distribute_tensor, local_of
from hp_dtensor.testing import run_ranks
from hp_trainer.checkpoint import Checkpoint, LocalStorage, save_checkpoint
from hp_trainer.config import AdamWConfig
from hp_trainer.exceptions import CheckpointError
from hp_trainer.optimizers import AdamW8bitConfig, state_bytes
from hp_trainer.optimizers.adamw_8bit import CodeSearch, dynamic_values
from hp_trainer.plugins import registries
from hp_trainer.training.recovery import Snapshot
from hp_trainer.training.state import load_state, named_state, state_parts

EIGHT_BIT = "{name: adamw_8bit, lr: 5.0e-3, eps: 1.0e-5, min_elements: 64}"


def built(platform, name, options, parameters):
    return registries().optimizers.get(name, platform.name).build(parameters, options, platform)


def parameter_of(platform, values):
    return platform.Parameter(platform.from_numpy(values.astype(np.float32)))


@pytest.fixture
def weights() -> np.ndarray:
    return np.random.default_rng(3).standard_normal((6, 700)).astype(np.float32)


def stored(platform, values, **options):
    """Return both moments as they come back once stored as codes, by slot."""
    optimizer = built(platform, "adamw_8bit", AdamW8bitConfig(**options), [("x", parameter_of(platform, values))])
    for slot in ("exp_avg", "exp_avg_sq"):
        optimizer.set_state("x", slot, platform.from_numpy(np.abs(values) if slot == "exp_avg_sq" else values))
    return {slot: platform.to_numpy(x) for slot, x in optimizer.state()["x"].items()}


@pytest.mark.parametrize("signed", [True, False])
def test_codes_stand_for_numbers_of_seven_decades(signed):
    values = dynamic_values(signed=signed)
    assert len(values) == (255 if signed else 256)
    assert (np.diff(values) > 0).all()
    assert 0 in values
    assert values[-1] == 1
    assert values[0] == (-1 if signed else 0)
    positive = values[values > 0]
    assert positive[0] < (1e-6 if signed else 1e-7)
    assert (np.diff(positive[positive > 0.1])[:-1] < (0.016 if signed else 0.008)).all()


def test_a_moment_is_off_by_at_most_half_a_code_of_its_block(hp_platform, weights):
    weights[0, :256] *= 1e-5
    retained = stored(hp_platform, weights)
    for slot, values in (("exp_avg", weights), ("exp_avg_sq", np.abs(weights))):
        codes = dynamic_values(signed=slot == "exp_avg")
        for begin in (0, 256, 512):
            part, found = values[:, begin : begin + 256], retained[slot][:, begin : begin + 256]
            scale = np.abs(part).max(1, keepdims=True)
            nearest = np.abs(part[..., None] / scale[..., None] - codes).min(-1)
            np.testing.assert_allclose(np.abs(part - found) / scale, nearest, atol=1e-6)


@pytest.mark.parametrize("shape", [(6, 700), (3, 5, 300), (4096,), (64, 64), (5000, 1)])
def test_codes_of_codes_are_the_same(hp_platform, shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    values.reshape(-1)[:40] = 0
    once = stored(hp_platform, values, min_elements=1)
    again = stored(hp_platform, once["exp_avg"], min_elements=1)
    np.testing.assert_array_equal(once["exp_avg"], again["exp_avg"])
    assert (once["exp_avg"].reshape(-1)[:40] == 0).all()


def test_steps_are_those_of_adamw_up_to_the_codes(hp_platform, weights):
    small = np.arange(5, dtype=np.float32)
    options = {"weight_decay": 0.1, "eps": 1e-6}
    ours = {name: parameter_of(hp_platform, x) for name, x in (("large", weights), ("small", small))}
    plain = {name: parameter_of(hp_platform, x) for name, x in (("large", weights), ("small", small))}
    eight_bit = built(hp_platform, "adamw_8bit", AdamW8bitConfig(**options), ours.items())
    adamw = built(hp_platform, "adamw", AdamWConfig(**options), plain.items())
    random = np.random.default_rng(5)
    for step in range(3):
        for name, x in ours.items():
            grad = hp_platform.from_numpy(random.standard_normal(tuple(x.shape)).astype(np.float32))
            hp_platform.set_grad(x, grad)
            hp_platform.set_grad(plain[name], grad)
        eight_bit.step(0.01)
        adamw.step(0.01)
        found, expected = (hp_platform.to_numpy(hp_platform.detach(x["large"])) for x in (ours, plain))
        # The first step computes with moments that no code has touched; later each step is of at most about 0.01.
        np.testing.assert_allclose(found, expected, atol=1e-6 if step == 0 else 2e-3)
    found, expected = (hp_platform.to_numpy(hp_platform.detach(x["small"])) for x in (ours, plain))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert eight_bit.num_steps == 3
    eight_bit.zero_grad()
    assert all(hp_platform.get_grad(x) is None for x in ours.values())


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit"])
def test_steps_are_counted_whatever_the_default_dtype_is(hp_platform, name):
    """In bfloat16 the number after 256 is 256 again."""
    if hp_platform.name != "torch":
        pytest.skip("this platform has no default dtype that a program sets")
    import torch

    found = []
    for dtype in (torch.float32, torch.bfloat16):
        x = parameter_of(hp_platform, np.ones(4))
        options = {"adamw": AdamWConfig, "adamw_8bit": AdamW8bitConfig}[name](betas=(0.9, 0.999))
        optimizer = built(hp_platform, name, options, [("x", x)])
        optimizer.num_steps = 256
        hp_platform.set_grad(x, hp_platform.from_numpy(np.ones(4, np.float32)))
        torch.set_default_dtype(dtype)
        try:
            optimizer.step(0.5)
        finally:
            torch.set_default_dtype(torch.float32)
        found.append(hp_platform.to_numpy(hp_platform.detach(x)).copy())
    np.testing.assert_array_equal(*found)


def test_a_weight_whose_memory_has_another_order_is_updated_alike(hp_platform, weights):
    if hp_platform.name != "torch":
        pytest.skip("a parameter of this platform has the order of its dimensions")
    straight = parameter_of(hp_platform, weights)
    turned = hp_platform.Parameter(hp_platform.from_numpy(weights.T.copy()).T)
    assert not turned.is_contiguous()
    for x in (straight, turned):
        optimizer = built(hp_platform, "adamw_8bit", AdamW8bitConfig(), [("x", x)])
        for _ in range(2):
            hp_platform.set_grad(x, hp_platform.from_numpy(weights[::-1].copy()))
            optimizer.step(0.01)
    np.testing.assert_array_equal(*(hp_platform.to_numpy(hp_platform.detach(x)) for x in (straight, turned)))


def test_half_precision_parameters_have_float32_moments(hp_platform, weights):
    half, single = hp_platform.dtype("bfloat16"), hp_platform.dtype("float32")
    values = {"large": weights, "small": weights[0, :5]}
    halves = {
        name: hp_platform.Parameter(hp_platform.ops.cast(hp_platform.from_numpy(x), half)) for name, x in values.items()
    }
    singles = {
        name: hp_platform.Parameter(hp_platform.ops.cast(hp_platform.detach(x), single)) for name, x in halves.items()
    }
    low, high = (built(hp_platform, "adamw_8bit", AdamW8bitConfig(), x.items()) for x in (halves, singles))
    for name, x in halves.items():
        grad = hp_platform.ops.cast(hp_platform.from_numpy(values[name][..., ::-1].copy()), half)
        hp_platform.set_grad(x, grad)
        hp_platform.set_grad(singles[name], hp_platform.ops.cast(grad, single))
    low.step(0.01)
    high.step(0.01)
    for name, x in halves.items():
        for slot, expected in high.state()[name].items():
            assert low.state()[name][slot].dtype == single
            np.testing.assert_array_equal(hp_platform.to_numpy(low.state()[name][slot]), hp_platform.to_numpy(expected))
        rounded = hp_platform.ops.cast(hp_platform.detach(singles[name]), half)
        found = (hp_platform.to_numpy(hp_platform.ops.cast(y, single)) for y in (hp_platform.detach(x), rounded))
        np.testing.assert_array_equal(*found)


def test_moments_of_half_precision_shards_say_that_they_are_float32(hp_platform, weights):
    def rank():
        mesh = init_device_mesh("cpu", (2,), platform=hp_platform)
        half = hp_platform.ops.cast(hp_platform.from_numpy(weights), hp_platform.dtype("bfloat16"))
        optimizer = built(hp_platform, "adamw_8bit", AdamW8bitConfig(), [("x", distribute_tensor(half, mesh))])
        single = hp_platform.dtype("float32")
        return [(x.dtype == single, x.spec.dtype == single) for x in optimizer.state()["x"].values()]

    assert run_ranks(rank, 2, hp_platform) == [[(True, True)] * 2] * 2


@pytest.mark.parametrize("signed", [True, False])
def test_the_table_finds_the_codes_of_a_binary_search(signed):
    values = dynamic_values(signed=signed)
    bounds = (values[:-1] + values[1:]) / 2
    random = np.random.default_rng(0)
    x = (random.standard_normal(100_000) * 10.0 ** random.uniform(-9, 0, 100_000)).astype(np.float32)
    near = [f(y, np.float32(s)) for y in (bounds, values) for f, s in ((np.nextafter, 2), (np.nextafter, -2))]
    x = np.concatenate([x, bounds, values, *near, np.float32([0.0, -0.0, 1, -1])])
    np.testing.assert_array_equal(CodeSearch(bounds).find(x), np.searchsorted(bounds, x))


def test_large_parameters_take_two_bytes_an_element_and_a_scale_a_block(hp_platform):
    parameters = [
        ("large", parameter_of(hp_platform, np.zeros((64, 512)))),
        ("small", parameter_of(hp_platform, np.zeros(9))),
    ]
    eight_bit = built(hp_platform, "adamw_8bit", AdamW8bitConfig(), parameters)
    blocks = 64 * 512 // 256
    assert state_bytes(eight_bit, hp_platform) == 2 * (64 * 512 + 4 * blocks) + 2 * 4 * 9
    planned = AdamW8bitConfig().state_bytes
    assert planned("large", (64, 512), 64 * 512, 4) + planned("small", (9,), 9, 4) == state_bytes(
        eight_bit, hp_platform
    )
    adamw = built(hp_platform, "adamw", AdamWConfig(), parameters)
    assert state_bytes(adamw, hp_platform) == 2 * 4 * (64 * 512 + 9)
    retained = [x for slots in eight_bit._state["large"].values() for x in (slots.codes, slots.scales)]
    held = sum(np.prod(tuple(x.shape)) * hp_platform.itemsize(x.dtype) for x in retained)
    assert held == 2 * (64 * 512 + 4 * blocks)


@pytest.mark.usefixtures("torch_suffices")  # it needs nothing of a platform
def test_plain_adamw_goes_on_from_it_and_it_from_plain_adamw(lab: Lab):
    plain = lab.reference("plain")
    eight_bit = lab.run("eight", optimizer=EIGHT_BIT)
    # Honest: the losses of a tiny model over six steps; the README has a longer comparison.
    np.testing.assert_allclose(losses(eight_bit), losses(plain), rtol=2e-3)
    for name, run, settings in (("a", plain, {"optimizer": EIGHT_BIT}), ("b", eight_bit, {})):
        moved = lab.resume(lab.interrupted_copy(run, name), {"dp_shard": 2}, 2, **settings)
        np.testing.assert_allclose(losses(moved), losses(plain), rtol=2e-3)
        assert tensors(moved, ("optimizer.",)).keys() == tensors(plain, ("optimizer.",)).keys()


@pytest.mark.usefixtures("torch_suffices")
def test_shards_of_whole_rows_have_the_codes_of_one_rank(lab: Lab):
    full = lab.resume(lab.interrupted_copy(lab.run("full", optimizer=EIGHT_BIT), "again"), optimizer=EIGHT_BIT)
    parts = lab.run("parts", {"dp_shard": 2}, 2, optimizer=EIGHT_BIT)
    np.testing.assert_allclose(losses(parts), losses(full), rtol=1e-4)
    for name, value in tensors(full, ("optimizer.embed", "optimizer.head")).items():
        found = tensors(parts, (name,))[name]
        # A rounding of float32 may turn to the next code, seldom.
        assert (np.abs(found - value) <= 1e-5 * np.abs(value).max()).mean() > 0.97


def test_states_saved_in_half_precision_are_taken_up_as_float32_and_others_refused(hp_platform, weights, tmp_path):
    """Earlier versions saved the moments of bfloat16 parameters in bfloat16."""
    half = hp_platform.dtype("bfloat16")

    def started():
        with nn.building(hp_platform):
            model = nn.Module()
            rounded = hp_platform.ops.cast(hp_platform.from_numpy(weights), half)
            model.x = hp_platform.Parameter(rounded, requires_grad=True)
        return model, built(hp_platform, "adamw_8bit", AdamW8bitConfig(), hp_platform.named_parameters(model))

    def saved(name, dtypes):
        model, optimizer = started()
        parts = []
        for part in state_parts(hp_platform, model, optimizer):
            (box, _), dtype = part.boxes[0], dtypes.get(part.name, part.dtype)
            values = hp_platform.ops.cast(hp_platform.from_numpy(np.abs(weights)), hp_platform.dtype(dtype))
            parts.append(dataclasses.replace(part, dtype=dtype, boxes=[(box, hp_platform.to_numpy(values))]))
        storage = LocalStorage(tmp_path / name)
        return Checkpoint(storage, save_checkpoint(storage, parts, step=1, model={}, state={}))

    slots = ("optimizer.x.exp_avg", "optimizer.x.exp_avg_sq")
    model, optimizer = started()
    load_state(hp_platform, model, optimizer, saved("old", dict.fromkeys(slots, "bfloat16")))
    expected = stored(hp_platform, bfloat16_of(hp_platform, np.abs(weights)))
    for slot, value in optimizer.state()["x"].items():
        np.testing.assert_array_equal(hp_platform.to_numpy(value), expected[slot])
    found = hp_platform.ops.cast(hp_platform.detach(model.x), hp_platform.dtype("float32"))
    np.testing.assert_array_equal(hp_platform.to_numpy(found), bfloat16_of(hp_platform, np.abs(weights)))
    for name, dtype in (("model.x", "float32"), ("model.x", "float16"), (slots[0], "int32")):
        with pytest.raises(CheckpointError, match=f"{name}: expected .*float.*, got {dtype}"):
            load_state(hp_platform, *started(), saved(f"{name}{dtype}", {name: dtype}))


def test_a_snapshot_for_recovery_restores_weights_and_codes(hp_platform, weights):
    """Five rows of bfloat16 on two ranks: shards are uneven, and dtypes of different widths are in one snapshot."""

    def program(rank):
        platform, mesh = hp_platform, init_device_mesh("cpu", (2,), platform=hp_platform)

        def sharded(values):
            half = platform.ops.cast(platform.from_numpy(values[:5]), platform.dtype("bfloat16"))
            return distribute_tensor(half, mesh, (Shard(0),))

        with nn.building(platform):
            model = nn.Module()
            model.x = platform.Parameter(sharded(weights))
        optimizer = built(platform, "adamw_8bit", AdamW8bitConfig(), platform.named_parameters(model))
        setup = SimpleNamespace(platform=platform, model=model, optimizer=optimizer, average=None)

        def step(values):
            platform.set_grad(model.x, sharded(values))
            optimizer.step(0.1)
            return {
                name: np.array(platform.to_numpy(local_of(platform, x)))
                for name, x in named_state(platform, model, optimizer)
            }

        before = step(weights + rank)
        snapshot = Snapshot.take(setup, 1, {"step": 1}, lambda size: np.empty(size, np.uint8))
        after = step(weights**2)
        assert all((after[name] != value).any() for name, value in before.items())
        assert snapshot.restore(setup) == {"step": 1}
        for name, x in named_state(platform, model, optimizer):
            np.testing.assert_array_equal(platform.to_numpy(local_of(platform, x)), before[name], err_msg=name)
        return {name: value.shape for name, value in before.items()}

    names = ("model.x", "optimizer.x.exp_avg", "optimizer.x.exp_avg_sq")
    expected = [dict.fromkeys(names, (rows, 700)) for rows in (3, 2)]
    assert run_ranks(lambda: program(current_world(hp_platform).rank), 2, hp_platform) == expected


def bfloat16_of(platform, values):
    rounded = platform.ops.cast(platform.from_numpy(values), platform.dtype("bfloat16"))
    return platform.to_numpy(platform.ops.cast(rounded, platform.dtype("float32")))
