"""The token step of a packed network, and the cache of a text that it reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_forge.config.settings import ModelSettings
from agent_forge.errors import ConfigError
from agent_forge.native import backend, extension
from agent_forge.native.tiles import floats, tiles_of
from agent_forge.quant.packed import Packing

FIRST_CAPACITY = 64  # tokens; doubled when it is full, up to the window
PROJECTION = "projection.weight"


@dataclass
class NativeCache:
    """What a text has left behind."""

    keys_values: NDArray[np.float32]  # layers x 2 x heads x capacity x size of a head
    memory: NDArray[np.float32]  # four sums
    position: int = 0

    def reserve(self, tokens: int, window: int) -> None:
        """Make room for so many more tokens; behind the window, they replace the oldest."""
        *heads, capacity, size = self.keys_values.shape
        wanted = min(window, self.position + tokens)
        if wanted > capacity:
            larger = np.zeros((*heads, min(window, max(wanted, 2 * capacity)), size), np.float32)
            larger[..., :capacity, :] = self.keys_values
            self.keys_values = larger


class NativeDecoder:
    """Reads a text token by token. `state` has decoded weights; `decays` of the memory's channels
    and `frequencies` of the rotary positions are as the network computes them."""

    def __init__(
        self,
        settings: ModelSettings,
        state: Mapping[str, Tensor],
        packing: Packing,
        *,
        decays: Tensor,
        frequencies: Tensor,
    ) -> None:
        self.settings, self.backend = settings, backend()
        if (module := extension()) is None:
            raise ConfigError("the native token step was not built, or is turned off")
        tensors = {name: tiles_of(name, weight, packing) for name, weight in state.items()}
        shifts = _log_odds(state, "halting.mean_target") - _log_odds(
            state, "halting.mean_probability"
        )
        more = {
            "projection.back": state[PROJECTION].t(),
            "memory.decays": decays,
            "attention.frequencies": frequencies,
            "halting.shifts": shifts,
        }
        tensors.update({name: floats(tensor) for name, tensor in more.items()})
        arrays = [array for tiles in tensors.values() for array in tiles[1:] if array is not None]
        self.weight_bytes = sum(array.nbytes for array in arrays)
        weights = settings.surprise_weight, settings.novelty_weight
        self._read = module.read
        try:
            self._network = module.open(_sizes(settings), weights, tensors, self.backend == "avx2")
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(f"the network does not fit its settings: {error}") from None

    def __deepcopy__(self, memo: object) -> Self:
        return self  # nothing in it ever changes

    def new_cache(self) -> NativeCache:
        s = self.settings
        capacity, size = min(s.sw_window, FIRST_CAPACITY), s.head_width
        shape = s.n_layers, 2, s.n_heads, capacity, size
        return NativeCache(np.zeros(shape, np.float32), np.zeros((4, s.d_mem), np.float32))

    def read(
        self, tokens: Sequence[int], cache: NativeCache, threshold: float | None = None
    ) -> tuple[Tensor, int]:
        """Logits after the last token, and the recursion steps that it took."""
        bound = self.settings.halt_threshold if threshold is None else threshold
        logits = np.empty(self.settings.vocab_size, np.float32)
        cache.reserve(len(tokens), self.settings.sw_window)
        place = self._network, cache.keys_values, cache.memory, cache.position
        try:
            steps = self._read(*place, np.array(tokens, np.int64), bound, logits)
        except (ValueError, TypeError, OverflowError, BufferError) as error:
            raise ConfigError(f"the tokens cannot be read: {error}") from None
        cache.position += len(tokens)
        return torch.from_numpy(logits), steps


def _sizes(s: ModelSettings) -> tuple[int, ...]:
    """The first members of `Network` in network.h, in their order."""
    widths = s.vocab_size, s.embed_rank, s.d_model, s.n_layers, s.n_heads, s.ffn_hidden
    inner = s.d_mem, s.gate_hidden, s.trm_hidden
    return *widths, *inner, s.sw_window, s.t_max, s.micro_steps, s.head_width


def _log_odds(state: Mapping[str, Tensor], name: str) -> Tensor:
    return torch.logit(state[name].float(), eps=1e-4)  # as HaltingHead.probability has it
