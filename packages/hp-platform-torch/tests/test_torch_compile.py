"""Compiled functions and modules on DTensors give what they give without compilation."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_dtensor import DeviceMesh, DTensor, Replicate, Shard, distribute_tensor, get_platform
from hp_dtensor.exceptions import ShardingRuleError
from hp_dtensor.testing import run_ranks

Tensor = torch.Tensor
ROWS = torch.linspace(-2, 2, 20).reshape(5, 4)
WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4)


def _mesh(ranks: int = 2) -> DeviceMesh:
    return DeviceMesh("cpu", (ranks,), platform=get_platform("torch"))


def _scores(x: Tensor, weight: Tensor) -> Tensor:
    scaled = F.gelu(x * 2 + 1) @ weight.t()
    return scaled.sin().softmax(-1) + scaled.shape[0]


def _compiled(function: Any, backend: str) -> list[Tensor]:
    x = distribute_tensor(ROWS, _mesh(), [Shard(0)]).requires_grad_()
    weight = distribute_tensor(WEIGHT, _mesh(), [Replicate()]).requires_grad_()
    compiled = torch.compile(function, backend=backend)
    results = [compiled(x, weight) for _ in range(2)]
    assert all(isinstance(result, DTensor) for result in results)
    for result in results:
        (result**2).sum().backward()
    return [*(result.full_tensor().detach() for result in results), x.grad.full_tensor(), weight.grad.full_tensor()]


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_function(backend: str) -> None:
    x, weight = ROWS.clone().requires_grad_(), WEIGHT.clone().requires_grad_()
    expected = _scores(x, weight)
    (2 * expected**2).sum().backward()
    for found in run_ranks(_compiled, 2, "torch", _scores, backend):
        torch.testing.assert_close(found, [expected.detach(), expected.detach(), x.grad, weight.grad])


def _rows(x: Tensor) -> Tensor:
    return x.softmax(-1) * x.shape[0]


def _compiled_on_the_first_rank(compiled: Any) -> list[int] | None:
    mesh = _mesh()
    x = distribute_tensor(ROWS, mesh, [Shard(0)], src_data_rank=None)
    if mesh.world.rank:
        return None
    y = (compiled or torch.compile(_rows, backend="eager"))(x)
    torch.testing.assert_close(y.to_local(), _rows(ROWS)[: len(y.to_local())])
    return list(y.shape)


@pytest.mark.parametrize("where", ["here", "on the rank"])
def test_every_thread_leaves_dtensors_out(where: str) -> None:
    """dynamo's settings are per thread, and every simulated rank has a thread of its own."""
    torch.compiler.reset()
    for _ in range(2):
        compiled = torch.compile(_rows, backend="eager") if where == "here" else None
        assert run_ranks(_compiled_on_the_first_rank, 2, "torch", compiled) == [[5, 4], None]


_IMPORTED_BEFORE = """
from torch import compile
import sys, torch
from hp_dtensor import DeviceMesh, Shard, distribute_tensor, get_platform
from hp_dtensor.testing import run_ranks

platform = get_platform("torch")
assert "torch._dynamo" not in sys.modules
rows = torch.linspace(-2, 2, 20).reshape(5, 4)
compiled = compile(lambda x: x.softmax(-1) * x.shape[0], backend="eager")


def on_ranks():
    return compiled(distribute_tensor(rows, DeviceMesh("cpu", (2,)), [Shard(0)])).full_tensor()


torch.testing.assert_close(run_ranks(on_ranks, 2, platform), [rows.softmax(-1) * 5] * 2)
"""


def test_compile_may_be_imported_before_the_platform() -> None:
    subprocess.run([sys.executable, "-c", _IMPORTED_BEFORE], check=True)


def _module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.ReLU(), torch.nn.LayerNorm(6), torch.nn.Linear(6, 3))


