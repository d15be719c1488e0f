"""What a row of each shape says, as values; and every reason why a row says nothing."""

import json
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.failures import UserError
from tunewright.data.examples import (
    Alpaca,
    BadRow,
    Chat,
    Completion,
    Message,
    Text,
    ToolCall,
    as_alpaca,
    as_chat,
)
from tunewright.data.shapes import example_of, format_of

USER = {"role": "user", "content": "Q"}
ANSWER = {"role": "assistant", "content": "A"}
Q, A = Message("user", "Q"), Message("assistant", "A", answer=True)
CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": '{"x": 1}'}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {}}}


def messages(*turns, **more):
    return {"messages": list(turns), **more}


def sharegpt(*turns, **more):
    pairs = [{"from": role, "value": value} for role, value in turns]
    return {"conversations": pairs, **more}


def parts(*found, **more):
    return {"role": "assistant", "content": list(found), **more}


@pytest.mark.parametrize(
    ("row", "shape", "example"),
    [
        (
            {"instruction": "Add.", "input": None, "output": "3", "text": "Below is"},
            "alpaca",
            Alpaca("Add.", "", "3"),
        ),
        ({"instruction": "", "input": "1", "output": "3"}, "alpaca", Alpaca("", "1", "3")),
        (
            {"instruction": "Q", "output": "A", "system": "S", "history": [["Q", "A"]]},
            "alpaca",
            Chat((Message("system", "S"), Q, A, Q, A)),
        ),
        (messages(USER, ANSWER), "messages", Chat((Q, A))),
        (messages(USER, ANSWER, prompt="Q", instruction=None), "messages", Chat((Q, A))),
        ({"messages": json.dumps([USER, ANSWER])}, "messages", Chat((Q, A))),
        (sharegpt(("human", "Q"), ("gpt", "A")), "sharegpt", Chat((Q, A))),
        ({"conversations": [USER, ANSWER]}, "sharegpt", Chat((Q, A))),
        (
            sharegpt(("human", "Q"), ("gpt", "A"), system="S"),
            "sharegpt",
            Chat((Message("system", "S"), Q, A)),
        ),
        ({"prompt": "Q ", "completion": " A"}, "prompt_completion", Completion("Q ", " A")),
        (
            {"prompt": [USER], "completion": [ANSWER]},
            "prompt_completion",
            Chat((Q, A)),
        ),
        (
            {"prompt": [USER, ANSWER, USER], "completion": "A"},
            "prompt_completion",
            Chat((Q, A._replace(answer=False), Q, A)),
        ),
        ({"text": " Once upon"}, "text", Text(" Once upon")),
    ],
)
def test_a_row_of_each_shape(row, shape, example):
    assert format_of(row) == shape
    assert example_of(row) == example_of(row, shape) == example


def test_a_shape_that_is_named_is_taken_where_others_fit_too():
    row = {**messages(USER, ANSWER), "text": "T", "prompt": "P", "completion": "C"}
    assert example_of(row) == Chat((Q, A))
    assert example_of(row, "text") == Text("T")
    assert example_of(row, "prompt_completion") == Completion("P", "C")


@pytest.mark.parametrize(
    ("columns", "row", "example"),
    [
        (
            {"instruction": "question", "output": "answer"},
            {"question": "Q", "answer": "A", "output": "not this"},
            Alpaca("Q", "", "A"),
        ),
        ({"text": "content"}, {"content": "T", "messages": None}, Text("T")),
        (
            {"messages": "dialogue", "role": "who", "content": "says"},
            {"dialogue": [{"who": "user", "says": "Q"}, {"who": "assistant", "says": "A"}]},
            Chat((Q, A)),
        ),
        ({"instruction": "text"}, {"text": "Q", "output": "A"}, Alpaca("Q", "", "A")),
    ],
)
def test_columns_that_have_other_names(columns, row, example):
    assert example_of(row, columns=columns) == example


def test_a_column_that_no_shape_has_is_the_user_s_to_mend():
    with pytest.raises(UserError, match="columns has anweisung, which no shape of a row has"):
        example_of({"q": "Q"}, columns={"anweisung": "q"})


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_in_a_field(key):
    turn = {**ANSWER, key: "R"}
    assert example_of(messages({**USER, key: None}, turn)) == Chat((Q, A._replace(reasoning="R")))


