"""Parallel styles take the names and defaults of torch's, on every platform, and give single-device gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from small_model import loss_of, make_data, make_model, reference

from hp_dtensor import (
    ColwiseParallel,
    DeviceMesh,
    DTensor,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    distribute_tensor,
    get_platform,
    loss_parallel,
    parallelize_module,
    record_collectives,
)
from hp_dtensor.exceptions import MeshError, MixedOperandsError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks

# float32 sums of at most 7 products of order one, in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def _mesh(platform: Platform, ranks: int = 2) -> DeviceMesh:
    return DeviceMesh("cpu", (ranks,), mesh_dim_names=("tp",), platform=platform)


def _full(platform: Platform, x: Any) -> np.ndarray:
    return platform.to_numpy(x.full_tensor() if isinstance(x, DTensor) else x)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_plain_tensors_come_out_by_default_and_gradients_are_right(hp_platform: Platform, ranks: int) -> None:
    def program() -> dict[str, np.ndarray]:
        platform = hp_platform
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        with _mesh(platform, ranks):
            model = parallelize_module(make_model(platform), parallelize_plan=plan)
        x, weight = make_data(platform)
        hidden = model.up(x)
        assert not isinstance(hidden, DTensor)
        output = model(x)
        assert not isinstance(output, DTensor)
        platform.backward(loss_of(platform, output, weight))
        return {n: _full(platform, platform.get_grad(p)) for n, p in platform.named_parameters(model)}

    expected = reference(hp_platform)
    for grads in run_ranks(program, ranks, hp_platform):
        for name, grad in grads.items():
            np.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


def test_defaults_are_torchs() -> None:
    plain = [ColwiseParallel(), RowwiseParallel(), PrepareModuleOutput(output_layouts=(), desired_output_layouts=())]
    assert all(style.use_local_output for style in plain)
    assert not any(style.use_local_output for style in (SequenceParallel(), PrepareModuleInput()))


class Doubled(ParallelStyle):
    """A style as its users write them for torch: `_apply` with the functions of `distribute_module`."""

    def _apply(self, module: Any, device_mesh: DeviceMesh) -> Any:
        return distribute_module(module, device_mesh, None, self._prepare_input, self._prepare_output)

    @staticmethod
    def _prepare_input(module: Any, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        return distribute_tensor(inputs[0], mesh, [Replicate()])

    @staticmethod
    def _prepare_output(module: Any, output: Any, mesh: DeviceMesh) -> Any:
        return (output + output).to_local()


def test_a_style_overrides_apply_as_in_torch(hp_platform: Platform) -> None:
    def program() -> np.ndarray:
        model = parallelize_module(make_model(hp_platform), _mesh(hp_platform), {"up": Doubled()})
        return hp_platform.to_numpy(model.up(make_data(hp_platform)[0]))

    expected = hp_platform.to_numpy(make_model(hp_platform).up(make_data(hp_platform)[0])) * 2
    for output in run_ranks(program, 2, hp_platform):
        np.testing.assert_allclose(output, expected, **CLOSE)


def test_without_a_plan_nothing_is_changed(hp_platform: Platform) -> None:
    model = make_model(hp_platform)
    with pytest.warns(UserWarning, match="there is no parallelize_plan"):
        assert parallelize_module(model, _mesh(hp_platform, 1)) is model
    assert not any(isinstance(p, DTensor) for _, p in hp_platform.named_parameters(model))


def test_without_a_mesh_there_is_an_error(hp_platform: Platform) -> None:
    with pytest.raises(MeshError, match="no mesh was given and there is no current one"):
        parallelize_module(make_model(hp_platform), parallelize_plan=ColwiseParallel())


@pytest.mark.parametrize("source", [0, 1, None])
def test_parameters_come_from_the_source_rank(hp_platform: Platform, source: int | None) -> None:
    def program() -> tuple[np.ndarray, int]:
        mesh = _mesh(hp_platform)
        model = make_model(hp_platform, seed=mesh.get_local_rank())
        with record_collectives() as log:
            plan = {"up": ColwiseParallel(), "down": SequenceParallel()}
            parallelize_module(model, mesh, plan, src_data_rank=source)
        return hp_platform.to_numpy(hp_platform.unwrap(model.down.weight)), log.count("broadcast")

    own = [hp_platform.to_numpy(make_model(hp_platform, seed=rank).down.weight) for rank in (0, 1)]
    for rank, (weight, broadcasts) in enumerate(run_ranks(program, 2, hp_platform)):
        np.testing.assert_array_equal(weight, own[rank if source is None else source])
        assert broadcasts == (0 if source is None else 4)


def test_a_plain_tensor_beside_an_output_that_stays_distributed(hp_platform: Platform) -> None:
    def program() -> str:
        plan = {"up": ColwiseParallel(use_local_output=False)}
        model = parallelize_module(make_model(hp_platform), _mesh(hp_platform), plan)
        with pytest.raises(MixedOperandsError) as refusal:
            hp_platform.ops.mul(
                model.up(make_data(hp_platform)[0]), hp_platform.zeros((5, 7), hp_platform.dtype("float32"))
            )
        return str(refusal.value)

    assert all("use_local_output" in message for message in run_ranks(program, 2, hp_platform))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_parallel_takes_plain_targets(hp_platform: Platform, reduction: str) -> None:
    rng = np.random.default_rng(0)
    logits, targets = rng.uniform(-1, 1, (5, 7)).astype(np.float32), rng.integers(0, 7, 5)

    def loss(x: Any) -> Any:
        return hp_platform.ops.cross_entropy(x, hp_platform.from_numpy(targets), reduction=reduction)

    def program() -> tuple[np.ndarray, np.ndarray]:
        x = distribute_tensor(hp_platform.from_numpy(logits), _mesh(hp_platform), [Shard(1)])
        hp_platform.set_requires_grad(x, True)
        with pytest.raises(MixedOperandsError):
            loss(x)
        with loss_parallel(), record_collectives() as log:
            value = loss(x)
            hp_platform.backward(value)
        assert log.count("all_gather") == log.count("all_to_all") == 0
        return _full(hp_platform, value), _full(hp_platform, hp_platform.get_grad(x))

    full = hp_platform.from_numpy(logits)
    hp_platform.set_requires_grad(full, True)
    expected = loss(full)
    hp_platform.backward(expected)
    for value, grad in run_ranks(program, 2, hp_platform):
        np.testing.assert_allclose(value, hp_platform.to_numpy(expected), **CLOSE)
        np.testing.assert_allclose(grad, hp_platform.to_numpy(hp_platform.get_grad(full)), **CLOSE)


NAMES = [f"input_{letter}" for letter in "abcdefgh"]


def gathered_keyword_inputs() -> dict[str, list[float]]:
    """Return the inputs by keyword that a module gets; the ranks pass them in different orders."""
    platform = get_platform()
    mesh = _mesh(platform)

    class Keywords(platform.Module):
        def forward(self, **inputs: Any) -> dict[str, Any]:
            return inputs

        construct = forward

    style = PrepareModuleInput(
        input_kwarg_layouts=dict.fromkeys(NAMES, Shard(0)),
        desired_input_kwarg_layouts=dict.fromkeys(NAMES, Replicate()),
        use_local_output=True,
    )
    module, rank = parallelize_module(Keywords(), mesh, style), mesh.world.rank
    shards = {name: np.full((1,), 10.0 * index + rank, np.float32) for index, name in enumerate(NAMES)}
    names = reversed(NAMES) if rank else NAMES
    got = module(**{name: platform.from_numpy(shards[name]) for name in names})
    return {name: platform.to_numpy(x).tolist() for name, x in got.items()}


def test_inputs_by_keyword_are_gathered_in_one_order(torch_suffices: None, rank_pool: Any) -> None:
    """In processes, where sets of names have different orders."""
    expected = {name: [10.0 * index, 10.0 * index + 1] for index, name in enumerate(NAMES)}
    assert rank_pool(2).run(f"{__file__}:gathered_keyword_inputs") == [expected, expected]
