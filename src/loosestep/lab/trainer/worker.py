"""One worker process: join the others, train, and leave nothing half done.

It is started by ``launch`` on this machine, by torchrun or by SLURM; who it is stands in its
environment (``ranks``). Whatever goes wrong is one line on stderr: exit code 2 if it is the user's
to mend, else 1.
"""

from __future__ import annotations

import math
import os
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore

from loosestep.comm.failure import reason_of
from loosestep.errors import LoosestepError, NotFinite, PeerLost
from loosestep.lab.trainer import saving
from loosestep.lab.trainer.by_strategy import levels_of
from loosestep.lab.trainer.connecting import make_sharing
from loosestep.lab.trainer.images import Images, read_images
from loosestep.lab.trainer.journal import Journal
from loosestep.lab.trainer.loop import Worker, make_feed, plan_optimizer
from loosestep.lab.trainer.mistakes import FAILED, LOST, STOPPED, USER_ERROR, BadInput, one_line
from loosestep.lab.trainer.orders import Orders
from loosestep.lab.trainer.ranks import Rank
from loosestep.lab.trainer.settings import Settings
from loosestep.lab.trainer.stopping import Stopping
from loosestep.lab.trainer.tasks import Task
from loosestep.lab.trainer.text import Text, read_text
from loosestep.lab.trainer.transformer import Shape
from loosestep.strategy.topology import Topology
from loosestep.sync.connected import resolve
from loosestep.telemetry import Telemetry, TensorBoard

INTERRUPTED, FINISHED = "interrupted", "finished"


def read_task(settings: Settings) -> Task:
    """Read the data; raise ``BadInput`` for what cannot be trained on."""
    if settings.task == "images":
        return read_images(settings.data, settings.image_size, settings.width)
    shape = Shape(
        context=settings.context, width=settings.width, depth=settings.depth, heads=settings.heads
    )
    return read_text(settings.data, settings.data_bytes, shape)


def unit_of(settings: Settings) -> str:
    """Return what is counted, before any data is read."""
    return Images.unit if settings.task == "images" else Text.unit


def check_enough(task: Task, num_workers: int) -> None:
    """Raise where some workers would have no data."""
    if task.num_samples < num_workers:
        raise BadInput(
            f"{num_workers} workers need a sample each, and there are {task.num_samples}; give "
            "more data or fewer workers"
        )


def work(orders: Orders, rank: Rank) -> int:
    """Train as one of the workers; return the exit code."""
    torch.set_num_threads(orders.settings.threads)
    task = read_task(orders.settings)
    check_enough(task, rank.num_workers)
    with ExitStack() as undo:
        join(rank, orders.settings.timeout)
        undo.callback(dist.destroy_process_group)
        worker = prepare(orders, task, undo)
        return train(worker, orders)


def join(rank: Rank, timeout: float) -> None:
    """Meet the other workers."""
    os.environ.update(rank.environment())
    _find_host(rank.address)
    problem = ""
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        problem = one_line(error)
    if "EADDRINUSE" in problem or "address already in use" in problem:
        raise BadInput(f"port {rank.port} of {rank.address} is in use; set MASTER_PORT to another")
    if problem:
        raise BadInput(
            f"worker {rank.rank} could not meet the others at {rank.address}:{rank.port} within "
            f"{timeout:g} s: {problem}"
        )


def _find_host(address: str) -> None:
    """Raise at once for a name that torch would ask for until its time is up."""
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        raise BadInput(
            f"there is no host {address!r} (MASTER_ADDR): {error.strerror}; name the one of rank 0"
        ) from error


def prepare(orders: Orders, task: Task, undo: ExitStack) -> Worker:
    """Make everything that a worker trains with, and what undoes it."""
    settings, rank, size = orders.settings, dist.get_rank(), dist.get_world_size()
    torch.manual_seed(settings.seed)
    model = task.make_model()
    told = Topology.from_hosts(timeout=settings.timeout)
    topology = levels_of(size, settings.hosts) or resolve(told)
    journal = open_journal(orders, rank)
    undo.callback(journal.close)
    optimizer = plan_optimizer(model, settings)
    sharing = make_sharing(settings, model, optimizer, topology, Telemetry([journal]))
    undo.callback(sharing.close)
    if settings.compile:
        sharing.model.compile()
    store = PrefixStore("loosestep trainer", dist.distributed_c10d._get_default_store())
    stopping = Stopping(store, rank, size, settings.timeout)
    undo.callback(stopping.close)
    feed = make_feed(task, settings, rank, size)
    worker = Worker(settings, task, sharing, journal, stopping, feed, topology.describe())
    if settings.resume is not None:
        saving.resume(worker, settings.resume)
    worker.plan()
    if rank == 0:
        orders.write_info(worker, model, topology)
    return worker


def open_journal(orders: Orders, rank: int) -> Journal:
    """Open a worker's files."""
    board = None
    if orders.settings.tensorboard:
        board = TensorBoard(orders.folder / f"tensorboard-{rank}")
    return Journal(orders.folder, rank, tensorboard=board, tracing=orders.settings.trace)


