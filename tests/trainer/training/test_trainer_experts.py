"""The ways of tokens to experts, and hash routing, by hp-train's settings: the same losses in any of them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from training_runs import FOUR_RANKS, events, losses, newest, skip_unless_torch_or, tensors

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_moe import LoadMetrics, expert_placement, move_experts
from hp_moe.load_balance import moe_layers
from hp_trainer.config import AdamWConfig, LoadedConfig
from hp_trainer.evaluation import generate
from hp_trainer.exceptions import EvaluationError, ParallelDimsError
from hp_trainer.launch.preflight import check_settings
from hp_trainer.parallel import ParallelDims
from hp_trainer.plugins import hookimpl, registries
from hp_trainer.training import Trainer, expert_moves

CLOSE = {"rtol": 2e-5, "atol": 0}
SHORT = {"training__steps": 3, "checkpoint__interval": None}


@pytest.mark.parametrize(
    "settings",
    [
        {"ep_chunks": 3},
        {"ep_dispatcher": "copy_per_expert"},
        {"ep_copies": 1, "ep_chunks": 2},
        {"ep_dispatcher": "auto", "ep": 4, "tp": 1, "dp_shard": 4, "ep_node_size": 2},
        {"ep_dispatcher": "two_level", "ep": 4, "tp": 1, "dp_shard": 4, "ep_node_size": 2},
    ],
    ids=["chunks", "a copy per expert", "copies of experts", "auto", "nodes"],
)
def test_losses_are_those_of_one_rank(torch_or, lab, settings, capsys):
    torch_or("ep_copies" in settings)
    degrees = FOUR_RANKS["folded"] | settings
    plain, run = losses(lab.reference("plain", **SHORT)), lab.run("run", degrees, 4, **SHORT)
    np.testing.assert_allclose(losses(run), plain, **CLOSE)
    expected_message = capsys.readouterr().err.count("hp-train: tokens are dispatched by ")
    assert expected_message == ("auto" in settings.values()), "the cost model's choice is reported once, by rank 0"


@pytest.mark.usefixtures("torch_suffices")
def test_checkpoints_do_not_know_where_copies_are(lab):
    """A run with copies goes on without them, on one rank, as if there had been none."""
    degrees = FOUR_RANKS["folded"] | {"ep_copies": 2}
    plain = lab.reference("plain")
    run = lab.run("run", degrees, 4)
    assert {name: array.shape for name, array in tensors(run).items()} == {
        name: array.shape for name, array in tensors(plain).items()
    }
    for name, array in tensors(run).items():
        np.testing.assert_allclose(array, tensors(plain)[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.fixture
def moves(monkeypatch):
    """Notes where the experts of each layer live after every move."""
    noted = []

    def move(*arguments, **more):
        noted.append(move_experts(*arguments, **more, min_gain=0.0))
        return noted[-1]

    monkeypatch.setattr(expert_moves, "move_experts", move)
    return noted


def have_moved(moves):
    return any(placement != tuple(range(len(placement))) for layers in moves for placement in layers.values())


LAYOUTS = {**FOUR_RANKS, "pipeline": {"pp": 2, "dp_shard": 2, "ep": 2}}
MOVING = {"training__ema__decay": 0.9, "checkpoint__interval": 3, "parallel__ep_move_interval": 1}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_moves_of_experts_change_no_loss_and_no_checkpoint(lab, moves, layout):
    """Weights, states and averages move; checkpoints on the way have every expert under its own number."""
    skip_unless_torch_or(lab.platform, layout in ("hybrid", "pipeline"))
    settings = MOVING | {"training__steps": 4, "checkpoint__interval": 2}
    plain = lab.reference("plain", **settings)
    run = lab.run("run", LAYOUTS[layout], 4, **settings)
    assert have_moved(moves)
    np.testing.assert_allclose(losses(run), losses(plain), **CLOSE)
    names = ("model.", "optimizer.", "ema.")
    expected = tensors(plain, names)
    assert tensors(run, names).keys() == expected.keys()
    for name, array in tensors(run, names).items():
        np.testing.assert_allclose(array, expected[name], rtol=2e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("how", ["8-bit states, copies", "written in the background"])
def test_a_run_whose_experts_move_is_taken_up_in_the_middle(lab, moves, how):
    """On four ranks with moves, and on one without, the losses are those of a run that was never interrupted."""
    skip_unless_torch_or(lab.platform, how.startswith("8-bit"))
    more = {"checkpoint__background": True}
    if how.startswith("8-bit"):
        eight = {"name": "adamw_8bit", "min_elements": 16, "block_size": 8, "eps": 1e-5}
        more = {"parallel__ep_copies": 1} | {f"optimizer__{name}": value for name, value in eight.items()}
    # Two steps after the checkpoint: weights that the loaded state has updated show in the loss of the second.
    settings = MOVING | more | {"training__steps": 5}
    degrees = FOUR_RANKS["hybrid"]
    full_value = lab.run("full", degrees, 4, **settings)
    assert have_moved(moves)
    again = lab.resume(lab.interrupted_copy(full_value, "again"), degrees, 4, **settings)
    np.testing.assert_allclose(losses(again), losses(full_value), **CLOSE)
    alone = lab.resume(lab.interrupted_copy(full_value, "alone"), {}, 1, **settings)
    np.testing.assert_allclose(losses(alone), losses(full_value), **CLOSE)


class RowMeans:
    """An optimizer whose states are means of rows."""

    num_steps = 0

    def __init__(self, parameters, options, platform):
        self._state = {name: {"row": platform.zeros(tuple(x.shape)[:-1], x.dtype)} for name, x in parameters}

    def state(self):
        return self._state

    @hookimpl
    def hp_optimizers(registry):
        registry.add("row_means", RowMeans, options=AdamWConfig)


@pytest.fixture
def row_means(plugged):
    plugged(RowMeans)
    registries.cache_clear()
    yield
    registries.cache_clear()


def test_states_that_cannot_travel_are_refused(lab, row_means):
    with pytest.raises(LaunchError, match=r"parallel.ep_move_interval: row_means has states of layers.*experts.w"):
        lab.run("run", FOUR_RANKS["hybrid"], 4, **SHORT, parallel__ep_move_interval=1, optimizer__name="row_means")


def test_states_that_cannot_travel_are_refused_by_stages_without_experts_too(lab, row_means):
    """Else they would wait for the others, in their first step."""
    settings = SHORT | {"parallel__ep_move_interval": 1, "optimizer__name": "row_means"}
    run = lab.start("run", LAYOUTS["pipeline"], **settings)

    def rank():
        with pytest.raises(ParallelDimsError, match=r"1 problem\n.*row_means has states of layers.*experts.w"):
            Trainer(run, run.load_config().config, lab.platform)

    run_ranks(rank, 4, lab.platform)


def test_moves_hold_the_moments_of_one_layer(lab):
    """8-bit moments are float32 on their way: those of three layers are never there at once."""
    if lab.platform.name != "torch":
        pytest.skip("bytes are counted on torch")
    from hp_platform_torch.trainer.counted_step import counted_bytes

    eight = {"optimizer__name": "adamw_8bit", "optimizer__min_elements": 16, "optimizer__eps": 1e-5}

    def rank(run):
        trainer = Trainer(run, run.load_config().config, lab.platform)
        moves, setup = trainer._expert_moves, trainer.setup
        layers = moe_layers(setup.model)
        moves.after_step(1, {name: LoadMetrics.of([9, 9, 0, 0]) for name in layers})
        assert expert_placement(setup.model).keys() == layers.keys()
        with counted_bytes() as live:
            moves.reset()
        named = lab.platform.named_parameters(setup.model)
        experts = sum(math.prod(lab.platform.local_shape(p)) for name, p in named if ".experts." in name)
        return live.peak, 2 * 4 * experts / len(layers)

    peaks = {}
    for count in (1, 3):
        model = {"model__num_hidden_layers": count, "model__num_dense_layers": 0}
        run = lab.start(f"run{count}", {"ep": 2, "dp_shard": 2, "ep_move_interval": 1}, **SHORT, **model, **eight)
        ((peaks[count], moments), _) = run_ranks(rank, 2, lab.platform, run)
    # What stays of the two other layers is new codes, of about a quarter of their moments.
    assert peaks[1] > moments
    assert peaks[3] - peaks[1] < moments


@pytest.mark.usefixtures("torch_suffices")
def test_hash_routing_gives_the_same_losses_in_any_layout(lab):
    settings = SHORT | {"model__routing": "hash", "training__recompute": "full"}
    plain = lab.run("plain", **settings)
    run = lab.run("run", FOUR_RANKS["folded"], 4, **settings)
    np.testing.assert_allclose(losses(run), losses(plain), **CLOSE)
    by_score = lab.reference("by score", **SHORT)
    assert losses(run) != losses(by_score)
    assert all(step["metrics"]["expert_bytes_sent"] > 0 for step in events(run, "step"))


OVER_SEQUENCES = {"model__load_balance_coeff": None, "model__norm_topk_prob": False, "model__router_z_loss": 0.1}


@pytest.mark.parametrize("routing", ["sinkhorn", "expert_choice"])
@pytest.mark.parametrize(
    ("degrees", "settings"),
    [
        (FOUR_RANKS["folded"], {"training__recompute": "full"}),
        (FOUR_RANKS["experts sharded"], {}),
        ({"cp": 2, "tp": 2}, {"training__sequence_length": 15}),
        ({"cp": 2, "ep": 2, "expert_mesh": "peer"}, {}),
        ({"pp": 2, "dp_shard": 2}, {"training__micro_batch_size": 2}),
    ],
    ids=["folded", "etp", "cp, tp, uneven", "cp, peer", "pp, micro-batches"],
)
def test_routing_over_sequences_gives_the_same_losses_in_any_layout(torch_or, lab, routing, degrees, settings):
    torch_or("expert_mesh" in degrees and routing == "expert_choice")
    settings = SHORT | OVER_SEQUENCES | settings | {"model__routing": routing}
    one, run = lab.reference("one", **settings), lab.run("run", degrees, 4, **settings)
    np.testing.assert_allclose(losses(run), losses(one), **CLOSE)
    weights = tensors(run, ["model."])
    for name, value in tensors(one, ["model."]).items():
        np.testing.assert_allclose(weights[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


@pytest.mark.usefixtures("torch_suffices")
def test_a_model_that_is_not_causal_generates_nothing(lab):
    settings = SHORT | OVER_SEQUENCES | {"model__routing": "expert_choice", "training__steps": 1}
    run = lab.run("run", **settings)
    with pytest.raises(EvaluationError, match=r"model\.routing = expert_choice: expected a causal model"):
        generate(run.load_config().config, lab.platform, ["a"], newest(run))
    loaded = LoadedConfig(lab.config(**settings, generate__prompts="[a]"), {})
    (problem,) = check_settings(loaded, 1, registries())
    assert (problem.path, problem.hint) == ("generate.prompts", "generate.prompts=[]")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ep_dispatcher": "pigeon"}, "(?s)ep_dispatcher: unknown dispatcher.*all_to_all.*'pigeon'"),
        ({"ep_dispatcher": "all_gather", "ep_chunks": 2}, "ep_chunks: all_gather does not send tokens in chunks"),
        ({"ep_dispatcher": "two_level"}, "ep_node_size: two_level needs the ranks of a node"),
        ({"ep_dispatcher": "two_level", "ep_node_size": 3}, "ep_node_size: the 4 .* ranks must fill nodes"),
        ({"ep_dispatcher": "auto", "ep_copies": 1}, "ep_copies: auto does not support copies of experts"),
        ({"ep_dispatcher": "auto", "ep_move_interval": 1}, "ep_move_interval: auto does not support moving"),
        ({"ep_move_interval": 0}, "ep_move_interval: out of range"),
        ({"ep_node_size": 2}, "ep_node_size: is used by ep_dispatcher two_level"),
    ],
)
def test_ways_that_cannot_be_are_refused_by_field(fields, message):
    with pytest.raises(ParallelDimsError, match=message):
        ParallelDims(dp_shard=4, ep=4, world_size=4, expert_mesh="folded", **fields)


def test_a_pipeline_has_no_ids_to_choose_by():
    dims = ParallelDims(pp=2, world_size=2)
    model = type("Options", (), {"routing": "hash"})()
    with pytest.raises(ParallelDimsError, match="pp: routing = hash chooses experts by token ids"):
        dims.validate_against_model(model)


# Micro-batches are not those of one rank in a pipeline: its loss within one is left out there.
LOSSES = {
    "model__sequence_aux_loss": 0.3,
    "model__global_batch_aux_loss": 0.2,
    "model__router_z_loss": 0.1,
    "training__steps": 3,
    "checkpoint__interval": None,
}
NOISE = {"model__router_jitter": 0.3, "training__steps": 3, "checkpoint__interval": None}


@pytest.mark.parametrize(
    ("degrees", "size", "settings"),
    [
        ({"cp": 2}, 2, {"model__micro_batch_aux_loss": 0.2}),
        ({"cp": 2, "tp": 2}, 4, {"model__micro_batch_aux_loss": 0.2}),
        (FOUR_RANKS["experts sharded"], 4, {"model__micro_batch_aux_loss": 0.2}),
        ({"cp": 2, "ep": 2, "expert_mesh": "peer"}, 4, {"model__micro_batch_aux_loss": 0.2}),
        ({"pp": 2, "dp_shard": 2}, 4, {"training__micro_batch_size": 2}),
    ],
    ids=["cp", "cp, tp", "etp", "cp, peer", "pp"],
)
def test_auxiliary_losses_are_those_of_one_rank(torch_or, lab, degrees, size, settings):
    torch_or("pp" in degrees or "etp" in degrees)
    one = lab.reference("one", **LOSSES, **settings)
    run = lab.run("run", degrees, size, **LOSSES, **settings)
    np.testing.assert_allclose(losses(run), losses(one), rtol=2e-5)
    found, expected = (
        [{name: x for name, x in event["metrics"].items() if "aux_loss" in name} for event in events(each, "step")]
        for each in (run, one)
    )
    assert len(expected[0]) == len([name for name in {**LOSSES, **settings} if name.endswith("_loss")])
    for got, wanted in zip(found, expected, strict=True):
        assert got == pytest.approx(wanted, rel=1e-4)
    weights = tensors(run, ["model."])
    for name, value in tensors(one, ["model."]).items():
        np.testing.assert_allclose(weights[name], value, rtol=2e-3, atol=2e-5, err_msg=name)


def test_the_scale_of_float16_scales_auxiliary_losses_too(lab):
    runs = [
        lab.run(f"{scale}", **LOSSES, training__dtype="float16", training__loss_scaling__init_scale=scale)
        for scale in (1.0, 4096.0)
    ]
    norms = [[event["gradient_norm"] for event in events(run, "step")] for run in runs]
    np.testing.assert_allclose(norms[1], norms[0], rtol=2e-2)
    without = lab.run("without", training__dtype="float16", training__steps=1, checkpoint__interval=None)
    assert abs(events(without, "step")[0]["gradient_norm"] - norms[0][0]) > 0.1 * norms[0][0], "losses must matter"


def test_evaluations_see_no_noise_and_leave_that_of_training_alone(lab):
    never = lab.reference("never", **NOISE)
    often = lab.run("often", **NOISE, training__eval_interval=1, training__eval_batches=1)
    assert losses(often) == losses(never)


def test_a_step_that_is_computed_twice_has_the_same_noise(lab):
    plain, checked = lab.reference("plain", **NOISE), lab.run("checked", **NOISE, training__replay_interval=1)
    assert losses(checked) == losses(plain)
    first, second = tensors(plain), tensors(checked)
    assert all((first[name] == second[name]).all() for name in first)
