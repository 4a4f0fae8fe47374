"""`pipeline` splits a module by names: its stages train as the full module, and what is no chain is refused."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from hp_dtensor import init_device_mesh, nn
from hp_dtensor.tensor.init import Normal, init_parameters
from hp_dtensor.testing import run_ranks
from hp_trainer.exceptions import PipelineError
from hp_trainer.pipeline import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    SplitPoint,
    build_stage,
    pipeline,
)

WIDTH, MICROBATCHES, RANKS = 4, 2, 2


class Block(nn.Module):
    """Hands on two tensors, of which the second is an input of all blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH)

    def forward(self, x, shift):
        return self.ops.add(self.ops.add(x, shift), self.down(self.ops.silu(self.up(x)))), shift


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, *, shift):
        return self.embed(x), shift


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, inputs, *, also, scaled):
        return self.ops.mul(self.head(self.ops.add(inputs["x"], also)), 0.5 if scaled else 1.0)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block() for _ in range(4)])

    def forward(self, x, shift):
        for layer in self.layers:
            x, shift = layer(x, shift)
        return x, shift


class Model(nn.Module):
    """A chain of nested submodules, the last of which gets a tensor twice; `between` computes something else."""

    def __init__(self, between=None) -> None:
        super().__init__()
        self.first, self.inner, self.last, self.between = First(), Inner(), Last(), between

    def forward(self, x, shift):
        y = self.first(x, shift=shift)
        y, _ = self.inner(*y) if self.between is None else self.between(self, *y)
        return {"logits": self.last({"x": y, "name": None}, also=y, scaled=True)}


def built(platform, cls=Model, *args):
    with nn.building(platform):
        model = cls(*args)
    init_parameters(model, lambda name, shape: Normal(0.5), seed=3)
    return model


def batch(platform, step, rows=4):
    random = np.random.default_rng(step)
    return [platform.from_numpy(random.standard_normal((rows, n)).astype(np.float32)) for n in (WIDTH, WIDTH, 3)]


def loss_of(platform):
    return lambda output, target: platform.ops.mean(platform.ops.square(platform.ops.sub(output["logits"], target)))


def trained(platform, module, step):
    results = []
    for number in range(3):
        results.append(step(*batch(platform, number)))
        with platform.no_grad():
            for _, p in platform.named_parameters(module):
                platform.copy_(p, platform.ops.sub(p, platform.ops.mul(platform.get_grad(p), 0.5)))
                platform.set_grad(p, None)
    weights = {name: platform.to_numpy(platform.detach(p)).copy() for name, p in platform.named_parameters(module)}
    return results, weights


def one_device(platform):
    model = built(platform)

    def step(x, shift, target):
        output = model(x, shift)
        platform.backward(loss_of(platform)(output, target))
        return platform.to_numpy(platform.detach(output["logits"])).copy()

    with platform.enable_grad():
        return trained(platform, model, step)


def on_ranks(platform, schedule_cls, spec, by_function):
    mesh = init_device_mesh("cpu", (RANKS,), ("pp",), platform=platform)
    x, shift, _ = batch(platform, 9, rows=2)
    pipe = pipeline(built(platform), (x,), {"shift": shift}, split_spec=spec)
    mine = range(mesh.get_rank(), pipe.num_stages, RANKS)
    if by_function:
        stages = [build_stage(pipe.get_stage_module(i), i, pipe.info(), "cpu", mesh["pp"]) for i in mine]
    else:
        stages = [pipe.build_stage(i, "cpu", mesh["pp"]) for i in mine]
    schedule = schedule_cls(stages[0] if len(stages) == 1 else stages, MICROBATCHES, loss_of(platform))
    with nn.building(platform):
        own = nn.ModuleList([stage.submod for stage in stages])

    def step(x, shift, target):
        given = {"args": (x,), "kwargs": {"shift": shift}} if 0 in mine else {"args": (), "kwargs": {}}
        output = schedule.step(*given["args"], target=target, **given["kwargs"])
        return None if output is None else platform.to_numpy(output["logits"]).copy()

    with platform.enable_grad():
        return trained(platform, own, step)


