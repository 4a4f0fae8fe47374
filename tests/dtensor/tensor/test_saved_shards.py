"""`reshard_after_forward` saves the shard of a gathered input: the same gradients, fewer bytes, one more gather."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from hp_dtensor import (
    ColwiseParallel,
    DeviceMesh,
    PrepareModuleInput,
    Replicate,
    RowwiseParallel,
    Shard,
    distribute_tensor,
    parallelize_module,
    record_collectives,
)
from hp_dtensor.parallel import nn
from hp_dtensor.parallel.offload import ActivationOffload
from hp_dtensor.parallel.recompute import checkpoint
from hp_dtensor.testing import run_ranks

WIDTH, HIDDEN, BATCH, LENGTH = 8, 16, 3, 6
GATHERED = BATCH * LENGTH * WIDTH * 4


class ThreeProducts(nn.Module):
    """One input of three products with different weights, as queries, keys and values have; then one by rows."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, HIDDEN, bias=True), nn.Linear(WIDTH, HIDDEN)
        self.third, self.out = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        for seed, (_, weight) in enumerate(self.platform.named_parameters(self)):
            values = np.random.default_rng(seed).standard_normal(tuple(weight.shape)).astype(np.float32)
            with self.platform.no_grad():
                self.platform.copy_(weight, self.platform.from_numpy(values))

    def forward(self, x):
        ops = self.ops
        return self.out(ops.add(ops.mul(self.first(x), self.second(x)), self.third(x)))


def parallel_model(platform, reshards):
    with nn.building(platform):
        model = ThreeProducts()
    mesh = DeviceMesh("cpu", (2,), mesh_dim_names=("tp",), platform=platform)
    columns = ColwiseParallel(use_local_output=False)
    gather = PrepareModuleInput(
        input_layouts=Shard(1), desired_input_layouts=Replicate(), reshard_after_forward=reshards
    )
    plan = {"": gather, "first": columns, "second": columns, "third": columns}
    plan["out"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
    x = np.random.default_rng(9).standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    x = distribute_tensor(platform.from_numpy(x), mesh, [Shard(1)])
    platform.set_requires_grad(x, True)
    return parallelize_module(model, mesh, plan), x


def gradients(platform, model, x):
    named = [("x", x), *platform.named_parameters(model)]
    return {name: platform.to_numpy(platform.unwrap(platform.get_grad(each))).copy() for name, each in named}


def one_step(platform, reshards, call=lambda platform, model, x: model(x)):
    """Return the gradients of a step and its all-gathers in backward."""
    model, x = parallel_model(platform, reshards)
    # A norm before it, as in a decoder: the shard is no leaf.
    y = call(platform, model, platform.ops.mul(x, 2.0))
    with record_collectives() as log:
        platform.backward(platform.ops.sum(platform.ops.square(y)).full_tensor())
    return gradients(platform, model, x), log.count("all_gather")


def skip_without_hooks(platform):
    if not platform.recomputes_on_unpack:
        pytest.skip(f"{platform.name} has no hooks on saved tensors")


def offloaded(platform, model, x):
    offload = ActivationOffload(platform, smallest=1)
    return offload.staying(lambda x: x, offload(model, x))


CALLS = {
    "plain": lambda platform, model, x: model(x),
    "offloaded": offloaded,
    "checkpointed": lambda platform, model, x: checkpoint(model, x, platform=platform),
}


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_same_and_one_gather_serves_all_products(name, hp_platform):
    skip_without_hooks(hp_platform)

    def program():
        return [one_step(hp_platform, reshards, CALLS[name]) for reshards in (False, True)]

    for (expected, before), (found, after) in run_ranks(program, 2, hp_platform):
        # A recomputation gathers anyway, so nothing is resharded within it.
        assert after == before + (name != "checkpointed")
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def recorded(saved):
    """Return a call under hooks that add each saved tensor's shape and memory to `saved`, and keep a copy."""

    def call(platform, model, x):
        def pack(tensor):
            saved.append((tuple(tensor.shape), tensor.untyped_storage().nbytes()))
            return tensor.clone()

        with platform.saving(pack, lambda copy: copy):
            return model(x)

    return call


def test_the_hooks_of_the_program_get_what_is_saved(hp_platform):
    """Also those of torch's non-reentrant checkpoint and `save_on_cpu`, which free the memory that they get."""
    torch = pytest.importorskip("torch")
    if hp_platform.name != "torch":
        pytest.skip(f"{hp_platform.name} cannot tell whether there are hooks")

    def on_cpu(platform, model, x):
        with torch.autograd.graph.save_on_cpu():
            return model(x)

    def recomputed(platform, model, x):
        return torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)

    def program():
        saved = [], []
        steps = [one_step(hp_platform, reshards, recorded(saved[reshards])) for reshards in (False, True)]
        for call in (on_cpu, recomputed):
            steps += [one_step(hp_platform, reshards, call) for reshards in (False, True)]
        return saved, steps

    for (without, resharding), steps in run_ranks(program, 2, hp_platform):
        assert resharding == without
        assert sum(nbytes == GATHERED for _, nbytes in without) >= 3  # the input of each product
        gathers = [count for _, count in steps]
        assert gathers[0::2] == gathers[1::2]
        assert gathers[4] == gathers[2] + 1  # the recomputation's
        for (expected, _), (found, _) in zip(steps[:1] * 6, steps, strict=True):
            for key, value in expected.items():
                np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_a_graph_that_is_retained_gathers_in_each_backward(hp_platform):
    skip_without_hooks(hp_platform)

    def program():
        model, x = parallel_model(hp_platform, True)
        loss = hp_platform.ops.sum(hp_platform.ops.square(model(hp_platform.ops.mul(x, 2.0)))).full_tensor()
        found, counts = [], []
        for is_last in (False, True):
            with record_collectives() as log:
                hp_platform.backward(loss, retain_graph=not is_last)
            found.append(gradients(hp_platform, model, x))
            counts.append(log.count("all_gather"))
        return found, counts

    for (once, twice), counts in run_ranks(program, 2, hp_platform):
        assert counts[0] == counts[1]
        for key, value in once.items():
            np.testing.assert_array_equal(twice[key], 2 * value, err_msg=key)


