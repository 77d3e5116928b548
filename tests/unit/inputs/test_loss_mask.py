"""Loss masks: given with a row, or derived from a chat's roles by rendering its prefixes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tokenizers import AddedToken

from hsx_dist.errors import ConfigError, InputError
from hsx_dist.inputs import loss_mask
from hsx_dist.inputs.encode import RowEncoder, RowRules, load_tokenizer
from hsx_dist.inputs.loss_mask import mask_of_spans
from hsx_dist.inputs.rows import Row
from hsx_dist.models.tiny import write_tiny_tokenizer

# The behaviour of stock templates, shortened. None of them marks the assistant's text.
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Llama-3: begins with a special token, strips messages, has no newline between turns.
LLAMA3 = (
    "{{ '<|begin|>' }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
# Gemma: the system's text is in the first user turn, roles have other names, and must alternate.
GEMMA = (
    "{{ '<bos>' }}{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must take turns') }}{% endif %}"
    "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' + (ns.first if loop.first else '') }}"
    "{{ m.content | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
# Qwen3: only the last turn keeps its thoughts. Without thoughts it has an empty one.
QWEN3 = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' + (m.reasoning_content or '') + '\n</think>\n\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|/head|>", "<|eot|>"]
SPECIAL += ["<bos>", "<start_of_turn>", "<end_of_turn>"]
CHAT = [
    {"role": "user", "content": "What is a page?"},
    {"role": "assistant", "content": "A run of tokens."},
    {"role": "user", "content": "And a segment?"},
    {"role": "assistant", "content": "The unit of durability: A run of tokens."},
]
SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(Path(folder), 512, 512)
    made = load_tokenizer(str(folder))
    made.add_special_tokens({"additional_special_tokens": [AddedToken(s, special=True) for s in SPECIAL]})
    return made


def said(
    tokenizer: Any, template: str, messages: list[dict[str, Any]], roles: tuple[str, ...] = ("assistant",), **kw: Any
):
    """The pieces of text whose mask is 1. Checks that the ids are those of apply_chat_template."""
    tokenizer.chat_template = template
    got = RowEncoder(tokenizer, 500, kw, rules=RowRules(loss_roles=roles)).encode(Row("k", 0, messages=messages))
    assert got.token_ids == list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **kw))
    assert got.loss_mask is not None
    runs, run = [], []
    for token, counts in zip([*got.token_ids, 0], [*got.loss_mask, 0], strict=True):
        if counts:
            run.append(token)
        elif run:
            runs.append(tokenizer.decode(run))
            run = []
    return runs


@pytest.mark.parametrize("system", [False, True])
@pytest.mark.parametrize(("template", "end"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot|>"), (GEMMA, "<end_of_turn>")])
def test_the_loss_mask_covers_the_assistants_text_and_its_end_of_turn(
    tokenizer: Any, template: str, end: str, system: bool
) -> None:
    messages = [SYSTEM, *CHAT] if system else CHAT
    assert said(tokenizer, template, messages) == [CHAT[1]["content"] + end, CHAT[3]["content"] + end]


def test_thoughts_that_a_template_drops_from_earlier_turns(tokenizer: Any) -> None:
    chat = [CHAT[0], {**CHAT[1], "reasoning_content": "first"}, CHAT[2], {**CHAT[3], "reasoning_content": "second"}]
    assert said(tokenizer, QWEN3, chat) == [
        "A run of tokens.<|im_end|>",
        "<think>\nsecond\n</think>\n\nThe unit of durability: A run of tokens.<|im_end|>",
    ]
    # Without thinking the header ends with an empty thought, which is not part of the answer then.
    assert said(tokenizer, QWEN3, CHAT, enable_thinking=False) == [
        "A run of tokens.<|im_end|>",
        "The unit of durability: A run of tokens.<|im_end|>",
    ]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}])
def test_repeated_turns_are_not_in_the_loss_of_an_answer(tokenizer: Any, options: dict[str, Any]) -> None:
    """Without thoughts each answer alone ends like the one before it, with the same turn of the user between them."""
    ask, answer = {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}
    *earlier, last = said(tokenizer, QWEN3, [ask, answer] * 4, **options)
    assert earlier == ["Yes.<|im_end|>"] * 3
    assert last.removeprefix("<think>\n\n</think>\n\n") == "Yes.<|im_end|>"


@pytest.mark.parametrize("template", [CHATML, LLAMA3, GEMMA, QWEN3])
@pytest.mark.parametrize(
    "flags",
    [
        {"weight": 0},
        {"weight": 0.0},
        {"train": False},
        {"weight": 1, "train": False},
        {"training": False},
        {"loss": False},
        {"trainable": 0},
    ],
)
def test_an_answer_of_weight_0_is_not_in_the_loss(tokenizer: Any, template: str, flags: dict[str, Any]) -> None:
    first, last = said(tokenizer, template, CHAT)
    kept = {"weight": 1, "train": True, "training": True, "loss": True, "trainable": 1}
    assert said(tokenizer, template, [CHAT[0], {**CHAT[1], **flags}, CHAT[2], {**CHAT[3], **kept}]) == [last]
    assert said(tokenizer, template, [CHAT[0], {**CHAT[1], **kept}, CHAT[2], {**CHAT[3], **flags}]) == [first]
    with pytest.raises(InputError, match="expected a loss mask with a 1 in it"):
        said(tokenizer, template, [CHAT[0], {**CHAT[1], **flags}])


@pytest.mark.parametrize(
    ("flag", "got"),
    [
        ({"weight": 0.5}, "weight of message 1 to be 0 or 1, got '0.5'"),
        *(({name: ""}, f"{name} of message 1 to be") for name in ("train", "training", "loss", "trainable")),
    ],
)
def test_a_weight_that_a_mask_cannot_have_is_refused(tokenizer: Any, flag: dict[str, Any], got: str) -> None:
    chat = [{**CHAT[0], **flag}, {**CHAT[1], **flag}]
    with pytest.raises(InputError, match=got):
        said(tokenizer, CHATML, chat)
    given = Row("k", 0, messages=chat, loss_mask=[1] * len(tokenizer.apply_chat_template(chat, return_dict=False)))
    rules = RowRules(loss_roles=("assistant",))
    assert RowEncoder(tokenizer, 500, rules=rules).encode(given).loss_mask == bytes(given.loss_mask or [])


def test_other_roles(tokenizer: Any) -> None:
    assert said(tokenizer, CHATML, CHAT, ("user",)) == [
        f"{CHAT[0]['content']}<|im_end|>",
        f"<|im_start|>user\n{CHAT[2]['content']}<|im_end|>",
    ]
    assert len(said(tokenizer, CHATML, [SYSTEM, *CHAT], ("system", "assistant"))) == 3


# Llama 2: the system's text is in the first user turn, between two marks.
LLAMA2 = (
    "{% set ns = namespace(first='') %}{% if messages[0].role == 'system' %}"
    "{% set ns.first = '<<SYS>>\n' + messages[0].content + '\n<</SYS>>\n\n' %}{% set messages = messages[1:] %}"
    "{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '<bos>[INST] ' + (ns.first if loop.first else '') + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
)
# Mistral: tools before the first user turn and before a user turn at the end, the system's text in the first.
MISTRAL = (
    "{% set ns = namespace(first='') %}{{ '<bos>' }}{% if messages[0].role == 'system' %}"
    "{% set ns.first = messages[0].content + '\n\n' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and (loop.first or loop.last) %}{{ '[TOOLS] ' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{{ '[INST] ' + (ns.first if loop.first else '') + m.content + '[/INST]' }}"
    "{% else %}{{ ' ' + m.content + '<|eot|>' }}{% endif %}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}}}]


@pytest.mark.parametrize(
    ("template", "end", "header"),
    [
        (GEMMA, "<end_of_turn>", "<start_of_turn>user\n"),
        (LLAMA2, " [/INST]", "<bos>[INST] "),
        (MISTRAL, "[/INST]", "[INST] "),
    ],
)
@pytest.mark.parametrize("roles", [("user",), ("assistant", "user")])
def test_the_systems_text_in_a_user_turn_is_not_in_the_loss(
    tokenizer: Any, template: str, end: str, header: str, roles: tuple[str, ...]
) -> None:
    text = "".join(said(tokenizer, template, [SYSTEM, *CHAT], roles))
    assert SYSTEM["content"] not in text
    assert text.startswith(CHAT[0]["content"] + end)
    assert header + CHAT[2]["content"] + end in text


@pytest.mark.parametrize("chat", [[SYSTEM, *CHAT[:3]], CHAT[:3], CHAT[:1], [SYSTEM, CHAT[0]]])
def test_tools_before_a_user_turn_are_not_in_the_loss(tokenizer: Any, chat: list[dict[str, Any]]) -> None:
    tokenizer.chat_template = MISTRAL
    row = Row("k", 0, messages=chat, tools=TOOLS)
    got = RowEncoder(tokenizer, 500, rules=RowRules(loss_roles=("user",))).encode(row)
    text = tokenizer.decode([t for t, counts in zip(got.token_ids, got.loss_mask or [], strict=True) if counts])
    # A header's blank may be one token with the first word.
    assert text.replace("] ", "]") == "".join(m["content"] + "[/INST]" for m in chat if m["role"] == "user")


def test_text_of_another_message_behind_a_message_is_refused(tokenizer: Any) -> None:
    template = (
        "{% for m in messages if m.role != 'system' %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{% if loop.first and messages[0].role == 'system' %}{{ ' ' + messages[0].content }}{% endif %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
    )
    with pytest.raises(InputError, match=r"message 1 \(role 'user'\) behind all others, got text of another message"):
        said(tokenizer, template, [SYSTEM, *CHAT], ("user",))


def test_a_template_that_needs_the_texts_and_joins_them_is_refused(tokenizer: Any) -> None:
    needs = "{% if messages[0].content != 'Be brief.' %}{{ raise_exception('x') }}{% endif %}"
    assert len(said(tokenizer, needs + CHATML, [SYSTEM, *CHAT], ("user",))) == 2
    with pytest.raises(InputError, match=r"message 1 \(role 'user'\) behind all others, got text of another message"):
        said(tokenizer, needs + GEMMA, [SYSTEM, *CHAT], ("user",))


# SmolLM2 and Qwen2.5: without a system message, the template writes a default one.
DEFAULT = "{% if messages[0].role != 'system' %}{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}" + CHATML


def test_a_default_system_message_is_not_in_the_loss_of_the_first_message(tokenizer: Any) -> None:
    said_first = [CHAT[1], *CHAT]
    answers = [CHAT[i]["content"] + "<|im_end|>" for i in (1, 1, 3)]
    assert said(tokenizer, DEFAULT, said_first) == answers
    assert said(tokenizer, DEFAULT, CHAT, ("user",))[0] == CHAT[0]["content"] + "<|im_end|>"
    # A system message of the row is in the loss, with its header.
    assert said(tokenizer, DEFAULT, [SYSTEM, *CHAT], ("system",)) == ["<|im_start|>system\nBe brief.<|im_end|>"]
    assert said(tokenizer, QWEN3, said_first, enable_thinking=False)[:2] == answers[:2]


@pytest.mark.parametrize("character", ["\ue0ff", "\ue000"])
def test_no_character_of_a_chat_moves_the_beginning_of_its_first_message(tokenizer: Any, character: str) -> None:
    template = DEFAULT.replace("You help.", f"You {character}help.")
    assert said(tokenizer, template, CHAT, ("user",))[0] == CHAT[0]["content"] + "<|im_end|>"


# Qwen3-Thinking and DeepSeek-R1: the header of an answer begins a thought.
THINKING = CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}")


@pytest.mark.parametrize(
    "template", [THINKING, THINKING.replace("\n' + m.content", "' + m.content").replace("assistant\n", "assistant")]
)
@pytest.mark.parametrize("answer", ['<tool_call>\n{"name": "f"}', "<table> of", "plain", "<"])
def test_an_answer_without_a_thought_begins_with_its_first_letter(tokenizer: Any, template: str, answer: str) -> None:
    assert "<think>" in template
    chat = [CHAT[0], {"role": "assistant", "content": answer}]
    assert said(tokenizer, template, chat) == [answer + "<|im_end|>"]


def test_a_thought_that_the_header_begins_is_not_in_the_loss_twice(tokenizer: Any) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"}]
    assert said(tokenizer, THINKING, chat) == ["hm\n</think>\n\nyes<|im_end|>"]


@pytest.mark.parametrize("answer", ["plain answer", "> a quoted answer of many words"])
def test_an_answer_that_alone_has_another_end_is_refused(tokenizer: Any, answer: str) -> None:
    template = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
        "{{ '<|return|>' if loop.last and m.role == 'assistant' else '<|im_end|>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    chat = [CHAT[0], {"role": "assistant", "content": answer}, *CHAT[2:]]
    with pytest.raises(
        InputError, match=r"expected to find message 1 in the rendered chat, .* <\|return\|>\. Give the row"
    ):
        said(tokenizer, template, chat)
    assert said(tokenizer, template, chat[:2]) == [answer + "<|return|>"]


def test_a_template_that_ends_each_chat_with_its_own_text_is_refused(tokenizer: Any) -> None:
    template = CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")
    with pytest.raises(InputError, match=r"before message 1 as .* Phi-3's adds <\|endoftext\|>\. Give the row"):
        said(tokenizer, template, CHAT)


def test_a_first_message_whose_text_is_not_rendered_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="expected to find the text of message 0"):
        said(tokenizer, "{{ messages[0].content | length }} {{ messages[0].content }}", CHAT[1:2])


def test_many_bytes_a_character(tokenizer: Any) -> None:
    chat = [CHAT[0], {"role": "assistant", "content": "Zeichen: 漢字 😀 é"}]
    assert said(tokenizer, CHATML, chat) == ["Zeichen: 漢字 😀 é<|im_end|>"]


def test_a_header_at_the_end_is_not_in_the_loss(tokenizer: Any) -> None:
    assert said(tokenizer, CHATML, CHAT, add_generation_prompt=True)[-1].endswith("tokens.<|im_end|>")


def test_a_chat_without_the_loss_roles_is_refused(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    with pytest.raises(InputError, match=r"expected a loss mask with a 1 in it, got \d+ zeros"):
        RowEncoder(tokenizer, 500, rules=RowRules(loss_roles=("assistant",))).encode(Row("k", 0, messages=CHAT[:1]))


def test_a_template_that_reads_otherwise_within_the_whole_is_refused(tokenizer: Any) -> None:
    with pytest.raises(InputError, match="renders the messages before message 1 as it renders them within the whole"):
        said(tokenizer, "{{ messages | length }}" + CHATML, CHAT)


def test_a_row_without_messages_and_without_a_mask_is_refused(tokenizer: Any) -> None:
    encoder = RowEncoder(tokenizer, 500, rules=RowRules(loss_roles=("assistant",)))
    with pytest.raises(InputError, match="got neither"):
        encoder.encode(Row("k", 0, text="text"))
    assert encoder.encode(Row("k", 0, token_ids=[5, 6], loss_mask=[0, 1])).loss_mask == b"\0\1"
    with pytest.raises(InputError, match="expected 2 entries, one for each token, got 3"):
        encoder.encode(Row("k", 0, token_ids=[5, 6], loss_mask=[0, 1, 1]))
    assert RowEncoder(tokenizer, 500).encode(Row("k", 0, text="text")).loss_mask is None


def test_generated_answers_need_nothing_before_them_to_count(tokenizer: Any) -> None:
    tokenizer.chat_template = CHATML
    rules = RowRules(loss_roles=("assistant",), include_output_tokens=True)
    got = RowEncoder(tokenizer, 500, rules=rules).encode(Row("k", 0, messages=CHAT[:1]))
    assert got.loss_mask == bytes(len(got.token_ids))
    assert RowEncoder(tokenizer, 500, rules=rules).encode(Row("k", 0, text="x")).loss_mask == b"\0"


def test_a_tokenizer_without_character_offsets_is_refused(tokenizer: Any) -> None:
    class Slow:
        is_fast = False

        def __len__(self) -> int:
            return 5

    with pytest.raises(ConfigError, match="expected a fast tokenizer"):
        RowEncoder(Slow(), 5, rules=RowRules(loss_roles=("assistant",)))


def test_a_token_of_a_headers_blank_and_the_first_word_is_in_the_mask() -> None:
    whole = "ASSISTANT: Yes\n"
    tokens = [(0, 9), (9, 10), (10, 14), (14, 15)]
    assert list(mask_of_spans(whole, [1, 2, 3, 4], tokens, [(11, 15)], frozenset())) == [0, 0, 1, 1]
    # A token of the header and blanks of the message has no text of the message.
    blanks = "ASSISTANT:\n\nYes"
    assert list(mask_of_spans(blanks, [1, 2, 3], [(0, 9), (9, 12), (12, 15)], [(11, 15)], frozenset())) == [0, 0, 1]


def test_a_token_of_the_templates_text_and_the_message_refuses_the_row() -> None:
    with pytest.raises(InputError, match=r"loss_roles: .* got one token of .* ':Yes'"):
        mask_of_spans("ASSISTANT:Yes\n", [1, 2, 3], [(0, 9), (9, 13), (13, 14)], [(10, 14)], frozenset())
    with pytest.raises(InputError, match=r"loss_roles: .* got one token of .* '####'"):
        mask_of_spans("C#### user", [1, 2, 3], [(0, 1), (1, 5), (5, 10)], [(0, 2)], frozenset())
    assert list(mask_of_spans("C \nuser", [1, 2, 3], [(0, 1), (1, 3), (3, 7)], [(0, 2)], frozenset())) == [1, 1, 0]


class _Counted(list[tuple[int, int]]):
    """Counts the offsets that are read."""

    read = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for item in super().__iter__():
            self.read += 1
            yield item

    def __getitem__(self, at: Any) -> Any:
        self.read += 1
        return super().__getitem__(at)


@pytest.mark.parametrize("in_order", [True, False])
def test_the_mask_of_many_spans_reads_each_token_few_times(in_order: bool) -> None:
    """A row may have thousands of messages, and a million tokens."""
    tokens, random = 4000, Random(1)
    offsets = _Counted((i, i + (i % 7 > 0)) for i in range(tokens))  # each seventh token has no text
    if not in_order:
        random.shuffle(offsets)
    ids = [random.randrange(4) for _ in range(tokens)]
    whole = "".join(random.choices("ab \n", k=tokens))
    spans = [(i, i + 7) for i in range(0, tokens, 10)]
    special = frozenset({0})
    found = mask_of_spans(whole, ids, offsets, spans, special)
    assert offsets.read < 10 * tokens
    expected = bytearray(tokens)
    for start, stop in spans:
        inside = [t for t, (a, b) in enumerate(offsets) if start <= a < stop and a < b]
        kept = len(inside)
        while kept and not whole[slice(*offsets[inside[kept - 1]])].strip():
            kept -= 1
        for t in inside[:kept] if kept and ids[inside[kept - 1]] in special else inside:
            expected[t] = 1
    assert found == bytes(expected)
    assert 0 < sum(found) < tokens


def test_a_text_is_not_searched_for_each_mark() -> None:
    class Text(str):
        def __contains__(self, _: object) -> bool:
            raise AssertionError

    assert loss_mask._mark(Text("a" + loss_mask._MARKS[0])) == loss_mask._MARKS[1]
