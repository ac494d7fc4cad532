"""A real server on this machine, in a thread, and models that say what a test has written."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import torch
import uvicorn
from torch import Tensor, nn

from agent_forge.api.app import Serving, create_app
from agent_forge.cli.serve import listening
from agent_forge.data.tokenizer import SPECIAL, Tokenizer
from agent_forge.infer.scheduler import Scheduler
from agent_forge.model.hf import config_dict
from agent_forge.model.opened import ForgeModel
from agent_forge.store.models import ModelStorage
from agent_forge.store.sessions import SessionStore
from tests.support.networks import shaken
from tests.support.tokenizers import TEXTS

MODEL = "cognate.small.s1"


@dataclass
class Server:
    """Where it listens, and what it is made of."""

    address: str
    scheduler: Scheduler
    models: Any

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def client(self, **options: Any) -> openai.OpenAI:
        given = {"api_key": "none", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **given)


@contextlib.contextmanager
def serving(root: Path, **options: Any) -> Iterator[Server]:
    app = create_app(Serving(SessionStore(root), **options))
    with listening("127.0.0.1", 0) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=2)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        models = app.state.models
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        try:
            yield Server(address, models.scheduler, models)
        finally:
            server.should_exit = True
            thread.join(20)
            assert not thread.is_alive()


def small_model(root: Path, name: str = "small", seed: int = 0, **metadata: Any) -> str:
    """An untrained network of ours, registered; its id."""
    store = SessionStore(root)
    if not (root / "sessions" / "s1").exists():
        store.create({"preset": "smoke"}, "preset: smoke\n", session_id="s1")
    model = shaken(seed)
    tokenizer = Tokenizer.train(TEXTS * 9, model.settings.vocab_size)
    storage, shape = ModelStorage(root, store.registry), config_dict(model.settings)
    about = {"config": shape, "tokenizer_files": tokenizer.files()}
    return storage.save_model(model, "s1", "cognate", name, {"seed": seed, **metadata}, **about)


class Scripted(nn.Module):
    """Says the tokens of a script behind the last beginning of a reply."""

    def __init__(self, script: Sequence[int], vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.script, self.vocab_size = list(script), vocab_size

    def forward(self, tokens: Tensor, **_: Any) -> Any:
        logits = torch.zeros(len(tokens), 1, self.vocab_size)
        for i, row in enumerate(tokens.tolist()):
            begin = len(row) - row[::-1].index(SPECIAL["<|assistant|>"])
            said = row[begin:]
            assert said == self.script[: len(said)], "the reply so far is not as it was said"
            logits[i, 0, self.script[len(said)]] = 50.0
        return SimpleNamespace(logits=logits)


def scripted(*parts: str) -> ForgeModel:
    """A model that says this in one reply, with results of tools where they come."""
    tokenizer = Tokenizer.train(["what is 6 times 7 calc 6*7 It is 42."] * 3, 400)
    ids = tokenizer.compose(*(SPECIAL.get(part, part) for part in parts))
    model = ForgeModel.__new__(ForgeModel)
    model.tokenizer = tokenizer
    model.network = Scripted([*ids, SPECIAL["<|end|>"]], 400)  # type: ignore[assignment]
    return model
