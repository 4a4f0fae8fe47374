"""Conversations become rows in which the answers alone are predicted."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_data import opened
from test_tokenizers import write_tokenizer

from hp_trainer.data import IGNORED, ChatDataConfig, ChatSource, chat
from hp_trainer.data.chat import TEMPLATES, JinjaTemplate
from hp_trainer.exceptions import DataError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "cat?"},
    {"role": "assistant", "content": "mat"},
    {"role": "user", "content": "naïve?"},
    {"role": "assistant", "content": "中文"},
]
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# As Qwen3's: the thoughts of all answers but the last are left out.
FORGETFUL = (
    "{% for message in messages %}<{{ message.role }}>"
    "{% if message.role == 'assistant' and loop.last %}(thought){% endif %}{{ message.content }};{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
MARKED = (
    "{% for message in messages %}{{ message.role }}: {% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content }}!{% endgeneration %}{% else %}{{ message.content }}{% endif %} {% endfor %}"
)
HIDING = "{% for message in messages %}{{ message.content }}|{% endfor %}{% if add_generation_prompt %}go{% endif %}"


def answers_of(template: str, turns: list[dict[str, str]] = TURNS) -> list[list[str]]:
    marked = JinjaTemplate(template, {}).mark(turns)
    return [[one.text[begin:end] for begin, end in one.answers] for one in marked]


def test_a_template_of_jinja_marks_what_follows_its_generation_prompt() -> None:
    assert answers_of(CHATML) == [["mat<|im_end|>\n", "中文<|im_end|>\n"]]
    (ours,) = TEMPLATES["chatml"].mark(TURNS)
    (theirs,) = JinjaTemplate(CHATML, {}).mark(TURNS)
    assert ours == theirs


def test_answers_that_later_turns_change_are_documents_of_their_own() -> None:
    assert answers_of(FORGETFUL) == [["(thought)mat;"], ["(thought)中文;"]]
    first, second = JinjaTemplate(FORGETFUL, {}).mark(TURNS)
    assert first.text.endswith("<assistant>(thought)mat;")
    assert "<assistant>mat;<user>" in second.text


def test_a_template_may_mark_answers_itself() -> None:
    (marked,) = JinjaTemplate(MARKED, {}).mark(TURNS)
    assert marked.text == "system: Be brief. user: cat? assistant: mat! user: naïve? assistant: 中文! "
    assert answers_of(MARKED) == [["mat!", "中文!"]]


def test_a_template_that_hides_its_answers_is_refused() -> None:
    with pytest.raises(DataError, match="does not start with its own generation prompt"):
        answers_of(HIDING)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('false') }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ raise_exception('roles must alternate') }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_runs_in_a_sandbox(source: str) -> None:
    with pytest.raises(DataError, match="the chat template failed on the conversation"):
        JinjaTemplate(source, {}).mark(TURNS[:3])


def test_a_template_that_does_not_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "_RENDER_SECONDS", 0.05)
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match=r"failed on the conversation: it has not ended after 0\.05 s of computing"):
        JinjaTemplate(endless, {}).mark(TURNS[:3])
    assert signal.getsignal(signal.SIGVTALRM) is signal.SIG_DFL
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)


def test_a_template_that_is_no_jinja_is_told() -> None:
    with pytest.raises(DataError, match="the chat template is not valid: "):
        JinjaTemplate("{% for %}", {})


# The dataset -------------------------------------------------------------------------------------------------


def write(file: Path, records: list[Any]) -> str:
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def predicted(source: ChatSource, folder: Path, length: int) -> list[str]:
    """The text of each row's tokens to predict."""
    train = opened(source, folder, length).train
    rows = train.read(np.arange(len(train)))
    texts = [source.tokenizer().decode(row[row != IGNORED].tolist()) for row in rows.targets]
    assert train.num_targets(np.arange(len(train))) == np.sum(rows.targets != IGNORED)
    return texts


def make_source(tmp_path: Path, records: list[Any], **options: Any) -> ChatSource:
    path = write(tmp_path / "chat.jsonl", records)
    source = ChatSource(ChatDataConfig(path=path, **{"eval_fraction": 0.0, **options}))
    assert list(source.problems()) == []
    return source


