from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hsx_dist.errors import ConfigError, InputError
from hsx_dist.inputs.encode import OutOfMemory, RowEncoder, RowRules, TooLong, load_tokenizer
from hsx_dist.inputs.rows import Row

WORDS = {"<s>": 0, "[user]": 1, "[assistant]": 2, "a": 3, "b": 4, "c": 5}
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real tokenizer of six words that puts <s> first, with a chat template."""
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", model_max_length=4)
    fast.chat_template = TEMPLATE
    path = tmp_path_factory.mktemp("tokenizer")
    fast.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return load_tokenizer(str(folder))


def test_text_gets_the_special_tokens_that_the_tokenizer_adds(tokenizer: Any) -> None:
    assert RowEncoder(tokenizer, 10).encode(Row("k", 0, text="a b c")).token_ids == [0, 3, 4, 5]


def test_messages_go_through_the_template(tokenizer: Any) -> None:
    row = Row("k", 0, messages=[{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}])
    assert RowEncoder(tokenizer, 10).encode(row).token_ids == [1, 3, 4, 2, 5]
    assert RowEncoder(tokenizer, 10, {"add_generation_prompt": True}).encode(row).token_ids == [1, 3, 4, 2, 5, 2]


def test_a_templates_error_with_a_long_text_of_the_row_is_not_shown(folder: Path) -> None:
    """Its redaction may take tens of milliseconds for each row."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{{ raise_exception(messages[0].content) }}"
    for content, got in (
        ("%2520 a" * 1000, r"accepts, got TemplateError\. "),
        ("系统消息必须是第一条，请检查", "accepts, got TemplateError: 系统消息必须是第一条，请检查"),
        ("a b", "accepts, got TemplateError: a b"),
    ):
        with pytest.raises(InputError, match=got):
            RowEncoder(tokenizer, 9999).encode(Row("k", 0, messages=[{"role": "user", "content": content}]))