def test_rows_as_multilingual_thinking_has_them():
    """The columns of HuggingFaceH4/Multilingual-Thinking, with the nulls its table brings."""
    row = {
        "reasoning_language": "French",
        "developer": "You are a helpful chatbot.",
        "user": "Q",
        "analysis": "Réfléchis.",
        "final": "A",
        "messages": [
            {"role": "system", "content": "reasoning language: French", "thinking": None},
            {"role": "user", "content": "Q", "thinking": None},
            {"role": "assistant", "content": "A", "thinking": "Réfléchis."},
        ],
    }
    system = Message("system", "reasoning language: French")
    assert format_of(row) == "messages"
    assert example_of(row) == Chat((system, Q, A._replace(reasoning="Réfléchis.")))


@pytest.mark.parametrize("key", ["text", "value"])
def test_typed_parts(key):
    turn = parts(
        {"type": "thinking", key: "R"},
        {"type": "reasoning", key: "S"},
        {"type": "text", key: "A", "other": None},
        {"type": "text", key: "B"},
        {"type": "tool_call", key: '{"name": "f", "arguments": {"x": 1}}'},
    )
    answer = Message("assistant", "AB", True, "RS", (ToolCall("f", {"x": 1}),))
    asked = {"role": "user", "content": [{"type": "text", key: "Q"}]}
    assert example_of(messages(asked, turn)) == Chat((Q, answer))


@pytest.mark.parametrize("arguments", ['{"x": 1}', {"x": 1}])
@pytest.mark.parametrize("role", ["tool", "function", "observation", "ipython"])
def test_calls_and_their_results(arguments, role):
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    row = messages(
        USER,
        {**CALLS, "tool_calls": [call]},
        {"role": role, "content": "7", "tool_call_id": "c1", "name": "f"},
        {"role": role, "content": ""},
        ANSWER,
        tools=[TOOL],
    )
    called = Message("assistant", "", True, "", (ToolCall("f", {"x": 1}, "c1"),))
    result = Message("tool", "7", name="f", tool_call_id="c1")
    assert example_of(row) == Chat((Q, called, result, Message("tool", ""), A), (TOOL,))


def test_a_conversation_may_end_with_a_call():
    assert example_of(messages(USER, CALLS)).messages[1].tool_calls[0].name == "f"


@pytest.mark.parametrize("value", [None, "", "[]", [], "null"])
def test_no_tools(value):
    assert example_of(messages(USER, ANSWER, tools=value)) == Chat((Q, A))


@pytest.mark.parametrize(
    "value",
    [
        [TOOL],
        json.dumps([TOOL]),
        [json.dumps(TOOL)],
        json.dumps([TOOL["function"]]),
        [TOOL["function"]],
    ],
)
def test_tools_however_they_are_written(value):
    assert example_of(messages(USER, ANSWER, tools=value)).tools == (TOOL,)


@pytest.mark.parametrize("arguments", ["", None, "{}", {}])
def test_a_call_without_arguments(arguments):
    call = {"name": "f", "arguments": arguments}
    found = example_of(messages(USER, {**CALLS, "tool_calls": [call]}))
    assert found.messages[1].tool_calls == (ToolCall("f", {}),)


@pytest.mark.parametrize(
    ("weight", "trained"),
    [
        ({"loss_weight": 0.0}, False),
        ({"loss_weight": 1.0}, True),
        ({"weight": 0}, False),
        ({"train": False}, False),
        ({"train": True}, True),
        ({"loss_weight": None}, True),
    ],
)
def test_a_weight_decides_what_is_trained(weight, trained):
    first, last = {**ANSWER, **weight}, {**ANSWER, "content": "B"}
    found = example_of(messages({**USER, "loss_weight": 0.0}, first, USER, last))
    assert [m.answer for m in found.messages] == [False, trained, False, True]


def test_a_weight_on_another_turn_trains_nothing():
    found = example_of(messages({**USER, "train": True}, ANSWER))
    assert [m.answer for m in found.messages] == [False, True]


