"""What is supervised: by hand for each family, as properties, and in a dozen rows of real data."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.contract.failures import UserError
from tunewright.data.documents import encode
from tunewright.data.examples import BadRow, Chat, Message, ToolCall
from tunewright.data.render import ChatText, renderers, template_of
from tunewright.data.shapes import example_of

TALK = Chat(
    (
        Message("user", "Hi"),
        Message("assistant", "Hello.", True),
        Message("user", "2 + 2?"),
        Message("assistant", "4", True),
    )
)
THOUGHTS = Chat(
    (
        Message("user", "Hi"),
        Message("assistant", "Hello.", True, reasoning="Greet."),
        Message("user", "2 + 2?"),
        Message("assistant", "4", True, reasoning="Two and two."),
    )
)
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    },
}
WORK = Chat(
    (
        Message("user", "2 + 2?"),
        Message("assistant", "", True, tool_calls=(ToolCall("add", {"a": 2}),)),
        Message("tool", "4"),
        Message("assistant", "It is 4.", True),
        Message("user", "Thanks"),
        Message("assistant", "Welcome.", True),
    )
)


def document_of(tokenizer, rendered):
    (document,) = encode(tokenizer, [(1, rendered)])
    return document


def mask_of(document):
    mask = [0] * len(document.ids)
    for start, end in document.spans:
        mask[start:end] = [1] * (end - start)
    return mask


def by_hand(tokenizer, marked):
    """Ids and mask of a text written as plain «trained» plain: each piece tokenized alone."""
    ids, mask = [], []
    for piece in marked.replace("»", "«").split("«"):
        found = tokenizer.encode([piece])[0].ids
        mask += [len(ids) and int(f"«{piece}»" in marked)] * len(found)
        ids += found
    return ids, mask


def trained(tokenizer, rendered):
    """The decoded supervised tokens of one row, span by span."""
    document = document_of(tokenizer, rendered)
    return [tokenizer.decode(document.ids[a:b].tolist()) for a, b in document.spans]


LLAMA_SYSTEM = "<|start_header_id|>system<|end_header_id|>\n\n"
LLAMA_USER = "<|start_header_id|>user<|end_header_id|>\n\n"
LLAMA_ANSWER = "<|start_header_id|>assistant<|end_header_id|>\n\n"
OSS_SYSTEM = "<|start|>system<|message|>Knowledge cutoff: 2024-06\nCurrent date: 2026-01-01<|end|>"
OSS_TOOLS = (
    "<|start|>developer<|message|># Tools\n\nnamespace functions {\n\n"
    "type add = (_: {\na: integer,\n}) => any;\n\n} // namespace functions<|end|>"
)
CHATML = (
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
    "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n«4<|im_end|>»\n"
)


@pytest.mark.parametrize(
    ("family", "chat", "marked"),
    [
        (
            "llama3",
            TALK,
            f"<s>{LLAMA_SYSTEM}Today Date: 01 Jan 2026\n\n<|eot_id|>"
            f"{LLAMA_USER}Hi<|eot_id|>{LLAMA_ANSWER}«Hello.<|eot_id|>»"
            f"{LLAMA_USER}2 + 2?<|eot_id|>{LLAMA_ANSWER}«4<|eot_id|>»",
        ),
        (
            "llama3",
            WORK._replace(tools=()),
            f"<s>{LLAMA_SYSTEM}Today Date: 01 Jan 2026\n\n<|eot_id|>{LLAMA_USER}2 + 2?<|eot_id|>"
            f'{LLAMA_ANSWER}«{{"name": "add", "parameters": {{"a": 2}}}}<|eot_id|>»'
            '<|start_header_id|>ipython<|end_header_id|>\n\n"4"<|eot_id|>'
            f"{LLAMA_ANSWER}«It is 4.<|eot_id|>»"
            f"{LLAMA_USER}Thanks<|eot_id|>{LLAMA_ANSWER}«Welcome.<|eot_id|>»",
        ),
        (  # the empty thought is the template's
            "qwen",
            TALK,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
            "<|im_start|>user\n2 + 2?<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n«4<|im_end|>»\n",
        ),
        (  # the earlier thought is not in the text
            "qwen",
            THOUGHTS,
            "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n«Hello.<|im_end|>»\n"
            "<|im_start|>user\n2 + 2?<|im_end|>\n"
            "<|im_start|>assistant\n«<think>\nTwo and two.\n</think>\n\n4<|im_end|>»\n",
        ),
        (
            "qwen",
            WORK,
            "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
            '«<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n</tool_call><|im_end|>»\n'
            "<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n«It is 4.<|im_end|>»\n"
            "<|im_start|>user\nThanks<|im_end|>\n"
            "<|im_start|>assistant\n<think>\n\n</think>\n\n«Welcome.<|im_end|>»\n",
        ),
        (
            "gemma",
            TALK,
            "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n«Hello.<end_of_turn>»\n"
            "<start_of_turn>user\n2 + 2?<end_of_turn>\n<start_of_turn>model\n«4<end_of_turn>»\n",
        ),
        (
            "mistral",
            TALK,
            "<s>[INST] Hi[/INST]« Hello.</s>»[INST] 2 + 2?[/INST]« 4</s>»",
        ),
        (
            "mistral",
            WORK,
            "<s>[INST] 2 + 2?[/INST]"
            '«[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2}, "id": "call00001"}]</s>»'
            '[TOOL_RESULTS] {"content": 4, "call_id": "call00001"}[/TOOL_RESULTS]'
            "« It is 4.</s>»[INST] Thanks[/INST]« Welcome.</s>»",
        ),
        (  # <|end|> in an earlier turn would let the model go on, only <|return|> ends an answer
            "gpt_oss",
            THOUGHTS,
            f"{OSS_SYSTEM}<|start|>user<|message|>Hi<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>Hello.»<|end|>"
            "<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
            "«<|channel|>analysis<|message|>Two and two.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>4<|return|>»",
        ),
        (
            "gpt_oss",
            WORK._replace(tools=(TOOL,)),
            f"{OSS_SYSTEM}{OSS_TOOLS}<|start|>user<|message|>2 + 2?<|end|><|start|>assistant"
            '« to=functions.add<|channel|>commentary json<|message|>{"a": 2}<|call|>»'
            '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"4"<|end|>'
            "<|start|>assistant«<|channel|>final<|message|>It is 4.»<|end|>"
            "<|start|>user<|message|>Thanks<|end|>"
            "<|start|>assistant«<|channel|>final<|message|>Welcome.<|return|>»",
        ),
        (  # the next role's marker ends the answer
            "next_role",
            TALK,
            "[gMASK]<sop><|user|>\nHi<|assistant|>«\nHello.<|user|>»"
            "\n2 + 2?<|assistant|>«\n4<|user|>»",
        ),
        (
            "next_role",
            WORK,
            '[gMASK]<sop><|user|>\n2 + 2?<|assistant|>«add\n{"a": 2}<|observation|>»'
            "\n4<|assistant|>«\nIt is 4.<|user|>»\nThanks<|assistant|>«\nWelcome.<|user|>»",
        ),
        ("generation", TALK, CHATML),
    ],
)
def test_ids_and_mask_by_hand(stand_in, family, chat, marked):
    tokenizer = stand_in(family)
    rendered = ChatText(tokenizer)(chat)
    assert rendered.text == marked.replace("«", "").replace("»", "")
    document = document_of(tokenizer, rendered)
    assert (document.ids.tolist(), mask_of(document)) == by_hand(tokenizer, marked)


@pytest.mark.parametrize("end_inside", [True, False])
def test_generation_markers_give_what_transformers_gives_and_the_end_token(stand_in, end_inside):
    transformers = pytest.importorskip("transformers")
    tokenizer = stand_in("generation")
    source = tokenizer.chat_template
    if not end_inside:
        source = source.replace("message.content + '<|im_end|>' }}", "message.content }}")
        source = source.replace(
            "{{- '\\n' }}\n    {%- else", "{{- '<|im_end|>\\n' }}\n    {%- else"
        )
        assert source != tokenizer.chat_template
    document = document_of(tokenizer, ChatText(tokenizer, source=source)(TALK))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, **tokenizer.special_tokens
    )
    expected = fast.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in TALK.messages],
        chat_template=source,
        return_assistant_tokens_mask=True,
        return_dict=True,
    )
    assert document.ids.tolist() == expected["input_ids"]
    mask = expected["assistant_masks"]
    if not end_inside:
        (end,) = tokenizer.encode(["<|im_end|>"])[0].ids
        ids = expected["input_ids"]
        mask = [m or int(i and mask[i - 1] and ids[i] == end) for i, m in enumerate(mask)]
    assert mask_of(document) == mask


@pytest.mark.parametrize(
    ("source", "pieces"),
    [
        # the closing token stands in front of the next turn
        (
            "{% for m in messages %}{{ '<|im_end|>' if not loop.first }}<|{{ m.role }}|>"
            "{{ m.content }}{% endfor %}<|im_end|>"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            ["Hello.<|im_end|>", "4<|im_end|>"],
        ),
        # an end token behind the last answer alone
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
            "{{ '<|assistant|>' if add_generation_prompt else eos_token }}",
            ["Hello.<|user|>", "4</s>"],
        ),
        # nothing but text: the end token is added, and the first token of the next heading ends
        (
            "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
            "{% if add_generation_prompt %}assistant: {% endif %}",
            [" Hello.\nus", " 4</s>"],
        ),
        # a heading, but no generation prompt
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}",
            ["Hello.<|im_end|>", "4<|im_end|>"],
        ),
        # the generation prompt opens a thought that no turn keeps
        (
            "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
            ["Hello.<|im_end|>", "4<|im_end|>"],
        ),
        # the prompt is the question's, a generation prompt is unknown
        (
            "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }} A:"
            "{% else %} {{ m.content }}</s>{% endif %}{% endfor %}",
            [" Hello.</s>", " 4</s>"],
        ),
        # messages by their number: no loop shows where turns begin, prefixes do
        (
            "{% for i in range(messages | length) %}<|{{ messages[i].role }}|>"
            "{{ messages[i].content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            ["Hello.<|im_end|>", "4<|im_end|>"],
        ),
        # a macro writes all, and only what is last is whole
        (
            "{% macro all(ms) %}{% for m in ms %}<|{{ m.role }}|>"
            "{{ m.content + '!' if loop.last else m.content }}<|im_end|>{% endfor %}{% endmacro %}"
            "{{ all(messages) }}",
            ["Hello.<|im_end|>", "4!<|im_end|>"],
        ),
        # a turn that is left out
        (
            "{% for m in messages %}{% if loop.index != 2 %}<|{{ m.role }}|>"
            "{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|>{% endif %}",
            ["4<|im_end|>"],
        ),
        # an opened thought that is closed at once
        (
            "{% for m in messages %}<|{{ m.role }}|>"
            "{% if m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}"
            "{{ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}",
            ["Hello.<|im_end|>", "4<|im_end|>"],
        ),
    ],
)
def test_templates_of_other_kinds(stand_in, source, pieces):
    tokenizer = stand_in("qwen")
    assert trained(tokenizer, ChatText(tokenizer, source=source)(TALK)) == pieces


def test_a_template_that_replaces_an_answer_is_a_bad_row(demo):
    source = "{% for m in messages %}{{ m.content if loop.last or m.role == 'user' else '...' }};"
    with pytest.raises(BadRow, match=r"the chat template changes the answer \(message 2\)"):
        ChatText(demo, source=source + "{% endfor %}")(TALK)


def test_a_thought_in_the_text_of_an_earlier_answer_is_dropped_with_it(stand_in):
    tokenizer = stand_in("qwen")
    told = [m._replace(content=f"<think>\nHm.\n</think>\n\n{m.content}") if m.answer else m
            for m in TALK.messages]  # fmt: skip
    rendered = ChatText(tokenizer)(Chat(tuple(told)))
    assert trained(tokenizer, rendered) == [
        "Hello.<|im_end|>",
        "<think>\nHm.\n</think>\n\n4<|im_end|>",
    ]


@pytest.mark.parametrize("answer", ["<", ">", "|>", "end", "<|end|>", "assistant"])
@pytest.mark.parametrize("family", ["qwen", "gpt_oss", "next_role"])
def test_an_answer_that_looks_like_what_closes_it(stand_in, family, answer):
    tokenizer = stand_in(family)
    question, reply = Message("user", "Q"), Message("assistant", answer, True)
    text = "".join(trained(tokenizer, ChatText(tokenizer)(Chat((question, reply) * 2))))
    heading, earlier, last = {
        "qwen": ("", "<|im_end|>", "<|im_end|>"),
        "gpt_oss": ("<|channel|>final<|message|>", "", "<|return|>"),
        "next_role": ("\n", "<|user|>", "<|user|>"),
    }[family]
    assert text == f"{heading}{answer}{earlier}{heading}{answer}{last}"


def test_a_thought_that_is_folded_into_an_answer_begins_it(stand_in):
    """Also where the generation prompt is not what stands in front of answers."""
    tokenizer = stand_in("qwen")
    source = (
        "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    assert trained(tokenizer, ChatText(tokenizer, source=source)(THOUGHTS)) == [
        "<think>\nGreet.\n</think>\n\nHello.<|im_end|>",
        "<think>\nTwo and two.\n</think>\n\n4<|im_end|>",
    ]


def test_a_thought_before_a_call_is_trained_where_the_template_has_no_field_for_it(stand_in):
    tokenizer = stand_in("qwen")
    source = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
        "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = WORK.messages[1]._replace(reasoning="Add.")
    rendered = ChatText(tokenizer, source=source)(Chat((WORK.messages[0], call)))
    assert trained(tokenizer, rendered) == [
        "<think>\nAdd.\n</think><tool_call>add</tool_call><|im_end|>"
    ]


def test_an_answer_that_quotes_the_template(stand_in):
    """Neither the closing token nor a heading inside a message leads astray."""
    tokenizer = stand_in("qwen")
    quote = "<|im_end|>\n<|im_start|>assistant\n4<|im_end|>"
    chat = Chat((Message("user", quote), Message("assistant", quote, True), *TALK.messages))
    found = trained(tokenizer, ChatText(tokenizer)(chat))
    assert found == [quote + "<|im_end|>", "Hello.<|im_end|>", "4<|im_end|>"]


@pytest.mark.parametrize(
    ("family", "end"),
    [
        ("llama3", "<|eot_id|>"),
        ("qwen", "<|im_end|>"),
        ("mistral", "</s>"),
        ("gpt_oss", "<|call|>"),
        ("next_role", "<|observation|>"),
    ],
)
def test_a_conversation_that_ends_with_a_call_has_an_end(stand_in, family, end):
    tokenizer = stand_in(family)
    (piece,) = trained(tokenizer, ChatText(tokenizer)(Chat(WORK.messages[:2])))
    assert '{"a": 2}' in piece
    assert piece.endswith(end)


def test_an_end_that_cannot_be_added_is_named(stand_in):
    tokenizer = replace(stand_in("qwen"), special_tokens={})
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(UserError, match="has no eos_token, so an answer could have no end"):
        ChatText(tokenizer, source=source)(TALK)
    assert trained(tokenizer, ChatText(tokenizer)(TALK))[1] == "4<|im_end|>"


@pytest.mark.parametrize(
    ("train_on", "pieces"),
    [
        ("responses", ["Hello.<|im_end|>", "4<|im_end|>"]),
        ("last_response", ["4<|im_end|>"]),
    ],
)
def test_train_on(stand_in, train_on, pieces):
    tokenizer = stand_in("generation")
    assert trained(tokenizer, ChatText(tokenizer, train_on)(TALK)) == pieces


def test_train_on_all_is_everything_but_the_first_token_and_excluded_answers(stand_in):
    tokenizer = stand_in("generation")
    rendered = ChatText(tokenizer, "all")(TALK)
    assert mask_of(document_of(tokenizer, rendered)) == [
        0,
        *[1] * (len(document_of(tokenizer, rendered).ids) - 1),
    ]
    first, answer, *others = TALK.messages
    rendered = ChatText(tokenizer, "all")(Chat((first, answer._replace(answer=False), *others)))
    text = rendered.text
    assert [text[a:b] for a, b in rendered.spans] == [
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n",
    ]


@pytest.mark.parametrize("train_on", ["responses", "all", "last_response"])
def test_a_loss_weight_of_zero_has_no_supervised_token(stand_in, train_on):
    def turn(role, text, weight):
        content = [{"type": "text", "value": text}]
        return {"role": role, "content": content, "loss_weight": weight}

    row = [turn("user", "Q", 0.0), turn("assistant", "Never", 0), turn("user", "R", 0.0)]
    row += [turn("assistant", "Always", 1.0), turn("user", "S", 0.0), turn("assistant", "Nor", 0.0)]
    for family in ("generation", "mistral", "next_role", "gpt_oss"):
        tokenizer = stand_in(family)
        rendered = ChatText(tokenizer, train_on)(example_of({"messages": row}))
        found = "".join(trained(tokenizer, rendered))
        assert "Always" in found
        assert "Never" not in found
        assert "Nor" not in found


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=30)
TEXTS = WORDS.filter(str.strip)


@st.composite
def chats(draw):
    messages = []
    for _ in range(draw(st.integers(1, 4))):
        answer = draw(st.booleans())
        messages += [
            Message("user", draw(TEXTS)),
            Message("assistant", draw(TEXTS), answer, reasoning=draw(st.just("") | TEXTS)),
        ]
    messages[-1] = messages[-1]._replace(answer=True)
    return Chat(tuple(messages))


@pytest.mark.parametrize("family", ["llama3", "qwen", "gemma", "mistral", "gpt_oss", "next_role"])
def test_every_row_keeps_its_text_and_trains_only_answers(stand_in, family):
    tokenizer = stand_in(family)
    render = ChatText(tokenizer)
    ends = ("<|eot_id|>", "<|im_end|>", "<end_of_turn>", "</s>", "<|return|>", "<|user|>")

    @settings(max_examples=60, deadline=None)
    @given(chats())
    def check(chat):
        rendered = render(chat)
        document = document_of(tokenizer, rendered)
        assert tokenizer.decode(document.ids.tolist()) == rendered.text
        answers = [message for message in chat.messages if message.answer]
        pieces = [rendered.text[start:end] for start, end in rendered.spans]
        assert len(pieces) == len(answers)
        for piece, message in zip(pieces, answers, strict=True):
            own = piece
            for end in ends:
                own = own.removesuffix(end)
            own = own.split("<|channel|>final<|message|>")[-1].strip()
            assert own.split("</think>")[-1].strip() == message.content.strip()
            assert not own.startswith("<think>") or message.reasoning

    check()


def real(folder, name):
    text = (folder / name).read_text()
    return [json.loads(line) for line in text.splitlines()] if "jsonl" in name else json.loads(text)


def pieces_of(tokenizer, row):
    example = example_of(row)
    name = template_of(example, "auto")
    return trained(tokenizer, renderers(tokenizer, [name])[name](example))


ALPACA_ANSWERS = {
    29: "fog.", 35: "3", 37: "0.5", 81: "77.0°F", 144: "Configuration", 158: "bird",
    195: "google.com", 200: "Negative", 342: "Prize.", 343: "Action.", 977: "15\n9\n8\n4\n0",
    993: "Fact.",
}  # fmt: skip
TYPED_ANSWERS = {
    0: "Hello! I am {{name}}, an AI assistant developed by {{author}}. "
    "How can I assist you today?",
    42: "您好，我是由 {{author}} 开发的人工智能助手，名为 {{name}}。"  # noqa: RUF001
    "我的主要用途是回答用户提出的问题。",
    79: "fog.", 85: "3", 131: "77.0°F", 141: "(555) 123-4567", 197: "Jupiter is a planet.",
    210: '"The children ran to school."', 245: "google.com", 346: "1. Java\n2. Python\n3. C++",
    412: "15% of 500 is 75.", 420: "She took a glance at the lackluster report.",
}  # fmt: skip
TOOL_ANSWERS = {
    11: [
        '{"name": "calculate_tip", "arguments": {"bill_amount": 100, "tip_percentage": 15}}',
        "The tip amount for your bill is $15.",
    ],
    43: [
        '{"name": "calculate_age", "arguments": '
        '{"birthdate": "1990-05-15", "current_date": "2022-03-15"}}',
        "According to the information provided, you are 31 years old today.",
    ],
    55: [
        "I'm sorry, but I don't have the capability to book flights. My current function is to "
        "create invoices. If you need help with that, feel free to ask!"
    ],
    119: [
        '{"name": "calculate_age", "arguments": {"birthdate": "1990-05-15"}}',
        "Based on the birthdate you provided, you are 31 years old.",
    ],
    134: [
        "I'm sorry, but I'm unable to assist with that. My current capabilities are limited to "
        "generating invoices for products or services. I don't have the ability to book flights "
        "or perform other external tasks."
    ],
    137: [
        '{"name": "calculate_tip", "arguments": {"bill_amount": 100, "tip_percentage": 15}}',
        "The tip amount for your bill is $15.",
    ],
    202: [
        '{"name": "calculate_bmi", "arguments": {"weight": 70, "height": 1.75}}',
        "Your Body Mass Index (BMI) is 22.86. This is considered a healthy weight for your height.",
    ],
    203: [
        '{"name": "calculate_age", "arguments": {"birthdate": "1990-05-15"}}',
        "Based on the birthdate you provided, you are 31 years old today.",
    ],
    218: [
        '{"name": "calculate_profit_margin", "arguments": {"revenue": 50000, "cost": 30000}}',
        "Based on the data you provided, your profit margin is 40%.",
    ],
    276: [
        "I'm sorry, but I'm unable to assist with that. Booking a flight is an external task and "
        "I don't have a function provided for that task. I can help calculate age based on a "
        "birthdate."
    ],
    280: [
        '{"name": "calculate_tip", "arguments": {"bill_amount": 50, "tip_percentage": 15}}',
        "The tip amount for your bill is $7.5.",
    ],
    290: [
        '{"name": "calculate_average", "arguments": {"numbers": [5, 10, 15, 20, 25]}}',
        "The average of the numbers you provided is 15.",
    ],
}


@pytest.mark.parametrize(
    ("name", "answers"),
    [("alpaca_en_demo.json", ALPACA_ANSWERS), ("v1_sft_demo.jsonl", TYPED_ANSWERS)],
)
def test_a_dozen_real_rows_by_hand(real_data, demo, name, answers):
    rows = real(real_data, name)
    found = {number: pieces_of(demo, rows[number]) for number in answers}
    assert found == {number: [f"{answer}<|end|>"] for number, answer in answers.items()}


@pytest.mark.parametrize("family", ["demo", "qwen", "next_role"])
def test_a_dozen_real_conversations_with_tools_by_hand(real_data, demo, stand_in, family):
    """Where the template knows no tools, where it does, and where the next role closes a turn."""
    rows = real(real_data, "glaive_toolcall_en_demo.json")
    tokenizer = demo if family == "demo" else stand_in(family)

    def expected(answer):
        if family == "next_role" and answer.startswith("{"):
            call = json.loads(answer)
            return f"{call['name']}\n{json.dumps(call['arguments'])}<|observation|>"
        if family == "next_role":
            return f"\n{answer}<|user|>"
        text = f"<tool_call>\n{answer}\n</tool_call>" if answer.startswith("{") else answer
        return text + ("<|end|>" if family == "demo" else "<|im_end|>")

    found = {number: pieces_of(tokenizer, rows[number]) for number in TOOL_ANSWERS}
    assert found == {n: [expected(a) for a in answers] for n, answers in TOOL_ANSWERS.items()}


@pytest.mark.parametrize("family", ["llama3", "qwen", "gemma", "mistral", "gpt_oss", "next_role"])
@pytest.mark.parametrize("name", ["v1_sft_demo.jsonl", "glaive_toolcall_en_demo.json"])
def test_all_real_conversations_have_an_answer_for_each_that_is_to_be_trained(
    real_data, stand_in, family, name
):
    render = ChatText(stand_in(family))
    for row in real(real_data, name):
        chat = example_of(row)
        assert len(render(chat).spans) == sum(message.answer for message in chat.messages)
