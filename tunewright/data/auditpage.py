"""The audit of the data for readers: lines for a terminal, and a Markdown page."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tunewright.data.audit import BOS
from tunewright.data.badrows import some

_BACKTICKS = re.compile("`+")
_BAR_WIDTH = 32


def narration(audit: Mapping[str, Any]) -> list[str]:
    """The audit in plain lines: the table, the picture of the lengths, and a sample."""
    figures = table(audit)
    width = max(len(name) for name, _ in figures)
    lines = ["data audit:", *(f"  {name:<{width}}  {value}" for name, value in figures)]
    lines += ["tokens of a row, before any cut:", *(f"  {bar}" for bar in picture(audit))]
    samples = audit.get("samples", [])[-1:]
    return lines + [f"sample, trained part in «»: {_one_line(s['text'])}" for s in samples]


def _one_line(text: str) -> str:
    return repr(text)[1:-1]


def table(audit: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures as (name, value), for a terminal and for the page."""
    lines = [
        ("rows read", f"{audit['rows']:,}"),
        ("dropped", _dropped(audit)),
        ("duplicates", f"{audit['duplicates']:,}"),
        ("truncated", _truncated(audit)),
        ("split", f"{audit['split']:,}"),
    ]
    for name, side in audit["sides"].items():
        lines += [
            (f"{name}: documents", f"{side['documents']:,}"),
            (f"{name}: tokens", f"{side['tokens']:,}"),
            (f"{name}: supervised", f"{side['supervised_tokens']:,} ({_share(side)})"),
            (f"{name}: packs", f"{side['packs']:,}, {side['filled']:.2%} full"),
        ]
    lines += [("no supervised token", _listed(audit["no_supervised_token"]))]
    lines += [("ends with end token", _ends(audit["end_token"]))]
    lines += [("BOS: 0, 1, 2 or more", ", ".join(f"{audit['bos'][name]:,}" for name in BOS))]
    if leakage := audit.get("leakage"):
        lines += [("evaluation rows leaked", _leakage(leakage))]
    return lines


def _dropped(audit: Mapping[str, Any]) -> str:
    total = sum(audit["dropped"].values())
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in audit["dropped"].items())
    return f"{total:,} ({reasons})" if total else "0"


def _truncated(audit: Mapping[str, Any]) -> str:
    cut = audit["prompt_cut"]["count"]
    more = f" ({cut:,} lost the beginning of their prompt)" if cut else ""
    return f"{audit['truncated']:,}{more}"


def _share(side: Mapping[str, Any]) -> str:
    return f"{side['supervised_tokens'] / max(1, side['tokens']):.1%}"


def _listed(found: Mapping[str, Any]) -> str:
    return f"{found['count']:,}" + (
        f" ({some(found['rows'], found['count'])})" if found["count"] else ""
    )


def _ends(end: Mapping[str, Any]) -> str:
    rate = end["count"] / max(1, end["of"])
    without = end["of"] - end["count"]
    more = f", not {some(end['rows_without'], without)}" if without else ""
    return f"{rate:.1%} of rows{more}"


def _leakage(leakage: Mapping[str, Any]) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in leakage["kinds"].items() if count)
    more = f" ({kinds})" if kinds else ""
    return f"{leakage['leaked']:,} of {leakage['eval_rows']:,}{more}"


def markdown(audit: Mapping[str, Any], stopped: Sequence[str] = ()) -> str:
    """The audit as a page."""
    lines = ["# Data audit", ""]
    lines += [f"**Stopped:** {problem}\n" for problem in stopped]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in table(audit)]
    lines += ["", "## Tokens of a row, before any cut", ""]
    percentiles = audit["lengths"]["percentiles"]
    lines += ["| " + " | ".join(f"p{p}" for p in percentiles) + " |"]
    lines += ["|" + "---|" * len(percentiles)]
    lines += ["| " + " | ".join(f"{value:,}" for value in percentiles.values()) + " |"]
    lines += ["", "```text", *picture(audit), "```"]
    if leakage := audit.get("leakage"):
        lines += _leak_lines(leakage)
    lines += ["", "## Samples, what is trained on in «»"]
    for sample in audit.get("samples", []):
        fence = _fence(sample["text"])
        lines += ["", f"{_cell(sample['row'])}:", "", f"{fence}text", sample["text"], fence]
    return "\n".join(lines) + "\n"


def picture(audit: Mapping[str, Any]) -> list[str]:
    """The histogram of lengths, a line for each bar."""
    bars = audit["lengths"]["histogram"]
    most = max((count for _, _, count in bars), default=1)
    lines = []
    for low, high, count in bars:
        bar = "█" * max(1 if count else 0, round(count / most * _BAR_WIDTH))
        lines.append(f"{low:>8,} to {high:>8,} {bar:<{_BAR_WIDTH}} {count:,}")
    return lines


def _leak_lines(leakage: Mapping[str, Any]) -> list[str]:
    lines = ["", "## Evaluation rows that are also training rows", ""]
    lines += [f"{_leakage(leakage)}; {leakage['compared']} of 13 words was compared.", ""]
    if leakage["rows"]:
        lines += ["| evaluation | training | shared |", "|---|---|---|"]
    return lines + [
        f"| {_cell(leak['eval_row'])} | {_cell(leak['train_row'])} | {leak['kind']} |"
        for leak in leakage["rows"]
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fence(text: str) -> str:
    """Longer than any run of back-ticks in the text."""
    longest = max((len(run) for run in _BACKTICKS.findall(text)), default=0)
    return "`" * max(3, longest + 1)
