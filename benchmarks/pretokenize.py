"""Pre-tokenization against the per-row `datasets.map` of a usual training script, and beside trl.

    python benchmarks/pretokenize.py [--json] [--quick] [--large] [--tokenizer DIR]

The same 50,000 Alpaca rows go through three programs, each a process of its own from start to end:

    ours   python -m tunewright.pretokenize: templates, masks, packing, audit, sealing
    map    load_dataset and one `map` that tokenizes row by row, padded to 1,024, as many scripts do
    trl    trl's own tokenizing, completion masks and packing, on all cores (where trl is installed)

Seconds are the best of three rounds, bytes those of our token store and of the Arrow file that
`map` leaves. Both are measured with a vocabulary that fits 16 bits and with one that does not.
Without --tokenizer it is a byte-level BPE of 8,192 entries, trained on the rows before anything is
timed, for 32 bits with entries that no text uses; `characters_per_token` says how well it does.
--large adds 2 million rows with answers of at most 200 characters.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import yaml

ROOT = Path(__file__).parents[1]
ROWS, QUICK_ROWS, LARGE_ROWS = 50_000, 5_000, 2_000_000
MAX_LENGTH, PACK_TOKENS = 1024, 8192
VOCABULARY, LARGE_VOCABULARY = 8_192, 70_000
END = "<|end|>"
AT_LEAST = {
    "faster_than_map": 2.5,
    "smaller_than_map_32_bits": 12.0,
    "smaller_than_map_16_bits": 25.0,
    "pack_fill": 0.995,
    "faster_than_trl": 1.0,
}
AT_MOST = {"large_peak_rss_mib": 2048.0}


class Done(NamedTuple):
    """What one process took: seconds, peak RSS of it and its children in MiB, bytes it left."""

    seconds: float
    peak_mib: float
    bytes: int


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one document on stdout")
    parser.add_argument("--quick", action="store_true", help="5,000 rows, once")
    parser.add_argument("--large", action="store_true", help="also 2 million rows")
    parser.add_argument("--tokenizer", type=Path, help="folder with tokenizer.json")
    parser.add_argument("--program", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.program:
        name, rows, tokenizer, out = args.program
        {"map": map_rows, "trl": trl_rows}[name](Path(rows), Path(tokenizer), Path(out))
        return 0
    with tempfile.TemporaryDirectory(prefix="tunewright-benchmark-") as scratch:
        found = measure(Path(scratch), args)
    print(json.dumps(found, indent=2)) if args.json else print("\n".join(table(found)))
    return 0 if found["met"] else 1


def measure(scratch: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures, as one document."""
    real, origin = real_rows()
    rows = sample(real, scratch / "rows.jsonl", QUICK_ROWS if args.quick else ROWS)
    tokenizers = tokenizers_for(real, scratch, args.tokenizer)
    figures: dict[str, float] = {"rows": sum(1 for _ in rows.open())}
    for bits, tokenizer in tokenizers.items():
        both = side_by_side(scratch, rows, tokenizer, rounds=1 if args.quick else 3)
        found = compared(both, bits)
        ratio = min(figures.get("faster_than_map", math.inf), found["faster_than_map"])
        figures |= {**found, "faster_than_map": ratio}
    figures |= facts_of(scratch / "ours", figures["rows"], real)
    not_run = {} if has_trl() else {"faster_than_trl": "trl is not installed"}
    if has_trl():
        trl = run_program("trl", rows, tokenizer, scratch / "trl")
        figures |= {"trl_s": trl.seconds, "trl_peak_rss_mib": trl.peak_mib}
        figures["faster_than_trl"] = trl.seconds / figures[f"ours_{bits}_bits_s"]
    if args.large:
        figures |= large(scratch, real, tokenizer)
    return document(figures, origin, not_run, args)


def side_by_side(scratch: Path, rows: Path, tokenizer: Path, rounds: int) -> dict[str, list[Done]]:
    """Ours and map in turn, each from nothing every time."""
    found: dict[str, list[Done]] = {"ours": [], "map": []}
    for _ in range(rounds):
        found["map"].append(run_program("map", rows, tokenizer, scratch / "map"))
        found["ours"].append(run_ours(scratch / "ours", rows, tokenizer))
    return found


def compared(both: dict[str, list[Done]], bits: int) -> dict[str, float]:
    ours, theirs = (min(both[name]) for name in ("ours", "map"))
    return {
        f"ours_{bits}_bits_s": ours.seconds,
        f"map_{bits}_bits_s": theirs.seconds,
        "faster_than_map": theirs.seconds / ours.seconds,
        f"ours_{bits}_bits_mib": ours.bytes / 2**20,
        f"map_{bits}_bits_mib": theirs.bytes / 2**20,
        f"smaller_than_map_{bits}_bits": theirs.bytes / ours.bytes,
        "ours_peak_rss_mib": ours.peak_mib,
        "map_peak_rss_mib": theirs.peak_mib,
    }


