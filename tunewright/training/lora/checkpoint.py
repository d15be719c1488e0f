"""Checkpoints that hold the adapters and their optimizer's state; the frozen weights stay behind.

checkpoints/step-00000200/
  .metadata, __<rank>_<i>.distcp   `model.<PEFT's name>` (fp32), `optimizer.<PEFT's name>.<state>`
  hf/                              adapter_config.json beside what every checkpoint has
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from tunewright.contract.rundir import RunDir
from tunewright.contract.settings import LoraSettings
from tunewright.training.base import BaseModel
from tunewright.training.checkpoint import Checkpoints, Progress
from tunewright.training.lora.model import AdaptedModel
from tunewright.training.world import World


class AdapterCheckpoints(Checkpoints):
    """The checkpoints of one run of adapters."""

    def __init__(
        self,
        run: RunDir,
        world: World,
        model: AdaptedModel,
        optimizer: Any,
        base: BaseModel,
        identity: Mapping[str, Any],
        settings: LoraSettings,
        chat_template: str | None,
    ) -> None:
        super().__init__(run, world, model, optimizer, base, identity, settings, chat_template)
        self.adapter = {"merge": settings.merge, "parameters": model.adapter_count}
        self._config = copy(model.peft.peft_config["default"])
        self._config.inference_mode = True
        # What loads the adapter looks here for the model below it.
        local = base.folder == run.base or base.revision is None
        self._config.base_model_name_or_path = str(base.folder.absolute()) if local else base.name
        self._config.revision = base.revision

    def _facts(self, progress: Progress, finished: bool) -> dict[str, Any]:
        return {**super()._facts(progress, finished), "adapter": self.adapter}

    def _describe(self, folder: Path) -> None:
        super()._describe(folder)
        self._config.save_pretrained(str(folder))
