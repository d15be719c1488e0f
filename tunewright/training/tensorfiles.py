"""The tensors of a folder of safetensors files, read where and when they are needed.

gpt-oss stores its experts packed (MXFP4: 32 values of 4 bits share a scale of 8 bits). They are
read as the model has them: 16-bit numbers, which hold every such value exactly.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
BLOCKS, SCALES = "_blocks", "_scales"
_FOUR_BITS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NUMBERS = {"F64", "F32", "F16", "BF16"}
_BIAS = 127
"""What a scale's exponent is counted from."""


def open_folder(folder: Path) -> SafetensorsFolder:
    """The tensors of a folder; raises FileNotFoundError where there are no safetensors."""
    found = SafetensorsFolder(folder)
    return PackedFolder(folder) if any(n.endswith(BLOCKS) for n in found.names) else found


class SafetensorsFolder:
    """The tensors of a folder of safetensors files; a file is mapped, never read as a whole."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._opened: dict[str, Any] = {}
        self._files = _files_by_name(folder, self._open)

    @property
    def names(self) -> set[str]:
        """Names in the files."""
        return {*self._files}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(self._slice(name).get_shape()) for name in self._files}

    def is_number(self, name: str) -> bool:
        """Whether a tensor holds its own numbers, and not codes that need a scale."""
        return name not in self._files or self._slice(name).get_dtype() in _NUMBERS

    def tensor(self, name: str) -> torch.Tensor:
        found: torch.Tensor = self._open(self._files[name]).get_tensor(name)
        return found

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows start to stop of a tensor; only these bytes are read."""
        found: torch.Tensor = self._slice(name)[start:stop]
        return found

    def _slice(self, name: str) -> Any:
        return self._open(self._files[name]).get_slice(name)

    def _open(self, file: str) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(self.folder / file, framework="pt")
        return self._opened[file]


class PackedFolder(SafetensorsFolder):
    """A folder with packed tensors, as if they were not: `x` for `x_blocks` and `x_scales`.

    blocks uint8 [experts, rows, groups, 16], scales uint8 [experts, rows, groups]; the tensor is
    bfloat16 [experts, 32 groups, rows].
    """

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = super().shapes()
        packed = [name.removesuffix(BLOCKS) for name in found if name.endswith(BLOCKS)]
        for name in packed:
            experts, rows, groups, width = found.pop(name + BLOCKS)
            found.pop(name + SCALES)
            found[name] = (experts, 2 * width * groups, rows)
        return found

    def tensor(self, name: str) -> torch.Tensor:
        if name + BLOCKS not in self.names:
            return super().tensor(name)
        return self.rows(name, 0, self._slice(name + BLOCKS).get_shape()[0])

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        if name + BLOCKS not in self.names:
            return super().rows(name, start, stop)
        experts = [
            unpacked(self._slice(name + BLOCKS)[place], self._slice(name + SCALES)[place])
            for place in range(start, stop)
        ]
        if experts:
            return torch.stack(experts)
        _, width, rows = self.shapes()[name]
        return torch.empty(0, width, rows, dtype=torch.bfloat16)


def unpacked(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of one expert, bfloat16 [32 groups, rows], exactly.

    blocks uint8 [rows, groups, 16], the first of two values in the lower half of a byte; scales
    uint8 [rows, groups], exponents of 2.
    """
    values = torch.tensor([*_FOUR_BITS, *(-value for value in _FOUR_BITS)])
    halves = torch.stack([blocks & 0x0F, blocks >> 4], dim=-1).flatten(-2).long()
    exponents = scales.to(torch.int32) - _BIAS
    numbers = torch.ldexp(values[halves], exponents[..., None])
    return numbers.flatten(-2).T.to(torch.bfloat16).contiguous()


def _files_by_name(folder: Path, opened: Any) -> dict[str, str]:
    """{tensor: file}; raises FileNotFoundError where there are no safetensors."""
    if (folder / INDEX).is_file():
        found = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        return {str(name): str(file) for name, file in found.items()}
    return dict.fromkeys(opened(SINGLE).keys(), SINGLE)
