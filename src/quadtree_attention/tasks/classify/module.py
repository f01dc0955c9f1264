# SPDX-License-Identifier: Apache-2.0
"""Training of a classifier."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor

from quadtree_attention.errors import OptionError
from quadtree_attention.tasks.classify import TASK
from quadtree_attention.tasks.classify.metrics import ranks
from quadtree_attention.tasks.training.data import Batch
from quadtree_attention.tasks.training.module import TaskModule


class ClassifyModule(TaskModule):
    """A backbone with a classifier, trained by AdamW with warm-up and cosine decay.

    Args:
        model: Name of a model of timm; models of this package start with `quadtree_`.
        options: Keyword arguments of that model.
        num_classes: Number of classes; set from the data.
        lr: Learning rate at a batch of 1024 images on all processes together; scaled linearly.
        min_lr: Final learning rate of the cosine, at the same batch size.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        weight_decay: Weight decay of AdamW; not for norms, biases and level weights.
        drop_path: Stochastic depth of the last block.
        label_smoothing: Share of the target spread over all classes.
        mixup: Strength of mixup; 0 turns it off.
        cutmix: Strength of cutmix; 0 turns it off.
        grad_checkpointing: Recompute blocks in backward to save memory.
        compile: Compile the model with `torch.compile`.
        cuda_graph: Capture forward and backward of the model as a CUDA graph and replay it, on one
            GPU. For small models, whose speed the host limits. No effect on a CPU.
        seed: Seed of weights, dropout and mixing.
    """

    task = TASK
    monitor = "val/top1"
    batch_of_lr = 1024
    set_by: ClassVar = {"drop_path_rate": "--model.drop_path", "num_classes": "the data"}

    def __init__(
        self,
        model: str = "quadtree_b_b0",
        options: dict[str, Any] | None = None,
        num_classes: int = 1000,
        lr: float = 1e-3,
        min_lr: float = 1e-5,
        warmup_epochs: float = 5,
        weight_decay: float = 0.05,
        drop_path: float = 0.1,
        label_smoothing: float = 0.1,
        mixup: float = 0.8,
        cutmix: float = 1.0,
        grad_checkpointing: bool = False,
        compile: bool = False,  # noqa: A002 (what users call it)
        cuda_graph: bool = False,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.build(model, options, num_classes=num_classes, drop_path_rate=drop_path)
        self.is_recorded = False
        self.mix = None
        if mixup > 0 or cutmix > 0:
            self.mix = Mixup(
                mixup_alpha=mixup,
                cutmix_alpha=cutmix,
                label_smoothing=label_smoothing,
                num_classes=num_classes,
            )
        self.soft_loss = SoftTargetCrossEntropy()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hparams["cuda_graph"] and not self.is_recorded and batch["images"].is_cuda:
            self._record(batch["images"])
        super().on_train_batch_start(batch, batch_idx)

    def losses(self, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
        images, labels = batch["images"], batch["labels"]
        if self.mix is not None and len(labels) % 2 == 0:
            images, targets = self.mix(images, labels)
            return self.soft_loss(self.model(images).float(), targets), {}
        smoothing = self.hparams["label_smoothing"]
        logits = self.model(images).float()
        return F.cross_entropy(logits, labels, label_smoothing=smoothing), {}

    def _record(self, images: Tensor) -> None:
        """Make the model replay a CUDA graph in training; evaluation runs as before."""
        trainer = self.trainer
        if trainer.world_size > 1 or trainer.accumulate_grad_batches > 1 or self.hparams["compile"]:
            raise OptionError(
                "cuda_graph works on one GPU, without gradient accumulation and compile, got "
                f"{trainer.world_size} processes, accumulate_grad_batches="
                f"{trainer.accumulate_grad_batches}, compile={self.hparams['compile']}; leave out "
                "--model.cuda_graph"
            )
        with trainer.precision_plugin.forward_context():
            dtype, enabled = torch.get_autocast_dtype("cuda"), torch.is_autocast_enabled("cuda")
            with torch.autocast("cuda", dtype, enabled, cache_enabled=False):
                torch.cuda.make_graphed_callables(self.model, (torch.zeros_like(images),))
        self.is_recorded = True

    def validate(self, batch: Batch) -> None:
        labels = batch["labels"]
        logits = self.model(batch["images"]).float()
        place = ranks(logits, labels)
        count = len(labels)
        self.log_mean("val/loss", F.cross_entropy(logits, labels), count)
        self.log_mean("val/top1", (place < 1).float().mean() * 100, count, prog_bar=True)
        self.log_mean("val/top5", (place < 5).float().mean() * 100, count)

    def card(self) -> dict[str, Any]:
        own = {"image_size": self.data.image_size, "eval_crop": self.data.eval_crop}
        return super().card() | own
