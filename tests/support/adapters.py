"""LoRA adapters as peft writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM

from tests.support.merge_models import family, save, tuned


def adapted(root: Path, kind: str, settings: dict[str, Any]) -> tuple[Path, Path]:
    """A base, and an adapter of it that peft wrote, with weights that are not zero."""
    base = save(root / "base", tuned(0, kind), family(kind)[1])
    config = LoraConfig(**{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings})
    model: Any = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        if weight.requires_grad:
            nn.init.normal_(weight, std=0.2, generator=generator)
    model.save_pretrained(root / "lora")
    return base, root / "lora"
