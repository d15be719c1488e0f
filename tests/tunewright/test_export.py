"""Shards → safetensors: the bits that torch's own programs give, streamed; damage is named."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from tunewright.contract import rundir
from tunewright.contract.failures import NonFinite, TunewrightError
from tunewright.export import write_weights
from tunewright.sharded import PIECE, ShardedModel

FOUR_RANKS = """
import sys, torch, torch.distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (4,))
torch.manual_seed(0)
model = {
    "even": distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)]),
    "uneven": distribute_tensor(torch.randn(9, 5), mesh, [Shard(0)]),
    "fewer rows than ranks": distribute_tensor(torch.randn(2, 5), mesh, [Shard(0)]),
    "whole everywhere": distribute_tensor(torch.randn(6), mesh, [Replicate()]),
    "by columns": distribute_tensor(torch.randn(8, 12), mesh, [Shard(1)]),
}
dcp.save({"model": model, "optimizer": {"even": {"exp_avg": model["even"]}}},
         checkpoint_id=sys.argv[1])
dcp.save(model, storage_writer=dcp.HuggingFaceStorageWriter(sys.argv[2], save_distributed=True))
dist.barrier()
dist.destroy_process_group()
"""


def save(folder: Path, model: dict[str, torch.Tensor]) -> Path:
    """A checkpoint of one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp.save({"model": model}, checkpoint_id=folder)
    return folder


def export(
    checkpoint: Path, out: Path, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    out.mkdir()
    with ShardedModel(checkpoint) as model:
        hashes = write_weights(model, model.entries(dtype), out)
    assert hashes == rundir.hash_files(out, ["model.safetensors"])
    return load_file(out / "model.safetensors")


def is_direct(checkpoint: Path) -> dict[str, bool]:
    with ShardedModel(checkpoint) as model:
        entries = model.entries(torch.float32)
        return {entry.name: model.extents(entry) is not None for entry in entries}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found[name], tensor), name


