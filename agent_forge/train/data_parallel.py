"""Data parallelism under torchrun: each process computes its rows, all apply the same gradient."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn


@dataclass(frozen=True)
class TrainingProcesses:
    """The processes that train one network together; alone, every method changes nothing."""

    rank: int = 0
    size: int = 1

    @classmethod
    def join(cls) -> TrainingProcesses:
        """Join the processes that torchrun started, if it did; the first one saves checkpoints."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls()
        if not dist.is_initialized():
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
        return cls(dist.get_rank(), size)

    def share(self, batch: Sequence[Tensor]) -> Sequence[Tensor]:
        """The rows of the batch that this process computes."""
        if self.size == 1:
            return batch
        if len(batch[0]) % self.size:
            raise ValueError(f"{len(batch[0])} rows do not divide among {self.size} processes")
        return [tensor[self.rank :: self.size] for tensor in batch]

    def gradients(self, model: nn.Module) -> list[Tensor]:
        """The gradients that are there; among several processes zeros stand for missing ones."""
        if self.size > 1:
            for p in model.parameters():
                if p.requires_grad and p.grad is None:
                    p.grad = torch.zeros_like(p)
        return [p.grad for p in model.parameters() if p.grad is not None]

    def agree(self, model: nn.Module) -> None:
        """Let QK-clip see the largest logits of all processes, so that all clip alike."""
        if self.size == 1:
            return
        for module in model.modules():
            largest = getattr(module, "largest_logit_H", None)
            if largest is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX)

    def sum(
        self, gradients: list[Tensor], values: dict[str, float], count: int
    ) -> tuple[dict[str, float], int]:
        """Add up the gradients, in place, and what was measured, over all processes."""
        if self.size == 1:
            return values, count
        for gradient in gradients:
            dist.all_reduce(gradient)
        device = gradients[0].device
        numbers = torch.tensor([*values.values(), count], dtype=torch.float64, device=device)
        dist.all_reduce(numbers)
        return dict(zip(values, numbers[:-1].tolist(), strict=True)), int(numbers[-1])

    def average(self, buffers: list[Tensor]) -> None:
        """Make running statistics equal in all processes."""
        if self.size == 1:
            return
        for buffer in buffers:
            dist.all_reduce(buffer)
            buffer.div_(self.size)
