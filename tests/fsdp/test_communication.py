"""The example plugin: bytes on the wire, errors against their bounds, sums in float32, training."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import numpy
import pytest
from fsdp_training import AdamW, Case, build, full_grads, mesh_of, micro_loss, shard, train_reference

from hp_dtensor.comm.mesh import init_device_mesh
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import CapabilityError
from hp_dtensor.spec.placements import Shard
from hp_dtensor.testing.simulated import run_ranks
from hp_fsdp import Communication, FullyShardError, ShardPlacementResult, fully_shard
from hp_fsdp.plugins import communications, get_communication, plugin_manager

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "hp-fsdp-quantized" / "src"))

from hp_fsdp_quantized import Float8, Int8, QuantizedCommunication, plugin

NUMEL = 1000  # of a shard: three blocks of 256 and one of 232


@pytest.fixture
def registered():
    """Register the plugin without its entry point."""
    manager = plugin_manager()
    manager.register(plugin, name="quantized")
    communications.cache_clear()
    yield
    manager.unregister(plugin)
    communications.cache_clear()


def _codec(platform, name):
    if name == "fp8" and platform.name != "torch":
        pytest.skip("refused, see below")
    return Int8() if name == "int8" else Float8()


def _bound(name, values):
    """Return the largest error of one quantization per element, plus a little for float32 rounding."""
    padded = numpy.zeros(-(-values.size // 256) * 256)
    padded[: values.size] = abs(values)
    peaks = numpy.repeat(padded.reshape(-1, 256).max(1), 256)[: values.size]
    if name == "int8":
        return peaks / 254 * (1 + 1e-4)
    return numpy.maximum(abs(values) / 16, peaks / 448 / 1024) * (1 + 1e-4)


def _data(rank, size):
    """Return values over ten powers of two, different on every rank."""
    rng = numpy.random.default_rng(rank)
    return (rng.standard_normal(size) * 2.0 ** rng.integers(-10, 1, size)).astype(numpy.float32)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_a_gather_is_off_by_one_quantization_and_sends_a_byte_per_value(hp_platform, name, dtype):
    codec = _codec(hp_platform, name)

    def rank():
        group = current_world(hp_platform).all
        values = [_data(r, NUMEL) for r in range(3)]
        output = hp_platform.empty((3 * NUMEL,), hp_platform.dtype(dtype))
        with record_collectives() as log:
            shard_ = hp_platform.from_numpy(values[group.rank])
            QuantizedCommunication(hp_platform, codec).all_gather(output, shard_, group).wait()
        assert log.wire_bytes() == 2 * (1024 + 4 * 4)
        assert log.wire_bytes() < 0.261 * 2 * 4 * NUMEL
        return hp_platform.to_numpy(output).astype(numpy.float64)

    results = run_ranks(rank, 3, hp_platform)
    for found in results:
        numpy.testing.assert_array_equal(found, results[0])
        for r, part in enumerate(found.reshape(3, NUMEL)):
            exact = _data(r, NUMEL)
            rounding = abs(exact) * 2.0**-11 + 2.0**-25 if dtype == "float16" else 0
            assert (abs(part - exact) <= _bound(name, exact) + rounding).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
@pytest.mark.parametrize("what", ["reduce_scatter", "all_reduce"])
def test_a_reduction_is_off_by_one_quantization_per_rank(hp_platform, name, what):
    """And by one more of the sum in an all-reduce."""
    codec = _codec(hp_platform, name)
    exact = [_data(r, 3 * NUMEL).astype(numpy.float64) for r in range(3)]

    def rank():
        group = current_world(hp_platform).all
        quantized = QuantizedCommunication(hp_platform, codec)
        mine = hp_platform.from_numpy(exact[group.rank].astype(numpy.float32))
        with record_collectives() as log:
            if what == "all_reduce":
                quantized.all_reduce(mine, group).wait()
                return hp_platform.to_numpy(mine).astype(numpy.float64), log.wire_bytes()
            output = hp_platform.empty((NUMEL,), mine.dtype)
            quantized.reduce_scatter(output, mine, group).wait()
        return hp_platform.to_numpy(output).astype(numpy.float64), log.wire_bytes()

    results = run_ranks(rank, 3, hp_platform)
    total, bound = (
        sum(exact),
        numpy.concatenate([sum(_bound(name, x[i : i + NUMEL]) for x in exact) for i in (0, 1000, 2000)]),
    )
    if what == "reduce_scatter":
        found = numpy.concatenate([values for values, _ in results])
        assert {sent for _, sent in results} == {2 * (1024 + 16)}
    else:
        found = results[0][0]
        assert all((values == found).all() for values, _ in results)
        assert {sent for _, sent in results} == {2 * 2 * (1024 + 16)}
        back = numpy.concatenate(
            [_bound(name, abs(total[i : i + NUMEL]) + bound[i : i + NUMEL]) for i in (0, 1000, 2000)]
        )
        bound = bound + back
    assert (abs(found - total) <= bound + 1e-6 * abs(total)).all()
    assert abs(found - total).max() > 0


def test_sums_are_in_float32(hp_platform):
    """Integer multiples of 256, so exact; the sums are beyond what int8 and float16 hold."""
    size = 4

    def rank():
        group = current_world(hp_platform).all
        values = numpy.tile([127.0, group.rank + 1.0], size * 128).astype(numpy.float32) * 256
        output = hp_platform.empty((256,), hp_platform.dtype("float32"))
        quantized = QuantizedCommunication(hp_platform, Int8())
        quantized.reduce_scatter(output, hp_platform.from_numpy(values), group).wait()
        return hp_platform.to_numpy(output)

    for found in run_ranks(rank, size, hp_platform):
        numpy.testing.assert_array_equal(found, numpy.tile([4 * 127 * 256.0, 10 * 256.0], 128))


@pytest.mark.parametrize("bad", [numpy.inf, numpy.nan])
def test_a_value_that_is_not_finite_stays_so(hp_platform, bad):
    def rank():
        group = current_world(hp_platform).all
        values = numpy.ones(2 * NUMEL, numpy.float32)
        if group.rank:
            values[300] = bad
        output = hp_platform.empty((NUMEL,), hp_platform.dtype("float32"))
        QuantizedCommunication(hp_platform, Int8()).reduce_scatter(output, hp_platform.from_numpy(values), group).wait()
        return numpy.isfinite(hp_platform.to_numpy(output))

    first, second = run_ranks(rank, 2, hp_platform)
    assert not first[300]
    assert first[:256].all()
    assert second.all()


@pytest.mark.parametrize("sizes", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
def test_training_stays_close(hp_platform, registered, sizes):
    """Three steps: losses within 1.5 percent of those with exact communication, and not equal to them."""
    case = Case(sizes, num_blocks=1, policy={"param_dtype": "float16", "reduce_dtype": "float32"})

    def rank(communication):
        names = ("replicate", "shard")[-len(sizes) :]
        mesh = init_device_mesh(hp_platform.device_types[0], sizes, mesh_dim_names=names, platform=hp_platform)
        model = shard(build(hp_platform, case), mesh, case)
        if communication == "int8":
            model.set_communication("int8")
        step, losses = AdamW(hp_platform), []
        for index in range(3):
            with record_collectives() as log:
                loss = micro_loss(hp_platform, model, case, current_world(hp_platform).rank, index, 0)
                losses.append(float(hp_platform.to_numpy(loss)))
                hp_platform.backward(loss)
            step(model)
        return losses, {record.name for record in log.records}

    exact = run_ranks(rank, case.size, hp_platform, "default")
    close = run_ranks(rank, case.size, hp_platform, "int8")
    assert close[0][1] == {"all_gather", "all_to_all"}
    for (losses, _), (expected, _) in zip(close, exact, strict=True):
        numpy.testing.assert_allclose(losses, expected, rtol=1.5e-2)
        assert losses != expected


def test_parts_can_be_chosen_and_gradients_are_within_their_bound(hp_platform, registered):
    """Exact gathers, so that only the reduction differs: by at most 1/254 of the largest gradient, twice."""
    case = Case((2,), num_blocks=1)

    def rank(communication):
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        model = build(hp_platform, case)
        fully_shard(model, mesh, communication=communication(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        return {name: grad for name, grad in full_grads(hp_platform, model).items() if grad is not None}

    exact = run_ranks(rank, 2, hp_platform, Communication)[0]
    found = run_ranks(rank, 2, hp_platform, lambda p: QuantizedCommunication(p, Int8(), gather=False))[0]
    largest = max(abs(grad).max() for grad in exact.values())
    # Of either rank; the ranks' own gradients are at most this much larger than their mean here.
    assert max(abs(found[name] - exact[name]).max() for name in exact) <= 4 * largest / 254
    assert any((found[name] != exact[name]).any() for name in exact)


@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_parameters_gathered_lossily_are_kept_until_they_are_written(hp_platform, stage):
    if hp_platform.device_types[0] != "cpu":
        pytest.skip("the array of an accelerator's tensor is a copy")
    case = Case((2,), num_blocks=1)

    class Counted(QuantizedCommunication):
        gathers = 0

        def all_gather(self, output, shard, group):
            self.gathers += 1
            return super().all_gather(output, shard, group)

    def rank():
        mesh = init_device_mesh(hp_platform.device_types[0], (2,), mesh_dim_names=("shard",), platform=hp_platform)
        communication = Counted(hp_platform, Int8())
        model = build(hp_platform, case)
        fully_shard(model, mesh, zero_stage=stage, communication=communication)
        world = current_world(hp_platform)
        counts, losses = [], []
        for index in range(4):
            if index == 2 and world.rank == 1:
                memory = hp_platform.to_numpy(hp_platform.detach(hp_platform.unwrap(model.head.weight)))
                memory += 1  # what no framework counts
            losses.append(
                float(hp_platform.to_numpy(hp_platform.detach(micro_loss(hp_platform, model, case, 0, 0, 0))))
            )
            counts.append(communication.gathers)
        assert losses[0] == losses[1] != losses[2] == losses[3]
        return counts

    assert run_ranks(rank, 2, hp_platform) == [[1, 1, 2, 2]] * 2


def test_unknown_names_and_missing_capabilities_are_told(hp_platform, registered):
    mesh = init_device_mesh(hp_platform.device_types[0], (1,), mesh_dim_names=("shard",), platform=hp_platform)
    model = build(hp_platform, Case((1,), num_blocks=1))
    with pytest.raises(
        FullyShardError, match=r"no communication is called 'int4'; known: default, fp8, int8\. Did you"
    ):
        fully_shard(model, mesh, communication="int4")
    with pytest.raises(FullyShardError, match="expected a name or a Communication, got int"):
        fully_shard(model, mesh, communication=8)
    with pytest.raises(FullyShardError, match=r"'int8' is registered by .* and again by"):
        plugin.hp_fsdp_communication(communications())
    if hp_platform.name != "torch":
        with pytest.raises(CapabilityError, match=r"float8_e4m3fn; use Int8\(\)"):
            fully_shard(model, mesh, communication="fp8")


@pytest.mark.parametrize("block", [0, -3, 2.5, True, "256"])
def test_blocks_are_of_a_positive_number_of_values(hp_platform, block):
    with pytest.raises(FullyShardError, match=rf"block: expected a positive number of values, got {block!r}"):
        QuantizedCommunication(hp_platform, Int8(), block=block)


def test_a_codec_is_no_name(hp_platform):
    with pytest.raises(FullyShardError, match=r"codec: expected a Codec such as Int8\(\), got 'int8'"):
        QuantizedCommunication(hp_platform, "int8")


def test_a_name_that_makes_no_communication_is_told_with_its_plugin(hp_platform):
    communications.cache_clear()
    communications().add("odd", lambda platform: 3)
    try:
        with pytest.raises(FullyShardError, match=r"communication 'odd' of plugin '.*': expected .* got a int"):
            get_communication("odd", hp_platform)
    finally:
        communications.cache_clear()


# float32: sums of a few hundred products in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def assert_grads(platform, model, expected):
    for name, grad in full_grads(platform, model).items():
        if expected[name] is not None:
            numpy.testing.assert_allclose(grad, expected[name], **CLOSE, err_msg=name)


class Late(Communication):
    """Runs every collective in `wait`."""

    def all_gather(self, output, shard, group):
        return _AtWait(functools.partial(super().all_gather, output, shard, group))

    def reduce_scatter(self, output, gradients, group):
        return _AtWait(functools.partial(super().reduce_scatter, output, gradients, group))

    def all_reduce(self, shard, group):
        return _AtWait(functools.partial(super().all_reduce, shard, group))


class _AtWait:
    def __init__(self, collective):
        self.collective = collective

    def wait(self):
        collective, self.collective = self.collective, None
        if collective is not None:
            collective().wait()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_buffer_is_reused_while_a_collective_runs(hp_platform, stage):
    """pytorch#140044, #180900: the all-reduce of HSDP read a buffer that the next reduce-scatter wrote."""
    case = Case((2, 2), num_blocks=4, steps=1)
    expected = train_reference(case).grads

    def rank():
        model = build(hp_platform, case)
        mesh = mesh_of(hp_platform, 2, 2)
        for each in (*model.blocks, model):
            fully_shard(each, mesh, zero_stage=stage, communication=Late(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 4, hp_platform)


def test_a_mesh_for_one_parameter_goes_with_a_communication_of_ones_own(hp_platform):
    """torch refuses custom collectives if shard_placement_fn returns meshes."""
    case = Case((4,), num_blocks=1, steps=1)
    expected = train_reference(case).grads

    def rank():
        pairs = mesh_of(hp_platform, 2, 2)
        model = build(hp_platform, case)

        def choose(parameter):
            return ShardPlacementResult(Shard(0), pairs) if parameter.shape[0] == 11 else None

        fully_shard(model, pairs.flatten("all"), shard_placement_fn=choose, communication=Late(hp_platform))
        hp_platform.backward(micro_loss(hp_platform, model, case, current_world(hp_platform).rank, 0, 0))
        assert_grads(hp_platform, model, expected)

    run_ranks(rank, 4, hp_platform)