def test_messages_without_an_error_are_not_redacted(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row may have 65,536 messages with long roles."""
    monkeypatch.setattr("hsx_dist.inputs.row_values.redacted", lambda _: pytest.fail("expected no redaction"))
    row = Row("k", 0, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}])
    assert RowEncoder(tokenizer, 10).encode(row).token_ids == [1, 3, 2, 5]


def test_ready_token_ids_are_taken_as_they_are(tokenizer: Any) -> None:
    assert RowEncoder(tokenizer, 10).encode(Row("k", 0, token_ids=[5, 0, 5])).token_ids == [5, 0, 5]


def test_too_long_says_length_and_limit(tokenizer: Any) -> None:
    assert len(RowEncoder(tokenizer, 4).encode(Row("k", 0, text="a b c")).token_ids) == 4
    for row in (Row("k", 0, text="a b c a"), Row("k", 0, token_ids=[3] * 5)):
        with pytest.raises(InputError, match="expected at most 4 tokens, got 5"):
            RowEncoder(tokenizer, 4).encode(row)


def test_token_ids_out_of_the_vocabulary(tokenizer: Any) -> None:
    with pytest.raises(InputError, match=r"below 6, .*, got 6 at position 1"):
        RowEncoder(tokenizer, 10).encode(Row("k", 0, token_ids=[5, 6]))
    assert RowEncoder(tokenizer, 10, vocab_size=8).encode(Row("k", 0, token_ids=[6])).token_ids == [6]


@pytest.mark.parametrize("roles", [None, ("assistant",)])
@pytest.mark.parametrize("fast", [True, False])
def test_a_tokenizer_with_more_tokens_than_the_model(
    folder: Path, fast: bool, roles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM pads embeddings: an id of the padding gives states that mean nothing."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.add_tokens(["<extra>"])
    encoder = RowEncoder(tokenizer, 20, vocab_size=6, rules=RowRules(loss_roles=roles if fast else None))
    monkeypatch.setattr(type(tokenizer), "is_fast", fast)
    answer = {"role": "assistant", "content": "c"}
    for row in (
        Row("k", 0, text="a <extra>", loss_mask=[0, 1, 1]),
        Row("k", 0, messages=[{"role": "user", "content": "<extra>"}, answer]),
        Row("k", 0, messages=[{"role": "user", "content": "<extra>"}, answer], loss_mask=[0, 0, 0, 1]),
    ):
        with pytest.raises(InputError, match=r"below 6, .*, got 6 at position \d: the tokenizer adds '<extra>'\. Rem"):
            encoder.encode(row)


def test_nothing_left_after_tokenising(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="at least one token"):
        RowEncoder(tokenizer, 10, {"chat_template": " "}).encode(
            Row("k", 0, messages=[{"role": "user", "content": ""}])
        )


PARTS = (
    "{% for m in messages %}[{{ m.role }}] {% if m.content is string %}{{ m.content }}"
    "{% elif m.content %}{% for part in m.content %}{{ part.text }} {% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("roles", [None, ("assistant",)])
def test_content_that_a_template_prints_as_python_text_is_refused(folder: Path, roles: Any) -> None:
    tokenizer = load_tokenizer(str(folder))
    encoder = RowEncoder(tokenizer, 10, rules=RowRules(loss_roles=roles))
    for content, got, ids in (
        ([{"type": "text", "text": "a b"}], "got parts", [1, 3, 4, 2, 5]),
        (["a b"], "got parts", None),
        ([{"type": "text", "text": ""}], "got parts", None),
        (None, "got null", [1, 2, 5]),
    ):
        row = Row("k", 0, messages=[{"role": "user", "content": content}, {"role": "assistant", "content": "c"}])
        tokenizer.chat_template = TEMPLATE
        with pytest.raises(InputError, match=got):
            encoder.encode(row)
        tokenizer.chat_template = PARTS
        if ids is not None:
            assert encoder.encode(row).token_ids == ids
    # A text None is no null, and a message without content is none either.
    tokenizer.chat_template = TEMPLATE
    assert encoder.encode(
        Row(
            "k",
            0,
            messages=[{"role": "user"}, {"role": "user", "content": "None"}, {"role": "assistant", "content": "c"}],
        )
    ).token_ids == [1, 1, 0, 2, 5]


# Qwen3 and others: roles that the template does not know, and parts, have no text.
TEXT_ALONE = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant', 'system') %}[{{ m.role }}] "
    "{{ m.content if m.content is string else '' }} {% for call in m.tool_calls or [] %}{{ call }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


@pytest.mark.parametrize("roles", [None, ("assistant",)])
def test_a_message_that_a_template_leaves_out_is_refused(folder: Path, roles: Any) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEXT_ALONE
    encoder = RowEncoder(tokenizer, 10, rules=RowRules(loss_roles=roles))
    part = {"type": "text", "text": "a"}
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    for bad, got in (
        ({"role": "developer", "content": "a"}, "message 1 .role 'developer', content: a string."),
        ({"role": "user", "content": [part]}, "message 1 .role 'user', content: a list."),
        ({"role": "user", "content": [part, {"type": "text", "text": ""}]}, "message 1 .role 'user', content: a list."),
    ):
        with pytest.raises(InputError, match=f"leaves out text of {got}"):
            encoder.encode(Row("k", 0, messages=[user, bad, answer]))
    assert encoder.encode(Row("k", 0, messages=[user, answer])).token_ids == [1, 3, 2, 5]
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content[0].text }} {% endfor %}"
    one = [{"role": "user", "content": [part]}, {"role": "assistant", "content": [{"type": "text", "text": "c"}]}]
    assert encoder.encode(Row("k", 0, messages=one)).token_ids == [1, 3, 2, 5]
    with pytest.raises(InputError, match="leaves out text of message 0"):  # its second part
        encoder.encode(Row("k", 0, messages=[{"role": "user", "content": [part, part]}, one[1]]))


def test_templates_may_leave_out_blanks_and_texts_next_to_tool_calls(tokenizer: Any, folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEXT_ALONE.replace(
        "m.content if m.content", "m.content if not m.tool_calls and m.content"
    ).replace("{{ call }}", "{{ call.name }}")
    called = {"role": "assistant", "content": "b", "tool_calls": [{"name": "c"}]}
    user = {"role": "user", "content": "a"}
    for blank in ([], [{"role": "developer", "content": " "}]):
        assert RowEncoder(tokenizer, 10).encode(Row("k", 0, messages=[*blank, user, called])).token_ids == [1, 3, 2, 5]


CALL = {"type": "function", "function": {"name": "b", "arguments": {"x": "a"}}}


@pytest.mark.parametrize("call", [CALL, CALL["function"]])
def test_a_tool_or_a_call_that_a_template_leaves_out_is_refused(folder: Path, call: dict[str, Any]) -> None:
    """Most templates without tools ignore them: a row with a call would be stored as a row without one."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEXT_ALONE.replace("{{ call }}", "")
    user, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}
    called = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    encoder = RowEncoder(tokenizer, 20)
    with pytest.raises(InputError, match="leaves out a call of message 1"):
        encoder.encode(Row("k", 0, messages=[user, called]))
    with pytest.raises(InputError, match="expected a chat template that renders tools"):
        encoder.encode(Row("k", 0, messages=[user, answer], tools=[call]))
    names = "{% for c in m.tool_calls or [] %}{{ (c.function or c).name }} {% endfor %}"
    tokenizer.chat_template = (
        TEXT_ALONE.replace("{% endif %}{% endfor %}", f"{names}{{% endif %}}{{% endfor %}}").replace("{{ call }}", "")
        + "{% for t in tools or [] %}{{ (t.function or t).name }} {% endfor %}"
    )
    assert encoder.encode(Row("k", 0, messages=[user, called])).token_ids == [1, 3, 2, 4, 4]
    assert encoder.encode(Row("k", 0, messages=[user, answer], tools=[call])).token_ids == [1, 3, 2, 5, 4]


