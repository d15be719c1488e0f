"""8-bit matrix products inside the decoder layers, with torchao. Lossy, and named so.

One scale a tensor, found anew in every step; weights are gathered between the ranks in 8 bits. The
shards that the optimizer changes stay fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tunewright.contract.failures import UserError

_WITHOUT = "precision: fp8 needs torchao; pip install torchao, or set precision to bf16"


def convert(layers: nn.ModuleList, device: torch.device, ranks: int) -> None:
    """Put 8-bit linears in the place of the layers' own, under the same names.

    A matrix whose rows do not divide among the `ranks` stays as it is: torchao gathers shards of
    one size. On a CPU the 8-bit products are emulated, so that a workload can be tried there.
    Raises UserError where torchao or a GPU that has such products is missing.
    """
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 9):
        name = torch.cuda.get_device_name(device)
        raise UserError(f"precision: fp8 needs an H100 or newer, this is a {name}; set it to bf16")
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        raise UserError(_WITHOUT) from None
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=device.type != "cuda")

    def fits(module: nn.Module, name: str) -> bool:
        return _fits(module, ranks)

    for layer in layers:
        convert_to_float8_training(layer, config=config, module_filter_fn=fits)


def refresh_scales(module: nn.Module) -> None:
    """Find the weights' scales after they have changed: one small all-reduce for all of them."""
    if any(_subclassed(p) for p in module.parameters()):
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        precompute_float8_dynamic_scale_for_fsdp(module)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """A DTensor of fp32 numbers over the same memory, where torchao has put a type of its own."""
    if not _subclassed(tensor):
        return tensor
    assert isinstance(tensor, DTensor)
    local: Any = tensor.to_local()
    return DTensor.from_local(
        local._tensor,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def _fits(module: nn.Module, ranks: int) -> bool:
    """The products take dimensions that are multiples of 16."""
    if not isinstance(module, nn.Linear):
        return False
    rows, columns = module.out_features, module.in_features
    return rows % 16 == 0 and columns % 16 == 0 and rows % ranks == 0


def _subclassed(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, DTensor) and hasattr(tensor.to_local(), "_linear_mm_config")
