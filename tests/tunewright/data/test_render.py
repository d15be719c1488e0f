import json
import shutil
from dataclasses import replace

import pytest

from tunewright.data.documents import encode, fitted
from tunewright.data.examples import Alpaca, BadRow, as_alpaca, example_of
from tunewright.data.render import AlpacaText, ChatText, chat_template_of
from tunewright.data.tokenizer import load_tokenizer

CHAT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
}


def supervised_texts(rendered):
    return [rendered.text[start:end] for start, end in rendered.spans]


def trained(tokenizer, rendered, train_on="responses"):
    """The decoded supervised tokens of one row, span by span."""
    (document,) = encode(tokenizer, [(1, rendered)], train_on)
    return [tokenizer.decode(document.ids[a:b].tolist()) for a, b in document.spans]


def ids_of(tokenizer, rendered):
    (document,) = encode(tokenizer, [(1, rendered)], "responses")
    return document.ids.tolist()


@pytest.mark.parametrize(
    ("context", "prompt"),
    [
        ("", "### Instruction:\nAdd.\n\n### Response:\n"),
        ("1 {2}", "### Instruction:\nAdd.\n\n### Input:\n1 {2}\n\n### Response:\n"),
    ],
)
def test_alpaca_text_and_span(demo, context, prompt):
    rendered = AlpacaText(demo)(Alpaca("Add.", context, "3"))
    assert rendered.text == prompt + "3<|end|>"
    assert rendered.spans == ((len(prompt), len(prompt) + len("3<|end|>")),)
    assert trained(demo, rendered) == ["3<|end|>"]


def test_alpaca_ids_by_hand(demo):
    """The prompt's tokens, then exactly two supervised ones: the answer and the end."""
    rendered = AlpacaText(demo)(Alpaca("Add.", "", "3"))
    (document,) = encode(demo, [(1, rendered)], "responses")
    n = len(document.ids)
    assert document.ids[-2:].tolist() == [demo.backend.token_to_id("3"), demo.id_of("eos_token")]
    assert document.spans == ((n - 2, n),)


def test_two_turns_are_two_spans(demo):
    rendered = ChatText(demo)(example_of(CHAT))
    assert rendered.text == (
        "<|start|><|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n"
        "<|user|>\n2 + 2?<|end|>\n<|assistant|>\n4<|end|>\n"
    )
    assert supervised_texts(rendered) == ["Hello.<|end|>", "4<|end|>"]
    assert trained(demo, rendered) == ["Hello.<|end|>", "4<|end|>"]


def test_trimmed_offsets_do_not_shift_the_span(llama):
    """Llama's post-processor gives '\\n\\n' the offsets of what follows; that must not train it."""
    rendered = ChatText(llama)(example_of(CHAT))
    assert trained(llama, rendered) == ["Hello.<|eot_id|>", "4<|eot_id|>"]
    spaced = AlpacaText(llama)(Alpaca("Add.", "", "  two spaces\n\n"))
    assert trained(llama, spaced) == ["  two spaces\n\n<|eot_id|>"]


@pytest.mark.parametrize("answer", ["日本語 ☃", "é" * 5, "👩‍👩‍👧 family", "a\r\nb"])
def test_characters_of_several_tokens(llama, answer):
    rendered = AlpacaText(llama)(Alpaca("Ünicode?", "", answer))
    assert trained(llama, rendered) == [answer + "<|eot_id|>"]


def test_typed_parts_and_a_loss_weight_of_zero(demo):
    def turn(role, weight, *texts):
        parts = [{"type": "text", key: text} for key, text in texts]
        return {"role": role, "content": parts, "loss_weight": weight}

    row = {
        "messages": [
            turn("user", 0.0, ("value", "Hi")),
            turn("assistant", 0, ("text", "Not this.")),
            turn("user", 0.0, ("value", "And?")),
            turn("assistant", 1.0, ("value", "Only "), ("text", "this.")),
        ]
    }
    assert supervised_texts(ChatText(demo)(example_of(row))) == ["Only this.<|end|>"]


