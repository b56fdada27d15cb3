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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from loosestep.comm.codecs.rounding import Rounding
from loosestep.comm.flat.staging import STAGING
from loosestep.comm.peers import Peers
from loosestep.comm.reducers.compressed import Memories
from loosestep.comm.reducers.feedback import ErrorFeedback, Residual, Residuals
from loosestep.comm.reducers.reducer import Around, Handle, Place
from loosestep.comm.tensors import Named


class ReplicaFeedback(ErrorFeedback):
    """A lossy reducer for parameters whose memory is the replica: ``ReplicaFeedback(Int2())``.

    For averagers, which keep references; a mean of gradients has nothing that it could stay in.
    Among more than two ranks the means come back encoded too, and what that leaves out is kept as
    ``ErrorFeedback`` keeps it. ``finalize`` and ``averaged`` take exact means.

    Example::

        wire = TwoLevel(ReplicaFeedback(Int2()), ranks_of_host="equal")
        attach(model, optimizer, post_local_sgd(period=4, reducer=wire))
    """

    leaves_apart = True  # replicas differ after a sync, by what could not be sent

    def __post_init__(self) -> None:
        """Refuse chance, by which equal replicas would part."""
        super().__post_init__()
        if self.decay != 1.0:
            raise ValueError(
                f"ReplicaFeedback keeps what was not sent in the parameters, and decay="
                f"{self.decay} would shrink what was learnt; use ErrorFeedback(..., decay=...)"
            )
        if self.moves.rounding is Rounding.STOCHASTIC:
            raise ValueError(
                f"{self.inner!r} rounds by chance, so that equal replicas would keep different "
                "rests; what is lost is sent later anyway: use rounding='nearest'"
            )

    def init(self, tensors: Sequence[Named], peers: Peers) -> OfMeans:
        """Return that nothing was left out yet."""
        return OfMeans(self.moves.init(tensors, peers))

    def start(self, buffer: torch.Tensor, peers: Peers, state: Residuals, place: Place) -> Handle:
        """Launch the mean of what arrives; ``left`` of the handle is what did not."""
        unsent = Unsent(buffer.numel())
        mine = Residual(state.mean, place.name, self.owned(buffer, peers, place))
        memories = Memories(unsent, mine)
        return Leaving(self.moves.launch(buffer, peers, state.inner, place, memories), unsent)


class OfMeans(Residuals):
    """What was left out of means only: of this rank's own values the rest is in the replica."""

    def describe(self) -> str:
        """Return whether something is kept: parts differ in size between ranks."""
        return "means" if self.mean else ""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on with what ``state_dict`` returned; an empty one forgets everything."""
        if state_dict.get("sent"):
            raise ValueError(
                "ReplicaFeedback keeps nothing of what was sent, but the checkpoint does; was it "
                "written with ErrorFeedback?"
            )
        super().load_state_dict(state_dict)


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
        """Note the difference between the values and what arrives."""
        left = STAGING.take(self._size, torch.float32, wanted.device)
        decoded(left)
        self.left = torch.sub(wanted, left, out=left)

    def commit(self) -> None:
        """Do nothing: the replica keeps it."""


class Leaving(Around):
    """A mean under way, and what it will not contain."""

    def __init__(self, handle: Handle, unsent: Unsent) -> None:
        super().__init__(handle)
        self._unsent = unsent

    leaves = True

    @property
    def left(self) -> torch.Tensor | None:
        """What of this rank's values was not sent; None: it has no say, or nobody to send to."""
        return self._unsent.left
