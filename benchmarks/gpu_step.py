"""The training step on GPUs: our recipe, as users run it, against the hardware and a usual script.

    python benchmarks/gpu_step.py [--json] [--quick] [--gpus N] [--only CASE …]

Every case is a process group of its own under torchrun, on all GPUs of this machine or the first N.
The recipe is `torchrun -m tunewright.recipes.fsdp` with a hyperparameters file and nothing that is
not its default but the batch and the precision; the figures are those it writes into its events.
Model shapes are real ones with random weights. Rows have the lengths of 999 real Alpaca rows
(alpaca_lengths.txt), so that what a padded script wastes is what it wastes in life; every token is
learnt from, in both. Beside each recipe a large bf16 matrix product runs on all GPUs, before it and
after it.

Cases: llama (Llama-3.1-8B, bf16), fp8 (the same with precision: fp8), padded (rows padded to 1,024,
FSDP1, bf16 weights and states, recomputation: what the usual script does), qwen (Qwen2.5-3B).
Without GPUs `--quick` runs a tiny shape on the CPU, to see that all of it works.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import (
    LENGTHS,
    PACK_TOKENS,
    Runner,
    arguments,
    document,
    finish,
    ratio,
    shown,
)

BATCH_TOKENS = 131_072
"""The public example's: 16 GPUs x 4 rows x 2 accumulated x 1,024."""
LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 128256,
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "rope_theta": 500000.0,
    "bos_token_id": 128000, "eos_token_id": 128001,
}  # fmt: skip
QWEN = {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "vocab_size": 151936,
    "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "rope_theta": 1000000.0,
    "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TINY = {**LLAMA, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES = {"llama": LLAMA, "fp8": LLAMA, "padded": LLAMA, "qwen": QWEN}


def main() -> int:
    args = arguments(__doc__, CASES).parse_args()
    chosen = args.only or default_cases(args.gpus)
    more = dict(pair.split("=", 1) for pair in args.set)
    with tempfile.TemporaryDirectory(prefix="tunewright-gpu-step-") as scratch:
        bench = Bench(Path(scratch), args.gpus, steps=4 if args.quick else 10, more=more)
        found = {case: bench.attempt(case, lambda case=case: bench.run(case)) for case in chosen}
        return shown(bench.document(found), args.json)


def default_cases(gpus: int) -> list[str]:
    return ["llama", "qwen"] if gpus < 2 else ["llama", "padded", "fp8"]


class Bench(Runner):
    """Runs cases one after the other in a folder of their own."""

    _product: float | None = None

    def run(self, case: str) -> dict[str, Any]:
        """The figures of one case, with the matrix product before and after it."""
        before = self._product or self._matmul()
        found = self._padded() if case == "padded" else self._recipe(case)
        # Also the one before the next case, which follows at once.
        after = self._product = self._matmul()
        product = (before + after) / 2
        return {**found, "product_before": before, "product_after": after, "product": product}

    def document(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        shares = {
            f"{case}_share": values["model_flops"] / values["product"]
            for case, values in found.items()
            if "model_flops" in values
        }
        more = {
            **shares,
            **ratio(found, "llama_over_padded", "llama", "padded"),
            **ratio(found, "fp8_over_bf16", "fp8", "llama"),
        }
        return document("gpu_step", self, found, more, self._targets())

    def _targets(self) -> dict[str, float]:
        if self.gpus == 1:
            return {"llama_tokens_per_second": 8_500, "qwen_tokens_per_second": 24_000}
        if self.gpus == 2:
            return {"llama_over_padded": 9, "llama_share": 0.69, "fp8_over_bf16": 1.12}
        return {}

    def _recipe(self, case: str) -> dict[str, Any]:
        config = CASES[case] if self.gpus else TINY
        batch = BATCH_TOKENS if self.gpus else 4 * PACK_TOKENS
        parameters: dict[str, Any] = {
            "model_name": str(self.model(case, config)),
            "tokens_path": str(self.store(config["vocab_size"], batch)),
            "global_batch_tokens": batch, "pack_tokens": PACK_TOKENS, "max_length": 1024,
            **({"precision": "fp8"} if case == "fp8" else {}),
        }  # fmt: skip
        return self.recipe(
            case, parameters, lambda file: self.torchrun("-m", "tunewright.recipes.fsdp", file)
        )

    def _padded(self) -> dict[str, Any]:
        folder = str(self.model("padded", LLAMA))
        return self.beside("padded_fsdp1.py", folder, str(LENGTHS), self.steps, torchrun=True)

    def _matmul(self) -> float:
        """FLOP/s of one GPU, mean over all of them at once."""
        result = self.scratch / "matmul.json"
        finish(self.torchrun(str(Path(__file__).parent / "matmul.py"), str(result)))
        return float(json.loads(result.read_text())["flops"])


if __name__ == "__main__":
    sys.exit(main())
