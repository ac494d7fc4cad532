"""Learn from rewards: what a model tries, what each try is worth, and a step along the policy
gradient. Two rewards, each a loss of the one training loop.

`VerifiedReward` asks questions several times. A try is worth 1 if its answer is right; its
advantage is that less the mean of its question's tries (not divided by their spread), and questions
whose tries are all alike teach nothing. `LikelihoodGain` is Quiet-STaR's (arXiv 2403.09629):
thoughts behind difficult tokens of a text, each worth by how much more likely it makes the true
next tokens than the mean thought there does, if it does. Both hold what they learn from near a
frozen reference.

Shapes: B texts, T tokens, P places of a text, K thoughts of a place, N = P K, R = B N, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.utils.checkpoint import checkpoint

from agent_forge.data.loader import IGNORE
from agent_forge.infer.generate import GeneratedText, SamplingSettings, generate
from agent_forge.model.branches import Branches, Trunk
from agent_forge.model.loss import CHUNK, LossOutput, states_of
from agent_forge.model.network import ForgeNetwork
from agent_forge.train.trainer import Batch

Ids = Sequence[int]
Verify = Callable[[int, GeneratedText], bool]  # the number of a question, and a try
MIXED_AT_FIRST = -1.0  # sigmoid: 0.27 of a prediction is the thought's, so that gradients flow
NLL_SHARE = 0.5  # of the loss of the true tokens, beside the policy's


def advantages(rewards_QS: Tensor) -> Tensor:
    """The reward of every try less the mean of its question's."""
    return rewards_QS - rewards_QS.mean(1, keepdim=True)


def policy_terms(
    model: ForgeNetwork,
    states_ND: Tensor,
    tokens_N: Tensor,
    reference: ForgeNetwork,
    reference_ND: Tensor,
) -> tuple[Tensor, Tensor]:
    """The log-probability of every token, and KL(model || reference) where it was chosen, from the
    states of both; logits exist for CHUNK tokens at a time."""

    def chunk(y: Tensor, tokens: Tensor, other: Tensor) -> Tensor:
        mine = F.log_softmax(model.logits(model.hidden(y)).float(), -1)
        with torch.no_grad():
            theirs = F.log_softmax(reference.logits(reference.hidden(other)).float(), -1)
        distance = (mine.exp() * (mine - theirs)).sum(-1)
        return torch.stack([mine.gather(-1, tokens[:, None])[:, 0], distance])

    cut = (torch.split(part, CHUNK) for part in (states_ND, tokens_N, reference_ND))
    parts = [checkpoint(chunk, *row, use_reentrant=False) for row in zip(*cut, strict=True)]
    log_p, distances = torch.cat(parts, 1)
    return log_p, distances


