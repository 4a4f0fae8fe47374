"""Schedules as text and pictures, and the command that shows them."""

from __future__ import annotations

import pytest

from hp_trainer import cli
from hp_trainer.exceptions import ScheduleError
from hp_trainer.pipeline import ActionSeconds, build_schedule, describe_timeline, draw_timeline, simulate


@pytest.fixture
def show(installed, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(["schedule", *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def test_the_names_and_one_schedule(show):
    code, out, _ = show()
    assert code == 0
    assert {"1f1b", "gpipe", "zero_bubble_v", "dualpipe_v"} <= set(out.split())
    code, out, _ = show("gpipe", "--ranks=2", "--microbatches=2", "--show=actions")
    assert code == 0
    assert out == (
        "rank 0: 0F0 0F1  .   .   .  0B0  =  0B1  =\n"
        "rank 1:  .  1F0 1F1 1B0  =  1B1  =   .   .\n"
        "rank 0: idle 3 of 9, at most 2 activations held\n"
        "rank 1: idle 3 of 9, at most 2 activations held\n"
        "bubble: 50.0% (largest ratio of idle to busy time)\n"
        "rank 0 executes: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1\n"
        "rank 1 executes: 1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1\n"
    )


def test_times_and_pictures(show, tmp_path):
    picture = tmp_path / "schedule.png"
    arguments = ("--ranks=4", "--microbatches=8", "--forward=1.5", "--transfer=0.25")
    code, out, _ = show("zero_bubble_v", *arguments, f"--to={picture}")
    assert code == 0
    assert out.startswith("rank 0: idle ")  # no rows: the times are no integers
    assert out.endswith(f"picture: {picture}\n")
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_schedule_in_a_file(show, tmp_path):
    file = tmp_path / "own.txt"
    file.write_text(str(build_schedule("1f1b", num_ranks=2, num_microbatches=3)))
    assert show(str(file))[1] == show("1f1b", "--ranks=2", "--microbatches=3")[1]
    file.write_text("rank 0: 0F0 0B0 0F1 0B1\nrank 1: 1F1 1F0 1B0 1B1")
    code, _, err = show(str(file))
    assert code == 2
    assert err == ("hp-train: the schedule deadlocks: rank 0 waits to start 0B0; rank 1 waits to start 1F1\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"hello", "expected a line that begins with 'rank 0:', got 'hello'"),
        (b"rank 0: 0F0 1B0\nrank 1: 1F0 0B0", "stage 1 is on rank 0 and on rank 1"),
        (b"\xff\xfe\x00", "'utf-8' codec can't decode"),
    ],
)
def test_a_file_that_holds_no_schedule(show, tmp_path, content, message):
    file = tmp_path / "own.txt"
    file.write_bytes(content)
    code, _, err = show(str(file))
    assert code == 2
    assert err.startswith(f"hp-train: schedule file {file}: {message}")
    code, _, err = show(str(file), "--ranks=2")
    assert code == 2
    assert "the file has its own ranks, stages and micro-batches" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("1f1b",), "schedule 1f1b needs --ranks and --microbatches"),
        (("1f1b", "--ranks=2", "--microbatches=0"), "num_microbatches must be an integer of at least 1, got 0"),
        (("1f2b", "--ranks=2", "--microbatches=2"), "1f2b"),
        (("no_file.txt",), "no pipeline schedule is called 'no_file.txt'; known: 1f1b"),
        (("1f1b", "--ranks=1000000", "--microbatches=8"), "1000000 * 1 * 8 = 8000000 forwards are too many"),
        (("dualpipe_v", "--ranks=262144", "--microbatches=1"), "262144^2 * 2 = 137438953472 is too large"),
        (("1f1b", "--ranks=2", "--microbatches=2", "--forward=1e308"), "whose sum over a step is a finite number"),
        (
            ("1f1b", "--ranks=2", "--microbatches=2", "--to=nowhere/a.png"),
            "'--to': expected a file in an existing folder",
        ),
        (("1f1b", "--ranks=2", "--microbatches=2", "--to="), "'--to': expected a file in an existing folder"),
        (
            ("1f1b", "--ranks=2", "--microbatches=2", "--weight-grad=nan"),
            "of at least 0, one above 0, got weight_grad=nan",
        ),
        (("1f1b", "--ranks=2", "--microbatches=2", "--transfer=-1"), "got transfer=-1.0"),
        (
            ("1f1b", "--ranks=2", "--microbatches=2", "--forward=0", "--input-grad=0", "--weight-grad=0"),
            "got forward, input_grad and weight_grad of 0",
        ),
        (("1f1b", "--ranks=2", "--microbatches=2", "--training.steps=3"), "schedule accepts no setting"),
        (("1f1b", "--ranks=2", "--microbatches=2", "--to=a.docx"), "expected a name that ends in one of"),
    ],
)
def test_bad_input_is_told(show, arguments, message):
    code, _, err = show(*arguments)
    assert code == 2
    assert message in err


def test_long_schedules_have_no_rows():
    timeline = simulate(build_schedule("1f1b", num_ranks=2, num_microbatches=200))
    assert len(describe_timeline(timeline).splitlines()) == 3


def test_pictures_of_every_format_and_kind(tmp_path):
    timeline = simulate(build_schedule("dualpipe_v", num_ranks=2, num_microbatches=4), ActionSeconds(weight_grad=0.5))
    draw_timeline(timeline, tmp_path / "a.svg")
    assert "rank 1" in (tmp_path / "a.svg").read_text() or (tmp_path / "a.svg").stat().st_size > 5000
    with pytest.raises(ScheduleError, match="expected a name that ends in one of"):
        draw_timeline(timeline, tmp_path / "a")