def train(worker: Worker, orders: Orders) -> int:
    """Train until the end, or until somebody asks to stop."""
    with listening(worker.stopping):
        dist.barrier()
        worker.journal.begin()
        try:
            _steps(worker, orders)
            # All end at the same step, so all come to the same answer.
            finished = worker.num_steps is not None and worker.step >= worker.num_steps
            reason = FINISHED if finished else worker.stopping.reason
            _end(worker, orders, reason)
        except BaseException as error:
            with suppress(OSError):  # the disk may be full
                _write_end(worker, one_line(error))
            raise
        _write_end(worker, reason)
    return STOPPED if reason == INTERRUPTED else 0


def _steps(worker: Worker, orders: Orders) -> None:
    settings, journal = worker.settings, worker.journal
    while worker.num_steps is None or worker.step < worker.num_steps:
        if not worker.stopping.may_begin():
            return
        loss = worker.train_step()
        _write_step(worker, loss)
        last = worker.step == worker.num_steps
        if settings.eval_every and worker.step % settings.eval_every == 0 and not last:
            _evaluate(worker)
        if settings.save_every and worker.step % settings.save_every == 0 and not last:
            _save(worker, orders)
        if settings.seconds is not None and journal.now >= settings.seconds:
            worker.stopping.ask(FINISHED)


def _end(worker: Worker, orders: Orders, reason: str) -> None:
    if reason == INTERRUPTED:
        if worker.saved_step != worker.step:
            _save(worker, orders)
        return
    worker.sharing.finalize()
    saving.check_finite(worker)
    loss = _evaluate(worker)
    if not math.isfinite(loss):  # on all workers: it is that of their average
        raise NotFinite(
            f"the loss on held-out data is {loss} after step {worker.step}, though the model is "
            "finite; this model is not saved: go on from an earlier checkpoint with a lower --lr, "
            "or with --clip"
        )
    if worker.settings.save_every:
        _save(worker, orders)


def _write_end(worker: Worker, reason: str) -> None:
    journal = worker.journal
    journal.event("end", step=worker.step, reason=reason, uplink=journal.uplink)


def _write_step(worker: Worker, loss: float) -> None:
    journal = worker.journal
    journal.event(
        "step",
        step=worker.step,
        loss=loss,
        lr=worker.sharing.optimizer.param_groups[0]["lr"],
        tokens=worker.tokens,
        seconds_waited=journal.seconds_waited,
        next_sync=worker.sharing.next_sync(worker.step),
        drift=journal.drift,
        sent=journal.sent,
        copied=journal.copied,
    )
    journal.scalar("loss/training", loss, worker.step)


def _evaluate(worker: Worker) -> float:
    """Write and return the loss on held-out data."""
    worker.sharing.arrive()  # an average is no part of what is left out: its time and bytes count
    with worker.journal.paused():
        loss = worker.evaluate()
        dist.barrier()
    if dist.get_rank() == 0:
        worker.journal.event("eval", step=worker.step, loss=loss)
        worker.journal.scalar("loss/held out", loss, worker.step)
    return loss


def _save(worker: Worker, orders: Orders) -> None:
    worker.sharing.arrive()
    with worker.journal.paused():
        path = saving.save(worker, orders.folder)
    worker.saved_step = worker.step
    if path is not None:
        worker.journal.event("save", step=worker.step, path=str(path))


@contextmanager
def listening(stopping: Stopping) -> Iterator[None]:
    """Stop with a checkpoint at the first Ctrl-C or SIGTERM, and at once at the second."""
    heard: list[int] = []

    def hear(number: int, _: object) -> None:
        heard.append(number)  # of this process: others may have asked before, for any reason
        if len(heard) > 1:
            os._exit(STOPPED)
        stopping.ask(INTERRUPTED)

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(orders: Orders, rank: Rank) -> int:
    """Train; turn whatever goes wrong into one line and an exit code."""
    try:
        return work(orders, rank)
    except KeyboardInterrupt:  # before there was anything to save
        return STOPPED
    except BadInput as error:
        return _say(str(error), USER_ERROR)
    except LoosestepError as error:
        code = LOST if isinstance(error, PeerLost) else FAILED
        said = one_line(error).removeprefix(f"rank {rank.rank}: ")
        return _say(f"worker {rank.rank}: {said}", code)
    except OSError as error:
        place = error.filename or orders.folder
        return _say(f"worker {rank.rank}: {place}: {error.strerror or one_line(error)}", FAILED)
    except Exception as error:
        story = _keep_story(orders.folder, rank)
        code = LOST if "gloo" in str(error).lower() else FAILED
        said = reason_of(error) if code == LOST else one_line(error)
        return _say(f"worker {rank.rank} failed: {said} ({story})", code)


def _say(text: str, code: int) -> int:
    print(f"loosestep: {text}", file=sys.stderr, flush=True)
    return code


def _keep_story(folder: Path, rank: Rank) -> str:
    """Write the traceback of what is being handled; return where it is, or itself."""
    path = folder / f"rank-{rank.rank}.error"
    try:
        path.write_text(traceback.format_exc(), encoding="utf-8")
    except OSError:
        return " ".join(traceback.format_exc().split())
    return f"the whole story is in {path}"
