"""Make the run's model folder out of what the command left, check it, and seal it:

    python -m tunewright.consolidate --run ROOT --result FILE

The newest sealed checkpoint becomes `<run>/model/`, a Hugging Face folder that is an MLflow model
as well; one of adapters becomes PEFT's folder, or with `merge: true` the whole model. Without one,
a Hugging Face folder that the command itself saved there is checked and sealed. Can be killed at
any point and started again. On a mount that takes whole files only, the folder is made on the local
disk and copied there.
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tunewright.contract import rundir
from tunewright.contract.failures import TunewrightError, UserError, reported
from tunewright.contract.rundir import RunDir
from tunewright.export import MAX_SHARD_BYTES, tied_once, write_weights
from tunewright.merging import MergedModel
from tunewright.mlmodel import make_mlflow_model
from tunewright.modelfolder import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER_PATTERNS,
    WEIGHTS,
    Expected,
    Findings,
    Header,
    check_finite,
    check_tied,
    check_tokens,
    compare,
    compare_converted,
    expected_tensors,
    has_tokenizer,
    read_header,
    read_object,
)
from tunewright.publishing import draft_of, publish, publish_copy, replaced, say
from tunewright.sharded import Entry, ShardedModel

THE_COMMAND = "the command"
_USERS_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS}
_OUTCOME = ("source", "step", "parameters", "bytes", "dtype", "shards")


def consolidate(run: RunDir, max_shard_bytes: int = MAX_SHARD_BYTES) -> dict[str, Any]:
    """The run's sealed model folder as {"model", "reason", "source", "parameters", "bytes", …}.

    "model" is null, with the reason, when the command left nothing to make a model of. Raises
    TunewrightError when what it left is not whole; then nothing half-made stays behind.
    """
    for leftover in (draft_of(run), replaced(run)):
        shutil.rmtree(leftover, ignore_errors=True)
    newest = rundir.sealed_checkpoints(run.checkpoints)[-1:]
    source = f"checkpoint step {newest[0][0]}" if newest else None
    sealed = rundir.manifest(run.model)
    if sealed and sealed.get("source") and source in (None, sealed["source"]):
        wrong = rundir.damage(run.model, sealed)
        if not wrong:
            return _outcome(run, sealed, f"{run.model} was sealed before and is whole")
        if not newest:
            raise TunewrightError(f"{wrong[0]}; save the model again and remove {rundir.MANIFEST}")
        say(f"{wrong[0]}; building the model folder again")
    try:
        if newest:
            return _from_checkpoint(run, *newest[0], str(source), max_shard_bytes)
        return _from_command(run)
    except OSError as error:
        kind = UserError if error.errno in _USERS_ERRORS else TunewrightError
        raise kind(
            f"{run.model} could not be written: {error.strerror} ({error.filename}); "
            "make room or give rights there and start again, what is trained is kept"
        ) from error


def _from_checkpoint(
    run: RunDir, step: int, checkpoint: Path, source: str, max_shard_bytes: int
) -> dict[str, Any]:
    say(f"building {run.model} from {checkpoint}")
    draft = draft_of(run)
    try:
        facts = _build(checkpoint, draft, max_shard_bytes)
        hashes = facts.pop("hashes")
        sealed = rundir.seal(
            draft, {"kind": "model", "source": source, "step": step, **facts}, hashes
        )
        if rundir.needs_staging(run.root):
            publish_copy(run, draft)
        else:
            publish(run, draft)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return _outcome(run, sealed, f"built from {source}")


def _build(checkpoint: Path, draft: Path, max_shard_bytes: int) -> dict[str, Any]:
    """Fill the draft from a checkpoint; returns the facts for its seal, and "hashes"."""
    origin = rundir.manifest(checkpoint) or {}
    dtype = origin.get("save_dtype", "bfloat16")
    _copy_description(checkpoint, draft, dtype)
    if adapter := origin.get("adapter"):
        fill = _fill_merged if adapter["merge"] else _fill_adapter
        return fill(checkpoint, draft, origin, max_shard_bytes)
    expected = expected_tensors(draft)
    findings = Findings()
    with ShardedModel(checkpoint) as model:
        entries = model.entries(getattr(torch, dtype))
        if expected is not None:
            compare({entry.name: entry.shape for entry in entries}, expected, checkpoint)
            entries = tied_once(model, entries, expected)
        _check_description(draft, _local_base(origin.get("base_model")), findings)
        hashes = write_weights(model, entries, draft, max_shard_bytes)
    return _facts(origin, draft, entries, hashes, expected, findings)


def _fill_adapter(
    checkpoint: Path, draft: Path, origin: Mapping[str, Any], max_shard_bytes: int
) -> dict[str, Any]:
    """The adapter as PEFT saves it, in one file: loading it begins with its base model."""
    with ShardedModel(checkpoint) as model:
        entries = model.entries(getattr(torch, origin["save_dtype"]))
        hashes = write_weights(model, entries, draft, sys.maxsize)
    os.replace(draft / WEIGHTS, draft / ADAPTER_WEIGHTS)
    hashes = {ADAPTER_WEIGHTS: hashes[WEIGHTS]}
    facts = _facts(origin, draft, entries, hashes, None, Findings())
    for name in (CONFIG, GENERATION_CONFIG):  # those of the base model hold
        (draft / name).unlink(missing_ok=True)
    return {"kind": "adapter", **facts}


def _fill_merged(
    checkpoint: Path, draft: Path, origin: Mapping[str, Any], max_shard_bytes: int
) -> dict[str, Any]:
    """The whole model: the base model's weights with the adapter's added in."""
    base = _base_below(checkpoint, origin["base_model"])
    say(f"adding the adapter to {base}")
    config = read_object(draft / CONFIG)
    if config.pop("quantization_config", None):  # what is written is not packed any more
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    expected = expected_tensors(draft)
    if expected is None:
        raise UserError(f"merge: transformers has no such architecture ({draft / CONFIG})")
    findings = Findings()
    with ShardedModel(checkpoint) as adapter:
        model = MergedModel(base, adapter, draft, expected)
        entries = model.entries(getattr(torch, origin["save_dtype"]))
        (draft / ADAPTER_CONFIG).unlink()
        _check_description(draft, base, findings)
        hashes = write_weights(model, entries, draft, max_shard_bytes)
    return _facts(origin, draft, entries, hashes, expected, findings)


def _base_below(checkpoint: Path, base_model: Mapping[str, Any]) -> Path:
    """The folder with the weights that an adapter was trained on; downloaded if it is not here.

    Random ones lie in the run itself.
    """
    run = RunDir(checkpoint.parents[1])
    if rundir.manifest(run.base):
        return run.base
    name, revision = base_model["name"], base_model.get("revision")
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import snapshot_download

    patterns = [*TOKENIZER_PATTERNS, "*.json", "*.safetensors"]
    return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))


def _facts(
    origin: Mapping[str, Any],
    draft: Path,
    entries: list[Entry],
    hashes: dict[str, dict[str, Any]],
    expected: Expected | None,
    findings: Findings,
) -> dict[str, Any]:
    """Finish the folder; what its seal says, and "hashes"."""
    dtype = origin.get("save_dtype", "bfloat16")
    parameters = sum(math.prod(entry.shape) for entry in entries)
    _finish(draft, dtype, (origin.get("base_model") or {}).get("name"), expected, findings)
    return {
        **_figures(parameters, sum(int(h["size"]) for h in hashes.values()), dtype, len(hashes)),
        "base_model": origin.get("base_model"),
        "data_fingerprint": (origin.get("identity") or {}).get("data"),
        "checks": findings.checks,
        "warnings": findings.warnings,
        "hashes": hashes,
    }


def _from_command(run: RunDir) -> dict[str, Any]:
    folder = run.model
    adapter = (folder / ADAPTER_CONFIG).is_file()
    if reason := _no_model(folder, adapter):
        say(reason)
        return {"model": None, "reason": reason}
    header = read_header(folder)
    if header is None:
        raise UserError(_pickled(folder))
    say(f"checking {folder}, left by the command: {len(header.shapes)} tensors")
    findings = Findings()
    expected = None if adapter else _check_structure(folder, header, findings)
    check_finite(header)
    _check_description(folder, None, findings)
    _finish(folder, header.dtype, None, expected, findings)
    facts = {
        "kind": "adapter" if adapter else "model",
        "source": THE_COMMAND,
        "step": None,
        **_figures(header.parameters, header.bytes, header.dtype, len(set(header.files.values()))),
        "base_model": _base_of_adapter(folder) if adapter else None,
        "checks": findings.checks,
        "warnings": findings.warnings,
    }
    return _outcome(run, rundir.seal(folder, facts), f"checked and sealed what {THE_COMMAND} left")


def _no_model(folder: Path, adapter: bool) -> str | None:
    """Why a folder is no Hugging Face model at all; None when it tries to be one."""
    weights = [*folder.glob("*.safetensors*"), *folder.glob("*.bin")] if folder.is_dir() else []
    if (adapter or (folder / CONFIG).is_file()) and weights:
        return None
    reason = f"the command left no checkpoint and no Hugging Face folder in {folder}"
    inner = sorted(p.parent.name for p in folder.glob(f"*/{CONFIG}"))
    if inner:
        reason += (
            f"; there is one in {inner[-1]}/ below it, save the final model in the folder itself"
        )
    return reason


def _pickled(folder: Path) -> str:
    found = ", ".join(sorted(p.name for p in folder.glob("*.bin"))) or "no model.safetensors"
    return (
        f"{folder} has {found}: weights as pickles can run code when they are loaded and are not "
        "registered; save them with save_pretrained(folder, safe_serialization=True), which is the "
        "default of current transformers"
    )


def _check_structure(folder: Path, header: Header, findings: Findings) -> Expected | None:
    expected = expected_tensors(folder)
    if expected is None:
        findings.warnings.append(
            f"{folder / CONFIG} names an architecture transformers lacks; shapes unchecked"
        )
        return None
    findings.checks["converted_names"] = not compare_converted(header, expected, folder)
    check_tied(header, expected)
    return expected


def _check_description(folder: Path, base: Path | None, findings: Findings) -> None:
    """Checks of the small files: token ids, tokenizer, chat template."""
    if not (folder / CONFIG).is_file():
        return
    if warning := check_tokens(folder, base):
        findings.warnings.append(warning)
    if not has_tokenizer(folder):
        findings.warnings.append(f"{folder.name} has no tokenizer; save it beside the model")


def _finish(
    folder: Path, dtype: str, base_model: str | None, expected: Expected | None, findings: Findings
) -> None:
    """Make the folder an MLflow model and note which checks it passed."""
    if reason := make_mlflow_model(folder, dtype, base_model):
        findings.warnings.append(f"MLflow cannot load this folder by itself: {reason}")
    findings.checks.update(
        names_and_shapes=expected is not None,
        finite=True,
        tied=sorted(expected.aliases) if expected else [],
        tokenizer=has_tokenizer(folder),
    )
    for warning in findings.warnings:
        say(f"warning: {warning}")


def _copy_description(checkpoint: Path, draft: Path, dtype: str) -> None:
    """Config, tokenizer and template, byte by byte; only the config's dtype follows the weights."""
    source = checkpoint / "hf"
    if not (source / CONFIG).is_file():
        raise TunewrightError(
            f"{source / CONFIG} is missing, so {checkpoint} cannot become a model folder"
        )
    shutil.copytree(source, draft)
    config = read_object(draft / CONFIG)
    if config.get("dtype", config.get("torch_dtype")) != dtype:
        config.pop("torch_dtype", None)
        (draft / CONFIG).write_text(json.dumps({**config, "dtype": dtype}, indent=2) + "\n")


