"""Chat templates of several families: the text is that of transformers, and what no template shows
by itself is shown all the same."""

import json
import re
from dataclasses import replace

import pytest

from tunewright.contract.failures import UserError
from tunewright.data.examples import BadRow, Chat, Completion, Message, Text, ToolCall
from tunewright.data.render import ChatText, renderers, template_text
from tunewright.data.shapes import example_of
from tunewright.data.templates import Template
from tunewright.data.turns import Arguments, forms_of

FAMILIES = ("llama3", "qwen", "gemma", "mistral", "gpt_oss", "next_role", "generation")
LOSE_SYSTEM = ("gemma", "mistral")
KNOW_TOOLS = ("llama3", "qwen", "mistral", "gpt_oss", "next_role")

TALK = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4"},
]
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
WORK = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "4", "tool_call_id": "abcdefghi"},
    {"role": "assistant", "content": "It is 4."},
]


def theirs(tokenizer, messages, **others):
    """What transformers makes of the same template, with our clock."""
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, **tokenizer.special_tokens
    )
    found = fast.apply_chat_template(messages, chat_template=tokenizer.chat_template, **others)
    if isinstance(found, str):
        found = re.sub(r"(Today Date: )\d\d \w{3} \d{4}", r"\g<1>01 Jan 2026", found)
        return re.sub(r"(Current date: )\d{4}-\d\d-\d\d", r"\g<1>2026-01-01", found)
    return found


@pytest.mark.parametrize(
    ("family", "system"),
    [(f, s) for f in FAMILIES for s in (False, True) if f not in LOSE_SYSTEM or not s],
)
def test_the_text_of_a_talk_is_that_of_transformers(stand_in, family, system):
    tokenizer = stand_in(family)
    messages = [{"role": "system", "content": "Be brief."}] * system + TALK
    rendered = ChatText(tokenizer)(example_of({"messages": messages}))
    closed = "<|user|>" if family == "next_role" else ""
    assert rendered.text == theirs(tokenizer, messages, tokenize=False) + closed
    assert not rendered.bos


@pytest.mark.parametrize("family", KNOW_TOOLS)
def test_the_text_of_tool_calls_is_that_of_transformers(stand_in, family):
    tokenizer = stand_in(family)
    rendered = ChatText(tokenizer)(example_of({"messages": WORK, "tools": [TOOL]}))
    closed = "<|user|>" if family == "next_role" else ""
    assert rendered.text == theirs(tokenizer, WORK, tools=[TOOL], tokenize=False) + closed


@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])
@pytest.mark.parametrize("family", ["qwen", "gpt_oss"])
def test_reasoning_reaches_the_field_that_the_template_reads(stand_in, family, field):
    wanted = {"qwen": "reasoning_content", "gpt_oss": "thinking"}[family]
    tokenizer = stand_in(family)
    rows = [
        [*TALK[:3], {"role": "assistant", "content": "4", name: "Two and two."}]
        for name in (field, wanted)
    ]
    rendered = ChatText(tokenizer)(example_of({"messages": rows[0]}))
    assert "Two and two." in rendered.text
    assert rendered.text == theirs(tokenizer, rows[1], tokenize=False)


@pytest.mark.parametrize(
    ("family", "shown"),
    [
        ("llama3", dict(system=True, reasoning=False, tools=True, calls=True, long_ids=True)),
        ("qwen", dict(system=True, reasoning=True, tools=True, calls=True, long_ids=True)),
        ("gemma", dict(system=False, reasoning=False, tools=False, calls=False)),
        ("mistral", dict(system=False, reasoning=False, tools=True, calls=True, long_ids=False)),
        ("gpt_oss", dict(system=True, developer=True, reasoning=True, tools=True, calls=True)),
        ("next_role", dict(system=True, developer=False, reasoning=False, tools=True, calls=True)),
    ],
)
def test_what_a_template_shows_is_found_out(stand_in, family, shown):
    tokenizer = stand_in(family)
    forms = forms_of(Template(tokenizer.chat_template, tokenizer.special_tokens))
    assert {name: getattr(forms, name) for name in shown} == shown


def test_what_a_template_cannot_show_is_folded_into_what_it_can(stand_in):
    system = {"role": "system", "content": "Be brief."}
    thought = {**WORK[1], "reasoning_content": "I need add."}
    messages = [system, WORK[0], thought, *WORK[2:]]
    text = ChatText(stand_in("gemma"))(example_of({"messages": messages, "tools": [TOOL]})).text
    assert text == (
        "<s><start_of_turn>user\nBe brief.\n\nTools, one JSON object a line:\n"
        f"{json.dumps(TOOL)}\n\n2 + 2?<end_of_turn>\n"
        "<start_of_turn>model\n<think>\nI need add.\n</think>\n\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\n4\n</tool_response><end_of_turn>\n"
        "<start_of_turn>model\nIt is 4.<end_of_turn>\n"
    )


