"""The step of the recipe ray_ddp on GPUs, Qwen2.5-3B under Ray Train, against the public script.

    python benchmarks/ray_step.py [--json] [--quick] [--gpus N] [--only CASE …]

Cases: recipe (`python -m tunewright.recipes.ray_ddp`, nothing set but the example's batch and
longest row), script (rows padded to 1,024 with DDP, as the public script has them: padded_ray.py).
Random weights. Rows have the lengths of 999 real Alpaca rows (alpaca_lengths.txt); every token is
learnt from, in both; rates are in tokens without padding. Each case has a Ray of its own. Without
GPUs a tiny shape runs on the CPU.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import LENGTHS, PACK_TOKENS, Runner, arguments, document, ratio, shown
from gpu_step import QWEN

LENGTH = 1024
BATCH_TOKENS = 8 * 4 * LENGTH
"""The public example's: 8 GPUs x 4 rows x 1,024."""
TINY = {**QWEN, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
CASES = ("recipe", "script")


def main() -> int:
    args = arguments(__doc__, CASES).parse_args()
    more = dict(pair.split("=", 1) for pair in args.set)
    with tempfile.TemporaryDirectory(prefix="tunewright-ray-step-") as scratch:
        bench = Bench(Path(scratch), args.gpus, steps=4 if args.quick else 10, more=more)
        runs = {"recipe": bench.ours, "script": bench.theirs}
        found = {case: bench.attempt(case, runs[case]) for case in args.only or CASES}
        return shown(bench.document(found), args.json)


class Bench(Runner):
    """Runs both in a folder of their own, one after the other."""

    def ours(self) -> dict[str, Any]:
        config = QWEN if self.gpus else TINY
        batch = BATCH_TOKENS if self.gpus else PACK_TOKENS
        parameters = {
            "model_name": str(self.model("qwen", config)),
            "tokens_path": str(self.store(config["vocab_size"], batch)),
            "global_batch_tokens": batch, "max_length": LENGTH,
        }  # fmt: skip
        here = str(max(1, self.gpus))
        return self.recipe(
            "recipe",
            parameters,
            lambda file: self.python(
                "-m", "tunewright.recipes.ray_ddp", file, LOCAL_WORLD_SIZE=here
            ),
        )

    def theirs(self) -> dict[str, Any]:
        folder = self.model("qwen", QWEN if self.gpus else TINY)
        workers = max(1, self.gpus)
        # Its steps are shorter, being of fewer tokens.
        steps = 4 * self.steps if self.gpus else self.steps
        return self.beside("padded_ray.py", str(folder), str(LENGTHS), workers, steps)

    def document(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        targets = {"recipe_over_script": 6.0} if self.gpus in (1, 2) else {}
        more = ratio(found, "recipe_over_script", "recipe", "script")
        as_is = found.get("script", {}).get("tokens_per_second_as_is")
        if more and as_is:
            more["recipe_over_script_as_is"] = found["recipe"]["tokens_per_second"] / as_is
        return document("ray_step", self, found, more, targets, ("ray",))


if __name__ == "__main__":
    sys.exit(main())