def _local_base(base_model: Mapping[str, Any] | None) -> Path | None:
    """The base model's folder when its small files lie on this machine; nothing is downloaded."""
    name = (base_model or {}).get("name")
    if not name:
        return None
    if Path(name).expanduser().is_dir():
        return Path(name).expanduser()
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, CONFIG, revision=(base_model or {}).get("revision"))
    except HFValidationError:
        return None
    return Path(found).parent if isinstance(found, str) else None


def _base_of_adapter(folder: Path) -> dict[str, Any]:
    facts = read_object(folder / ADAPTER_CONFIG)
    return {"name": facts.get("base_model_name_or_path"), "revision": facts.get("revision")}


def _figures(parameters: int, size: int, dtype: str, shards: int) -> dict[str, Any]:
    return {"parameters": parameters, "bytes": size, "dtype": dtype, "shards": shards}


def _outcome(run: RunDir, sealed: Mapping[str, Any], reason: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "model": str(run.model),
        "reason": reason,
        **{k: sealed.get(k) for k in _OUTCOME},
    }
    found["warnings"] = sealed.get("warnings", [])
    say(
        f"{reason}: {found['parameters']:,} parameters in {found['dtype']}, "
        f"{(found['bytes'] or 0) / 1e6:,.1f} MB in {found['shards']} file(s)"
    )
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tunewright.consolidate", description="Make and seal a run's model folder."
    )
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument(
        "--result", type=Path, required=True, help="where the outcome goes, as JSON"
    )
    parser.add_argument(
        "--max-shard-bytes", type=int, default=MAX_SHARD_BYTES, help="size limit of a weight file"
    )
    given = parser.parse_args(argv)
    if not given.run.is_dir():
        raise UserError(f"--run {given.run} is not a folder")
    outcome = consolidate(RunDir(given.run.absolute()), given.max_shard_bytes)
    rundir.write_json(given.result, outcome)


if __name__ == "__main__":
    with reported():
        main()