def facts_of(tokens: Path, rows: float, real: list[dict[str, Any]]) -> dict[str, float]:
    """What the manifest of our store says."""
    facts = json.loads(next(tokens.glob("*/manifest.json")).read_text())
    counts = facts["counts"]["train"]
    characters = sum(len(text_of(row)) for row in real) / len(real)
    return {
        "pack_fill": counts["tokens"] / (counts["packs"] * PACK_TOKENS),
        "tokens_per_row": counts["tokens"] / rows,
        "characters_per_token": characters * rows / counts["tokens"],
        "cores": float(len(psutil.Process().cpu_affinity() or [])),
    }


def large(scratch: Path, real: list[dict[str, Any]], tokenizer: Path) -> dict[str, float]:
    short = [{**row, "output": row["output"][:200]} for row in real]
    rows = sample(short, scratch / "large.jsonl", LARGE_ROWS)
    done = run_ours(scratch / "large", rows, tokenizer)
    return {
        "large_rows": LARGE_ROWS,
        "large_s": done.seconds,
        "large_peak_rss_mib": done.peak_mib,
        "large_mib": done.bytes / 2**20,
    }


def document(
    figures: dict[str, float], origin: str, not_run: dict[str, str], args: argparse.Namespace
) -> dict[str, Any]:
    if args.quick:
        not_run |= {"pack_fill": "needs 50,000 rows"}
    if not args.large:
        not_run |= {"large_peak_rss_mib": "needs --large"}
    for name in AT_LEAST:
        if name not in figures:
            not_run.setdefault(name, "needs the other tokenizer")
    targets = {n: t for n, t in {**AT_LEAST, **AT_MOST}.items() if n not in not_run}
    met = all(
        figures[name] >= target if name in AT_LEAST else figures[name] <= target
        for name, target in targets.items()
    )
    return {
        "benchmark": "pretokenize",
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": versions(),
        "data": origin,
        "figures": {name: round(value, 4) for name, value in figures.items()},
        "targets": targets,
        "not_run": not_run,
        "met": met,
    }


def versions() -> dict[str, str]:
    found = {}
    for name in ("tokenizers", "datasets", "transformers", "trl"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def table(found: dict[str, Any]) -> list[str]:
    """The document for a reader."""
    lines = [f"pretokenize on {found['machine']}, {found['versions']}", f"  {found['data']}"]
    lines += [f"  {name:<28} {value:14,.3f}" for name, value in found["figures"].items()]
    for name, target in found["targets"].items():
        sign = ">=" if name in AT_LEAST else "<="
        value = found["figures"][name]
        met = value >= target if name in AT_LEAST else value <= target
        lines.append(f"  target {name} {sign} {target:g}: {'met' if met else 'missed'}")
    return lines + [f"  not run: {name} ({why})" for name, why in found["not_run"].items()]


def real_rows() -> tuple[list[dict[str, Any]], str]:
    """The rows to sample from, and a word on where they are from."""
    folder = os.environ.get("TUNEWRIGHT_TEST_DATA")
    if folder:
        path = Path(folder, "alpaca_en_demo.json")
        return json.loads(path.read_text()), f"rows sampled from {path.name}"
    path = ROOT / "deployments" / "demo.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return rows, "rows of the project's own demo: TUNEWRIGHT_TEST_DATA is not set"


def sample(rows: list[dict[str, Any]], path: Path, count: int) -> Path:
    """`count` rows, drawn with repetition, as JSON lines."""
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(count):
            file.write(json.dumps(draw.choice(rows)) + "\n")
    return path


def text_of(row: dict[str, Any]) -> str:
    prompt = f"### Instruction:\n{row['instruction']}\n\n"
    if row.get("input"):
        prompt += f"### Input:\n{row['input']}\n\n"
    return f"{prompt}### Response:\n{row['output']}"


def tokenizers_for(
    rows: list[dict[str, Any]], scratch: Path, given: Path | None
) -> dict[int, Path]:
    """Folders of tokenizers by the bits of their ids."""
    from tokenizers import Tokenizer

    if given is not None:
        backend = Tokenizer.from_file(str(given / "tokenizer.json"))
        return {16 if max(backend.get_vocab().values()) < 1 << 16 else 32: given.absolute()}
    trained = trained_tokenizer(rows, scratch / "tokenizer-16")
    larger = shutil.copytree(trained, scratch / "tokenizer-32")
    found = json.loads((larger / "tokenizer.json").read_text())
    vocabulary = found["model"]["vocab"]
    vocabulary |= {f"<unused {n}>": n for n in range(len(vocabulary), LARGE_VOCABULARY)}
    (larger / "tokenizer.json").write_text(json.dumps(found))
    return {16: trained, 32: larger}


def trained_tokenizer(rows: list[dict[str, Any]], folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[END],
        show_progress=False,
    )
    backend.train_from_iterator(map(text_of, rows), trainer)
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "pad_token": END}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def run_ours(tokens: Path, rows: Path, tokenizer: Path) -> Done:
    shutil.rmtree(tokens, ignore_errors=True)
    settings = rows.with_name("settings.yaml")
    wanted = {
        "model_name": str(tokenizer),
        "dataset_name": str(rows),
        "max_length": MAX_LENGTH,
        "pack_tokens": PACK_TOKENS,
    }
    settings.write_text(yaml.safe_dump(wanted))
    result = rows.with_name("result.json")
    words = ["-m", "tunewright.pretokenize", "--settings", str(settings)]
    words += ["--tokens-root", str(tokens), "--result", str(result)]
    seconds, peak = watched([sys.executable, *words], {})
    return Done(seconds, peak, size_of(tokens))


