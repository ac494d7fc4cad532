"""MuonGrokfast: clip, amplify what persists, orthogonalise matrices, AdamW for the rest, QK-clip.

Grokfast adds lambda times a running mean of the gradient: slow components grow. Muon replaces a
matrix's momentum by the nearest orthogonal matrix, in fp32 (bf16 is many times slower on a CPU),
equal shapes in one batch. QK-clip bounds the attention logits of a head by scaling its weights.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.adamw import adamw

from agent_forge.errors import NotFinite
from agent_forge.optim.config import MuGrokConfig
from agent_forge.quant.layers import stored_weight

WATCHED_ROWS = 16
Params = nn.Module | Iterable[nn.Parameter]
# Matrices that AdamW handles better: embeddings and heads of any maker, and small ones.
NOT_HIDDEN = ("embed", "wte", "wpe", "lm_head", "projection", "halting", "lora_")


def orthogonalize(x_NRC: Tensor, steps: int) -> Tensor:
    """The nearest orthogonal matrices, nearly: singular values end between about 0.7 and 1.2."""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x_NRC.shape[-2] > x_NRC.shape[-1]
    x: Tensor = x_NRC.transpose(-2, -1) if tall else x_NRC
    x = x.float() / x.float().norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-2, -1)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-2, -1) if tall else x


def split_roles(params: Params) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Hidden matrices, and everything else: embeddings, head, norms, biases, scalars."""
    matrices: list[nn.Parameter] = []
    rest: list[nn.Parameter] = []
    for item in params.named_parameters() if isinstance(params, nn.Module) else params:
        name, parameter = item if isinstance(item, tuple) else ("", item)
        hidden = parameter.ndim == 2 and not any(part in name for part in NOT_HIDDEN)
        (matrices if hidden else rest).append(parameter)
    return matrices, rest


def divergence(logits: Tensor, reference: Tensor) -> Tensor:
    """KL(reference || model) at each position, in nats, over the last dimension."""
    own, wanted = F.log_softmax(logits.float(), -1), F.log_softmax(reference.float(), -1)
    return F.kl_div(own, wanted, reduction="none", log_target=True).sum(-1)


