"""The table of metric names: every number a run may log, with its unit and meaning.

Code, docs and dashboard share it, and logging a name that is not here is an error. `{}` in a name
stands for one segment (a model's number, a data set).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    phase: str
    unit: str
    meaning: str


METRICS = (
    Metric("phase/duration_seconds", "any", "s", "time the phase took, all attempts together"),
    Metric("phase/success", "any", "0 or 1", "whether the phase ended well"),
    Metric("toy/loss", "toy", "squared error", "training loss of the toy's linear model"),
    Metric("toy/final_loss", "toy", "squared error", "loss on 1,024 fresh examples"),
    Metric("{}/train/loss", "any", "nats/token", "cross-entropy of the last recursion step"),
    Metric("{}/train/loss_avg_100", "any", "nats/token", "its mean over the last 100 steps"),
    Metric("{}/train/loss_step_{}", "any", "nats/token", "cross-entropy of a recursion step"),
    Metric("{}/train/halting_loss", "any", "nats", "of the halting head against its targets"),
    Metric("{}/train/gate_entropy", "any", "nats", "how undecided the memory gate is"),
    Metric("{}/train/halt_rate", "any", "share", "tokens for which halting early was right"),
    Metric("{}/train/divergence", "any", "nats/token", "KL from the teacher"),
    Metric("{}/train/rate", "any", "share", "of the full learning rate"),
    Metric("{}/train/grad_norm", "any", "norm", "norm of the gradient before clipping"),
    Metric("{}/train/update_norm", "any", "norm", "norm of the matrices' update"),
    Metric("{}/train/orthogonality_error", "any", "rms", "rms of X X' - 1 of a matrix's update"),
    Metric("{}/train/ema_to_raw", "any", "ratio", "slow part of the gradient to the whole"),
    Metric("{}/train/qk_clip_count", "any", "heads", "heads whose logits were clipped"),
    Metric("{}/train/evaluation_loss", "any", "nats/token", "on data that is not trained on"),
    Metric("{}/accuracy/{}", "cognate", "share", "exact match on unseen items of a domain"),
    Metric("{}/nats/{}", "cognate", "nats/token", "loss of the answers to those items"),
    Metric("{}/act/quick_steps", "cognate", "steps", "mean recursion steps when it must be quick"),
    Metric("{}/act/mean_steps", "cognate", "steps", "mean recursion steps with its own threshold"),
    Metric("{}/gate/memory_use", "cognate", "share", "of the memory in the gate's blend"),
    Metric("{}/latency_ms", "cognate", "ms", "for the next token of 512, without a cache"),
    Metric("{}/final_loss", "cognate", "nats/token", "mean over the domains, unseen items"),
    Metric("{}/size_mb", "cognate", "MB", "of the weights on disk"),
    Metric("{}/parameters", "cognate", "weights", "tied ones count once"),
    Metric("baseline/majority/{}", "cognate", "share", "right with the most frequent answer"),
    Metric("baseline/ngram/{}", "cognate", "share", "right with an n-gram model's answer"),
    Metric(
        "phase/barrier_{}", "cognate", "nats/token", "loss halfway between two, over their mean"
    ),
    Metric("phase/diversity", "cognate", "0 to 1", "how different the three are"),
    Metric("phase/num_models_created", "cognate", "models", "specialists handed over"),
    Metric("phase/total_parameters", "cognate", "weights", "of all of them"),
    Metric("phase/avg_final_loss", "cognate", "nats/token", "mean of their final losses"),
    Metric("generation/best_fitness", "evomerge", "0 to 1", "of the champion so far"),
    Metric("generation/avg_fitness", "evomerge", "0 to 1", "mean of the generation"),
    Metric("generation/fitness_std", "evomerge", "0 to 1", "spread of the generation"),
    Metric("generation/diversity_score", "evomerge", "ratio", "mean distance, 1 = the parents'"),
    Metric("generation/failed", "evomerge", "candidates", "that could not be measured"),
    Metric("generation/mutation_count", "evomerge", "candidates", "mutants of the generation"),
    Metric("combo/{}/usage", "evomerge", "candidates", "that a combo made"),
    Metric("phase/initial_fitness", "evomerge", "0 to 1", "of the best parent, as searched"),
    Metric("phase/final_fitness", "evomerge", "0 to 1", "of the champion, as searched"),
    Metric("phase/best_fitness", "evomerge", "0 to 1", "the same"),
    Metric("phase/fitness_improvement", "evomerge", "0 to 1", "the difference"),
    Metric("phase/fitness_improvement_percent", "evomerge", "%", "relative to the best parent"),
    Metric("phase/compression_ratio", "evomerge", "ratio", "models that became one"),
    Metric("phase/final_perplexity", "evomerge", "1 or more", "a token, on unseen items"),
    Metric("phase/final_perplexity_score", "evomerge", "0 to 1", "1 - H / H0 on unseen items"),
    Metric("phase/final_accuracy", "evomerge", "0 to 1", "beyond chance on unseen items"),
    Metric("phase/final_speed", "evomerge", "0 to 1", "0.5: a merge costs what its parents cost"),
    Metric("phase/final_memory", "evomerge", "0 to 1", "0.5: a merge is as large as its parents"),
    Metric("system/cpu_percent", "system", "%", "load of all cores"),
    Metric("system/process_cpu_percent", "system", "%", "load by this process; 100 = one core"),
    Metric("system/process_rss_mb", "system", "MB", "memory that this process holds"),
    Metric("system/memory_available_mb", "system", "MB", "memory that is free for programs"),
    Metric("system/disk_free_mb", "system", "MB", "free disk where the run is stored"),
    Metric("system/gpu_memory_used_mb", "system", "MB", "memory in use on the first GPU"),
)


PATTERNS = {m: re.compile(re.escape(m.name).replace(r"\{\}", r"[^/]+")) for m in METRICS}


@lru_cache(maxsize=4096)
def find_metric(name: str) -> Metric | None:
    """The entry that a logged name belongs to."""
    return next((metric for metric, pattern in PATTERNS.items() if pattern.fullmatch(name)), None)
