# SPDX-License-Identifier: Apache-2.0
from quadtree_attention.tasks.toy import TASK
from quadtree_attention.tasks.training.module import TaskModule


class ToyModule(TaskModule):
    task = TASK
    monitor = "val/score"
    batch_of_lr = 2

    def __init__(
        self,
        model: str = "toy_brightness",
        lr: float = 0.1,
        min_lr: float = 0.0,
        warmup_epochs: float = 0.0,
        weight_decay: float = 0.0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(model)

    def losses(self, batch):
        loss = (self.model(batch["images"]) - batch["truth"]).square().mean()
        return loss, {}

    def validate(self, batch):
        loss, _ = self.losses(batch)
        self.log_mean("val/score", -loss, len(batch["truth"]))