@dataclass
class VerifiedReward:
    """Tries at questions; a batch holds numbers of questions."""

    prompts: Sequence[Ids]
    verify: Verify
    reference: ForgeNetwork
    sampling: SamplingSettings  # at temperature 1: what is sampled is what is learned
    samples: int
    kl: float
    success: dict[int, float] = field(default_factory=dict)  # of questions, until it is taken out

    def __call__(self, model: nn.Module, batch: Batch, generator: Generator) -> LossOutput:
        assert isinstance(model, ForgeNetwork)
        questions = batch[0].tolist()
        tries, rewards = self._try(model, questions, generator)
        self.success.update(zip(questions, rewards.mean(1).tolist(), strict=True))
        advantages_QS = advantages(rewards)
        teaches = advantages_QS.any(1)
        count = sum(one.length for one in tries)  # of all, so that leaving some out changes nothing
        values = {"reward": float(rewards.mean())}
        values |= {"taught_share": float(teaches.float().mean())}
        if not teaches.any():  # a gradient of nothing would still be a step
            return LossOutput(torch.zeros((), requires_grad=True), count, {"loss": 0.0, **values})
        rows = [i for i in range(len(tries)) if teaches[i // self.samples]]
        device = next(model.parameters()).device
        tokens, sampled = (t.to(device) for t in _padded([tries[i] for i in rows]))
        with torch.no_grad():
            reference = states_of(self.reference.to(device), tokens[:, :-1])[sampled]
        states = states_of(model, tokens[:, :-1])[sampled]
        chosen = tokens[:, 1:][sampled]
        log_p, distances = policy_terms(model, states, chosen, self.reference, reference)
        each = advantages_QS.flatten()[rows].to(device).repeat_interleave(sampled.sum(1))
        total = self.kl * distances.mean() - (each * log_p).sum() / count
        values |= {"divergence": float(distances.detach().mean())}
        return LossOutput(total, count, {"loss": float(total.detach()), **values})

    def _try(
        self, model: ForgeNetwork, questions: Sequence[int], generator: Generator
    ) -> tuple[list[QuestionTry], Tensor]:
        """Every try, and what it is worth."""
        (end,) = self.sampling.stop_tokens or (None,)  # one at most, so that it is known
        seed = int(torch.randint(2**31, (1,), generator=generator))
        prompts = [self.prompts[number] for number in questions]
        how = replace(self.sampling, seed=seed)
        texts = generate(model, prompts, how, samples=self.samples)
        model.train()
        torch.clear_autocast_cache()  # what was cast without a graph
        tries, right = [], []
        for i, text in enumerate(texts):
            closing = [end] if end is not None and text.stopped_by == "token" else []
            tries.append(QuestionTry(prompts[i // self.samples], [*text.tokens, *closing]))
            right.append(float(self.verify(questions[i // self.samples], text)))
        return tries, torch.tensor(right).view(-1, self.samples)


class QuestionTry(NamedTuple):
    """A question, and what was sampled after it, its end among the tokens."""

    prompt: Ids
    tokens: Ids

    @property
    def length(self) -> int:
        return len(self.tokens)


def _padded(tries: Sequence[QuestionTry]) -> tuple[Tensor, Tensor]:
    """Tries as rows of one tensor, and which of the tokens but the first were sampled."""
    ends = [len(prompt) + len(tokens) for prompt, tokens in tries]
    longest = max(ends)
    rows = [[*p, *t, *[0] * (longest - end)] for (p, t), end in zip(tries, ends, strict=True)]
    places = torch.arange(1, longest)
    starts = torch.tensor([[len(prompt)] for prompt, _ in tries])
    return torch.tensor(rows), (places >= starts) & (places < torch.tensor(ends)[:, None])


class MixingHead(nn.Module):
    """How much of a prediction is the thought's, from the states without and with it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(2 * width, width)
        self.outer = nn.Linear(width, 1)
        nn.init.zeros_(self.outer.weight)
        nn.init.constant_(self.outer.bias, MIXED_AT_FIRST)

    def forward(self, without: Tensor, with_thought: Tensor) -> Tensor:
        joined = torch.cat([without, with_thought], -1)
        return torch.sigmoid(self.outer(F.relu(self.inner(joined))))


@dataclass
class LikelihoodGain:
    """Thoughts in texts; the model has a MixingHead `mixing` while it is trained."""

    reference: ForgeNetwork
    begin: int  # the token that begins a thought, and the one that ends it
    end: int
    thoughts: int  # of a place
    length: int  # tokens of a thought
    places: int  # of a text
    ahead: int  # true tokens that a thought is judged by
    kl: float
    nll_share: float = NLL_SHARE

    def __call__(self, model: nn.Module, batch: Batch, generator: Generator) -> LossOutput:
        assert isinstance(model, ForgeNetwork)
        tokens, targets = batch
        trunk = Trunk.read(model, tokens)
        answers_BTD = model.answers(trunk.x_BTD)
        at_BP = self._difficult(model, answers_BTD.detach(), targets)
        at_BN = at_BP.repeat_interleave(self.thoughts, 1)
        thoughts_RL = sample_thoughts(model, trunk, at_BN, self.begin, self.length, generator)
        given, true = self._rows(at_BN, thoughts_RL, targets)
        states = model.answers(Branches(model, trunk, at_BN).read(given))
        with torch.no_grad():
            plain = self.reference.to(tokens.device)
            other = Branches(plain, Trunk.read(plain, tokens), at_BN).read(given)
            theirs = plain.answers(other)[:, : self.length]
        log_p, distances = policy_terms(
            model,
            states[:, : self.length].flatten(0, 1),
            thoughts_RL.flatten(),
            self.reference,
            theirs.flatten(0, 1),
        )
        thinking = states[:, self.length + 1 :]
        likely_R, helped, nll = self._likelihoods(model, answers_BTD, at_BN, thinking, true)
        grouped = likely_R.detach().view(-1, self.thoughts)
        worth = (grouped - grouped.mean(1, keepdim=True)).clamp(min=0).flatten()
        count = thoughts_RL.numel()
        policy = -(worth[:, None] * log_p.view(-1, self.length)).sum() / count
        total = policy + self.nll_share * nll + self.kl * distances.sum() / count
        values = {"loss": float(total.detach()), "reward": float(worth.mean())}
        values |= {"divergence": float(distances.detach().mean()), "thought_gain": helped}
        return LossOutput(total, count, values)

    def _difficult(self, model: ForgeNetwork, answers_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """The places whose next token the model finds least likely."""
        with torch.no_grad():
            logits = model.logits(model.hidden(answers_BTD)).float()
            losses = F.cross_entropy(
                logits.transpose(1, 2), targets_BT, reduction="none", ignore_index=IGNORE
            )
        return losses.topk(self.places, dim=1).indices

    def _rows(
        self, at_BN: Tensor, thoughts_RL: Tensor, targets_BT: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What a branch reads: begin, thought, end, the true tokens but the last; and those."""
        b, n = at_BN.shape
        places = at_BN.flatten()[:, None] + torch.arange(self.ahead, device=at_BN.device)
        rows = torch.arange(b, device=at_BN.device).repeat_interleave(n)[:, None]
        inside = places < targets_BT.shape[1]
        true = targets_BT[rows, places.clamp(max=targets_BT.shape[1] - 1)]
        true = torch.where(inside, true, IGNORE)
        true = true.masked_fill((true == IGNORE).cumsum(1) > 0, IGNORE)  # another text begins there
        marks = [thoughts_RL.new_full((b * n, 1), token) for token in (self.begin, self.end)]
        known = true[:, :-1].clamp(min=0)
        return torch.cat([marks[0], thoughts_RL, marks[1], known], 1), true

    def _likelihoods(
        self,
        model: ForgeNetwork,
        answers_BTD: Tensor,
        at_BN: Tensor,
        thinking_RAD: Tensor,
        true_RA: Tensor,
    ) -> tuple[Tensor, float, Tensor]:
        """The log-likelihood of the true tokens after every thought, by how much likelier a token
        is than without, and their mean loss."""
        rows = torch.arange(len(at_BN), device=at_BN.device).repeat_interleave(at_BN.shape[1])
        places = at_BN.flatten()[:, None] + torch.arange(self.ahead, device=at_BN.device)
        plain = answers_BTD[rows[:, None], places.clamp(max=answers_BTD.shape[1] - 1)]
        share = model.mixing(plain, thinking_RAD)  # type: ignore[operator]
        logits = [model.logits(model.hidden(s)).float() for s in (plain, thinking_RAD)]
        mixed = (1 - share) * logits[0] + share * logits[1]
        without, losses = (
            F.cross_entropy(x.transpose(1, 2), true_RA, reduction="none", ignore_index=IGNORE)
            for x in (logits[0].detach(), mixed)
        )
        count = max(1, int((true_RA != IGNORE).sum()))
        helped = float((without - losses.detach()).sum() / count)
        return -losses.sum(1), helped, losses.sum() / count


@torch.no_grad()
def sample_thoughts(
    model: ForgeNetwork, trunk: Trunk, at_BN: Tensor, begin: int, length: int, generator: Generator
) -> Tensor:
    """A thought for every branch, R x L, all of them one token at a time at once."""
    branches = Branches(model, trunk, at_BN)
    token = torch.full((at_BN.numel(), 1), begin, device=at_BN.device)
    found = []
    for _ in range(length):
        y = model.answers(branches.read(token)[:, -1])
        probabilities = model.logits(model.hidden(y)).float().softmax(-1).cpu()
        token = torch.multinomial(probabilities, 1, generator=generator).to(at_BN.device)
        found.append(token)
    torch.clear_autocast_cache()  # what was cast without a graph
    return torch.cat(found, 1)