def test_the_word_none_in_a_call_is_no_null(folder: Path) -> None:
    """DeepSeek's template renders calls only where the content is null."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = (
        "{% for m in messages %}[{{ m.role }}] {% if m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name }} {{ c.function.arguments.x }} {% endfor %}{% else %}{{ m.content }} {% endif %}"
        "{% endfor %}"
    )
    call = {"function": {"name": "b", "arguments": {"x": "None"}}}
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert RowEncoder(tokenizer, 10).encode(Row("k", 0, messages=messages)).token_ids == [1, 3, 2, 4, 0]
    messages[1]["content"] = ""
    with pytest.raises(InputError, match="leaves out a call of message 1"):
        RowEncoder(tokenizer, 10).encode(Row("k", 0, messages=messages))


def test_a_template_that_needs_the_texts_themselves_is_not_judged(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.content not in ('a', 'c') %}{{ raise_exception('other text') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }} {% endfor %}"
    )
    assert RowEncoder(tokenizer, 10).encode(
        Row("k", 0, messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "c"}])
    ).token_ids == [1, 3, 2, 5]


def test_a_template_that_raises_refuses_the_row(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="chat template accepts, got TemplateError: no tools here"):
        RowEncoder(tokenizer, 10).encode(Row("k", 0, messages=[{"role": "tool", "content": "a"}]))


def test_a_text_on_which_the_tokenizer_panics_refuses_the_row(folder: Path) -> None:
    """A panic is no ``Exception``. The regular expressions of Qwen's tokenizers panic on megabytes of blanks."""
    tokenizer = load_tokenizer(str(folder))
    split = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")  # too many ways to match the text
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), split])
    encoder = RowEncoder(tokenizer, 10)
    text = "a" * 60 + "b"
    with pytest.raises(InputError, match="text that the tokenizer accepts, got PanicException: Onig"):
        encoder.encode(Row("k", 0, text=text))
    for rules in (RowRules(), RowRules(loss_roles=("user",))):
        with pytest.raises(InputError, match="chat template accepts, got PanicException: Onig"):
            RowEncoder(tokenizer, 10, rules=rules).encode(Row("k", 0, messages=[{"role": "user", "content": text}]))
    assert encoder.encode(Row("k", 0, text="a b")).token_ids == [0, 3, 4]


def test_a_model_without_a_template(folder: Path) -> None:
    bare = load_tokenizer(str(folder))
    bare.chat_template = None
    with pytest.raises(InputError, match="chat template"):
        RowEncoder(bare, 10).encode(Row("k", 0, messages=[{"role": "user", "content": "a"}]))


def test_the_tokenizer_can_be_in_another_folder_than_the_model(folder: Path, tmp_path: Path) -> None:
    assert len(load_tokenizer(str(tmp_path), engine_kwargs={"tokenizer": str(folder)})) == 6


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a model with a tokenizer"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_too_long_rows_are_truncated_or_refused(tokenizer: Any) -> None:
    row = Row("k", 0, token_ids=[3, 4, 5, 3, 4], loss_mask=[0, 1, 0, 1, 1])
    cut = RowEncoder(tokenizer, 10, rules=RowRules(max_length=3, too_long="truncate")).encode(row)
    assert (cut.token_ids, cut.loss_mask) == ([3, 4, 5], b"\0\1\0")
    with pytest.raises(TooLong, match="at most 3 tokens, got 5"):
        RowEncoder(tokenizer, 10, rules=RowRules(max_length=3)).encode(row)
    assert len(RowEncoder(tokenizer, 4, rules=RowRules(max_length=9, too_long="truncate")).encode(row).token_ids) == 4
    with pytest.raises(InputError, match="got 1 zeros"):  # the tokens with a loss are cut off
        RowEncoder(tokenizer, 10, rules=RowRules(max_length=1, too_long="truncate")).encode(row)


