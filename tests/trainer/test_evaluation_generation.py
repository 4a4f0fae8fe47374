"""A trained model writes text: the same for the same seed, after any prompt."""

from __future__ import annotations

import math
import shutil

import numpy as np
import pytest
from training_runs import FOUR_RANKS, Lab, newest, train_rank

from hp_dtensor.exceptions import LaunchError
from hp_dtensor.testing import run_ranks
from hp_trainer.config import GenerateConfig
from hp_trainer.evaluation import Sampler, generate, write_samples
from hp_trainer.exceptions import CheckpointError
from hp_trainer.run import RunFolder

DIGITS = "0123456789" * 400


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory, hp_platform):
    """A run on a text of digits, which a few steps teach to go on counting."""
    lab = Lab(tmp_path_factory.mktemp("generation"), hp_platform)
    lab.text.write_text(DIGITS)
    return lab.run("run", {}, 1, training__steps=40, optimizer__lr=2e-2, checkpoint__interval=None)


@pytest.fixture
def trained(lab, trained_once):
    """A copy of that run in the test's own folder."""
    lab.text.write_text(DIGITS)
    return RunFolder(shutil.copytree(trained_once.path, lab.folder / "run"))


def written(lab, run, prompts, **settings):
    config = lab.config({}, training__steps=40, **settings)
    return generate(config, lab.platform, prompts, newest(run))


def test_what_was_learnt_is_written(lab, trained):
    greedy = {"generate__temperature": 0, "generate__max_new_tokens": 20}
    window = lab.config().training.sequence_length
    long = "0123456789" * 10
    assert len(long) > window
    # One after the other, an empty prompt, more than the model is shown, and text that it has never seen.
    assert written(lab, trained, ["345", long], **greedy) == ["345" + "67890123456789012345", long + "0123456789" * 2]
    empty, foreign = written(lab, trained, ["", "naïve ☃ 012"], **greedy)
    assert empty.startswith("\n")
    assert len(empty) == 21
    assert foreign.startswith("naïve ☃ 012")
    assert written(lab, trained, ["345"], **greedy) == written(lab, trained, ["345"], **greedy, generate__seed=5)


@pytest.mark.usefixtures("torch_suffices")
def test_draws_depend_on_the_seed_alone(lab, trained):
    hot = {"generate__temperature": 2.0, "generate__top_k": None, "generate__max_new_tokens": 30}
    first = written(lab, trained, ["01", "01"], **hot)
    assert written(lab, trained, ["01", "01"], **hot) == first
    assert first[0] != first[1], "each text has draws of its own"
    assert written(lab, trained, ["01"], **hot) == first[:1], "a text does not depend on those beside it"
    assert written(lab, trained, ["01", "01"], **hot, generate__seed=1) != first
    assert written(lab, trained, ["01"], **(hot | {"generate__top_k": 1})) == written(
        lab, trained, ["01"], **(hot | {"generate__temperature": 0})
    )


def test_samples_are_kept_with_a_finished_run(lab, trained):
    settings = {"generate__prompts": "['01', '']", "generate__max_new_tokens": 4, "generate__temperature": 0}
    config = lab.config(training__steps=40, **settings)
    texts = write_samples(trained, config)
    assert texts[0] == "012345"
    retained = trained.samples_file.read_text()
    assert retained.startswith("after 40 steps")
    assert all(text in retained for text in texts)
    trained.samples_file.unlink()
    assert write_samples(trained, lab.config(training__steps=41, **settings)) == []
    assert not trained.samples_file.exists()


def test_bytes_of_the_command_line_that_are_no_text_are_a_prompt_too(lab, trained):
    (text,) = written(lab, trained, [b"\xff12".decode(errors="surrogateescape")], generate__max_new_tokens=3)
    assert text.startswith("\ufffd12")


def test_a_model_of_another_checkpoint_is_refused(lab, trained):
    config = lab.config(FOUR_RANKS["folded"], model__num_experts=8)
    with pytest.raises(CheckpointError, match="num_experts is 4 there and 8 here"):
        generate(config, lab.platform, ["a"], newest(trained))


# How a token is drawn ----------------------------------------------------------------------------------------


def draws(logits, count=4000, **options):
    sampler, random = Sampler(GenerateConfig(**options), window=4), np.random.default_rng(0)
    return np.bincount([sampler.pick(np.array(logits), random) for _ in range(count)], minlength=len(logits)) / count


def test_tokens_are_drawn_by_their_probability():
    logits = [0.0, 1.0, 2.0, -math.inf]
    expected = np.exp(logits) / np.exp(logits).sum()
    # Three standard deviations of a frequency over 4000 draws are below 0.024.
    np.testing.assert_allclose(draws(logits, temperature=1.0, top_k=None), expected, atol=0.025)
    cold = np.exp(np.array(logits) * 2) / np.exp(np.array(logits) * 2).sum()
    np.testing.assert_allclose(draws(logits, temperature=0.5, top_k=None), cold, atol=0.025)


def test_only_the_likeliest_are_drawn():
    found = draws([0.0, 1.0, 2.0, 1.5], temperature=5.0, top_k=2)
    assert found[0] == found[1] == 0
    assert min(found[2:]) > 0.3
    assert draws([0.0, 3.0, 1.0], temperature=0.0)[1] == 1


class Counting:
    """A causal model that always goes on to the next number, and notes what it was shown."""

    def __init__(self, platform):
        self.platform = platform
        self.shown = []

    def __call__(self, ids):
        ids = self.platform.to_numpy(ids)
        self.shown.append(ids.tolist())
        return self.platform.from_numpy(np.eye(10, dtype=np.float32)[(ids + 1) % 10] * 100)


def test_the_model_is_shown_the_last_tokens_of_every_text_and_the_end_is_not_written(lab):
    model = Counting(lab.platform)
    sampler = Sampler(GenerateConfig(max_new_tokens=50), window=3, end=8)
    written = sampler.extend(lab.platform, model, [[1, 2, 3, 4], [6], [4, 5]])
    assert written == [[1, 2, 3, 4, 5, 6, 7], [6, 7], [4, 5, 6, 7]]
    assert model.shown == [
        [[2, 3, 4], [6, 0, 0], [4, 5, 0]],
        [[3, 4, 5], [6, 7, 0], [4, 5, 6]],
        [[4, 5, 6], [5, 6, 7]],
        [[5, 6, 7]],
    ]
    assert Sampler(GenerateConfig(max_new_tokens=0), window=3).extend(lab.platform, model, [[1]]) == [[1]]


def test_logits_without_a_token_are_never_drawn(lab):
    model = Counting(lab.platform)
    sampler = Sampler(GenerateConfig(max_new_tokens=3, temperature=0), window=3, vocab_size=6)
    ((*_, third, last),) = sampler.extend(lab.platform, model, [[3]])
    assert third < 6
    assert last < 6
    run = lab.run("wide", model__vocab_size=300, training__steps=1)
    # Hardly trained, the model would choose any of its 300 logits, of which 256 are bytes.
    config = run.load_config([("generate.max_new_tokens", "40"), ("generate.temperature", "5")]).config
    assert generate(config, lab.platform, ["a"], newest(run))[0].startswith("a")


def test_a_damaged_checkpoint_is_refused_by_name(lab, trained):
    folder = newest(trained).folder
    shard = next((trained.checkpoints / folder).glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.raises(LaunchError, match=rf"{shard.name}.*checksum"):
        run_ranks(train_rank, 4, lab.platform, trained, lab.platform, folder)