@pytest.mark.rank
def test_four_ranks_shards_become_what_torchs_own_programs_make_of_them(tmp_path):
    from torch.distributed.checkpoint import _consolidate_hf_safetensors as torchs

    script = tmp_path / "four.py"
    script.write_text(FOUR_RANKS)
    checkpoint, sharded = tmp_path / "dcp", tmp_path / "hf"
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4", str(script)]
    ran = subprocess.run(
        [sys.executable, *words, str(checkpoint), str(sharded)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        dcp_to_torch_save(checkpoint, tmp_path / "model.pt")
    oracle = torch.load(tmp_path / "model.pt")["model"]
    found = export(checkpoint, tmp_path / "float32")
    assert_same(found, oracle)
    (tmp_path / "torchs").mkdir()
    files = dict.fromkeys(oracle, 1)
    torchs.consolidate_safetensors_files(str(sharded), str(tmp_path / "torchs"), files)
    (consolidated,) = (tmp_path / "torchs").glob("*.safetensors")
    assert_same(found, load_file(consolidated))
    for dtype in (torch.bfloat16, torch.float16):
        cast = {name: tensor.to(dtype) for name, tensor in oracle.items()}
        assert_same(export(checkpoint, tmp_path / str(dtype), dtype), cast)
    assert is_direct(checkpoint) == {name: name != "by columns" for name in oracle}


def test_types_shapes_and_orders_of_all_kinds(tmp_path):
    torch.manual_seed(0)
    several_pieces = torch.randn(3, PIECE // 4 + 7)
    base = torch.randn(4, 6)
    model = {
        "several pieces": several_pieces,
        "one number": torch.tensor(2.5),
        "no numbers": torch.empty(0, 4),
        "transposed": base.t(),
        "a part of another": base[1:3],
        "a column": base[:, 2],
        "whole numbers": torch.arange(7),
        "yes and no": torch.tensor([True, False]),
        "half": torch.randn(5).half(),
        "double": torch.randn(5).double(),
    }
    checkpoint = save(tmp_path / "dcp", model)
    for dtype in (torch.float32, torch.bfloat16):
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in model.items()}
        assert_same(export(checkpoint, tmp_path / str(dtype), dtype), cast)
    assert [name for name, direct in is_direct(checkpoint).items() if not direct] == ["transposed"]


def test_casting_rounds_as_torch_does_at_every_number(tmp_path):
    bits = torch.arange(0, 2**32, 4093, dtype=torch.int64).to(torch.int32)
    numbers = bits.view(torch.float32)
    numbers = numbers[numbers.abs() < 60_000]
    checkpoint = save(tmp_path / "dcp", {"numbers": numbers})
    for dtype in (torch.bfloat16, torch.float16):
        found = export(checkpoint, tmp_path / str(dtype), dtype)["numbers"]
        assert torch.equal(found.view(torch.int16), numbers.to(dtype).view(torch.int16))


def test_values_that_are_not_finite_are_counted_over_all_pieces(tmp_path):
    numbers = torch.zeros(3 * PIECE // 4)
    numbers[5] = numbers[-5] = float("nan")
    checkpoint = save(tmp_path / "dcp", {"numbers": numbers})
    with pytest.raises(NonFinite, match=r"numbers has 2 values .* \(torch.bfloat16\)"):
        export(checkpoint, tmp_path / "out", torch.bfloat16)


def test_memory_does_not_grow_with_the_tensor(tmp_path):
    size = 256 << 20
    checkpoint = save(tmp_path / "dcp", {"large": torch.ones(size // 4)})
    code = (
        "import sys, torch, psutil\n"
        "from pathlib import Path\n"
        "from tunewright.export import write_weights\n"
        "from tunewright.sharded import ShardedModel\n"
        "before = psutil.Process().memory_info().rss\n"
        "with ShardedModel(Path(sys.argv[1])) as model:\n"
        "    write_weights(model, model.entries(torch.float32), Path(sys.argv[2]))\n"
        "status = Path('/proc/self/status').read_text()\n"
        "peak = int(status.partition('VmHWM:')[2].split()[0]) * 1024\n"
        "print(peak - before)\n"
    )
    (tmp_path / "out").mkdir()
    words = [sys.executable, "-c", code, str(checkpoint), str(tmp_path / "out")]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) < size / 2


def test_a_file_cut_short_is_named_with_the_tensor(tmp_path):
    checkpoint = save(tmp_path / "dcp", {"first": torch.ones(9), "last": torch.ones(999)})
    (file,) = checkpoint.glob("*.distcp")
    os.truncate(file, file.stat().st_size - 100)
    with pytest.raises(
        TunewrightError, match=r"__0_0.distcp: the shard of last at byte \d+ .*the file ends at"
    ):
        export(checkpoint, tmp_path / "out")
    file.unlink()
    with pytest.raises(TunewrightError, match=r"__0_0.distcp cannot be read: No such file"):
        export(checkpoint, tmp_path / "again")


@pytest.mark.parametrize("numbers", [9, PIECE // 4, 2 * PIECE // 4 + 77])
@pytest.mark.parametrize("where", [0, 0.5, 1])
def test_a_bit_that_was_changed_on_the_disk_is_found(numbers, where, tmp_path):
    checkpoint = save(tmp_path / "dcp", {"whole": torch.ones(5), "weight": torch.rand(numbers)})
    with ShardedModel(checkpoint) as model:
        (entry,) = (e for e in model.entries(torch.float32) if e.name == "weight")
        ((file, start, length),) = model.extents(entry)
    content = bytearray(file.read_bytes())
    content[start + int(where * (length - 1))] ^= 1
    file.write_bytes(content)
    with pytest.raises(
        TunewrightError, match=r"__0_0.distcp: the shard of weight at byte \d+ is not what was"
    ):
        export(checkpoint, tmp_path / "out")


def change_metadata(checkpoint: Path, change: Callable[[Any], None]) -> None:
    path = checkpoint / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def another_length(metadata: Any) -> None:
    for index, info in metadata.storage_data.items():
        metadata.storage_data[index] = replace(info, length=info.length - 200)


def no_place(metadata: Any) -> None:
    metadata.storage_data.clear()


def one_shard_less(metadata: Any) -> None:
    metadata.state_dict_metadata["model.a"].chunks.clear()


def other_rows(metadata: Any) -> None:
    meta = metadata.state_dict_metadata["model.a"]
    shape = torch.Size([40, 3])
    meta.size = shape
    meta.chunks[:] = [ChunkStorageMetadata(torch.Size([0, 0]), shape)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (another_length, "the tensor a cannot be read: PytorchStreamReader failed"),
        (no_place, r"the shard of a at \[0, 0\] is missing"),
        (one_shard_less, "shards of the tensor a are missing"),
        (other_rows, r"__0_0.distcp: the shard of a at byte 0 holds \[30, 4\] in 480 bytes, .*40"),
    ],
)
def test_metadata_that_does_not_fit_the_bytes_is_refused(tmp_path, change, words):
    checkpoint = save(tmp_path / "dcp", {"a": torch.randn(30, 4)})
    change_metadata(checkpoint, change)
    with pytest.raises(TunewrightError, match=words):
        export(checkpoint, tmp_path / "out")


def compressed(item: bytes) -> bytes:
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(item)) as source,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name))
    return packed.getvalue()


def in_the_old_format(item: bytes) -> bytes:
    packed = io.BytesIO()
    torch.save(torch.load(io.BytesIO(item)), packed, _use_new_zipfile_serialization=False)
    return packed.getvalue()


@pytest.mark.parametrize("repack", [compressed, in_the_old_format])
def test_other_archives_are_left_to_torch(tmp_path, repack):
    model = {"a": torch.randn(30, 4)}
    checkpoint = save(tmp_path / "dcp", model)
    (file,) = checkpoint.glob("*.distcp")
    file.write_bytes(repack(file.read_bytes()))

    def another_size(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, length=file.stat().st_size)

    change_metadata(checkpoint, another_size)
    assert is_direct(checkpoint) == {"a": False}
    assert_same(export(checkpoint, tmp_path / "out"), model)


def test_a_description_that_would_run_code_is_not_followed(tmp_path):
    checkpoint = save(tmp_path / "dcp", {"a": torch.randn(30, 4)})
    (file,) = checkpoint.glob("*.distcp")
    item = io.BytesIO()
    with zipfile.ZipFile(item, "w") as archive:
        archive.writestr("archive/data.pkl", f"cos\nmkdir\n(V{tmp_path / 'made'}\ntR.")
    padded = item.getvalue()
    file.write_bytes(padded)

    def another_size(metadata: Any) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, length=len(padded))

    change_metadata(checkpoint, another_size)
    with pytest.raises(TunewrightError, match="the tensor a cannot be read"):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "made").exists()


def test_an_output_that_cannot_be_written_is_named(tmp_path):
    checkpoint = save(tmp_path / "dcp", {"a": torch.randn(30, 4)})
    with ShardedModel(checkpoint) as model, pytest.raises(FileNotFoundError) as caught:
        write_weights(model, model.entries(torch.float32), tmp_path / "nowhere")
    assert caught.value.filename == str(tmp_path / "nowhere" / "model.safetensors")


def test_the_header_is_what_transformers_writes(tmp_path):
    checkpoint = save(tmp_path / "dcp", {"a": torch.ones(2, 3), "b": torch.ones(2)})
    export(checkpoint, tmp_path / "out", torch.bfloat16)
    raw = (tmp_path / "out" / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    assert length % 8 == 0
    assert json.loads(raw[8 : 8 + length]) == {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
        "b": {"dtype": "BF16", "shape": [2], "data_offsets": [12, 16]},
    }
