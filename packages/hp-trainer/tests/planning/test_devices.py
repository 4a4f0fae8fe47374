"""Known devices, and device files with measurements in place of rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hp_trainer.exceptions import PlanError
from hp_trainer.launch.examination import _BLOCKS
from hp_trainer.planning.devices import MeasuredBlock, find_device, known_devices

RATE, COPY, LEAST = 500e12, 2e12, 4e-6
SHAPES = [(512, 1024, 1024), (4096, 4096, 4096), (8192, 8192, 8192)]
LATENCY, BANDWIDTH = 2e-5, 100e9


def product(rows: int, inputs: int, outputs: int) -> str:
    elements = rows * (inputs + outputs) + inputs * outputs
    seconds = LEAST + 2 * rows * inputs * outputs / RATE + 2 * elements / COPY
    return f"{{dtype: bfloat16, rows: {rows}, inputs: {inputs}, outputs: {outputs}, seconds: {seconds!r}}}"


def collective(size: int, nodes: int = 1, more: str = "", name: str = "all_gather") -> str:
    seconds = nodes * (LATENCY + size / BANDWIDTH)
    return f"{{collective: {name}, ranks: 8, nodes: {nodes}, bytes: {size}, seconds: {seconds!r}{more}}}"


def write(path: Path, products: list[str], collectives: list[str], more: str = "") -> str:
    lines = [
        "format: 2",
        "memory: 1GiB",
        f"memory_bandwidth: {COPY}",
        "products:",
        *(f"  - {each}" for each in products),
    ]
    lines += ["collectives:", *(f"  - {each}" for each in collectives), more]
    path.write_text("\n".join(lines))
    return str(path)


def test_measured_products_and_collectives_give_the_rates(tmp_path: Path) -> None:
    large = collective(
        2**28, more=f", product_seconds: 1.0e-2, both_seconds: {1e-2 + 0.25 * (LATENCY + 2**28 / 1e11)!r}"
    )
    collectives = [collective(2**20), collective(2**24), large, collective(2**20, 2), collective(2**24, 2)]
    device = find_device(write(tmp_path / "mine.yaml", [product(*each) for each in SHAPES], collectives))
    assert device.name == "mine"
    assert device.flops["bfloat16"] * device.efficiency == pytest.approx(RATE)
    assert device.operation_seconds == pytest.approx(LEAST)
    assert device.inner_latency == pytest.approx(LATENCY)
    assert device.inner_bandwidth * device.link_efficiency == pytest.approx(BANDWIDTH)
    assert device.outer_latency == pytest.approx(2 * LATENCY)
    assert device.outer_bandwidth == pytest.approx(BANDWIDTH / 2)
    assert device.hidden == {"weights": pytest.approx(0.75)}


def test_large_collectives_determine_what_computation_hides(tmp_path: Path) -> None:
    def hidden(of_small: float) -> dict[str, float]:
        small, large = 2e-5 + 2**16 / 1e11, 2e-5 + 2**28 / 1e11
        collectives = [
            collective(2**16, more=f", product_seconds: 1.0e-2, both_seconds: {1e-2 + (1 - of_small) * small!r}"),
            collective(2**28, more=f", product_seconds: 1.0e-2, both_seconds: {1e-2 + 0.75 * large!r}"),
        ]
        return find_device(write(tmp_path / "mine.yaml", [product(*SHAPES[0])], collectives)).hidden

    # The times of a small one are mostly noise, in which it may even seem to take longer beside a computation.
    assert [hidden(each) for each in (1.0, 0.25, -2.0)] == [{"weights": pytest.approx(0.25, abs=0.03)}] * 3


def test_measured_blocks_give_the_rates_of_each_kind_of_work(tmp_path: Path) -> None:
    rates = {"products": 9e10, "attention": 5e10, "saved": 1e9, "operations": 1e5}

    def measured(dtype: str, sizes: tuple[int, int, int], factor: float) -> dict[str, Any]:
        given = {"dtype": dtype, **dict(zip(("hidden_size", "batch", "length"), sizes, strict=True))}
        work = MeasuredBlock(**given, seconds=1.0).work
        of_dtype = rates | {name: factor * rates[name] for name in ("products", "attention")}
        seconds = sum(getattr(work, name) / rate for name, rate in of_dtype.items())
        return given | {"seconds": seconds + (work.operands + work.loss) / COPY}

    # One block of the other dtype gives its rate, as cheap operations take as long in both.
    blocks = [measured("float32", each, 1.0) for each in _BLOCKS] + [measured("bfloat16", _BLOCKS[-1], 4.0)]
    path = tmp_path / "mine.yaml"
    links = {"inner_bandwidth": 1e9, "outer_bandwidth": 1e9}
    path.write_text(yaml.safe_dump({"format": 2, "memory": 1e9, "memory_bandwidth": COPY, **links, "blocks": blocks}))
    device = find_device(str(path))
    products = rates["products"]
    assert device.flops == {"float32": pytest.approx(products), "bfloat16": pytest.approx(4 * products)}
    assert device.attention_efficiency == pytest.approx(5 / 9)
    assert device.traffic == pytest.approx(COPY / rates["saved"])
    assert device.operation_seconds == pytest.approx(1 / rates["operations"])


BLOCK = {"dtype": "float32", "hidden_size": 128, "batch": 4, "length": 256, "seconds": 1.0}
RATES = {"format": 2, "memory": 1e9, "memory_bandwidth": 1e9, "inner_bandwidth": 1e9, "outer_bandwidth": 1e9}


def test_blocks_of_each_dtype_give_a_rate_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"

    def rates(*blocks: dict[str, object]) -> dict[str, float]:
        path.write_text(yaml.safe_dump({**RATES, "blocks": list(blocks)}))
        return find_device(str(path)).flops

    half = {**BLOCK, "dtype": "bfloat16", "seconds": 0.25}
    assert rates(BLOCK, half)["float32"] == rates(BLOCK)["float32"]
    assert rates(half, BLOCK)["bfloat16"] == rates(half)["bfloat16"]
    assert rates(half)["bfloat16"] > 2 * rates(BLOCK)["float32"]
    assert rates(BLOCK, half)["bfloat16"] > 2 * rates(BLOCK)["float32"]


@pytest.mark.parametrize(
    ("changed", "printed"),
    [
        ({"dtype": "float8"}, "blocks.0.dtype: Input should be"),
        ({"hidden_size": 100}, "blocks.0.hidden_size: Input should be a multiple of 64"),
        ({"length": 10**160}, "blocks.0.length: Input should be less than"),
        ({"batch": True}, "blocks.0.batch: expected a number above 0, got True"),
        ({"seconds": 1e-300}, "blocks.0.seconds: Input should be greater than or equal to"),
        ({"heads": 2}, "blocks.0.heads: Unexpected keyword argument"),
    ],
)
def test_bad_blocks_are_named(tmp_path: Path, changed: dict[str, object], printed: str) -> None:
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump({**RATES, "blocks": [BLOCK | changed]}))
    with pytest.raises(PlanError) as error:
        find_device(str(tmp_path / "mine.yaml"))
    assert printed in str(error.value)


@pytest.mark.parametrize("given", [{}, {"format": 1}, {"format": 3}])
def test_measurements_of_another_format_are_refused(tmp_path: Path, given: dict[str, int]) -> None:
    path = tmp_path / "old.yaml"
    without = {name: value for name, value in RATES.items() if name != "format"}
    path.write_text(yaml.safe_dump({**without, **given, "blocks": [BLOCK]}))
    with pytest.raises(PlanError) as error:
        find_device(str(path))
    number = given.get("format", 1)
    assert f"device file {path}: expected measurements of format 2, got format {number}" in str(error.value)
    assert f"hp-train doctor --to {path}" in str(error.value)
    # Rates alone have the same meaning in all formats.
    path.write_text(yaml.safe_dump({**without, "flops": {"float32": 1e12}}))
    assert find_device(str(path)).flops == {"float32": 1e12}


def test_blocks_that_take_less_time_than_copies_of_their_operands_give_rates(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    block = BLOCK | {"seconds": 1e-2}
    given = {
        "format": 2,
        "memory": 1e9,
        "memory_bandwidth": 1e9,
        "inner_bandwidth": 1e9,
        "outer_bandwidth": 1e9,
        "blocks": [block],
    }
    path.write_text(yaml.safe_dump(given))
    work = MeasuredBlock(**block).work
    assert (work.operands + work.loss) / 1e9 > block["seconds"]
    assert find_device(str(path)).flops == {"float32": pytest.approx(work.products / (block["seconds"] / 2))}


def test_groups_of_two_sizes_give_the_time_of_a_hop(tmp_path: Path) -> None:
    measured = [
        {"collective": "all_gather", "ranks": ranks, "bytes": size, "seconds": 1e-3 + 5e-4 * (ranks - 2) + size / 1e9}
        for ranks in (2, 4)
        for size in (2**16, 2**20, 2**24)
    ]
    path = tmp_path / "mine.yaml"
    path.write_text(
        yaml.safe_dump(
            {"format": 2, "memory": 1e9, "memory_bandwidth": 1e9, "flops": {"float32": 1e9}, "collectives": measured}
        )
    )
    device = find_device(str(path))
    assert (device.inner_latency, device.hop_seconds) == (pytest.approx(1e-3), pytest.approx(5e-4))
    assert device.link("all_gather", 1, 8)[0] == pytest.approx(4e-3)


def test_one_node_and_one_size_are_enough(tmp_path: Path) -> None:
    device = find_device(write(tmp_path / "mine.yaml", [product(*SHAPES[-1])], [collective(2**24)]))
    assert device.flops["bfloat16"] == pytest.approx(RATE, rel=0.02)
    assert device.outer_bandwidth == device.inner_bandwidth == pytest.approx(BANDWIDTH, rel=0.15)


def test_stated_fields_go_before_measurements(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", [product(*SHAPES[-1])], [collective(2**24)], "inner_bandwidth: 1.0e9")
    assert find_device(path).inner_bandwidth == 1e9


@pytest.mark.parametrize(
    ("products", "collectives", "printed"),
    [
        (["{dtype: bfloat16, rows: 8}"], [], "products.0.inputs: Field required"),
        (["{dtype: int4, rows: 8, inputs: 8, outputs: 8, seconds: 1.0}"], [], "products.0.dtype: Input should be"),
        ([], ["{collective: gossip, ranks: 2, bytes: 8, seconds: 1.0}"], "collectives.0.collective: Input should be"),
        ([], ["{collective: send, ranks: 1, bytes: 8, seconds: 1.0}"], "collectives.0.ranks: Input should be"),
    ],
)
def test_bad_measurements_are_named(tmp_path: Path, products: list[str], collectives: list[str], printed: str) -> None:
    (tmp_path / "mine.yaml").write_text(
        "format: 2\nmemory: 1GiB\nmemory_bandwidth: 1.0e12\nflops: {float32: 1.0e12}\n"
        f"products: [{', '.join(products)}]\ncollectives: [{', '.join(collectives)}]\n"
    )
    with pytest.raises(PlanError) as error:
        find_device(str(tmp_path / "mine.yaml"))
    assert printed in str(error.value)


def test_known_devices_are_read_once_and_found_in_any_case() -> None:
    assert set(known_devices()) == {"H100", "H100-96GB", "H200", "H800", "A100", "910B"}
    assert find_device("h800") is find_device("H800")


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("[" * 5000, "is not YAML: nested more than 50 levels deep"),
        ("memory: " + "{a: " * 5000, "is not YAML: nested more than 50 levels deep"),
        ("- " * 5000, "is not YAML: nested more than 50 levels deep"),
        # Aliases that stand for 2^40 values.
        ("[&a0 [0]" + "".join(f", &a{i + 1} [*a{i}, *a{i}]" for i in range(40)) + "]", "expected the fields"),
    ],
)
def test_deeply_nested_files_are_refused_quickly(tmp_path: Path, text: str, printed: str) -> None:
    (tmp_path / "mine.yaml").write_text(text)
    with pytest.raises(PlanError, match=printed):
        find_device(str(tmp_path / "mine.yaml"))