def test_two_results_become_one_message_of_the_user(stand_in):
    chat = Chat(
        (
            Message("user", "Q"),
            Message("assistant", "", True, tool_calls=(ToolCall("f", {}), ToolCall("g", {}))),
            Message("tool", "1"),
            Message("tool", "2"),
            Message("assistant", "A", True),
        )
    )
    text = ChatText(stand_in("gemma"))(chat).text
    assert (
        "<start_of_turn>user\n<tool_response>\n1\n</tool_response>\n"
        "<tool_response>\n2\n</tool_response><end_of_turn>\n" in text
    )


def test_a_system_message_that_the_template_would_lose_goes_to_the_question(stand_in):
    messages = [{"role": "system", "content": "Be brief."}, *TALK[:2]]
    tokenizer = stand_in("mistral")
    assert "Be brief." not in theirs(tokenizer, messages, tokenize=False)
    rendered = ChatText(tokenizer)(example_of({"messages": messages}))
    assert rendered.text == "<s>[INST] Be brief.\n\nHi[/INST] Hello.</s>"


def test_a_system_message_between_turns_goes_to_the_next_question(stand_in):
    turns = (Message("user", "Q"), Message("assistant", "A", True), Message("system", "S"))
    text = ChatText(stand_in("gemma"))(Chat((*turns, *turns[:2]))).text
    assert text.count("<start_of_turn>user\nS\n\nQ<end_of_turn>") == 1


@pytest.mark.parametrize("given", [None, "call_24_characters_long_id"])
def test_ids_that_a_template_asks_for_are_made(stand_in, given):
    calls = tuple(ToolCall(name, {}, given and given + name) for name in "fg")
    results = [Message("tool", c.name, tool_call_id=c.id) for c in calls]
    ends = (Message("assistant", "A", True),)
    chat = Chat((Message("user", "Q"), Message("assistant", "", True, "", calls), *results, *ends))
    text = ChatText(stand_in("mistral"))(chat).text
    assert re.findall(r'"(?:call_)?id": "(\w+)"', text) == ["call00001", "call00002"] * 2


def test_arguments_are_an_object_and_text(stand_in):
    """Some templates add the arguments to text, others write them as JSON."""
    source = (
        "{% for m in messages %}{{ m.role }}:{% for c in m.tool_calls or [] %}"
        "{{ '[' + c.function.name + c.function.arguments + ']' }}"
        "{{ c.function.arguments | tojson }}{{ c.function.arguments }}"
        "{{ c.function.arguments.a }}{% endfor %}{{ m.content }};{% endfor %}"
    )
    rendered = ChatText(stand_in("qwen"), source=source)(example_of({"messages": WORK}))
    assert rendered.text == (
        'user:2 + 2?;assistant:[add{"a": 2}]{"a": 2}{"a": 2}2;tool:4;assistant:It is 4.;'
    )
    assert Arguments(a="é") + "!" == '{"a": "é"}!'


