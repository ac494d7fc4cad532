"""The native token step of a packed network of ours, made once and kept as long as the network."""

from weakref import WeakKeyDictionary

import torch

from agent_forge.errors import ConfigError
from agent_forge.model.attention import ROPE_BASE
from agent_forge.model.network import ForgeNetwork
from agent_forge.native import backend
from agent_forge.native.decoder import NativeDecoder

Made = tuple[object, NativeDecoder | None]  # what it was made of
_made: WeakKeyDictionary[ForgeNetwork, Made] = WeakKeyDictionary()


def native_decoder(network: ForgeNetwork) -> NativeDecoder | None:
    """The native token step of a network; None if torch has to compute it."""
    if network.packing is None or backend() == "torch":
        return None
    state = network.state_dict()
    if any(t.device.type != "cpu" or t.dtype != torch.float32 for t in state.values()):
        return None
    # A weight that was changed or replaced since makes it anew.
    made_of = backend(), [(t.data_ptr(), t._version) for t in state.values()]
    if network not in _made or _made[network][0] != made_of:
        _made[network] = made_of, _make(network)
    return _made[network][1]


def _make(network: ForgeNetwork) -> NativeDecoder | None:
    half = network.settings.head_width // 2
    assert network.packing is not None
    try:
        return NativeDecoder(
            network.settings,
            network.state_dict(),
            network.packing,
            decays=network.memory.decays(torch.zeros(1)),
            frequencies=ROPE_BASE ** (-torch.arange(half).float() / half),
        )
    except ConfigError:  # trained since it was unpacked, or larger than C allows for
        return None
