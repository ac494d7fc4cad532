"""What it takes to run a model, measured on this machine: bytes, latency, memory of a process."""

from __future__ import annotations

import shutil
import subprocess
import timeit
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from agent_forge.data.tokenizer import Tokenizer
from agent_forge.infer.generate import SamplingSettings, generate
from agent_forge.infer.native import native_decoder
from agent_forge.model.network import ForgeNetwork
from agent_forge.native.bundle import HERE, SOURCES
from agent_forge.phases.phase7_edge.config import Target
from agent_forge.phases.training import LatentModel, network_bytes, network_config
from agent_forge.store import files, tensors

PROMPT_TOKENS, WRITTEN_TOKENS, ROUNDS = 64, 64, 5
BUILD_SECONDS, RUN_SECONDS = 120, 60
PEAK = "peak memory: "  # a line of the program


@dataclass(frozen=True)
class Profile:
    """What a model takes on this machine."""

    weights: int
    model_bytes: int  # weights and config
    total_bytes: int  # with the tokenizer
    first_token_ms: float  # of a prompt of PROMPT_TOKENS
    token_ms: float  # of each further one
    memory_mb: float | None  # of the C program at its peak; None where it cannot be built
    step: str  # what computed: avx2, plain or torch

    @property
    def tokens_per_s(self) -> float:
        return 1000 / self.token_ms

    def missed(self, target: Target, first: Profile) -> list[str]:
        """The limits that are not met, in words; `first` is what came in."""
        megabytes, share = self.total_bytes / 1e6, self.model_bytes / first.model_bytes
        found = [
            (megabytes > target.size_mb, f"{megabytes:.3g} MB > {target.size_mb:g}"),
            (share > target.share, f"{share:.1%} of the bytes > {target.share:.1%}"),
            (
                self.token_ms > target.latency_ms,
                f"{self.token_ms:.3g} ms a token > {target.latency_ms:g}",
            ),
            (
                self.tokens_per_s < target.tokens_per_s,
                f"{self.tokens_per_s:.4g} tokens/s < {target.tokens_per_s:g}",
            ),
            (
                (self.memory_mb or 0.0) > target.memory_mb,
                f"{self.memory_mb or 0.0:.3g} MB of memory > {target.memory_mb:g}",
            ),
        ]
        return [text for is_missed, text in found if is_missed]


@dataclass(frozen=True)
class Profiler:
    """Measures models; the program is built in `place` when it is first needed."""

    place: Path
    tokenizer: Tokenizer
    device: str

    def measure(self, models: Mapping[str, LatentModel]) -> dict[str, Any]:
        """The profiles of models, for a journal. They take turns, so that what else the machine
        does slows none of them alone."""
        networks = {name: model.opened().to(self.device) for name, model in models.items()}
        best = {name: [float("inf"), float("inf")] for name in models}
        for _ in range(ROUNDS):
            for name, network in networks.items():
                best[name] = [min(a, b) for a, b in zip(best[name], _times(network), strict=True)]
        found = {}
        for name, model in models.items():
            own, (first, whole) = networks[name], best[name]
            packed = model.packing.pack(model.state) if model.packing else None
            decoder, size = native_decoder(own), network_bytes(own, packed)
            profile = Profile(
                model.settings.parameters(),
                size,
                size + sum(map(len, self.tokenizer.files().values())),
                1000 * first,
                1000 * max(whole - first, 1e-9) / WRITTEN_TOKENS,
                self.memory(model),
                decoder.backend if decoder else "torch",
            )
            found[name] = asdict(profile)
        return found

    def memory(self, model: LatentModel) -> float | None:
        """Megabytes that a process of the C program takes at its peak, loading and writing."""
        if self.program is None:
            return None
        folder = self.place / "model"
        network = model.opened()
        packed = model.packing.pack(model.state) if model.packing else None
        state = packed.tensors if packed else network.state_dict()
        with files.staging(folder) as stage:
            with stage.writing("model.safetensors") as writer:
                tensors.write_tensors(writer, state)
            stage.write_json("config.json", network_config(network, packed))
            for name, content in self.tokenizer.files().items():
                stage.write_bytes(name, content)
        how = ("--bench", "--tokens", str(WRITTEN_TOKENS))
        told = _told([str(self.program), str(folder), "once", *how], RUN_SECONDS)
        lines = [line.removeprefix(PEAK) for line in told.splitlines() if line.startswith(PEAK)]
        return float(lines[0].split()[0]) / 1e3 if lines else None

    @cached_property
    def program(self) -> Path | None:
        """The C program of a bundle; None where it cannot be built."""
        if not (compiler := shutil.which("cc")):
            return None
        program = self.place / "forge_run"
        sources = [str(HERE / name) for name in SOURCES if name.endswith(".c")]
        flags = ["-O2", "-std=c99", "-ffp-contract=off", "-w", "-o", str(program)]
        _told([compiler, *flags, *sources, "-lm"], BUILD_SECONDS)
        return program if program.exists() else None


def _told(command: Sequence[str], seconds: float) -> str:
    """What a command says; nothing if it fails."""
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": seconds}
    try:
        done = subprocess.run(command, check=True, **options)
    except (OSError, subprocess.SubprocessError):
        return ""
    return str(done.stdout)


def _times(network: ForgeNetwork) -> tuple[float, float]:
    """Seconds to the first token after a prompt, and to the last of as many as are timed."""
    prompt = [[5 + i % 200 for i in range(PROMPT_TOKENS)]]
    times = []
    for count in (1, 1 + WRITTEN_TOKENS):
        write = partial(generate, network, prompt, SamplingSettings(max_new_tokens=count))
        times.append(timeit.timeit(write, number=1))
    return times[0], times[1]