def test_the_first_part_of_a_split_backward_gathers_nothing_again(hp_platform):
    skip_without_hooks(hp_platform)
    if not hp_platform.splits_backward:
        pytest.skip(f"{hp_platform.name} runs both parts at once")

    def split(reshards):
        model, x = parallel_model(hp_platform, reshards)
        y = hp_platform.unwrap(model(x))
        with record_collectives() as first:
            (of_x,), finish = hp_platform.split_backward([y], [hp_platform.ops.ones_like(y)], [x])
        with record_collectives() as second:
            finish()
        hp_platform.set_grad(x, of_x)
        return gradients(hp_platform, model, x), first.count("all_gather"), second.count("all_gather")

    for without, resharding in run_ranks(lambda: [split(False), split(True)], 2, hp_platform):
        assert resharding[1:] == (without[1], without[2] + 1)
        for key, value in without[0].items():
            np.testing.assert_array_equal(resharding[0][key], value, err_msg=key)


def test_a_write_to_the_gathered_tensor_is_seen_and_one_to_the_shard_is_refused(hp_platform):
    skip_without_hooks(hp_platform)
    if hp_platform.name != "torch":
        pytest.skip("counts of writes are torch's")

    def program():
        model, x = parallel_model(hp_platform, True)
        shard = x * 2.0
        y = model(shard).sum().full_tensor()
        shard.add_(1.0)
        with pytest.raises(RuntimeError, match="modified in place"):
            hp_platform.backward(y)
        found = []
        for reshards in (False, True):
            model, x = parallel_model(hp_platform, reshards)
            # Before the products, after the gather.
            hp_platform.add_forward_pre_hook(model, lambda m, args, kwargs: ((args[0].mul_(3.0),), kwargs))
            hp_platform.backward(model(x * 2.0).square().sum().full_tensor())
            found.append(gradients(hp_platform, model, x))
        return found

    for expected, found in run_ranks(program, 2, hp_platform):
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)


@pytest.mark.parametrize("reshards", [False, True])
def test_a_write_to_a_weight_before_backward_is_refused(hp_platform, reshards):
    """torch does not check the versions of tensors that hooks have packed."""
    skip_without_hooks(hp_platform)
    if hp_platform.name != "torch":
        pytest.skip("counts of writes are torch's")

    def program():
        model, x = parallel_model(hp_platform, reshards)
        y = model(x).sum().full_tensor()
        with hp_platform.no_grad():
            model.first.weight.mul_(2.0)
        with pytest.raises(RuntimeError, match=r"in ?place"):
            hp_platform.backward(y)

    run_ranks(program, 2, hp_platform)


def test_second_derivatives(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("MindSpore's backward is not recorded")
    import torch

    def program():
        found = []
        for reshards in (False, True):
            model, x = parallel_model(hp_platform, reshards)
            loss = model(x * 2.0).square().sum().full_tensor()
            (of_x,) = torch.autograd.grad(loss, [x], create_graph=True)
            of_x.square().sum().backward()
            found.append(gradients(hp_platform, model, x))
        return found

    for expected, found in run_ranks(program, 2, hp_platform):
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-5, err_msg=key)


def test_fewer_bytes_are_alive_between_forward_and_backward(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("the bytes are counted on torch")
    from hp_platform_torch.trainer.counted_step import counted_bytes

    def saved(reshards):
        model, x = parallel_model(hp_platform, reshards)
        hp_platform.backward(model(x * 2.0).sum().full_tensor())
        with counted_bytes() as live:
            y = model(x * 2.0).sum().full_tensor()
            # Simulated ranks hold the buffers of collectives in circles.
            x.device_mesh.world.all.barrier()
            gc.collect()
            x.device_mesh.world.all.barrier()
            alive = live.now
            hp_platform.backward(y)
        return alive

    for gathered, shard in run_ranks(lambda: (saved(False), saved(True)), 2, hp_platform):
        assert gathered - shard == GATHERED - GATHERED // 2
