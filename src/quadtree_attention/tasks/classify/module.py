# SPDX-License-Identifier: Apache-2.0
"""Training of a classifier."""

from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from timm.data import Mixup
from timm.loss import SoftTargetCrossEntropy
from torch import Tensor, nn

from quadtree_attention.errors import OptionError
from quadtree_attention.models.registry import create
from quadtree_attention.tasks.classify.metrics import ranks
from quadtree_attention.tasks.training.loader import seed_from, set_seed
from quadtree_attention.tasks.training.module import TaskModule, check_options


class ClassifyModule(TaskModule):
    """A backbone with a classifier, and how it is trained: AdamW, warm-up, cosine decay.

    Args:
        model: Name of a model in timm; ours start with `quadtree_`.
        options: Keyword arguments of that model.
        num_classes: Classes; comes from the data.
        lr: Learning rate at a batch of 1024 images on all processes together; scaled linearly.
        min_lr: Where the cosine ends, at that batch size too.
        warmup_epochs: Epochs in which the learning rate rises to `lr`.
        weight_decay: Of AdamW; norms, biases and level weights have none.
        drop_path: Stochastic depth of the last block.
        label_smoothing: Share of the target spread over all classes.
        mixup: Strength of mixup; 0 turns it off.
        cutmix: Strength of cutmix; 0 turns it off.
        grad_checkpointing: Recompute blocks in backward to save memory.
        compile: Compile the model with `torch.compile`.
        cuda_graph: Record forward and backward of the model once and replay them, on one GPU: for
            small models, which leave a GPU waiting for the host. Without effect on a CPU.
        seed: Decides weights, dropout and mixing.
    """

    monitor = "val/top1"
    batch_of_lr = 1024
    links: ClassVar = {"data.classes": ("model.num_classes", len)}

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
        check_options(options, drop_path_rate="--model.drop_path", num_classes="the data")
        self.save_hyperparameters()
        set_seed(seed_from(seed))  # the same first weights on every process
        self.kwargs = {"num_classes": num_classes, **(options or {})}
        self.model: nn.Module = create(model, drop_path_rate=drop_path, **self.kwargs)
        if grad_checkpointing:
            cast(Any, self.model).set_grad_checkpointing(True)
        if compile:
            self.model.compile()  # in place: the names of the weights stay
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

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, num_classes)"""
        return self.model(images)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.hparams["cuda_graph"] and not self.is_recorded and batch["images"].is_cuda:
            self._record(batch["images"])
        super().on_train_batch_start(batch, batch_idx)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        images, labels = batch["images"], batch["labels"]
        if self.mix is not None and len(labels) % 2 == 0:
            images, targets = self.mix(images, labels)
            loss: Tensor = self.soft_loss(self(images).float(), targets)
        else:
            smoothing = self.hparams["label_smoothing"]
            loss = F.cross_entropy(self(images).float(), labels, label_smoothing=smoothing)
        self.check_loss(loss, batch_idx)
        self.log_mean("train/loss", loss.detach(), len(labels), prog_bar=True)
        self.note_skipped(batch)
        return loss

    def _record(self, images: Tensor) -> None:
        """Makes the model replay a CUDA graph in training; evaluation runs as before."""
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

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        labels = batch["labels"]
        logits = self(batch["images"]).float()
        place = ranks(logits, labels)
        count = len(labels)
        self.log_mean("val/loss", F.cross_entropy(logits, labels), count)
        self.log_mean("val/top1", (place < 1).float().mean() * 100, count, prog_bar=True)
        self.log_mean("val/top5", (place < 5).float().mean() * 100, count)
        self.note_skipped(batch)

    def card(self) -> dict[str, Any]:
        """What the weights need beside them to be used."""
        data = cast(Any, self.trainer).datamodule
        return {
            "model": self.hparams["model"],
            "kwargs": self.kwargs,
            "task": "classify",
            "classes": data.classes,
            "image_size": data.image_size,
            "eval_crop": data.eval_crop,
        }
