"""The model that a run is for: the best one so far, with its class names and a model card."""

import json
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from bcosvit.files import atomic
from bcosvit.models.card import model_card
from bcosvit.models.weights import CLASSES_KEY, RUN_KEY, save_state
from bcosvit.train.record import Plan
from bcosvit.train.task import Task, model_state

WEIGHTS, CARD = "best.safetensors", "README.md"


class BestModel(Callback):
    """Saves the model whenever its validation accuracy is higher than ever before.

    It must stand before the callback that averages weights, which puts the trained ones back at
    the same hook: what is saved is what was validated.
    """

    def __init__(self, folder: Path, plan: Plan) -> None:
        self.folder, self.plan = folder, plan
        self.accuracy = -1.0
        self.epoch = 0

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Task)
        # On every process: the metric is reduced, and sharded weights are gathered.
        accuracy = pl_module.val_means["top1"].compute().item()
        if accuracy <= self.accuracy:
            return
        self.accuracy, self.epoch = accuracy, trainer.current_epoch + 1
        state = trainer.strategy.lightning_module_state_dict()
        if not trainer.is_global_zero:
            return
        own = model_state(state)
        save_state(own, self.plan.model, self.folder / WEIGHTS, metadata=self._notes())
        with atomic(self.folder / CARD) as temporary:
            temporary.write_text(self._card(), encoding="utf-8")

    def state_dict(self) -> dict[str, Any]:
        return {"accuracy": self.accuracy, "epoch": self.epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.accuracy, self.epoch = state_dict["accuracy"], state_dict["epoch"]

    def _notes(self) -> dict[str, str]:
        run = {
            "data": self.plan.data,
            "recipe": self.plan.recipe_name,
            "epoch": self.epoch,
            "accuracy": self.accuracy,
            # What pictures must be cut like, to be seen as validation saw them.
            "eval_crop": self.plan.recipe.eval_crop,
        }
        return {CLASSES_KEY: json.dumps(self.plan.classes), RUN_KEY: json.dumps(run)}

    def _card(self) -> str:
        plan = self.plan
        images = f"{plan.train_images} for training, {plan.val_images} for validation"
        epochs = f"{plan.recipe.epochs} (`run.yaml` has the whole recipe)"
        return model_card(
            plan.model,
            self._notes(),
            weights=WEIGHTS,
            details={
                "input": f"RGB in [0, 1], {plan.image_size}×{plan.image_size} pixels",
                "epochs": epochs,
                "images": images,
            },
        )