@pytest.mark.parametrize("roles", [None, ("assistant",)])
def test_a_far_too_long_text_is_refused_before_it_is_tokenised(tokenizer: Any, roles: Any) -> None:
    def never(text: str, **options: Any) -> Any:
        raise AssertionError(f"tokenised {len(text)} characters")

    class Counted:
        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

        __call__ = staticmethod(never)

    def rows(characters: int) -> list[Row]:
        chat = [{"role": "user", "content": "5" * characters}, {"role": "assistant", "content": "a"}]
        return [Row("k", 0, text="5" * characters), Row("k", 0, messages=chat)]

    encoder = RowEncoder(Counted(), 50, vocab_size=1000, rules=RowRules(loss_roles=roles))
    for row in rows(262_145):
        with pytest.raises(TooLong, match=r"at most 262144 characters for 50 tokens, got 262\d\d\d\."):
            encoder.encode(row)
    with pytest.raises(InputError, match="tokenised 262144 characters"):
        encoder.encode(rows(262_144)[0])
    with pytest.raises(InputError, match="tokenised 300000 characters"):  # 5,000 tokens may have 320,000
        RowEncoder(Counted(), 5000, vocab_size=1000, rules=RowRules()).encode(rows(300_000)[0])


def test_an_answer_to_be_generated_gets_its_header(tokenizer: Any) -> None:
    encoder = RowEncoder(tokenizer, 10, rules=RowRules(include_output_tokens=True))
    ask = [{"role": "user", "content": "a"}]
    assert encoder.encode(Row("k", 0, messages=ask)).token_ids == [1, 3, 2]
    answered = Row("k", 0, messages=[*ask, {"role": "assistant", "content": "b"}])
    assert encoder.encode(answered).token_ids == [1, 3, 2, 4]


def test_tools_reach_the_template(folder: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = "{% for t in tools %}{{ t.name }} {% endfor %}" + TEMPLATE
    row = Row("k", 0, messages=[{"role": "user", "content": "a"}], tools=[{"name": "b"}])
    assert RowEncoder(tokenizer, 10).encode(row).token_ids == [4, 1, 3]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ messages[0].content * (10**15) }}", "MemoryError"),
        ("{{ messages | tojson }}{{ messages[0].content.x.y }}", "UndefinedError"),
        ("{% for i in range(10**9) %}{% endfor %}", "Overflow"),
    ],
)
def test_a_template_that_fails_or_grows_refuses_the_row(folder: Path, template: str, reason: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = template
    with pytest.raises(InputError, match=reason):
        RowEncoder(tokenizer, 10).encode(Row("k", 0, messages=[{"role": "user", "content": "a"}]))


@pytest.mark.parametrize("fast", [True, False])
def test_a_row_without_memory_may_be_tried_again(folder: Path, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that is short of memory for a moment must not refuse a row forever."""
    tokenizer = load_tokenizer(str(folder))
    tokenizer.chat_template = TEMPLATE
    encoder = RowEncoder(tokenizer, 10)
    row = Row("k", 0, messages=[{"role": "user", "content": "a"}])
    for n in range(1, 3):  # the rendering with marks, and the rendering itself
        calls, real = iter(range(1, n)), type(tokenizer).apply_chat_template

        def short(*args: Any, calls: Any = calls, real: Any = real, **kwargs: Any) -> Any:
            if next(calls, None) is None:
                raise MemoryError
            return real(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "apply_chat_template", short)
            if not fast:
                patch.setattr(type(tokenizer), "is_fast", False)
            with pytest.raises(OutOfMemory, match="expected memory to render and tokenise the row"):
                encoder.encode(row)
    assert encoder.encode(row).token_ids


def test_the_cost_of_a_loss_mask_is_bounded(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [{"role": role, "content": "a"} for role in ("user", "assistant")] * 30
    rules = RowRules(loss_roles=("assistant",))
    assert RowEncoder(tokenizer, 200, rules=rules).encode(Row("k", 0, messages=chat)).loss_mask is not None
    monkeypatch.setattr("hsx_dist.inputs.encode._MAX_RENDERED", 400_000)
    with pytest.raises(InputError, match="got more with 60 messages"):
        RowEncoder(tokenizer, 200, rules=rules).encode(Row("k", 0, messages=chat))
    with pytest.raises(TooLong):  # a long row is refused before its prefixes are rendered
        RowEncoder(tokenizer, 20, rules=rules).encode(Row("k", 0, messages=chat))
