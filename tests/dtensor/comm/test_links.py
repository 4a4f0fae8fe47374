"""Links that are measured: equal on every rank, one value per axis that has several ranks."""

from hp_dtensor import init_device_mesh, measure_links
from hp_dtensor.testing import run_ranks


def test_measured_links_are_equal_on_all_ranks(hp_platform):
    def program():
        mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
        return measure_links(mesh, num_bytes=2**16, repeats=2)

    found = run_ranks(program, 4, hp_platform)
    assert len(set(found)) == 1
    for values in (dict(found[0].latency), dict(found[0].bandwidth)):
        assert values.keys() == {"a", "b"}
        assert min(values.values()) > 0