class MuonGrokfast(torch.optim.Optimizer):
    """Give it a model, which it then routes by role and clips by head, or bare parameters."""

    def __init__(self, params: Params, config: MuGrokConfig) -> None:
        self.config = config
        self.metrics: dict[str, float] = {}
        self._attentions: list[Any] = []  # layers of model.attention whose logits are bounded
        matrices, rest = split_roles(params)
        if isinstance(params, nn.Module) and config.qk_clip_threshold:
            self._attentions = [m for m in params.modules() if _is_trained_attention(m)]
            for attention in self._attentions:
                attention.watched = WATCHED_ROWS
        role, rate = ("muon", config.muon_lr) if config.muon else ("adamw", config.fallback_lr)
        groups = [
            {"params": matrices, "role": role, "lr": rate, "decay": config.weight_decay},
            {"params": rest, "role": "adamw", "lr": config.fallback_lr, "decay": 0.0},
        ]
        super().__init__([g for g in groups if g["params"]], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update from the gradients that are there."""
        loss = closure() if closure is not None else None
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(_gradients(trained))
        if not torch.isfinite(norm):
            raise NotFinite(f"the gradient's norm is {float(norm)}; no weight was changed")
        if self.config.grad_clip:
            torch.nn.utils.clip_grads_with_norm_(trained, self.config.grad_clip, norm)
        self.metrics = {"grad_norm": float(norm)}
        self._amplify(trained)
        for group in self.param_groups:
            if params := [p for p in group["params"] if p.grad is not None]:
                update = self._muon if group["role"] == "muon" else self._adamw
                update(params, group["lr"], group["decay"])
        self.metrics["qk_clip_count"] = float(self._clip_attention())
        return loss

    def penalty(self, logits: Tensor, reference: Tensor) -> Tensor:
        """What a loss adds to stay near a reference: the coefficient times the mean divergence."""
        return self.config.kl_coefficient * divergence(logits, reference.detach()).mean()

    def _amplify(self, params: list[Tensor]) -> None:
        """Grokfast: g + lambda * EMA(g); the EMA begins with the first gradient."""
        alpha, strength = self.config.grokfast_alpha, self.config.grokfast_lambda
        if not strength:
            return
        grads = _gradients(params)
        for p, grad in zip(params, grads, strict=True):
            if "ema" not in self.state[p]:
                self.state[p]["ema"] = grad.clone()
        means = [self.state[p]["ema"] for p in params]
        torch._foreach_lerp_(means, grads, 1 - alpha)
        raw = torch.nn.utils.get_total_norm(grads)
        slow = torch.nn.utils.get_total_norm(means)
        self.metrics["ema_to_raw"] = float(slow / raw.clamp(min=1e-12))
        torch._foreach_add_(grads, means, alpha=strength)

    def _muon(self, params: list[Tensor], lr: float, decay: float) -> None:
        """Nesterov momentum, orthogonalised; scaled so that its size matches an AdamW update."""
        by_shape: dict[tuple[int, ...], list[Tensor]] = defaultdict(list)
        for p in params:
            by_shape[tuple(p.shape)].append(p)
            if "momentum" not in self.state[p]:
                self.state[p]["momentum"] = torch.zeros_like(p)
        squares, error, beta = 0.0, 0.0, self.config.momentum
        for shape, group in by_shape.items():
            grads, momenta = _gradients(group), [self.state[p]["momentum"] for p in group]
            torch._foreach_lerp_(momenta, grads, 1 - beta)
            nesterov = torch.stack(grads).lerp(torch.stack(momenta), beta)
            update = orthogonalize(nesterov, self.config.ns_steps)
            x = update[0].t() if shape[0] > shape[1] else update[0]
            off = x @ x.t() - torch.eye(len(x), device=x.device)  # how far from orthogonal it is
            error = max(error, float(off.square().mean().sqrt()))
            update *= 0.2 * max(shape) ** 0.5
            squares += float(update.square().sum()) * lr**2
            torch._foreach_mul_(group, 1 - lr * decay)
            torch._foreach_add_(group, list(update.unbind()), alpha=-lr)
        self.metrics["update_norm"] = squares**0.5
        self.metrics["orthogonality_error"] = error

    def _adamw(self, params: list[Tensor], lr: float, decay: float) -> None:
        """torch's own fused AdamW. No decay but of matrices: unseen tokens would shrink away."""
        for p in params:
            state = self.state[p]
            if "step" not in state:
                state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        names = ("exp_avg", "exp_avg_sq", "step")
        first, second, steps = ([self.state[p][name] for p in params] for name in names)
        options: dict[str, Any] = {"fused": True, "amsgrad": False, "maximize": False}
        options |= {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "lr": lr, "weight_decay": decay}
        adamw(params, _gradients(params), first, second, [], steps, **options)

    def _clip_attention(self) -> int:
        """Scale down the heads whose largest logit is beyond the threshold; returns how many."""
        clipped = 0
        for attention in self._attentions:
            largest = attention.largest_logit_H
            if largest is None:
                continue
            factor_H = (self.config.qk_clip_threshold / largest.clamp(min=1e-6)).clamp(max=1.0)
            clipped += int((factor_H < 1).sum())
            q, k = stored_weight(attention.q), stored_weight(attention.k)
            rows = factor_H.repeat_interleave(len(q) // attention.heads)[:, None]
            q.mul_(rows if self.config.mlarope_protected else rows.sqrt())
            if not self.config.mlarope_protected:
                k.mul_(rows.sqrt())
            attention.largest_logit_H = None
        return clipped


def _gradients(params: list[Tensor]) -> list[Tensor]:
    return [p.grad for p in params if p.grad is not None]


def _is_trained_attention(module: Any) -> bool:
    """True for attention whose queries and keys are trained themselves, not frozen under LoRA."""
    linears = (module.q, module.k) if hasattr(module, "largest_logit_H") else ()
    return bool(linears) and all(stored_weight(linear).requires_grad for linear in linears)