def run_program(name: str, rows: Path, tokenizer: Path, out: Path) -> Done:
    """One of the others, with a cache of its own that is empty."""
    shutil.rmtree(out, ignore_errors=True)
    words = [sys.executable, __file__, "--program", name, str(rows), str(tokenizer), str(out)]
    cache = {"HF_DATASETS_CACHE": str(out / "cache"), "HF_HUB_OFFLINE": "1"}
    seconds, peak = watched(words, cache)
    return Done(seconds, peak, size_of(out / "tokens") or size_of(out, "cache-*.arrow"))


def watched(words: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """Seconds, and the peak of the memory of the process and all below it, in MiB."""
    began = time.perf_counter()
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            words, cwd=ROOT, env={**os.environ, **environment}, stdout=log, stderr=log
        )
        peaks = [0]
        watcher = threading.Thread(target=follow, args=(process, peaks), daemon=True)
        watcher.start()
        code = process.wait()
        seconds = time.perf_counter() - began
        watcher.join()
        if code != 0:
            log.seek(0)
            raise SystemExit(f"{words[:4]} failed:\n{log.read()[-2000:]}")
    return seconds, max(peaks) / 2**20


def follow(process: subprocess.Popen[bytes], peaks: list[int]) -> None:
    while process.poll() is None:
        try:
            top = psutil.Process(process.pid)
            tree = [top, *top.children(recursive=True)]
            peaks.append(sum(member.memory_info().rss for member in tree))
        except psutil.Error:
            continue  # one has just ended
        time.sleep(0.1)


def size_of(folder: Path, pattern: str = "*") -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def map_rows(rows: Path, tokenizer_folder: Path, out: Path) -> None:
    """One row at a time, padded: how scripts for instruction tuning usually tokenize."""
    from datasets import load_dataset
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    raw = load_dataset("json", data_files=str(rows), split="train")

    def tokenized(row: dict[str, Any]) -> Any:
        text = text_of(row) + tokenizer.eos_token
        found = tokenizer(text, truncation=True, max_length=MAX_LENGTH, padding="max_length")
        found["labels"] = found["input_ids"].copy()
        return found

    raw.map(tokenized, remove_columns=raw.column_names)


def trl_rows(rows: Path, tokenizer_folder: Path, out: Path) -> None:
    """What SFTTrainer does to its data before it trains, packing and completion masks on."""
    from types import SimpleNamespace

    from datasets import load_dataset
    from transformers import AutoTokenizer
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    cores = len(psutil.Process().cpu_affinity() or [1])
    raw = load_dataset("json", data_files=str(rows), split="train")

    def pair(row: dict[str, Any]) -> dict[str, str]:
        answer = row["output"]
        return {"prompt": text_of({**row, "output": ""}), "completion": answer}

    pairs = raw.map(pair, remove_columns=raw.column_names, num_proc=cores)
    config = SFTConfig(
        output_dir=str(out / "run"),
        max_length=PACK_TOKENS,
        packing=True,
        dataset_num_proc=cores,
        use_cpu=True,
        bf16=False,
        report_to="none",
    )
    trainer: Any = SimpleNamespace(
        _tokenizer=tokenizer, chat_template=None, completion_only_loss=True
    )
    SFTTrainer._prepare_dataset(trainer, pairs, tokenizer, config, True, None, "train")


def has_trl() -> bool:
    return "trl" in versions()


if __name__ == "__main__":
    raise SystemExit(main())