def test_train_on_all_labels_everything_but_the_first_token(llama):
    rendered = AlpacaText(llama)(Alpaca("Add.", "", "3"))
    assert trained(llama, rendered, "all") == [rendered.text]


def test_exactly_one_bos_for_alpaca_text_as_the_tokenizer_gives(llama, demo):
    rendered = AlpacaText(llama)(Alpaca("Add.", "", "3"))
    assert ids_of(llama, rendered).count(llama.id_of("bos_token")) == 1
    assert ids_of(llama, rendered)[0] == llama.id_of("bos_token")
    brought = rendered._replace(text="<|begin_of_text|>" + rendered.text)
    assert ids_of(llama, brought) == ids_of(llama, rendered)
    assert demo.id_of("bos_token") not in ids_of(demo, AlpacaText(demo)(Alpaca("Add.", "", "3")))


def test_a_chat_template_with_a_bos_gets_no_second_one(llama):
    ids = ids_of(llama, ChatText(llama)(example_of(CHAT)))
    assert ids.count(llama.id_of("bos_token")) == 1


def test_the_end_token_is_supervised_when_it_is_also_the_pad(llama):
    padded = replace(llama, special_tokens={**llama.special_tokens, "pad_token": "<|eot_id|>"})
    assert padded.id_of("pad_token") == padded.id_of("eos_token")
    assert trained(padded, AlpacaText(padded)(Alpaca("Add.", "", "3"))) == ["3<|eot_id|>"]


@pytest.mark.parametrize("name", ["deployments/model", "tests/data/models/llama"])
def test_the_same_ids_as_transformers(name, pytestconfig):
    transformers = pytest.importorskip("transformers")
    folder = pytestconfig.rootpath / name
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(str(folder))
    rendered = AlpacaText(ours)(Alpaca("Say it.", "in Café", " Déjà vu\n"))
    assert ids_of(ours, rendered) == theirs(rendered.text)["input_ids"]
    chat = ChatText(ours)(example_of(CHAT))
    assert chat.text == theirs.apply_chat_template(CHAT["messages"], tokenize=False)
    assert ids_of(ours, chat) == theirs.apply_chat_template(CHAT["messages"])["input_ids"]
    config = transformers.AutoConfig.from_pretrained(folder)
    assert config.vocab_size == ours.vocabulary == len(theirs)
    assert theirs.pad_token_id not in (theirs.bos_token_id, theirs.eos_token_id)
    ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
    assert theirs.pad_token_id not in ([ends] if isinstance(ends, int) else ends)


def test_a_tokenizer_without_a_template_gets_ours(llama):
    plain = replace(llama, chat_template=None)
    rendered = ChatText(plain)(example_of(CHAT))
    assert rendered.text == (
        "<|begin_of_text|>### User:\nHi\n\n### Assistant:\nHello.<|eot_id|>\n\n"
        "### User:\n2 + 2?\n\n### Assistant:\n4<|eot_id|>\n\n"
    )
    assert supervised_texts(rendered) == ["Hello.<|eot_id|>", "4<|eot_id|>"]
    assert chat_template_of(plain).startswith("{{ bos_token }}")


def test_a_generation_prompt_that_history_does_not_keep(demo):
    """Reasoning templates open a thought for the model, but keep only the answer."""
    template = demo.chat_template.replace(
        "'<|assistant|>\\n' }}", "'<|assistant|>\\n<think>\\n' }}"
    )
    thinking = replace(demo, chat_template=template)
    assert template != demo.chat_template
    rendered = ChatText(thinking)(example_of(CHAT))
    assert supervised_texts(rendered) == ["Hello.<|end|>", "4<|end|>"]


def test_generation_marks_and_the_clock_of_a_template(demo):
    marked = replace(
        demo,
        chat_template="{{ strftime_now('%Y') }}{% for m in messages %}[{{ m.role }}]"
        "{% generation %}{{ m.content }}{% endgeneration %};{% endfor %}",
    )
    row = {"messages": CHAT["messages"][:2]}
    assert ChatText(marked)(example_of(row)).text == "2026[user]Hi;[assistant]Hello.;"


