"""A client of any OpenAI-compatible chat endpoint: no request is sent that could pass the cost cap.

- A request counts at its worst case (every byte of the prompt a token, an answer of `max_tokens`)
  from before it is sent until its real price is known. What was sent and not answered, and might
  have been billed, keeps counting so.
- The key is read from the environment for each request. It goes to the endpoint itself and nowhere
  else: redirects are not followed, and plain http is for this machine only.
- What another try may mend (408, 429, 5xx, silence, a cut connection) is tried again, a bounded
  number of times and seconds; any other refusal ends at once.
"""

import difflib
import json
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from random import Random
from typing import Annotated, NamedTuple, Protocol

from pydantic import AfterValidator, Field

from agent_forge.config.settings import Settings
from agent_forge.data.endpoint_cost import (
    CostEstimate,
    ListedModel,
    Price,
    Spending,
    listed_model,
    usage_of,
)
from agent_forge.data.endpoint_http import MAX_SAID, Address, NotAnswered, NotSent, Reply
from agent_forge.errors import ConfigError, EndpointFailed, ForgeError, Interrupted

MAX_REQUEST_BYTES = 1 << 20
TEMPLATE_TOKENS = 256  # that a chat template may put around the messages
BACK_OFF_S, MAX_BACK_OFF_S = 1.0, 60.0
MAX_WAIT_S = 300.0  # that a Retry-After may ask for
SLICE_S = 0.5  # of waiting, after which a request to stop is heard
UNFINISHED = ("length", "content_filter", "tool_calls", "error")  # the text is not the answer
GO_ON = "what is done is kept; run the same command again later"
Message = Mapping[str, str]


def _address(text: str) -> str:
    return Address(text).url


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):  # perhaps the key itself: it is not repeated
        hint = "--set key_variable=OPENROUTER_API_KEY"
        raise ConfigError("key_variable is the name of a variable, in capitals", hint=hint)
    return name


class EndpointSettings(Settings):
    """Where to ask, how often, and what it may cost."""

    base_url: Annotated[str, AfterValidator(_address)] = Field(
        description="address that /models and /chat/completions follow, as in https://host/api/v1"
    )
    models: list[str] = Field(min_length=1, description="models that are asked in turn")
    key_variable: Annotated[str, AfterValidator(_variable)] = Field(
        "FORGE_ENDPOINT_KEY", description="name of the environment variable with the API key"
    )
    requests_per_minute: float = Field(50, gt=0, le=60_000, description="most requests a minute")
    timeout_s: float = Field(120, gt=0, le=3600, description="seconds for one whole reply")
    retries: int = Field(5, ge=0, le=20, description="tries after the first one")
    max_tokens: int = Field(1024, ge=1, le=1_000_000, description="longest answer in tokens")
    temperature: float = Field(0.7, ge=0, le=2, description="how freely the models choose")
    cost_cap_usd: float = Field(0, ge=0, description="most that may be spent; 0: free models only")
    usd_per_million_prompt: float | None = Field(
        None, ge=0, description="price of prompt tokens where the endpoint lists none"
    )
    usd_per_million_completion: float | None = Field(
        None, ge=0, description="price of answered tokens where the endpoint lists none"
    )
    seed: int = Field(0, ge=0, lt=2**63, description="seed of the jitter between tries")


class Completion(NamedTuple):
    """An answer; the tokens are None where the endpoint did not count them."""

    text: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cost_usd: float


class ChatRequest(Protocol):
    """Messages to send; requests with the same key are the same request."""

    @property
    def key(self) -> str: ...

    @property
    def messages(self) -> list[dict[str, str]]: ...


class ReplyRejected(ValueError):
    """A reply that is no whole answer; it was paid for all the same."""

    def __init__(self, reason: str, cost_usd: float) -> None:
        super().__init__(reason)
        self.cost_usd = cost_usd


class Clock:
    """The time, and waiting; tests have another one."""

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