@pytest.mark.parametrize(
    ("cls", "spec", "by_function"),
    [
        (ScheduleGPipe, {"inner.layers.1": SplitPoint.END}, False),
        (ScheduleGPipe, {"inner": SplitPoint.BEGINNING}, True),
        (
            ScheduleInterleaved1F1B,
            {"inner": SplitPoint.END, "inner.layers.0": SplitPoint.BEGINNING, "inner.layers.3": SplitPoint.BEGINNING},
            False,
        ),
    ],
)
def test_stages_train_as_the_full_module(hp_platform, cls, spec, by_function):
    expected, weights = one_device(hp_platform)
    found = run_ranks(on_ranks, RANKS, hp_platform, hp_platform, cls, spec, by_function)
    for output, wanted in zip(found[-1][0], expected, strict=True):
        np.testing.assert_allclose(output, wanted, rtol=1e-5, atol=1e-6)
    # Each name is that in the full module, behind the number of the stage.
    named = {name.partition(".")[2]: weight for _, own in found for name, weight in own.items()}
    assert named.keys() == weights.keys()
    for name, weight in weights.items():
        np.testing.assert_allclose(named[name], weight, rtol=1e-5, atol=1e-6, err_msg=name)


def written(model, x, shift):
    model.platform.copy_(x, model.ops.add(x, 1.0))
    return model.inner(x, shift)


class WithParameter(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scale = self.parameter((1,))


class Shared(Model):
    def __init__(self) -> None:
        super().__init__()
        self.inner.layers[3].up.weight = self.inner.layers[0].up.weight


END = {"inner.layers.1": SplitPoint.END}


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (
            (Model, lambda m, x, s: m.inner(m.ops.mul(x, 2.0), s)),
            {},
            "inner.layers.0 gets a tensor that is not of the output of",
        ),
        (
            (Model, lambda m, x, s: (m.ops.add(x, m.inner(x, s)[0]), s)),
            {},
            "last gets a tensor that is not of the output of",
        ),
        ((Model, written), {}, "inner.layers.0 gets the output of first after it was written in place"),
        ((Model, lambda m, x, s: m.inner(*m.inner(x, s))), {}, "inner.layers.0 is called twice"),
        (
            (Model, lambda m, x, s: (x, m.inner(x, s))),
            {},
            "last gets a tensor that is not of the output of inner.layers.3",
        ),
        ((Model, lambda m, x, s: (m.first.embed(x), s)), {}, "first.embed gets|forward does not call 'inner.layers.1'"),
        (
            (Model, lambda m, x, s: (m.inner(x, s)[0].shape[0], s)),
            {},
            "last gets int 4, which may depend on the example",
        ),
        ((WithParameter,), {}, "scale is in no stage; move it into a submodule"),
        ((Shared,), {}, "inner.layers.0.up.weight is in 2 stages; .* TiedWeights"),
        ((Model,), {"split_spec": None}, "expected names of submodules, such as .*; calls of pipe_split"),
        ((Model,), {"split_policy": print}, "nothing is traced here; give split_spec"),
        ((Model,), {"split_spec": {"inner.layer.1": SplitPoint.END}}, "no submodule 'inner.layer.1'; did you mean"),
        ((Model,), {"split_spec": {"inner": 1}}, r"split_spec\['inner'\]: expected SplitPoint.BEGINNING or"),
        ((Model,), {"split_spec": {"first": SplitPoint.BEGINNING}}, "there is no submodule before it"),
    ],
)
def test_modules_that_are_no_chain_are_refused(hp_platform, make, options, message):
    model = built(hp_platform, *make)
    x, shift, _ = batch(hp_platform, 0)
    with pytest.raises(PipelineError, match=message):
        pipeline(model, (x, shift), **{"split_spec": END, **options})
    # The hooks are gone: the module runs as before.
    if make == (Model,):
        assert model(x, shift) is not None


def test_a_tensor_that_occurs_twice_is_refused(hp_platform):
    """The stages could not know which of the two a submodule gets."""
    x, _, _ = batch(hp_platform, 0)
    with pytest.raises(
        PipelineError, match=r"first gets a tensor that occurs 2 times in the arguments.*give different"
    ):
        pipeline(built(hp_platform), (x, x), split_spec=END)


def test_divided_modules_with_hooks_are_refused(hp_platform):
    """The stages would not call them; those of a submodule that is kept are called."""
    model, (x, shift, _) = built(hp_platform), batch(hp_platform, 0)
    layer = hp_platform.add_forward_pre_hook(
        model.inner.layers[0], lambda _, args, kwargs: ((hp_platform.ops.mul(args[0], 3.0), args[1]), kwargs)
    )
    expected = hp_platform.to_numpy(hp_platform.detach(model(x, shift)["logits"]))
    pipe = pipeline(model, (x, shift), split_spec=END)
    found = pipe.get_stage_module(1)(*pipe.get_stage_module(0)(x, shift))["logits"]
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(found)), expected)
    layer.remove()
    for module, named in ((model, "the module"), (model.inner, "inner"), (model.inner.layers, "inner.layers")):
        for add in (hp_platform.add_forward_pre_hook, hp_platform.add_forward_hook):
            hook = add(module, lambda *_: None)
            with pytest.raises(PipelineError, match=f"{named} is divided into stages and has hooks"):
                pipeline(model, (x, shift), split_spec=END)
            hook.remove()


