"""The current mesh, groups by torch's names, and meshes and specs that are sent between processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from hp_dtensor import (
    DeviceMesh,
    RaggedShard,
    Replicate,
    Shard,
    TensorSpec,
    destroy_process_group,
    distribute_tensor,
    fake_world,
    get_backend,
    get_current_mesh,
    get_group_local_rank,
    get_process_group_ranks,
    init_device_mesh,
    init_process_group,
    ones,
    split_group,
)
from hp_dtensor.comm.process_group import record_collectives
from hp_dtensor.exceptions import CollectiveError, LaunchError, MeshError
from hp_dtensor.platform.interface import Platform
from hp_dtensor.testing import run_ranks
from hp_dtensor.testing.rule_proof import Operations


def _mesh(platform: Platform, *shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", shape, mesh_dim_names=("dp", "tp")[: len(shape)], platform=platform)


def _made_in_blocks(platform: Platform) -> list[str]:
    outer, x = _mesh(platform, 2, 2), platform.from_numpy(np.arange(12, dtype=np.float32).reshape(4, 3))
    with outer:
        first = ones(4, 3, placements=(Shard(0), Replicate()))
        with outer["tp"]:
            second = distribute_tensor(x, placements=(Shard(0),))
        assert get_current_mesh() is outer
        third = distribute_tensor(x)
    with pytest.raises(MeshError, match=r"no current one; pass device_mesh=, or use `with mesh:`"):
        get_current_mesh()
    return [made.spec.describe_placements() for made in (first, second, third)]


def test_factories_use_the_innermost_mesh(hp_platform: Platform) -> None:
    expected = ["(dp:S(0), tp:R)", "(tp:S(0))", "(dp:R, tp:R)"]
    assert run_ranks(_made_in_blocks, 4, hp_platform, hp_platform) == [expected] * 4


def test_a_mesh_takes_its_platform_by_name(hp_platform: Platform) -> None:
    def program() -> Platform:
        return DeviceMesh("cpu", [0, 1], platform=hp_platform.name).platform

    assert run_ranks(program, 2, hp_platform) == [hp_platform] * 2


def test_an_error_ends_the_block(hp_platform: Platform) -> None:
    with pytest.raises(KeyError), _mesh(hp_platform, 1):
        raise KeyError
    with pytest.raises(MeshError):
        get_current_mesh()


def _groups(platform: Platform) -> tuple:
    mesh = _mesh(platform, 2, 2)
    groups = mesh.get_all_groups()
    world = mesh.world
    part = split_group(world.all, [[3, 1], [0]])
    facts = (
        [get_process_group_ranks(group) for group in groups],
        None if part is None else (get_process_group_ranks(part), get_group_local_rank(part)),
        get_backend(groups[0]),
    )
    one_axis = DeviceMesh.from_group(groups[1], "cpu", mesh_dim_names=("tp",))
    assert one_axis.get_group() is groups[1]
    assert (one_axis.size(), one_axis.get_local_rank()) == (2, mesh.get_local_rank("tp"))
    both = DeviceMesh.from_group(groups, "cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert (both, both.get_all_groups()) == (mesh, groups)
    for wrong, message in (
        ((groups[::-1], "cpu", [[0, 1], [2, 3]]), "the groups of rank"),
        ((groups, "cpu"), "needs mesh: all ranks"),
        (([0, 1], "cpu"), "takes a ProcessGroup, or one per axis"),
    ):
        with pytest.raises(MeshError, match=message):
            DeviceMesh.from_group(*wrong)
    destroy_process_group(groups[0])
    assert mesh.get_group("dp") is not groups[0]
    return facts


def test_groups_by_torchs_names(hp_platform: Platform) -> None:
    assert run_ranks(_groups, 4, hp_platform, hp_platform) == [
        ([[0, 2], [0, 1]], ([0], 0), "simulated"),
        ([[1, 3], [0, 1]], ([3, 1], 1), "simulated"),
        ([[0, 2], [2, 3]], None, "simulated"),
        ([[1, 3], [2, 3]], ([3, 1], 0), "simulated"),
    ]


def test_parts_of_a_group_are_checked(hp_platform: Platform) -> None:
    def split() -> str:
        with pytest.raises(CollectiveError) as refusal:
            split_group(_mesh(hp_platform, 2).get_group(), [[0, 2], [0], []])
        return str(refusal.value)

    assert run_ranks(split, 2, hp_platform)[1] == (
        "split_group into [[0, 2], [0], []]: expected at least one subgroup, and none empty; "
        "ranks [2] are outside the parent group of 2; ranks [0] appear more than once"
    )


def test_joining_a_job_needs_a_meeting_point(hp_platform: Platform) -> None:
    with pytest.raises(LaunchError, match=r"tcp://host:port"):
        init_process_group(rank=0, world_size=2, platform=hp_platform)
    with pytest.raises(LaunchError, match=r"got 'tcp://localhost:1', rank=None"):
        init_process_group(init_method="tcp://localhost:1", platform=hp_platform)


def _pickled(platform: Platform) -> bool:
    mesh = _mesh(platform, 2, 2)
    mesh.flatten("all")
    spec = TensorSpec(mesh["tp"], (RaggedShard(0, (3, 1)),), (4, 2), platform.dtype("float32"))
    again, full = pickle.loads(pickle.dumps((spec, mesh)))
    assert (full == mesh, full["all"].size()) == (True, 4)
    return again is spec


def test_specs_and_meshes_come_back_from_pickle(hp_platform: Platform) -> None:
    """A spec that comes back is the very same object, as equal specs always are."""
    assert run_ranks(_pickled, 4, hp_platform, hp_platform) == [True] * 4


def test_a_mesh_is_not_read_in_a_world_of_another_size() -> None:
    with fake_world(8, rank=3):
        data = pickle.dumps(DeviceMesh("cpu", (2, 4), mesh_dim_names=("dp", "tp")))
        assert pickle.loads(data).get_coordinate() == (0, 3)
    with fake_world(4), pytest.raises(MeshError, match="a world of 8 ranks was read in a world of 4"):
        pickle.loads(data)


def test_meshes_of_one_rank_alone_are_equal(hp_platform: Platform) -> None:
    first, second = (init_device_mesh("cpu", (1,), mesh_dim_names=("dp",), platform=hp_platform) for _ in range(2))
    assert first == second


LOGITS = np.linspace(-2.0, 2.0, 20, dtype=np.float32).reshape(4, 5) ** 2
TARGETS = np.array([0, 4, 2, 3])
INSIDE = (1, 2)

CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **{
        f"cross entropy {reduction}": lambda ops, x, t, reduction=reduction: ops.cross_entropy(
            x, t, reduction=reduction
        )
        for reduction in ("mean", "sum", "none")
    },
    "log_softmax": lambda ops, x, t: ops.log_softmax(x, 1),
    "cumsum": lambda ops, x, t: ops.cumsum(x, 1),
    "roll": lambda ops, x, t: ops.roll(x, 2, 1),
    "flip": lambda ops, x, t: ops.flip(x, (0, 1)),
    "a slice": lambda ops, x, t: x[1:, 1:4],
    "a sum": lambda ops, x, t: ops.sum(x, 1),
}


def _called(platform: Platform, placements: Sequence[Any], name: str) -> tuple[Any, int, Any, Any]:
    """Placements, collectives, local shape, and inside the full result."""
    mesh = DeviceMesh("cpu", (2,), ranks=INSIDE, platform=platform)
    x = distribute_tensor(platform.from_numpy(LOGITS), mesh, placements)
    targets = distribute_tensor(platform.from_numpy(TARGETS), mesh, (Replicate(),))
    with record_collectives() as log:
        result = CALLS[name](Operations(platform), x, targets)
    full = platform.to_numpy(result.full_tensor()) if mesh.get_coordinate() is not None else None
    return result.placements, log.count(), platform.local_shape(platform.unwrap(result)), full


@pytest.mark.parametrize("placement", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_outside_makes_the_same_call(hp_platform: Platform, name: str, placement: Any) -> None:
    plain = CALLS[name](Operations(hp_platform), hp_platform.from_numpy(LOGITS), hp_platform.from_numpy(TARGETS))
    results = run_ranks(_called, 3, hp_platform, hp_platform, (placement,), name)
    assert len({placements for placements, *_ in results}) == 1
    assert results[0][1] == 0
    assert set(results[0][2]) <= {0}
    for rank in INSIDE:
        np.testing.assert_allclose(results[rank][3], hp_platform.to_numpy(plain), rtol=1e-5, atol=1e-6)
