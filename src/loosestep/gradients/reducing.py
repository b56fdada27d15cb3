"""Gradients under ``attach`` by a reducer of one's choice, in place of the backend's all-reduce."""

from collections.abc import Callable, Sequence

import torch
from torch._C._distributed_c10d import GradBucket

from loosestep.comm.peers import Phase
from loosestep.comm.reducers import Place, Reducer
from loosestep.errors import NotFinite
from loosestep.gradients.hook import GradientHook
from loosestep.gradients.plain import Bucket, ToAll
from loosestep.gradients.reductions import Reductions, Shared, check_complex
from loosestep.gradients.sharing import GradientSharing, finished, mean_future
from loosestep.telemetry.traffic import Traffic

LOSSY_BYTES = 12 << 20  # of gradients in a bucket that travels in few bits


class ReducedBuckets:
    """Buckets of a DDP module: a hook for every level that may share gradients."""

    def __init__(self, sharing: GradientSharing, reducer: Reducer) -> None:
        self._sharing = sharing
        levels = sorted(sharing.schedule.gradient_levels())
        self._hooks: dict[str, GradientHook] = {}
        try:
            for level in levels:
                self._hooks[level] = GradientHook(reducer, sharing.peers(level))
        except BaseException:
            self.close()  # those of the levels before
            raise
        sharing.reductions = [hook.reductions for hook in self._hooks.values()]
        self._counted = Counted([reductions.traffic for reductions in sharing.reductions])
        sharing.step_traffic = self._counted.since

    def bucket(self, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Share it over the level that the schedule names, if any."""
        level = self._sharing.due.gradients
        for name, hook in self._hooks.items():
            if name != level:
                hook.observe(bucket)  # windows are those of the first backward on every level
        if level is None:
            return finished(bucket.buffer())
        self._sharing.count(Traffic())
        return self._hooks[level].bucket(bucket).then(self._arrived)

    def close(self) -> None:
        """End the threads."""
        for hook in self._hooks.values():
            hook.close()

    def _arrived(self, future: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
        self._sharing.arrived()
        return future.value()


class ByReducer(ToAll):
    """Buckets of a plain module: gradients by the reducer, and exactly who used what."""

    def __init__(self, sharing: GradientSharing, reducer: Reducer) -> None:
        super().__init__(sharing)
        if reducer.lossy:
            # Few bytes travel faster than backward makes new ones: begin early, end with little.
            self.bucket_bytes, self.bucket_share = min(self.bucket_bytes, LOSSY_BYTES), 0.5
        self._reductions = Reductions(reducer)
        self._slots: dict[Bucket, str] = {}
        levels = sorted(sharing.schedule.gradient_levels())
        # Now, and not inside a backward.
        self._groups = [self._reductions.own_peers(sharing.peers(level)) for level in levels]
        sharing.reductions = [self._reductions]
        self._counted = Counted([self._reductions.traffic])
        sharing.step_traffic = self._counted.since

    def adopt(self, buckets: Sequence[Bucket]) -> None:
        """Refuse what the reducer cannot take; a bucket gets its buffer when it is first used."""
        for bucket in buckets:
            check_complex(self._reductions.reducer, bucket.parameters)

    def launch(self, bucket: Bucket, level: str) -> Callable[[], None]:
        """Launch the mean of the bucket over the level's group."""
        if bucket not in self._buffers:
            self._take_in(bucket, bucket.parameters[0].new_empty(bucket.numel))
        buffer, peers = bucket.pack(self._buffers[bucket]), self._sharing.peers(level)
        gradients, used = buffer[: -bucket.num_flags], buffer[-bucket.num_flags :]
        shared = self._share(bucket, gradients, level)
        flags = mean_future(used, peers.group.process_group) if peers.size > 1 else finished(used)

        def land() -> None:
            try:
                shared.wait()
            except NotFinite:
                self._sharing.wait(flags, peers)  # else they come while the next ones are packed
                raise
            self._sharing.arrived()
            self._sharing.wait(flags, peers)
            bucket.unpack(buffer)

        return land

    def _take_in(self, bucket: Bucket, buffer: torch.Tensor) -> None:
        """Remember a new bucket's buffer, and by which name its error feedback goes."""
        self._buffers[bucket] = buffer
        self._slots[bucket] = f"gradients {len(self._slots)}"

    def _share(self, bucket: Bucket, buffer: torch.Tensor, level: str) -> Shared:
        name = self._slots[bucket]
        phase = Phase("sharing gradients", name, self._sharing.clock.step)
        self._sharing.count(Traffic())
        peers = self._sharing.peers(level).during(phase)
        # With the flags behind the gradients it is no buffer of tensors: those reducers are exact.
        runs = bucket.runs if buffer.numel() == bucket.runs.numel else None
        return self._reductions.share(buffer, peers, Place(name, runs))

    def close(self) -> None:
        """End the thread and let go of the groups."""
        self._groups = []
        self._reductions.close()


class Counted:
    """What several reductions have moved, since somebody asked last."""

    def __init__(self, totals: list[Traffic]) -> None:
        self._totals = totals
        self._seen = Traffic()

    def since(self) -> Traffic:
        """Return it and begin anew."""
        now = Traffic()
        for total in self._totals:
            now.add(total)
        before, self._seen = self._seen, now
        return Traffic(now.bytes_sent - before.bytes_sent, now.bytes_copied - before.bytes_copied)