def test_stages_of_a_split_in_eval_mode_do_not_train(hp_platform):
    model, (x, shift, _) = built(hp_platform), batch(hp_platform, 0)
    model.training = False
    stage = pipeline(model, (x, shift), split_spec=END).get_stage_module(0)
    assert not stage.training
    assert len(stage(x, shift)) == 2
    stage.training = True
    with pytest.raises(PipelineError, match="expected eval mode, in which the module was split"):
        stage(x, shift)


def test_functions_that_return_their_argument_are_refused(hp_platform):
    """On torch the identity shows only in the call; elsewhere the docstring says that it is lost."""
    if hp_platform.name != "torch":
        pytest.skip("only functions of `ops` are watched there")
    from torch.nn import functional

    x, shift, _ = batch(hp_platform, 0)
    for between, name in [
        (lambda y: functional.dropout(y, 0.5, False), "torch.nn.functional.dropout"),
        (lambda y: y.float(), "torch.Tensor.float"),
        (lambda y: y.to(y.dtype), "torch.Tensor.to"),
    ]:
        model = built(hp_platform, Model, lambda m, y, s, between=between: m.inner(between(y), s))
        with pytest.raises(PipelineError, match=f"{name} is called on the output of first, and returns its argument"):
            pipeline(model, (x, shift), split_spec=END)


def test_the_first_stage_is_called_as_the_example(hp_platform):
    model = built(hp_platform)
    x, shift, _ = batch(hp_platform, 0)
    stage = pipeline(model, (x,), {"shift": shift}, split_spec=END).get_stage_module(0)
    assert len(stage(x, shift=shift)) == 2
    with pytest.raises(PipelineError, match="argument 'shift': expected a tensor, as in the example, got nothing"):
        stage(x, shift)


class Options(nn.Module):
    """Computes by its options, and returns `extra` too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.extra = nn.Linear(WIDTH, WIDTH), None

    def forward(self, x, mask, flag, name, parts):
        x = self.linear(x)
        if mask is not None:
            x = self.ops.mul(x, mask)
        x = self.ops.sub(x, self.ops.mul(parts["b"], 2.0))
        return {"x": x if flag and name == "plus" else self.ops.neg(x), "extra": self.extra}


class WithOptions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = Options(), Last(), nn.Linear(3, 2)

    def forward(self, x, mask=None, flag=True, name="plus", n=2, parts=None):
        y = self.a(x, mask, flag, name, parts)
        return self.c(self.b(y, also=y["x"], scaled=n > 1))


def test_only_tensors_may_differ_from_the_example(hp_platform):
    model = built(hp_platform, WithOptions)
    (x, y, _), (z, _, _) = batch(hp_platform, 0), batch(hp_platform, 1)
    parts = {"a": y, "b": z}
    options = {"mask": None, "flag": True, "name": "plus", "n": 2, "parts": parts}
    pipe = pipeline(model, (x,), options, split_spec={"c": SplitPoint.BEGINNING})
    first, last = pipe.get_stage_module(0), pipe.get_stage_module(1)

    # In another order, and with other tensors.
    options["parts"] = {"b": y, "a": x}
    found, expected = last(first(x, **options)), model(x, **options)
    np.testing.assert_array_equal(hp_platform.to_numpy(hp_platform.detach(found)), hp_platform.to_numpy(expected))
    for name, value in [("mask", x), ("flag", False), ("flag", 1), ("name", "minus"), ("n", 3), ("parts", None)]:
        with pytest.raises(PipelineError, match=f"argument '{name}.*as in the example, got "):
            first(x, **{**options, name: value})
    copied, wanted = (hp_platform.detach(each(x, **options)) for each in (copy.deepcopy(first), first))
    np.testing.assert_array_equal(hp_platform.to_numpy(copied), hp_platform.to_numpy(wanted))
    # Of a submodule, the next one would get None still.
    model.a.extra = x
    with pytest.raises(PipelineError, match=r"the output of a\['extra'\]: expected None, as in the example, got a ten"):
        first(x, **options)