def _trained() -> list[Tensor]:
    model, mesh = _module(), _mesh()
    for module in model:
        for name, parameter in list(module.named_parameters(recurse=False)):
            placement = Shard(0) if parameter.dim() > 1 else Replicate()
            setattr(module, name, torch.nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
    model.compile(backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(distribute_tensor(ROWS, mesh, [Shard(0)])) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().full_tensor() for parameter in model.parameters()]


def test_a_module_in_training() -> None:
    model = copy.deepcopy(_module())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        (model(ROWS) ** 2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    for found in run_ranks(_trained, 2, "torch"):
        torch.testing.assert_close(found, [parameter.detach() for parameter in model.parameters()])


_OPTIMIZERS = {
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adam, foreach": lambda parameters: torch.optim.Adam(parameters, lr=0.1, foreach=True),
    "AdamW, tensor lr": lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.1)),
    "AdamW, fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
}


def _stepped(kind: str, how: str, distributed: bool) -> tuple[int, list[Tensor]]:
    """Return the number of graphs made of an optimizer's steps, and the full weights after them."""
    graphs, mesh = [], _mesh()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def placed(x: Tensor) -> Tensor:
        return distribute_tensor(x, mesh, [Shard(0)]) if distributed else x.clone()

    parameters = [torch.nn.Parameter(placed(ROWS * scale)) for scale in (1, 2)]
    optimizer = _OPTIMIZERS[kind](parameters)
    step = optimizer.step if how != "a function that calls it" else lambda: optimizer.step()
    optimizer_step = step if how == "eager" else torch.compile(step, backend=backend)
    for number in range(4):
        sum((x * placed(ROWS + number)).sum() for x in parameters).backward()
        optimizer_step()
        optimizer.zero_grad()
    return len(graphs), [x.detach().full_tensor() if distributed else x.detach() for x in parameters]


@pytest.mark.parametrize("kind", _OPTIMIZERS)
def test_steps_of_an_optimizer(kind: str) -> None:
    """Those of plain parameters are compiled, before and after those of DTensors."""
    torch.compiler.reset()
    ((_, expected),) = run_ranks(_stepped, 2, "torch", kind, "eager", False)[:1]
    for how in ("the method", "a function that calls it"):
        for _, found in run_ranks(_stepped, 2, "torch", kind, how, True):
            torch.testing.assert_close(found, expected)
    torch.compiler.reset()
    plain = run_ranks(_stepped, 2, "torch", kind, "the method", False)
    assert plain[0][0] or plain[1][0] or "fused" in kind  # dynamo never compiles fused steps
    torch.testing.assert_close([found for _, found in plain], [expected, expected])


def _plain_and_distributed() -> int:
    """Graphs made of a function that gets plain tensors, then DTensors, then plain ones."""
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(_scores, backend=backend)
    expected = _scores(ROWS, WEIGHT)
    torch.testing.assert_close(compiled(ROWS, WEIGHT), expected)
    x, weight = (distribute_tensor(full, _mesh(1), [Shard(0)]) for full in (ROWS, WEIGHT))
    torch.testing.assert_close(compiled(x, weight).full_tensor(), expected)
    torch.testing.assert_close(compiled(ROWS, WEIGHT), expected)
    return len(graphs)


def test_plain_tensors_are_compiled_as_ever() -> None:
    torch.compiler.reset()
    assert run_ranks(_plain_and_distributed, 1, "torch") == [1]


def _traced() -> str:
    x = distribute_tensor(ROWS, _mesh(), [Shard(0)])
    with pytest.raises(ShardingRuleError, match=r"to_dlpack of TensorSpec.* would export this rank's shard"):
        torch.utils.dlpack.to_dlpack(x)
    with pytest.raises(torch.jit.TracingCheckError, match=r"a function made by torch\.jit\.script with TensorSpec"):
        torch.jit.trace(torch.sin, (x,))
    with pytest.raises(ShardingRuleError, match="has no sharding rule"):
        torch.export.export(torch.nn.ReLU(), (x,)).module()(x)
    traced = torch.jit.trace(torch.sin, (x,), check_trace=False)
    with pytest.raises(ShardingRuleError, match=r"a function made by torch\.jit\.script") as refusal:
        traced(x)
    return str(refusal.value)


def test_a_trace_is_refused_by_its_check_or_at_its_first_call() -> None:
    for message in run_ranks(_traced, 2, "torch"):
        assert "this rank's shard alone" in message
    assert torch.equal(torch.jit.trace(torch.sin, (ROWS,))(ROWS), ROWS.sin())
