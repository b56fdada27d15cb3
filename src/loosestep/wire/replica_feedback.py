"""What a message leaves out stays in the replica that sent it.

    difference = mine - reference,  sent = encode(difference),  reference += mean of what was sent
    mine = reference + (difference - what was sent of it)

``ErrorFeedback`` puts what was left out aside and takes it out of the parameters until it is sent;
with two bits that is a third of what a worker has learnt since the last sync. Here a worker goes on
with it: the next difference contains it by itself, and nothing has to be remembered. The price is
that replicas are not equal after a sync: they differ by what could not be sent. (Difference
compression as in CHOCO-SGD, https://arxiv.org/abs/1902.00340, with the mean of all in place of
gossip.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from loosestep.flat import STAGING, slices
from loosestep.peers import Peers
from loosestep.wire.compressed import Memories
from loosestep.wire.feedback import ErrorFeedback, Residual
from loosestep.wire.reducer import Around, Handle, Reducer
from loosestep.wire.rounding import Rounding


class ReplicaFeedback(ErrorFeedback):
    """A lossy reducer for parameters whose memory is the replica: ``ReplicaFeedback(Int2())``.

    For averagers, which keep references; a mean of gradients has nothing that it could stay in.
    Among more than two ranks the means come back encoded too, and what that leaves out is kept as
    ``ErrorFeedback`` keeps it. ``finalize`` and ``averaged`` take exact means.

    Example::

        wire = TwoLevel(ReplicaFeedback(Int2()), hosts="agree")
        attach(model, optimizer, post_local_sgd(period=4, reducer=wire))
    """

    leaves_apart = True  # replicas differ after a sync, by what could not be sent

    def __init__(self, inner: Reducer) -> None:
        super().__init__(inner)
        if self._engine.rounding is Rounding.STOCHASTIC:
            raise ValueError(
                f"{inner!r} rounds by chance, so that equal replicas would keep different rests; "
                "what is lost is sent later anyway: use rounding='nearest'"
            )

    def start(self, buffer: torch.Tensor, peers: Peers, slot: str) -> Handle:
        """Launch the mean of what arrives; ``left`` of the handle is what did not."""
        first, last = slices(buffer.numel(), peers.size)[peers.group_rank]
        mean = Residual(self._mean, f"{peers.level}/{slot}", last - first)
        unsent = Unsent(buffer.numel())
        return Leaving(self._engine.launch(buffer, peers, slot, Memories(unsent, mean)), unsent)

    def describe_kept(self, level: str) -> str:
        """Return whether something is kept on a level, to be compared across its ranks."""
        return "means" if any(key.startswith(f"{level}/") for key in self._mean) else ""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what ``state_dict`` returned; an empty one forgets everything."""
        if state_dict.get("sent"):
            raise ValueError(
                "ReplicaFeedback keeps nothing of what was sent, but the checkpoint does; was it "
                "written with ErrorFeedback?"
            )
        super().load_state_dict(state_dict)

    def __repr__(self) -> str:
        return f"ReplicaFeedback({self.inner!r})"


class Unsent:
    """What could not be sent of one buffer, until it goes back to where it came from."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.bytes_held = 0  # before ``keep``
        self.left: torch.Tensor | None = None

    def carry(self, values: torch.Tensor) -> torch.Tensor:
        """Return the values: what was kept is among them."""
        return values

    def keep(self, wanted: torch.Tensor, decoded: Callable[[torch.Tensor], None]) -> None:
        """Keep the difference between the values and what arrives."""
        left = STAGING.take(self._size, torch.float32, wanted.device)
        decoded(left)
        self.left = torch.sub(wanted, left, out=left)


class Leaving(Around):
    """A mean under way, and what it will not contain."""

    def __init__(self, handle: Handle, unsent: Unsent) -> None:
        super().__init__(handle)
        self._unsent = unsent

    @property
    def left(self) -> torch.Tensor | None:
        """What of this rank's values was not sent; None: it has no say, or nobody to send to."""
        return self._unsent.left