def call_row(**function):
    return messages(USER, {**CALLS, "tool_calls": [{"function": function}]})


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (None, "not an object (NoneType)"),
        ([1], "not an object (list)"),
        ("text", "not an object (str)"),
        (
            {"question": 1, "n": 2},
            "unknown shape (its keys: question, n; known are messages, sharegpt, alpaca, "
            "prompt_completion, text, and columns maps names)",
        ),
        ({"prompt": "Q"}, "unknown shape (its keys: prompt; known are messages, sharegpt, "
         "alpaca, prompt_completion, text, and columns maps names)"),
        ({"instruction": "Add.", "output": " \n"}, "no answer"),
        ({"instruction": "Add.", "output": None}, "no answer"),
        ({"instruction": "Add."}, "no answer (no output; its keys: instruction)"),
        ({"instruction": " ", "input": "", "output": "3"}, "no instruction"),
        ({"instruction": "Add.", "output": 3}, "output is not text (int)"),
        ({"instruction": "Add.", "output": "\udce9t\ud800"},
         "not UTF-8 text (output has the byte 0xe9)"),
        ({"instruction": "Add.", "output": "\ud83d"},
         "broken Unicode (output has half a character)"),
        ({"instruction": "Q", "output": "A", "history": ["Q"]},
         "history is not a list of pairs (['Q'])"),
        ({"prompt": "", "completion": "A"}, "no prompt"),
        ({"prompt": "Q", "completion": " "}, "no answer"),
        ({"prompt": ["Q"], "completion": "A"}, "a message is not an object (message 1: str)"),
        ({"text": "\n"}, "no text"),
        ({"text": 5}, "text is not text (int)"),
        (messages(), "no messages (a list of at least one is needed)"),
        ({"messages": "Hi"},
         "messages: not JSON (Expecting value: line 1 column 1 (char 0): Hi)"),
        ({"messages": {"role": "user"}}, "no messages (a list is needed, not dict)"),
        (messages(1), "a message is not an object (message 1: int)"),
        (messages({"content": "Q"}, ANSWER), "a message has no role (message 1)"),
        (messages(USER, {"role": "", "content": "A"}), "a message has no role (message 2)"),
        (messages({"role": "narrator", "content": "x"}, ANSWER),
         "an unknown role (message 1: narrator)"),
        (messages(USER), "no answer (no message is the assistant's)"),
        (messages(USER, {**ANSWER, "content": ""}),
         "no answer (message 2 (assistant) has no content)"),
        (messages(USER, {**ANSWER, "content": None, "thinking": "R"}),
         "no answer (message 2 (assistant) has no content)"),
        (messages({**USER, "content": " "}, ANSWER),
         "an empty message (message 1 (user) has no content)"),
        (messages(USER, USER, ANSWER), "a role twice in a row (messages 1 and 2: user)"),
        (messages(USER, ANSWER, ANSWER), "a role twice in a row (messages 2 and 3: assistant)"),
        (messages(USER, ANSWER, USER), "does not end with an answer (the last message is: user)"),
        (messages(USER, CALLS, {"role": "tool", "content": "7"}),
         "does not end with an answer (the last message is: tool)"),
        (messages(USER, {"role": "tool", "content": "7"}, ANSWER),
         "a tool's result without a call (message 2)"),
        (messages(USER, CALLS, {"role": "tool", "content": "7", "tool_call_id": "c2"}, ANSWER),
         "a tool's result without a call (message 3: c2)"),
        (messages(USER, {**ANSWER, "content": 5}), "content is not text (int)"),
        (messages(USER, parts({"type": "image", "url": "x"})),
         "content that is not text (a part of type image)"),
        (messages(USER, parts("A")), "content that is not text (a part of type str)"),
        (messages(USER, parts({"type": "text", "text": "A"}, {"type": "thinking", "text": "R"},
                              thinking="S")),
         "reasoning is given twice (as a part and as a field)"),
        (messages({**USER, "thinking": "R"}, ANSWER),
         "reasoning or a call that is not an answer's (message 1: user)"),
        (messages(USER, {**ANSWER, "loss_weight": 0.5}),
         "a loss_weight other than 0 and 1 (0.5)"),
        (messages(USER, {**ANSWER, "train": "no"}), "a train other than 0 and 1 ('no')"),
        (messages(USER, {**ANSWER, "loss_weight": 0}),
         "no supervised token (every answer is excluded by its weight)"),
        (messages(USER, ANSWER, tools="[{"),
         "tools: not JSON (Expecting property name enclosed in double quotes: line 1 column 3 "
         "(char 2)..."),
        (messages(USER, ANSWER, tools={"name": "f"}), "tools are not a list (dict)"),
        (messages(USER, ANSWER, tools=[3]), "a tool is not an object (int)"),
        (call_row(name="f", arguments="{x"), "a tool call's arguments: not JSON"),
        (call_row(name="f", arguments="[1]"), "a tool call's arguments are not an object ([1])"),
        (call_row(arguments="{}"), "a tool call has no name"),
        (call_row(name="f", arguments={"x": "\ud83d"}),
         "broken Unicode (a tool call has half a character)"),
        (sharegpt(("human", "Q"), ("function_call", "f(x)")), "a tool call: not JSON"),
        (sharegpt(("human", "Q"), ("function_call", "3")), "a tool call is not an object (3)"),
        (sharegpt(("human", "Q"), ("function_call", "")),
         "no answer (message 2 (assistant) has no content)"),
    ],
)  # fmt: skip
def test_a_row_that_says_nothing_has_a_reason(row, error):
    with pytest.raises(BadRow) as caught:
        example_of(row)
    assert str(caught.value).startswith(error.removesuffix("...").removesuffix(")"))
    assert len(str(caught.value).splitlines()) == 1