class Endpoint:
    """Asks an endpoint: slowly enough, again where that may help, and below the cost cap."""

    def __init__(
        self,
        settings: EndpointSettings,
        clock: Clock | None = None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        self.settings, self.spending = settings, Spending(settings.cost_cap_usd)
        self._address = Address(settings.base_url)
        self._address.key(settings.key_variable)  # refused before any work
        self._clock, self._should_stop = clock or Clock(), should_stop
        self._random, self._turn = Random(settings.seed), -math.inf
        self._listed: dict[str, ListedModel] | None = None

    def list_models(self) -> dict[str, ListedModel]:
        """Return the models of the endpoint by name; it is asked for them once."""
        if self._listed is None:
            data = self._ask("/models").data
            rows = data.get("data") if isinstance(data, dict) else None
            if not isinstance(rows, list):
                raise EndpointFailed(f"{self._address.url}/models is no list of models", hint=GO_ON)
            models = [listed_model(row) for row in rows]
            self._listed = {model.name: model for model in models if model is not None}
        return self._listed

    def price_of(self, model: str) -> Price:
        """Return what a model costs; one that is unknown or may not be asked is refused."""
        listed, given = self.list_models(), self._given_price()
        if model not in listed:
            raise ConfigError(f"{self._address.url} has no model {model!r}{self._near(model)}")
        context = listed[model].context_length
        if context is not None and self.settings.max_tokens >= context:
            problem = f"max_tokens {self.settings.max_tokens} leaves no room in the {context}"
            raise ConfigError(f"{problem} tokens of {model}", hint="--set max_tokens=...")
        price = listed[model].price or given or (Price(0, 0) if self._address.is_local else None)
        if price is None:
            hint = "--set usd_per_million_prompt=... --set usd_per_million_completion=..."
            raise ConfigError(f"{self._address.url} lists no price of {model}", hint=hint)
        if any(price) and not self.settings.cost_cap_usd:
            hint = "set the most that may be spent (--cost-cap USD), or choose a free model"
            raise ConfigError(f"{model} is not free, and the cost cap is 0", hint=hint)
        return price

    def _given_price(self) -> Price | None:
        prompt = self.settings.usd_per_million_prompt
        completion = self.settings.usd_per_million_completion
        if prompt is None or completion is None:
            return None
        return Price(prompt / 1e6, completion / 1e6)

    def estimate_cost(
        self, requests: Iterable[ChatRequest], done: Collection[str] = ()
    ) -> CostEstimate:
        """Return the most that the requests but those in `done` take, each asked once."""
        models = self.settings.models
        prices = {model: self.price_of(model) for model in models}
        left = [(i, request) for i, request in enumerate(requests) if request.key not in done]
        prompts = {i: _prompt_tokens(request.messages) for i, request in left}
        longest, pace = self.settings.max_tokens, self.settings.requests_per_minute
        usd = sum(prices[models[i % len(models)]].of(n, longest) for i, n in prompts.items())
        count = len(left)
        return CostEstimate(count, sum(prompts.values()), count * longest, usd, count / pace)

    def complete(self, messages: Sequence[Message], model: str) -> Completion:
        """Return the answer of a model, or raise ReplyRejected."""
        price, prompt = self.price_of(model), _prompt_tokens(messages)
        worst = price.of(prompt, self.settings.max_tokens)
        asked = {"model": model, "messages": [*messages], "max_tokens": self.settings.max_tokens}
        body = json.dumps({**asked, "temperature": self.settings.temperature}).encode()
        reply = self._ask("/chat/completions", body, worst, model)
        tokens, cost = usage_of(reply.data, price, worst)
        self.spending.count("paid", cost)
        text, problem = _answer(reply)
        if problem:
            raise ReplyRejected(problem, cost)
        return Completion(self._address.without_key(text), *tokens, cost)

    def _ask(self, path: str, body: bytes = b"", worst_usd: float = 0.0, model: str = "") -> Reply:
        """Return a reply of status 200; ask again as long as that may help."""
        problem = ""
        for attempt in range(self.settings.retries + 1):
            self._wait_for_turn()
            if body:
                self.spending.send(worst_usd)
            wait_s = 0.0
            try:
                settings = self.settings
                reply = self._address.exchange(
                    path, body, settings.key_variable, settings.timeout_s
                )
            except NotSent as error:
                problem = f"it cannot be reached ({error})"
                if body:
                    self.spending.refund()
            except NotAnswered as error:
                problem = f"it does not answer ({error})"
            else:
                if body and reply.is_unpaid:
                    self.spending.refund()
                if (status := reply.error_status) == 200:
                    return reply
                said = self._address.without_key(reply.said)[:MAX_SAID]
                problem = f"{status}{': ' if said else ''}{said}"
                if not reply.is_passing:
                    raise self._refusal(status, problem, model)
                wait_s = reply.retry_after_s
            if wait_s > MAX_WAIT_S:
                problem += f"; it asks to wait {wait_s:.0f} s"
                break
            if attempt < self.settings.retries:
                back_off_s = min(MAX_BACK_OFF_S, BACK_OFF_S * 2**attempt)
                self._pause(max(wait_s, back_off_s * (0.5 + self._random.random())))
        raise EndpointFailed(f"{self._address.url} failed: {problem}", hint=GO_ON)

    def _refusal(self, status: int, problem: str, model: str) -> ForgeError:
        """Return the error of a status that asking again would not change."""
        url, variable = self._address.url, self.settings.key_variable
        if status in (401, 403):
            hint = "" if self._address.key(variable) else f"{variable} is not set"
            return ConfigError(f"{url} refused the key of {variable} ({problem})", hint=hint)
        if status == 404 and model:
            return ConfigError(f"{url} has no model {model!r} ({problem}){self._near(model)}")
        if status == 404:
            hint = "--endpoint is what /models follows, as in https://host/api/v1"
            return ConfigError(f"{url}/models is not there ({problem})", hint=hint)
        if 300 <= status < 400:
            hint = "redirects are not followed; if you trust the other address, give that one"
            return EndpointFailed(f"{url} points elsewhere ({problem})", hint=hint)
        return EndpointFailed(f"{url} refused the request ({problem})", hint=GO_ON)

    def _near(self, model: str) -> str:
        names = [name for name in self._listed or {} if name != model]
        near = difflib.get_close_matches(model, names, n=1)
        return f"; did you mean {near[0]!r}?" if near else f"; it lists {len(names)} others"

    def _wait_for_turn(self) -> None:
        """Wait until the next request may be sent."""
        self._pause(self._turn - self._clock.now())
        self._turn = self._clock.now() + 60.0 / self.settings.requests_per_minute

    def _pause(self, seconds: float) -> None:
        """Wait; a request to stop ends it."""
        end = self._clock.now() + seconds
        while True:
            if self._should_stop():
                raise Interrupted("stopped between requests")
            if (left := end - self._clock.now()) <= 1e-6:
                return
            self._clock.sleep(min(left, SLICE_S))


def _prompt_tokens(messages: Sequence[Message]) -> int:
    """Return the most tokens that messages can be: no token is less than a byte."""
    n_bytes = len(json.dumps([*messages]))
    if n_bytes > MAX_REQUEST_BYTES:
        raise ConfigError(f"a request of {n_bytes:,} bytes is beyond {MAX_REQUEST_BYTES:,}")
    return n_bytes + TEMPLATE_TOKENS


def _answer(reply: Reply) -> tuple[str, str]:
    """Return the text of a reply, or what is wrong with it."""
    if reply.is_too_large:
        return "", "the reply is too large"
    if not isinstance(reply.data, dict):
        return "", "the reply is not JSON"
    choices = reply.data.get("choices")
    if not isinstance(choices, list) or not choices:
        return "", "the reply has no choices"
    choice = choices[0] if isinstance(choices[0], dict) else {}
    message, finish = choice.get("message"), choice.get("finish_reason")
    text = message.get("content") if isinstance(message, dict) else None
    if finish in UNFINISHED:
        return "", f"the answer ended by {finish}"
    if not isinstance(text, str) or not isinstance(finish, str | None):
        return "", "the answer is not text"
    return text, "" if text.strip() else "the answer is empty"