def test_the_content_of_a_message_that_only_calls_tools_fits_the_template(stand_in):
    strict = "{% for m in messages %}{{ m.content + ';' }}{{ m.tool_calls }}{% endfor %}"
    none = (
        "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls[0].function.name }}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    blanks = [forms_of(Template(source, {})).blank for source in (strict, none)]
    assert blanks == ["", None]
    text = ChatText(stand_in("qwen"), source=none)(example_of({"messages": WORK})).text
    assert text == "2 + 2?;add;4;It is 4.;"


def test_the_builtin_template(demo):
    builtin = renderers(demo, ["builtin"])["builtin"]
    messages = [
        {"role": "system", "content": "Be brief."},
        WORK[0],
        {**WORK[1], "content": "Wait.", "reasoning_content": "I need add."},
        *WORK[2:],
    ]
    rendered = builtin(example_of({"messages": messages, "tools": [TOOL]}))
    assert rendered.text == (
        f"### Tools:\n{json.dumps(TOOL)}\n\n### System:\nBe brief.\n\n### User:\n2 + 2?\n\n"
        "### Assistant:\n<think>\nI need add.\n</think>\nWait.\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2}}\n</tool_call><|end|>\n\n'
        "### Tool:\n4\n\n### Assistant:\nIt is 4.<|end|>\n\n"
    )
    assert [rendered.text[a:b] for a, b in rendered.spans] == [
        "<think>\nI need add.\n</think>\nWait.\n<tool_call>\n"
        '{"name": "add", "arguments": {"a": 2}}\n</tool_call><|end|>',
        "It is 4.<|end|>",
    ]


def test_without_a_template_ours_is_used_with_the_bos_that_the_tokenizer_adds(llama):
    plain = replace(llama, chat_template=None)
    rendered = ChatText(plain)(example_of({"messages": TALK}))
    assert rendered.text == (
        "<|begin_of_text|>### User:\nHi\n\n### Assistant:\nHello.<|eot_id|>\n\n"
        "### User:\n2 + 2?\n\n### Assistant:\n4<|eot_id|>\n\n"
    )


def test_the_template_of_the_workload_is_text_or_a_path(demo, tmp_path):
    source = "{% for m in messages %}({{ m.role }}) {{ m.content }}\n{% endfor %}"
    path = tmp_path / "mine.jinja"
    path.write_text(source)
    row = example_of({"messages": TALK[:2]})
    for given in (source, str(path)):
        chat = renderers(demo, ["chat"], given)["chat"]
        assert chat(row).text == "(user) Hi\n(assistant) Hello.<|end|>"
        assert template_text(demo, "chat", given) == source
    assert template_text(demo, "chat") == demo.chat_template


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("/nowhere/mine.jinja", "chat_template /nowhere/mine.jinja cannot be read"),
        ("/", "cannot be read (Is a directory)"),
        ("{% for m in messages %}", "the chat template is broken (line 1): Unexpected end"),
        ("{{ x | nothing }}", "No filter named 'nothing'"),
        ("a\n{% frob %}", "(line 2): Encountered unknown tag 'frob'"),
    ],
)
def test_a_template_that_cannot_be_used_is_one_sentence(demo, given, words):
    with pytest.raises(UserError) as caught:
        renderers(demo, ["chat"], given)
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('roles must\n alternate.') }}", "(roles must alternate)"),
        ("{{ messages[9].content.strip() }}", "has no element 9"),
        ("{{ 'a' + 1 }}", "can only concatenate str"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.__class__.__mro__ }}", "is unsafe"),
        ("{{ messages.append(1) }}", "attribute 'append' of 'list' object is unsafe"),
        ("{{ range(999999999) | list }}", "Range too big"),
    ],
)
def test_a_row_that_the_template_refuses_is_one_sentence(demo, source, words):
    with pytest.raises(BadRow) as caught:
        ChatText(demo, source=source)(example_of({"messages": TALK}))
    assert str(caught.value).startswith("the chat template refuses it (")
    assert words in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_globals_of_transformers(demo):
    source = (
        "{{ strftime_now('%Y') }}{{ {'b': '<é>', 'a': [1]} | tojson }}"
        "{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}"
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}"
        "{% if loop.index > 1 %}{% break %}{% endif %}{% endfor %}"
    )
    tokenizer = replace(demo, chat_template=source)
    text = ChatText(tokenizer)(example_of({"messages": TALK[:2]})).text
    assert text == '2026{"b": "<é>", "a": [1]}{\n "a": 2,\n "b": 1\n}Hello.<|end|>'
    expected = theirs(tokenizer, TALK[:2], tokenize=False)
    assert text.removeprefix("2026").removesuffix("<|end|>") == expected[4:]


def test_marks_change_no_text(demo):
    """Loops in macros and set blocks, whose text the template may still measure, get no marks."""
    source = (
        "{% macro all(list) %}{% for m in list %}{{ m.role }}{% endfor %}{% endmacro %}"
        "{% set roles %}{% for m in messages %}{{ m.role[0] }}{% endfor %}{% endset %}"
        "{{ roles }}{{ roles | length }}{{ all(messages) | length }}"
        "{% for m in messages | reverse %}{% endfor %}{% for c in '<>' %}{{ c }}{% endfor %}"
        "{% for m in messages %}{% for n in messages %}{% endfor %}[{{ m.content }}]{% endfor %}"
    )
    tokenizer = replace(demo, chat_template=source)
    rendered = ChatText(tokenizer)(example_of({"messages": TALK}))
    assert rendered.text == theirs(tokenizer, TALK, tokenize=False)
    assert [rendered.text[a:b] for a, b in rendered.spans] == ["Hello.]", "4]"]


def test_a_developer_is_a_system_where_the_model_knows_no_developer(stand_in):
    messages = [{"role": "developer", "content": "Be brief."}, *TALK]
    text = ChatText(stand_in("qwen"))(example_of({"messages": messages})).text
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    text = ChatText(stand_in("gpt_oss"))(example_of({"messages": messages})).text
    assert "<|start|>developer<|message|># Instructions\n\nBe brief." in text


def test_rows_of_another_shape_than_the_template(demo):
    found = renderers(demo, ["chat", "completion", "text"])
    assert "Q<|end|>\n<|assistant|>\nA<|end|>" in found["chat"](Completion("Q", "A")).text
    with pytest.raises(BadRow, match="plain text has no roles"):
        found["chat"](Text("A"))
    with pytest.raises(BadRow, match="not a prompt with a completion"):
        found["completion"](Text("A"))
    with pytest.raises(BadRow, match="not plain text"):
        found["text"](Completion("Q", "A"))