def test_a_named_shape_that_a_row_does_not_have():
    with pytest.raises(BadRow, match=r"no conversations \(its keys: text\)"):
        example_of({"text": "T"}, "sharegpt")
    with pytest.raises(BadRow, match="no prompt or completion"):
        example_of({"prompt": "T"}, "prompt_completion")


def test_a_bad_row_survives_a_process():
    error = pickle.loads(pickle.dumps(BadRow("no answer", "message 2")))
    assert (error.reason, error.detail) == ("no answer", "message 2")


def test_one_question_as_either():
    chat = Chat((Message("user", "Add.\n\n1 2"), Message("assistant", "3", answer=True)))
    assert as_chat(Alpaca("Add.", "1 2", "3")) == as_chat(chat) == chat
    assert as_alpaca(chat) == Alpaca("Add.\n\n1 2", "", "3")
    assert as_chat(Completion("Q", "A")) == Chat((Q, A))
    assert as_alpaca(Completion("Q", "A")) == Alpaca("Q", "", "A")
    for other in (Text("T"), Chat((Q, A, Q, A)), Chat((Q, A._replace(reasoning="R")))):
        with pytest.raises(BadRow, match="not one question with one answer"):
            as_alpaca(other)
    with pytest.raises(BadRow, match="plain text has no roles"):
        as_chat(Text("T"))


ODD = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
NAMES = st.sampled_from([
    "instruction", "input", "output", "messages", "conversations", "prompt", "completion", "text",
    "tools", "system", "history", "role", "from", "content", "value", "tool_calls", "type", "name",
    "arguments", "function", "loss_weight", "thinking",
])  # fmt: skip
ROWS = st.recursive(
    ODD | st.sampled_from(["user", "assistant", "tool", "text", "tool_call", "{}", "[]"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)


@given(ROWS)
def test_any_row_is_an_example_or_a_bad_row(row):
    try:
        found = example_of(row)
    except BadRow:
        return
    json.dumps(found, ensure_ascii=False, default=str).encode()


@given(st.lists(st.tuples(st.text(min_size=1), st.text(min_size=1)), min_size=1, max_size=4))
def test_both_spellings_say_the_same(turns):
    pairs = [(role, text) for turn in turns for role, text in zip(("human", "gpt"), turn)]  # noqa: B905
    names = {"human": "user", "gpt": "assistant"}
    as_messages = messages(*({"role": names[r], "content": t} for r, t in pairs))
    contents = []
    for row in (sharegpt(*pairs), as_messages):
        try:
            contents.append(example_of(row))
        except BadRow as error:
            contents.append(str(error))
    assert contents[0] == contents[1]
    if isinstance(contents[0], Chat):
        assert [m.content for m in contents[0].messages] == [text for _, text in pairs]
