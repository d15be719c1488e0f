"""Attention over packed documents: the fast kernel where there is one, else an exact mask.

`varlen` gives the documents' borders to torch's variable-length kernel (GPU, 16-bit). Otherwise
transformers builds a block-diagonal causal mask from positions that restart; it does so only
without an attention mask and without a cache, which is why every call says `use_cache=False`.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
import torch._dynamo

from tunewright.contract.failures import UserError
from tunewright.training.batches import Batch

VARLEN = "tunewright_varlen"
_LARGEST_HEAD = 256
_BLIND = {
    "gpt_oss": {
        "full_attention": "create_causal_mask",
        "sliding_attention": "create_sliding_window_causal_mask",
    }
}
"""Models that make their masks without a look at positions, so that packed documents would see each
other: {model type: {kind of layer: transformers' function that does look}}."""


def choose(
    config: Any, device: torch.device, dtype: torch.dtype, plain: bool = False
) -> str | None:
    """The attention to build a model with; None is transformers' own choice, with a mask.

    `plain`: the latter also where the kernel would do.
    """
    text = config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None):
        return "eager"  # the other implementations leave the cap out
    if device.type == "cuda" and _has_sinks(config) and not plain:
        return "flex_attention"  # exact, and part of torch; the kernels made for it are downloads
    fits = device.type == "cuda" and dtype != torch.float32 and _simple(config) and _varlen()
    if plain or not fits:
        return None
    _register(device)
    return VARLEN


def extra_inputs(model: Any, batch: Batch) -> dict[str, Any]:
    """What a model needs beside positions: the documents' borders, or masks made from them."""
    if model.config._attn_implementation != VARLEN:
        return _masks(model, batch) if model.config.model_type in _BLIND else {}
    # Compiled layers serve any number of documents.
    torch._dynamo.maybe_mark_dynamic(batch.borders, 0)
    return {
        "cu_seq_lens_q": batch.borders,
        "cu_seq_lens_k": batch.borders,
        "max_length_q": batch.longest,
        "max_length_k": batch.longest,
    }


def _masks(model: Any, batch: Batch) -> dict[str, Any]:
    """The masks of each kind of layer, as transformers makes them for other models."""
    from transformers import masking_utils

    states = torch.empty(*batch.input_ids.shape, 1, dtype=model.dtype, device=batch.borders.device)
    return {
        "attention_mask": {
            kind: getattr(masking_utils, make)(
                model.config, states, None, None, position_ids=batch.position_ids
            )
            for kind, make in _BLIND[model.config.model_type].items()
        }
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
    dropout: float = 0.0,
    **borders: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over torch's kernel.

    query [1, heads, tokens, width], key and value [1, kv heads, tokens, width]; the result is
    [1, tokens, heads, width].
    """
    from torch.nn.attention.varlen import varlen_attn

    assert not dropout, "the kernel has no dropout"
    options: dict[str, Any] = {"scale": scaling, "window_size": ((sliding_window or 0) - 1, 0)}
    if key.shape[1] != query.shape[1]:
        options.update(_shared_heads)
        if _repeats:
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


def check_isolation(model: Any, device: torch.device, tolerance: float) -> None:
    """Change one document and see that its neighbour's logits stay: true of exact packing only.

    `tolerance`: by how much of the largest logit they may move. Raises UserError for a model whose
    packed documents see each other. Call it without gradients.
    """
    first, second = (probe(model, device, token)[0, 8:].float() for token in (1, 3))
    leak = (first - second).abs().max().item()
    if leak > tolerance * first.abs().max().item():
        raise UserError(
            f"model_name: packed rows see each other in {type(model).__name__} "
            f"(logits move by {leak:.2g}); this architecture cannot be trained on packed rows"
        )


def probe(model: Any, device: torch.device, token: int = 1) -> torch.Tensor:
    """Logits [1, 16, vocabulary] of two documents of 8 tokens, the first made of `token`."""
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.tensor(
        [[token % vocabulary] * 8 + [i % vocabulary for i in range(8)]], device=device
    )
    positions = torch.arange(8, device=device).repeat(2)[None]
    nothing = torch.empty(0, dtype=torch.int64, device=device)
    borders = torch.tensor([0, 8, 16], dtype=torch.int32, device=device)
    batch = Batch(ids, positions, nothing, nothing, borders, longest=8, tokens=16)
    found: torch.Tensor = model(
        input_ids=ids, position_ids=positions, use_cache=False, **extra_inputs(model, batch)
    ).logits
    return found


def _simple(config: Any) -> bool:
    """Whether attention is softmax of scaled products and no more, in heads the kernel takes."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    # A class that rules out torch's own attention has something in it, such as sinks.
    simple = getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False)
    dropout = getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0)
    return bool(simple) and not dropout and width <= _LARGEST_HEAD and width % 8 == 0


def _has_sinks(config: Any) -> bool:
    """Whether attention may look at nothing: transformers' flexible attention knows how to."""
    return bool(config.model_type in _BLIND)


def _varlen() -> bool:
    """torch has the kernel, with the argument that makes it causal (2.11 and later)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return "window_size" in inspect.signature(varlen_attn).parameters


# How query heads share keys and values; set once, so that compiled layers see constants.
_shared_heads: dict[str, Any] = {}
_repeats = False


@cache
def _register(device: torch.device) -> None:
    """Make the kernel known to transformers, and find out whether it takes shared heads itself."""
    global _repeats
    from torch.nn.attention.varlen import varlen_attn
    from transformers import AttentionInterface

    if "enable_gqa" in inspect.signature(varlen_attn).parameters:
        _shared_heads["enable_gqa"] = True
    else:
        _repeats = not _takes_shared_heads(device)
    AttentionInterface.register(VARLEN, attend)


def _takes_shared_heads(device: torch.device) -> bool:
    """Whether the kernel, which has no word for it, gives what repeated keys and values give."""
    from torch.nn.attention.varlen import varlen_attn

    borders = torch.tensor([0, 24, 64], dtype=torch.int32, device=device)
    drawn = torch.Generator(device).manual_seed(0)
    shapes = ((64, 4, 64), (64, 2, 64), (64, 2, 64))
    query, key, value = (
        torch.randn(s, generator=drawn, device=device, dtype=torch.bfloat16, requires_grad=True)
        for s in shapes
    )

    def results(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        out: Any = varlen_attn(query, k, v, borders, borders, 40, 40, window_size=(-1, 0))
        return [out, *torch.autograd.grad(out.float().square().sum(), (query, key, value))]

    try:
        shared = results(key, value)
    except RuntimeError:
        return False
    repeated = results(*(t.repeat_interleave(2, dim=1) for t in (key, value)))
    return all(
        torch.allclose(a.float(), b.float(), rtol=0.05, atol=0.05)
        for a, b in zip(shared, repeated, strict=True)
    )
