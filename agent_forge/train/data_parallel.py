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

    def agree(self, model: nn.Module) -> None:
        """Let QK-clip see the largest logits of all processes, so that all clip alike."""
        for module in model.modules() if self.size > 1 else ():
            largest = getattr(module, "largest_logit_H", None)
            if largest is not None:
                dist.all_reduce(largest, dist.ReduceOp.MAX)

    def sum(
        self, model: nn.Module, values: dict[str, float], count: int
    ) -> tuple[list[Tensor], dict[str, float], int]:
        """The gradients of the model, and what was measured, added up over all processes."""
        for p in model.parameters() if self.size > 1 else ():
            if p.requires_grad:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        if self.size == 1:
            return gradients, values, count
        device = gradients[0].device
        numbers = torch.tensor([*values.values(), count], dtype=torch.float64, device=device)
        dist.all_reduce(numbers)
        return gradients, dict(zip(values, numbers[:-1].tolist(), strict=True)), int(numbers[-1])

    def average(self, buffers: list[Tensor]) -> None:
        """Make running statistics equal in all processes."""
        for buffer in buffers if self.size > 1 else ():
            dist.all_reduce(buffer)
            buffer.div_(self.size)