def test_the_loss_is_on_answers_alone(tmp_path: Path) -> None:
    source = make_source(tmp_path, [{"messages": TURNS}], template="chatml")
    assert predicted(source, tmp_path / "a", 200) == ["mat<|im_end|>\n中文<|im_end|>\n"]
    folder = write_tokenizer(
        tmp_path / "tokenizer", ("<|im_start|>", "<|im_end|>"), begins=False,
        eos_token="<|im_end|>", chat_template=CHATML,
    )  # fmt: skip
    source = make_source(tmp_path, [{"messages": TURNS}], tokenizer=str(folder))
    assert predicted(source, tmp_path / "b", 200) == ["mat\n中文\n"]
    train = opened(source, tmp_path / "b", 200).train.read(np.array([0]))
    assert np.sum(train.targets == 1) == 2, "the end of an answer is predicted too"
    (tmp_path / "marked.jinja").write_text(MARKED)
    own = {"tokenizer": str(folder), "template_file": str(tmp_path / "marked.jinja")}
    source = make_source(tmp_path, [{"messages": TURNS}], **own)
    assert predicted(source, tmp_path / "d", 200) == [" mat! 中文!"], "spaces belong to the words that follow"
    source = make_source(tmp_path, [{"messages": TURNS}], tokenizer=str(folder), loss_on="everything")
    assert predicted(source, tmp_path / "c", 200)[0].startswith("system\nBe brief.")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "cat? ", "completion": "mat"},
        {"question": "cat? ", "answer": "mat"},
    ],
)
def test_prompts_with_completions(tmp_path: Path, record: dict[str, str]) -> None:
    prompt, completion = record
    options = {"prompt_field": prompt, "completion_field": completion}
    assert predicted(make_source(tmp_path, [record], **options), tmp_path / "bytes", 20) == ["mat\0"]
    folder = write_tokenizer(tmp_path / "tokenizer", eos_token="</s>")
    source = make_source(tmp_path, [record], tokenizer=str(folder), **options)
    row = opened(source, tmp_path / "file", 20).train.read(np.array([0]))
    assert row.ids[0, 0] == 0, "documents of this tokenizer begin with <s>"
    assert row.targets[0][row.targets[0] != IGNORED][-1] == 1


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": TURNS[:2], "completion": TURNS[2:3]},
        {"messages": [*TURNS[:2], {"role": "assistant", "content": [{"type": "text", "text": "mat"}]}]},
        {"messages": [{"from": "human", "value": "cat?"}, {"from": "gpt", "value": "mat"}]},
    ],
)
def test_other_ways_to_write_a_conversation(tmp_path: Path, record: dict[str, Any]) -> None:
    assert predicted(make_source(tmp_path, [record], template="plain"), tmp_path, 100) == ["mat\n\0"]


def test_conversations_share_rows_and_are_truncated(tmp_path: Path) -> None:
    records = [{"prompt": "p" * n, "completion": "c" * n} for n in (3, 4, 20, 30)]
    packed = predicted(make_source(tmp_path, records), tmp_path / "complete", 32)
    assert sorted(packed) == ["ccc", "cccc\0ccc\0", "c" * 13]
    alone = predicted(make_source(tmp_path, records, packing="none"), tmp_path / "none", 32)
    assert [text.count("c") for text in alone] == [3, 4, 13, 3]
    with pytest.raises(DataError, match=r"no conversation of .* has an answer within training\.sequence_length = 2"):
        opened(make_source(tmp_path, records), tmp_path / "short", 2)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"messages": []}, "chat.jsonl:1: expected a list of messages, each an object with role and content, got []"),
        ({"messages": [{"role": "user"}]}, "chat.jsonl:1: expected a message with role and content, got {'role'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "chat.jsonl:1: expected a message with role and content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "expected a message with role and content"),
        ({"messages": [{"from": "human", "value": 3}]}, "chat.jsonl:1: expected a message with role and content"),
        ({"text": "a"}, "chat.jsonl:1 has neither messages ('messages') nor a prompt with its completion"),
        ({"conversations": TURNS}, "its fields: conversations. Set data.name=chat and data.messages_field=conversati"),
        ({"question": "a", "answer": "b"}, "data.prompt_field=question and data.completion_field=answer"),
        ({"prompt": "a", "completion": 3}, "chat.jsonl:1: expected text in field 'completion', got 3"),
        ({"messages": TURNS}, "chat.jsonl:1: the tokenizer has no chat template; set data.template (chatml, "),
    ],
)
def test_an_invalid_conversation_is_reported_with_its_line(tmp_path: Path, record: Any, message: str) -> None:
    path = write(tmp_path / "chat.jsonl", [record])
    (problem,) = ChatSource(ChatDataConfig(path=path)).problems()
    assert message in problem.what
    assert problem.path == "path"


def test_a_template_that_is_missing_is_told_with_its_setting(tmp_path: Path) -> None:
    path = write(tmp_path / "chat.jsonl", [{"messages": TURNS}])
    (problem,) = ChatSource(ChatDataConfig(path=path, template_file=str(tmp_path / "none"))).problems()
    assert problem.path == "template"
    assert "none cannot be read: " in problem.what
    (problem,) = ChatSource(ChatDataConfig(path=path, tokenizer=str(tmp_path / "none"))).problems()
    assert problem.path == "tokenizer"
