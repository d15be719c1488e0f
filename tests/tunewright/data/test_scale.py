import io
import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tunewright.contract.failures import TunewrightError, UserError
from tunewright.contract.progress import percent_of
from tunewright.data import spill as spills
from tunewright.data import workers
from tunewright.data.documents import Batch, Document
from tunewright.data.prepare import prepare
from tunewright.data.progress import Progress
from tunewright.data.spill import Spill
from tunewright.data.store import TokenStore, write_store


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 9), st.integers(1, 30))
def test_packing_loses_and_repeats_no_token(tmp_path_factory, lengths, per_batch, block):
    documents, token = [], 0
    for row, length in enumerate(lengths, 1):
        spans = ((1, length),) if length > 1 else ()
        documents.append(Document(row, np.arange(token, token + length, dtype=np.uint16), spans))
        token += length
    spill = Spill(np.uint16)
    spills._BLOCK_TOKENS, kept = block, spills._BLOCK_TOKENS
    try:
        for first in range(0, len(documents), per_batch):
            spill.add(Batch.of(documents[first : first + per_batch], np.uint16))
        arrays = spill.packed(20)
        facts = {"pack_tokens": 20, "counts": {"train": {"rows": len(lengths)}}}
        root = tmp_path_factory.mktemp("tokens")
        split = write_store(root, "abc", {"train": arrays}, facts).train
    finally:
        spills._BLOCK_TOKENS = kept
        spill.close()
    found = {}
    for index, pack in enumerate(split):
        ends = pack.lengths.cumsum().tolist()
        rows = split.source_rows(index).tolist()
        for row, start, end in zip(rows, [0, *ends[:-1]], ends, strict=True):
            found[row] = pack.input_ids[start:end].tolist()
            assert pack.supervised[start:end].tolist() == [False] + [True] * (end - start - 1)
    assert found == {document.row: document.ids.tolist() for document in documents}
    assert split.tokens == token


def rows(count):
    return [
        {"instruction": f"Count to {n % 97}.", "output": f"It ends at {n}."} for n in range(count)
    ]


def test_several_processes_make_the_same_tokens(settings, write_rows, tmp_path, monkeypatch):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one core: there are no several processes")
    path = write_rows([*rows(2000), {"instruction": "x"}])
    wanted = settings(path, eval_fraction=0.1, on_bad_row="drop", max_leakage=1)
    one = prepare(wanted, tmp_path / "one").store
    monkeypatch.setattr(workers, "_PAYS_FROM_ROWS", 100)
    several = prepare(wanted, tmp_path / "several").store
    assert several.facts["files"] == one.facts["files"]
    assert several.facts["audit"] == one.facts["audit"]


MANY = """
    import sys
    from pathlib import Path
    from tunewright.contract.settings import DataSettings
    from tunewright.data import workers
    from tunewright.data.prepare import prepare
    workers._PAYS_FROM_ROWS = 100
    wanted = DataSettings(model_name=sys.argv[1], dataset_name=sys.argv[2])
    prepare(wanted, Path(sys.argv[3]))
"""


def test_no_process_outlives_its_parent(write_rows, tmp_path, demo):
    script = tmp_path / "many.py"
    script.write_text(textwrap.dedent(MANY))
    path = write_rows(rows(60_000))
    parent = subprocess.Popen(
        [sys.executable, str(script), demo.name, str(path), str(tmp_path / "tokens")],
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 60
    children = []
    while len(children) < min(2, len(os.sched_getaffinity(0))) and time.monotonic() < deadline:
        children = psutil.Process(parent.pid).children(recursive=True)
        time.sleep(0.05)
    time.sleep(1)
    children = psutil.Process(parent.pid).children(recursive=True) or children
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    assert psutil.wait_procs(children, timeout=20)[1] == []


PEAK = """
    import json, resource, sys
    from pathlib import Path
    from tunewright.contract.settings import DataSettings
    from tunewright.data import workers
    from tunewright.data.prepare import prepare
    workers._PAYS_FROM_ROWS = 10**9
    wanted = DataSettings(model_name=sys.argv[1], dataset_name=sys.argv[2])
    prepare(wanted, Path(sys.argv[3]))
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


def test_memory_does_not_grow_with_the_text(tmp_path, demo):
    def peak_mib(count):
        path = tmp_path / f"{count}.jsonl"
        with path.open("w") as file:
            for n in range(count):
                file.write(json.dumps({"instruction": f"Say {n}.", "output": f"word {n} " * 60}))
                file.write("\n")
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(PEAK), demo.name, str(path), f"{tmp_path}/t"],
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return int(done.stdout) / 1024

    small, large = peak_mib(3_000), peak_mib(15_000)
    # 12,000 rows more are 7 MiB of text and, as lists of ids, over 50 MiB.
    assert large - small < 15


def test_a_store_larger_than_a_block_is_written_whole(settings, write_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(spills, "_BLOCK_TOKENS", 100)
    monkeypatch.setattr(spills, "_BLOCKS_BETWEEN_RELEASES", 2)
    found = prepare(settings(write_rows(rows(500))), tmp_path / "tokens").store
    monkeypatch.undo()
    whole = prepare(settings(write_rows(rows(500))), tmp_path / "others").store
    assert found.facts["files"] == whole.facts["files"]
    TokenStore.open(found.path, verify=True)


def test_a_worker_that_dies_is_one_sentence(settings, write_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "_PAYS_FROM_ROWS", 1)
    monkeypatch.setattr(workers, "_WORDS", (sys.executable, "-c", "raise SystemExit(3)"))
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    with pytest.raises(TunewrightError, match=r"ended by itself \(exit code 3; "):
        prepare(settings(write_rows(rows(50))), tmp_path / "tokens")


def test_what_the_user_can_fix_is_said_from_a_worker_too(
    settings, write_rows, tmp_path, monkeypatch, demo
):
    monkeypatch.setattr(workers, "_PAYS_FROM_ROWS", 1)
    monkeypatch.setattr(workers, "_cores", lambda: 2)
    wanted = settings(write_rows(rows(50)), chat_template="{{ broken", template="chat")
    with pytest.raises(UserError, match="template"):
        prepare(wanted, tmp_path / "tokens")


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(stream):
    now = [0.0]
    progress = Progress(stream, clock=lambda: now[0])
    progress.stage("reading rows", None, 0.1)
    for second in range(1, 5):
        now[0] = second / 2
        progress.at(second * 10)
    progress.stage("tokenizing", 1000, 1.0)
    now[0] = 3.5
    progress.at(500)
    progress.close()
    return stream.getvalue()


def test_a_line_a_second_where_nobody_watches():
    lines = shown(io.StringIO()).splitlines()
    assert lines == [
        "progress: 0.0 % reading rows 20 rows, 20 rows/s",
        "progress: 0.0 % reading rows 40 rows, 20 rows/s",
        "progress: 55.0 % tokenizing 500 of 1,000 rows, 333 rows/s, 2 s left",
    ]
    assert [percent_of(line) for line in lines] == [0.0, 0.0, 55.0]


def test_a_bar_in_a_terminal():
    text = shown(Terminal())
    assert "█" in text
    assert "\n" not in text
    assert text.endswith("\r\033[K")


@pytest.mark.parametrize("line", ["", "progress: ", "progress: nan % x", "progress: 120 % x", "a"])
def test_other_lines_are_no_progress(line):
    assert percent_of(line) is None
