"""What asking an endpoint costs: prices, what was spent, and the cap that it stays below."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, TypeGuard

from agent_forge.errors import CostCapReached

PRICED = (("prompt", None), ("completion", None), ("request", 0), ("internal_reasoning", 0))
Note = Callable[[str, float], None]  # of a record and its USD


class Price(NamedTuple):
    """USD for a token of a prompt, for a token of an answer, and for a request."""

    prompt: float
    completion: float
    request: float = 0.0

    def of(self, prompt_tokens: int, completion_tokens: int) -> float:
        tokens = prompt_tokens * self.prompt + completion_tokens * self.completion
        return tokens + self.request


class ListedModel(NamedTuple):
    """A model of the endpoint; None is what it does not tell."""

    name: str
    price: Price | None
    context_length: int | None


class CostEstimate(NamedTuple):
    """The most that requests can take: no answer is longer than `max_tokens`."""

    requests: int
    prompt_tokens: int
    completion_tokens: int
    usd: float
    minutes: float


class Spending:
    """USD spent so far, and the worst case of the request under way, below one cap."""

    def __init__(self, cap_usd: float) -> None:
        self.cap_usd = cap_usd
        self._note: Note = lambda record, usd: None
        self._settled = self._under_way = 0.0

    @property
    def usd(self) -> float:
        return self._settled + self._under_way

    @contextlib.contextmanager
    def noted(self, note: Note) -> Iterator[None]:
        """Have `note` called before each change in the block, but for the price of an answer: that
        belongs into one record with the answer."""
        before, self._note = self._note, note
        try:
            yield
        finally:
            self._note = before

    def send(self, worst_usd: float) -> None:
        """Count a request that is about to be sent, or refuse it."""
        if self.usd + worst_usd > self.cap_usd:
            problem = f"${self.usd:.6f} of the cost cap of ${self.cap_usd:.6f} are spent, and the"
            hint = "what is done is kept; a higher --cost-cap goes on"
            raise CostCapReached(f"{problem} next request may cost ${worst_usd:.6f}", hint=hint)
        self._note("sent", worst_usd)
        self.count("sent", worst_usd)

    def refund(self) -> None:
        """The request under way was refused, so it costs nothing."""
        self._note("unpaid", 0.0)
        self.count("unpaid", 0.0)

    def carry(self, usd: float) -> None:
        """Count what earlier runs have spent."""
        self._settled += usd

    def count(self, record: str, usd: float) -> None:
        """Count a record: a request that was sent, or the price of the last one."""
        sent = record == "sent"
        self._settled += self._under_way if sent else usd
        self._under_way = usd if sent else 0.0


def listed_model(row: Any) -> ListedModel | None:
    """Return a row of /models, as OpenRouter has it or with less; None if it names no model."""
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        return None
    pricing, context, price = row.get("pricing"), row.get("context_length"), None
    if isinstance(pricing, dict):
        values = [_usd(pricing.get(key, default)) for key, default in PRICED]
        prompt, completion, request, thinking = values
        if prompt is not None and completion is not None and request is not None:
            price = Price(prompt, max(completion, thinking or 0.0), request)
    return ListedModel(row["id"], price, context if _is_count(context) else None)


def _usd(value: Any) -> float | None:
    """Return an amount, which may be text; None if it is none (below 0: it varies)."""
    try:
        amount = float(value) if isinstance(value, str | int | float) else -1.0
    except (ValueError, OverflowError):
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None


def _is_count(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53


def usage_of(
    data: Any, price: Price, worst_usd: float
) -> tuple[tuple[int | None, int | None], float]:
    """Return the tokens that a reply counted and its price: the higher one of what they cost and
    what it says; the worst case if it counted none, or 0, which no reply takes."""
    usage = data.get("usage") if isinstance(data, dict) else None
    found = usage if isinstance(usage, dict) else {}
    prompt, completion = found.get("prompt_tokens"), found.get("completion_tokens")
    said = _usd(found.get("cost", 0)) or 0.0
    if not (_is_count(prompt) and _is_count(completion) and prompt and completion):
        return (None, None), max(worst_usd, said)
    return (prompt, completion), max(price.of(prompt, completion), said)
