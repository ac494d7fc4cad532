"""The one training loop, LoRA and distillation."""
