"""Attention over packed documents: the fast kernel where there is one, else an exact mask.

`varlen` gives the documents' borders to torch's variable-length kernel (GPU, 16-bit). Otherwise
transformers builds a block-diagonal causal mask from positions that restart; it does so only
without an attention mask and without a cache, which is why every call says `use_cache=False`.
"""

from __future__ import annotations

import inspect
from itertools import accumulate
from typing import Any

import torch

from tunewright.contract.failures import UserError
from tunewright.training.batches import Batch

VARLEN = "tunewright_varlen"
_LARGEST_HEAD = 256


def choose(config: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """The attention to build a model with; None is transformers' own choice, with a mask."""
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return "eager"  # the other implementations leave the cap out
    if device.type != "cuda" or dtype == torch.float32 or not _plain(config) or not _varlen():
        return None
    _register()
    return VARLEN


def extra_inputs(model: Any, batch: Batch) -> dict[str, Any]:
    """What the variable-length kernel needs beside positions: the documents' borders."""
    if model.config._attn_implementation != VARLEN:
        return {}
    borders = torch.tensor([0, *accumulate(batch.lengths)], dtype=torch.int32)
    borders = borders.to(batch.input_ids.device, non_blocking=True)
    longest = max(batch.lengths)
    return {
        "cu_seq_lens_q": borders,
        "cu_seq_lens_k": borders,
        "max_length_q": longest,
        "max_length_k": longest,
    }


def described(model: Any) -> str:
    """`varlen`, or the implementation with the word mask, for the receipt."""
    name = model.config._attn_implementation
    return "varlen" if name == VARLEN else f"{name} mask"


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **borders: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over torch's kernel.

    query [1, heads, tokens, width], key and value [1, kv heads, tokens, width]; the result is
    [1, tokens, heads, width].
    """
    from torch.nn.attention.varlen import varlen_attn

    options: dict[str, Any] = {"scale": scaling, "window_size": ((sliding_window or 0) - 1, 0)}
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            repeats = query.shape[1] // key.shape[1]
            key, value = (t.repeat_interleave(repeats, dim=1) for t in (key, value))
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    found = varlen_attn(
        q,
        k,
        v,
        borders["cu_seq_lens_q"],
        borders["cu_seq_lens_k"],
        borders["max_length_q"],
        borders["max_length_k"],
        **options,
    )
    assert isinstance(found, torch.Tensor)
    return found[None], None


def check_isolation(model: Any, device: torch.device) -> None:
    """Change one document and see that its neighbour's logits stay: true of exact packing only.

    Raises UserError for a model whose packed documents see each other. Call it without gradients.
    """
    vocabulary = model.config.get_text_config().vocab_size
    first, second = _probe(model, vocabulary, device, 1), _probe(model, vocabulary, device, 3)
    leak = (first - second).abs().max().item()
    if leak > 1e-3 * first.abs().max().item():
        raise UserError(
            f"model_name: packed rows see each other in {type(model).__name__} "
            f"(logits move by {leak:.2g}); this architecture cannot be trained on packed rows"
        )


def _probe(model: Any, vocabulary: int, device: torch.device, token: int) -> torch.Tensor:
    """Logits of the second of two documents of 8 tokens, the first made of `token`."""
    ids = torch.tensor(
        [[token % vocabulary] * 8 + [i % vocabulary for i in range(8)]], device=device
    )
    positions = torch.arange(8, device=device).repeat(2)[None]
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    batch = Batch(ids, positions, nothing, nothing, [8, 8], 16)
    found: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, **extra_inputs(model, batch)
    ).logits[0, 8:]
    return found.float()


def _plain(config: Any) -> bool:
    """Whether attention is softmax of scaled products and no more, in heads the kernel takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # A class that rules out torch's own attention has something in it, such as sinks.
    plain = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
    dropout = getattr(text, "attention_dropout", 0.0)
    return bool(plain) and not dropout and width <= _LARGEST_HEAD and width % 8 == 0


def _varlen() -> bool:
    """torch has the kernel, with the argument that makes it causal (2.11 and later)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(VARLEN, attend)
