"""The step of the recipe lora on GPUs, in the shapes of gpt-oss, against the public example.

    python benchmarks/lora_step.py [--json] [--quick] [--gpus N] [--only CASE …] [--layers N …]

Cases, on one GPU:
  gpt-oss-20b   our recipe, nothing set but the example's batch and ranks
  example       TRL and PEFT as the public example calls them, on the same rows (example_lora.py)
and on more, at 4, 12 and 36 layers or those of --layers, each until one does not fit:
  gpt-oss-120b  our recipe with the frozen weights sharded over all GPUs
  example-120b  the example beside it, sharded as it does that

Random weights. Rows have the lengths of 999 real Alpaca rows times 3.3, so that the longest has the
example's 2,048 tokens (mean 630): the rows of its own data set are not here. Every token is learnt
from, in all cases; rates are in tokens without padding. Our recipe runs through lora_unsealed.py,
which leaves out the copy of the random weights on disk. Without GPUs a tiny shape runs on the CPU,
in --ranks processes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench import Runner, arguments, document, ratio, row_lengths, shown

MAX_LENGTH = 2048
STRETCH = MAX_LENGTH / int(row_lengths().max())
BATCH_TOKENS = 8 * 4 * MAX_LENGTH
"""The public example's: 8 GPUs x 4 rows accumulated x 2,048."""
EXAMPLE_STEPS = 4
"""How many times as many steps the example takes, its own being of four rows only."""
ADAPTERS = {"lora_r": 32, "lora_alpha": 32, "lora_experts_r": 8}
LARGE = {
    "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "vocab_size": 201088,
    "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
    "num_local_experts": 128, "num_experts_per_tok": 4, "num_attention_heads": 64,
    "num_key_value_heads": 8, "head_dim": 64, "sliding_window": 128, "attention_bias": True,
    "attention_dropout": 0.0, "hidden_act": "silu", "swiglu_limit": 7.0, "rms_norm_eps": 1e-5,
    "initializer_range": 0.02, "max_position_embeddings": 131072, "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "original_max_position_embeddings": 4096, "truncate": False,
    },
    "router_aux_loss_coef": 0.9, "output_router_logits": False, "tie_word_embeddings": False,
    "pad_token_id": 199999, "eos_token_id": 200002,
}  # fmt: skip
SMALL = {**LARGE, "num_hidden_layers": 24, "num_local_experts": 32}
TINY = {**LARGE, "vocab_size": 512, "hidden_size": 64, "intermediate_size": 64,
        "num_hidden_layers": 2, "num_local_experts": 4, "num_experts_per_tok": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "pad_token_id": 0, "eos_token_id": 1}  # fmt: skip
TINY_PACK = 1024
ON_ONE, GROWING = ("gpt-oss-20b", "example"), ("gpt-oss-120b", "example-120b")
LAYERS = [4, 12, 36]


def main() -> int:
    parser = arguments(__doc__, (*ON_ONE, *GROWING))
    parser.add_argument("--layers", type=int, nargs="+", help="of gpt-oss-120b; default: 4 12 36")
    parser.add_argument("--ranks", type=int, default=1, help="processes where there is no GPU")
    args = parser.parse_args()
    layers = args.layers or (LAYERS if args.gpus else [1, 2])
    more = dict(pair.split("=", 1) for pair in args.set)
    with tempfile.TemporaryDirectory(prefix="tunewright-lora-step-") as scratch:
        bench = Bench(Path(scratch), args.gpus, steps=4 if args.quick else 10, more=more)
        bench.cpu_ranks = args.ranks
        chosen = args.only or (ON_ONE if bench.ranks == 1 else GROWING)
        found: dict[str, dict[str, Any]] = {}
        for case in ON_ONE:
            found |= bench.single(case) if case in chosen else {}
        found |= bench.growing(layers, [case for case in GROWING if case in chosen])
        return shown(bench.document(found), args.json)


class Bench(Runner):
    """Runs cases one after the other in a folder of their own."""

    def single(self, case: str) -> dict[str, dict[str, Any]]:
        run = self._example if case == "example" else partial(self._recipe, case)
        return {case: self.attempt(case, lambda: run(SMALL))}

    def growing(self, layers: list[int], cases: list[str]) -> dict[str, dict[str, Any]]:
        """The shape of 120b with more and more layers; a case ends where so many do not fit."""
        found: dict[str, dict[str, Any]] = {}
        for count in layers:
            config = {**LARGE, "num_hidden_layers": count}
            runs = {
                "gpt-oss-120b": lambda s=config: self._recipe("gpt-oss-120b", s, sharding="fsdp"),
                "example-120b": lambda s=config: self._example(s),
            }
            for case in list(cases):
                name = f"{case}_{count}_layers"
                found[name] = self.attempt(name, runs[case])
                if "failed" in found[name]:
                    cases.remove(case)
        return found

    def document(self, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
        more = ratio(found, "lora_over_example", "gpt-oss-20b", "example")
        for case in [case for case in found if case.startswith("gpt-oss-120b")]:
            layers = case.removeprefix("gpt-oss-120b")
            more |= ratio(found, f"lora_over_example{layers}", case, f"example-120b{layers}")
        shares = {
            f"{case}_share_of_ceiling": values["model_flops"] / values["ceiling_flops"]
            for case, values in found.items()
            if values.get("ceiling_flops")
        }
        aims = {1: "lora_over_example", 8: "lora_over_example_36_layers"}
        targets = {aims[self.gpus]: 3.0} if self.gpus in aims else {}
        packages = ("trl", "peft", "accelerate")
        return document("lora_step", self, found, {**shares, **more}, targets, packages)

    def _recipe(self, case: str, config: Mapping[str, Any], **settings: str) -> dict[str, Any]:
        config = self._sized(config)
        parameters = {
            "model_name": str(self.model(case, config)), "tokens_path": str(self._rows(config)),
            "global_batch_tokens": self._batch(), **ADAPTERS, **settings,
            **({} if self.gpus else {"pack_tokens": TINY_PACK, "max_length": TINY_PACK}),
        }  # fmt: skip
        driver = str(Path(__file__).parent / "lora_unsealed.py")
        return self.recipe(case, parameters, lambda file: self.torchrun(driver, file))

    def _example(self, config: Mapping[str, Any]) -> dict[str, Any]:
        config = self._sized(config)
        folder, rows = self.model("example", config), self._rows(config)
        # Its steps are of four rows a GPU: shorter than ours on few GPUs.
        steps = -(-EXAMPLE_STEPS * self.steps // self.ranks)
        words = ("example_lora.py", str(folder), str(rows), max(steps, self.steps))
        return self.beside(*words, torchrun=self.ranks > 1)

    def _rows(self, config: Mapping[str, Any]) -> Path:
        if self.gpus:
            return self.store(config["vocab_size"], BATCH_TOKENS, STRETCH)
        return self.store(config["vocab_size"], self._batch(), pack_tokens=TINY_PACK)

    def _sized(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Tiny on a CPU, with the layers of what it stands for where these are few."""
        if self.gpus:
            return dict(config)
        return {**TINY, "num_hidden_layers": min(2, config["num_hidden_layers"])}

    def _batch(self) -> int:
        return BATCH_TOKENS if self.gpus else 2 * TINY_PACK


if __name__ == "__main__":
    sys.exit(main())