def test_a_template_that_rewrites_earlier_turns_is_a_bad_row(demo):
    only_last = replace(
        demo,
        chat_template="{% for m in messages %}"
        "{{ m.content if loop.last or m.role == 'user' else '...' }};{% endfor %}",
    )
    with pytest.raises(BadRow, match="rewrites earlier turns"):
        ChatText(only_last)(example_of(CHAT))


def test_a_row_that_the_template_refuses(demo):
    strict = replace(demo, chat_template="{{ raise_exception('roles must alternate') }}")
    with pytest.raises(BadRow, match=r"the chat template refuses it \(roles must alternate\)"):
        ChatText(strict)(example_of(CHAT))


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (None, "not an object (NoneType)"),
        ([1], "not an object (list)"),
        ({"conversations": []}, "no instruction or messages (its keys: conversations)"),
        ({"instruction": "Add.", "output": " "}, "no answer"),
        ({"instruction": "Add.", "output": None}, "no answer"),
        ({"instruction": "", "output": "3"}, "no instruction"),
        ({"instruction": "Add.", "output": 3}, "output is not text (int)"),
        ({"instruction": "Add.", "output": "\ud800"}, "broken Unicode (output has half a char"),
        ({"messages": []}, "no messages"),
        ({"messages": [None]}, "a message is not an object"),
        ({"messages": [{"content": "Hi"}]}, "a message has no role"),
        ({"messages": [{"role": "user", "content": "Hi"}]}, "no answer"),
        (
            {"messages": [{"role": "assistant", "content": "Hi", "loss_weight": 0}]},
            "no supervised token",
        ),
        (
            {"messages": [{"role": "assistant", "content": "Hi", "loss_weight": 0.5}]},
            "a loss_weight other than 0 and 1 (0.5)",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "content that is not text (a part of type image_url)",
        ),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "has tools"),
    ],
)
def test_bad_rows_and_their_reasons(row, reason):
    with pytest.raises(BadRow) as caught:
        example_of(row)
    assert str(caught.value).startswith(reason)


def test_alpaca_and_chat_stand_in_for_each_other(demo):
    assert as_alpaca(example_of({"messages": CHAT["messages"][:2]})) == Alpaca("Hi", "", "Hello.")
    with pytest.raises(BadRow, match="not one question with one answer"):
        as_alpaca(example_of(CHAT))
    rendered = ChatText(demo)(Alpaca("Add.", "1 2", "3"))
    assert rendered.text == "<|start|><|user|>\nAdd.\n\n1 2<|end|>\n<|assistant|>\n3<|end|>\n"


def test_truncation_cuts_at_the_right_and_never_leaves_an_unlabelled_row(demo):
    rendered = AlpacaText(demo)(Alpaca("Add.", "", "1 2 3 4 5 6 7 8 9"))
    (document,) = encode(demo, [(1, rendered)], "responses")
    n = len(document.ids)
    ((start, end),) = document.spans
    cut = fitted(document, n - 2, "truncate")
    assert cut.ids.tolist() == document.ids[: n - 2].tolist()
    assert cut.spans == ((start, end - 2),)
    assert fitted(document, n, "drop") is document
    with pytest.raises(BadRow, match="too long"):
        fitted(document, n - 1, "drop")
    with pytest.raises(BadRow, match="no supervised token"):
        fitted(document, start, "truncate")


def test_a_list_of_templates_in_the_config_means_its_default(tmp_path, pytestconfig):
    shutil.copytree(pytestconfig.rootpath / "deployments/model", tmp_path / "model")
    (tmp_path / "model/chat_template.jinja").unlink()
    path = tmp_path / "model/tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = [
        {"name": "tool_use", "template": "T"},
        {"name": "default", "template": "D"},
    ]
    config["eos_token"] = {"content": "<|end|>", "special": True}
    config["add_bos_token"] = True
    path.write_text(json.dumps(config))
    found = load_tokenizer(str(tmp_path / "model"))
    assert (found.chat_template, found.eos, found.adds_bos) == ("D", "<|end|>", True)
