import json
import subprocess
import sys

import pytest
import yaml

from tunewright.contract.failures import DataError
from tunewright.data.auditpage import markdown, picture
from tunewright.data.prepare import prepare
from tunewright.data.store import TokenStore


def row(number, **more):
    return {"instruction": f"Spell {number}.", "output": "a" * number, **more}


def audit_of(settings, path, tmp_path, **others):
    return prepare(settings(path, **others), tmp_path / "tokens").store.facts["audit"]


def test_the_figures_of_a_small_set(settings, write_rows, tmp_path, demo):
    rows = [*[row(n) for n in range(1, 11)], row(3), row(3), {"instruction": "No."}, row(400)]
    path = write_rows(rows)
    found = audit_of(settings, path, tmp_path, on_bad_row="drop")
    store = TokenStore.open(next((tmp_path / "tokens").glob("[!.]*")))
    assert (found["rows"], found["duplicates"], found["truncated"], found["split"]) == (14, 2, 1, 0)
    assert found["dropped"] == {"no answer": 1}
    assert found["dropped_rows"] == {"no answer": [f"{path} row 13"]}
    assert found["sides"]["train"]["documents"] == 13
    assert found["sides"]["train"]["tokens"] == store.train.tokens
    assert found["end_token"] == {"of": 13, "count": 12, "rows_without": [f"{path} row 14"]}
    assert found["bos"] == {"0": 13, "1": 0, "2 or more": 0, "rows": []}
    assert found["no_supervised_token"] == {"count": 0, "rows": []}
    prompt = "### Instruction:\nSpell {}.\n\n### Response:\n{}<|end|>"
    lengths = [
        len(demo.encode([prompt.format(r["output"].count("a"), r["output"])])[0].ids)
        for r in rows if "output" in r
    ]  # fmt: skip
    assert found["lengths"]["percentiles"]["100"] == max(lengths)
    assert found["lengths"]["percentiles"]["50"] == sorted(lengths)[6]
    assert sum(count for _, _, count in found["lengths"]["histogram"]) == 13
    assert [s["row"] for s in found["samples"]] == [f"{path} row {n}" for n in (1, 7, 14)]
    assert found["samples"][0]["text"] == (
        "### Instruction:\nSpell 1.\n\n### Response:\n«a<|end|>»"
    )


def test_a_bos_is_counted(settings, write_rows, tmp_path, llama):
    path = write_rows([row(n) for n in range(1, 6)])
    found = audit_of(settings, path, tmp_path, model_name=llama.name)
    assert found["bos"] == {"0": 0, "1": 5, "2 or more": 0, "rows": []}


def test_a_template_that_begins_each_question_with_a_bos_has_none_twice(
    settings, write_rows, tmp_path, llama
):
    turns = [{"role": r, "content": "hello"} for r in ("user", "assistant") * 2]
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} "
        "[/INST]{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
    )
    path = write_rows([{"messages": turns}] * 3)
    found = audit_of(settings, path, tmp_path, model_name=llama.name, chat_template=template)
    assert found["bos"]["1"] == 3


def test_all_policies_are_counted(settings, write_rows, tmp_path):
    path = write_rows([*[row(n) for n in range(1, 20)], {"instruction": "w " * 300, "output": "b"}])
    cut = audit_of(settings, path, tmp_path)
    assert (cut["truncated"], cut["prompt_cut"]) == (1, {"count": 1, "rows": [f"{path} row 20"]})
    split = audit_of(settings, path, tmp_path, on_too_long="split")
    assert (split["truncated"], split["split"]) == (0, 1)
    dropped = audit_of(settings, path, tmp_path, on_too_long="drop")
    assert dropped["dropped"] == {"too long": 1}


def test_the_page_shows_everything(settings, write_rows, tmp_path):
    rows = [row(n) for n in range(1, 30)]
    path = write_rows(rows, "a|b.jsonl")
    pages = []
    wanted = settings(path, eval_fraction=0.2, max_leakage=1)
    prepare(wanted, tmp_path / "tokens", lambda *found: pages.append(markdown(*found)))
    prepare(wanted, tmp_path / "tokens", lambda *found: pages.append(markdown(*found)))
    page = pages[0]
    assert pages[1] == page, "a hit shows the same page"
    for words in (
        "| rows read | 29 |", "| train: supervised |", "| p1 | p5 |", "█", "«a", "a\\|b.jsonl row",
        "| ends with end token | 100.0% of rows |", "| evaluation rows leaked |",
    ):  # fmt: skip
        assert words in page, words
    assert "Stopped" not in page


def test_text_in_a_sample_cannot_break_the_page(settings, write_rows, tmp_path):
    fences = {"instruction": "Show code.", "output": "```python\nx\n```\n# heading"}
    found = audit_of(settings, write_rows([fences]), tmp_path)
    assert "````text\n" in markdown(found)


def test_the_picture_has_a_bar_for_every_row():
    audit = {"lengths": {"histogram": [[1, 9, 1000], [10, 99, 1], [100, 999, 0]]}}
    bars = [line.count("█") for line in picture(audit)]
    assert bars[0] > 10
    assert bars[1:] == [1, 0]


def test_the_program_leaves_the_page_also_when_it_stops(write_rows, tmp_path, demo):
    path = write_rows([row(1), {"instruction": "No."}])
    parameters = {"model_name": demo.name, "dataset_name": str(path), "on_bad_row": "drop"}
    (tmp_path / "parameters.yaml").write_text(yaml.safe_dump(parameters))
    done = subprocess.run(
        [sys.executable, "-m", "tunewright.pretokenize", "--settings",
         str(tmp_path / "parameters.yaml"), "--tokens-root", str(tmp_path / "tokens"),
         "--result", str(tmp_path / "result.json"), "--page", str(tmp_path / "page.md")],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert "**Stopped:** 1 of 2 rows would be dropped" in page
    assert f"1 no answer ({path} row 2)" in page


def test_thresholds_of_today_hold_for_tokens_of_yesterday(settings, write_rows, tmp_path):
    path = write_rows([*[row(n) for n in range(1, 5)], {"instruction": "No."}])
    wanted = settings(path, on_bad_row="drop", max_dropped=0.5)
    first = prepare(wanted, tmp_path / "tokens")
    assert json.dumps(first.store.facts["audit"])
    with pytest.raises(DataError, match=r"1 of 5 rows would be dropped, more than max_dropped=0.1"):
        prepare(wanted.model_copy(update={"max_dropped": 0.1}), tmp_path / "tokens")
