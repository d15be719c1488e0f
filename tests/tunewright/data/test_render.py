"""Alpaca text, completions and plain text; and what tokenizers do to a text and its spans."""

import json
import shutil
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tunewright.contract.failures import UserError
from tunewright.data.documents import encode
from tunewright.data.examples import Alpaca, BadRow, Chat, Completion, Message, Text
from tunewright.data.render import (
    AlpacaText,
    ChatText,
    renderers,
    template_of,
    template_text,
)
from tunewright.data.shapes import example_of
from tunewright.data.tokenizer import load_tokenizer

CHAT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4"},
    ]
}
EXAMPLES = {
    "alpaca": Alpaca("Add.", "1 2", "3"),
    "chat": example_of(CHAT),
    "completion": Completion("1 2 ", "3"),
    "text": Text("1 2 3"),
}


def document_of(tokenizer, rendered):
    (document,) = encode(tokenizer, [(1, rendered)])
    return document


def trained(tokenizer, rendered):
    """The decoded supervised tokens of one row, span by span."""
    document = document_of(tokenizer, rendered)
    return [tokenizer.decode(document.ids[a:b].tolist()) for a, b in document.spans]


def ids_of(tokenizer, rendered):
    return document_of(tokenizer, rendered).ids.tolist()


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
    document = document_of(demo, AlpacaText(demo)(Alpaca("Add.", "", "3")))
    n = len(document.ids)
    assert document.ids[-2:].tolist() == [demo.backend.token_to_id("3"), demo.id_of("eos_token")]
    assert document.spans == ((n - 2, n),)


@pytest.mark.parametrize(
    ("name", "train_on", "text", "pieces"),
    [
        ("completion", "responses", "1 2 3<|end|>", ["3<|end|>"]),
        ("completion", "last_response", "1 2 3<|end|>", ["3<|end|>"]),
        ("completion", "all", "1 2 3<|end|>", ["1 2 3<|end|>"]),
        ("text", "responses", "1 2 3<|end|>", ["1 2 3<|end|>"]),
    ],
)
def test_completions_and_plain_text(demo, name, train_on, text, pieces):
    rendered = renderers(demo, [name], None, train_on)[name](EXAMPLES[name])
    assert rendered.text == text
    assert [rendered.text[a:b] for a, b in rendered.spans] == pieces


@pytest.mark.parametrize(
    ("kind", "template", "given", "name"),
    [
        ("alpaca", "auto", None, "alpaca"),
        ("alpaca", "auto", "{{ messages }}", "chat"),
        ("alpaca", "alpaca", "{{ messages }}", "alpaca"),
        ("alpaca", "builtin", None, "builtin"),
        ("chat", "auto", None, "chat"),
        ("chat", "alpaca", None, "alpaca"),
        ("completion", "auto", "{{ messages }}", "completion"),
        ("completion", "chat", None, "chat"),
        ("text", "auto", None, "text"),
        ("text", "chat", None, "text"),
    ],
)
def test_which_template_renders_which_example(kind, template, given, name):
    assert template_of(EXAMPLES[kind], template, given) == name


def test_what_stands_for_a_template_in_the_fingerprint(demo):
    names = ("alpaca", "chat", "builtin", "completion", "text")
    texts = {template_text(demo, name) for name in names}
    assert len(texts) == len(names)
    assert template_text(demo, "chat") == demo.chat_template


def test_two_turns_are_two_spans(demo):
    rendered = ChatText(demo)(example_of(CHAT))
    assert rendered.text == (
        "<|start|><|user|>\nHi<|end|>\n<|assistant|>\nHello.<|end|>\n"
        "<|user|>\n2 + 2?<|end|>\n<|assistant|>\n4<|end|>\n"
    )
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


def test_train_on_all_labels_everything_but_the_first_token(llama):
    rendered = AlpacaText(llama, "all")(Alpaca("Add.", "", "3"))
    assert trained(llama, rendered) == [rendered.text]


def test_exactly_one_bos_where_the_tokenizer_adds_one(llama, demo):
    bos = llama.id_of("bos_token")
    for name in ("alpaca", "chat", "builtin", "completion", "text"):
        example = EXAMPLES.get(name, EXAMPLES["chat"])
        ids = ids_of(llama, renderers(llama, [name])[name](example))
        assert (ids[0], ids.count(bos)) == (bos, 1), name
    rendered = AlpacaText(llama)(Alpaca("Add.", "", "3"))
    brought = rendered._replace(text="<|begin_of_text|>" + rendered.text)
    assert ids_of(llama, brought) == ids_of(llama, rendered)
    assert demo.id_of("bos_token") not in ids_of(demo, AlpacaText(demo)(Alpaca("Add.", "", "3")))


@pytest.mark.parametrize("pad", ["<|eot_id|>", None])
@pytest.mark.parametrize("name", ["alpaca", "chat", "builtin", "completion", "text"])
def test_the_end_token_is_supervised_whatever_the_pad_is(llama, name, pad):
    specials = {**llama.special_tokens, "pad_token": pad}
    if pad is None:
        del specials["pad_token"]
    changed = replace(llama, special_tokens=specials)
    example = EXAMPLES.get(name, EXAMPLES["chat"])
    pieces = trained(changed, renderers(changed, [name])[name](example))
    assert all(piece.endswith("<|eot_id|>") for piece in pieces)
    assert pieces == trained(llama, renderers(llama, [name])[name](example))


@pytest.mark.parametrize("name", ["alpaca", "builtin", "completion", "text"])
def test_a_tokenizer_without_an_end_token_is_refused(demo, name):
    endless = replace(demo, special_tokens={}, chat_template=None)
    with pytest.raises(UserError, match="has no eos_token, so an answer could have no end"):
        renderers(endless, [name])
    with pytest.raises(UserError, match="has no eos_token"):
        template_text(endless, "chat")


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


def test_alpaca_and_chat_stand_in_for_each_other(demo):
    question = Chat((Message("user", "Hi"), Message("assistant", "Hello.", True)))
    assert AlpacaText(demo)(question).text.endswith("Hi\n\n### Response:\nHello.<|end|>")
    with pytest.raises(BadRow, match="not one question with one answer"):
        AlpacaText(demo)(example_of(CHAT))
    rendered = ChatText(demo)(Alpaca("Add.", "1 2", "3"))
    assert rendered.text == "<|start|><|user|>\nAdd.\n\n1 2<|end|>\n<|assistant|>\n3<|end|>\n"


WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=40).filter(str.strip)


@pytest.mark.parametrize("train_on", ["responses", "all", "last_response"])
def test_every_row_keeps_its_text_and_trains_its_answer(demo, llama, train_on):
    @settings(max_examples=80, deadline=None)
    @given(WORDS, WORDS, WORDS)
    def check(instruction, context, output):
        rows = {
            "alpaca": Alpaca(instruction, context, output),
            "completion": Completion(instruction, output),
            "text": Text(output),
        }
        for tokenizer in (demo, llama):
            found = renderers(tokenizer, list(rows), None, train_on)
            end = tokenizer.eos
            for name, row in rows.items():
                rendered = found[name](row)
                ids = ids_of(tokenizer, rendered)
                start = tokenizer.special_tokens["bos_token"] if tokenizer.adds_bos else ""
                assert tokenizer.decode(ids) == start + rendered.text
                (span,) = rendered.spans
                piece = rendered.text[slice(*span)]
                whole = train_on == "all" or name == "text"
                assert piece == (rendered.text if whole else output + end)

    check()


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
