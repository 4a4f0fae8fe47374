"""Run a training job: start local ranks, restarting them after failures, or join the ranks of a launcher."""

from __future__ import annotations

import contextlib
import functools
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from hp_dtensor.comm.world import current_world
from hp_dtensor.exceptions import HPError, LaunchError
from hp_dtensor.launch import (
    Generation,
    Nodes,
    Replacement,
    current_generation,
    from_environment,
    is_launched,
    lasting_memory,
    launch,
    next_generation,
    serve_node,
)
from hp_dtensor.launch.fork_server import forked_ranks
from hp_dtensor.launch.local_launch import STOP_SIGNALS
from hp_dtensor.platform.interface import Platform
from hp_dtensor.platform.selection import get_platform
from hp_trainer import _coordination
from hp_trainer._coordination import Group, Interrupted, coordinator
from hp_trainer.checkpoint import Storage, find_latest, list_checkpoints
from hp_trainer.checkpoint.index import step_of
from hp_trainer.config import TrainerConfig
from hp_trainer.evaluation import write_samples
from hp_trainer.exceptions import (
    CheckpointError,
    ConfigError,
    DataError,
    HangError,
    MachineError,
    RunFolderError,
    RunLockedError,
    StoppedError,
    TrainingError,
    UnfitCheckpointError,
    describe_exit,
    describe_machine_error,
)
from hp_trainer.launch.platforms import (
    Node,
    chosen_platform,
    import_platform,
    is_first_process,
    num_accelerators,
    report,
    report_import,
    world_size_of,
)
from hp_trainer.launch.preflight import layout_problems
from hp_trainer.parallel.dims import dims_of
from hp_trainer.run import RunFolder, RunLock, checkpoint_storage
from hp_trainer.training import Trainer
from hp_trainer.training.checkpoints import Choice
from hp_trainer.training.recovery import Sources, StateCopies, replicas_of, with_fewer_replicas
from hp_trainer.training.stalls import is_of_collective, watched_set_up


def launch_training(
    config: TrainerConfig,
    folder: Path,
    prepare: Callable[[], str | None],
    choice: Choice = "newest that fits",
    node: Node | None = None,
) -> Path:
    """Train on all ranks of a job, and return the run folder when every rank has finished.

    Args:
        config: the configuration, with the platform and the number of local ranks.
        folder: the run folder, which is locked for this job until it ends.
        prepare: called once per job, under the lock, before any rank uses the folder. It fills or opens the run folder
            and returns the name of the checkpoint to continue from, or None to start from the beginning.
        choice: how the ranks load this checkpoint.
        node: this machine of a job with `launch.nodes`. Only machine 0 calls `prepare`.

    Raises:
        RunLockedError: another job trains this run.
        LaunchError: a local rank failed.
        StoppedError: a signal ended the run before its last step.
        HPError: whatever `prepare` raises, or the training if this process is a rank.
    """
    if node is not None and node.number:
        _raise_if_stopped(_train_on_node(config, RunFolder(folder), node), RunFolder(folder), config)
        return folder
    with ExitStack() as stack:
        platform = stack.enter_context(_importing(config))

        def start() -> tuple[str, str, str | None]:
            if not folder.exists():
                # Runs after the lock is released: the folder is removed again if the run could not start.
                stack.callback(_remove_empty, folder)
                folder.mkdir(parents=True)
            lock = stack.enter_context(RunLock(folder))
            # Ranks on other machines may have another working directory.
            return str(folder.absolute() if is_launched() or node else folder), lock.nonce, prepare()

        return _train(config, platform, start, choice, node)


@contextlib.contextmanager
def _importing(config: TrainerConfig) -> Iterator[Platform | str]:
    """Import the framework here, or in a server that forks the local ranks; yield the platform, or its name."""
    name = chosen_platform(config.platform)
    is_here = is_launched() or config.launch.nodes is not None or _trains_here(config)
    if is_here or not isinstance(name, str) or num_accelerators(name):
        yield import_platform(config.platform)
        return
    report_import(name)
    with forked_ranks(name, world_size_of(config), [__name__]) as is_possible:
        yield name if is_possible else import_platform(name)


def _trains_here(config: TrainerConfig) -> bool:
    """Return whether this process is the only rank. Restarts need a process that survives."""
    return world_size_of(config) == 1 and not config.launch.max_restarts


def _train(
    config: TrainerConfig,
    platform: Platform | str,
    start: Callable[[], tuple[str, str, str | None]],
    choice: Choice,
    node: Node | None,
) -> Path:
    """Train on all ranks; `start` locks and prepares the run, and returns its folder, lock and checkpoint."""
    name = platform if isinstance(platform, str) else platform.name
    if is_launched():
        if config.fault_tolerance.copies is not None:
            report(
                "fault_tolerance has no effect: these ranks were started by another launcher, which ends all when one "
                "dies, and restarts them from the newest checkpoint if it is configured to. Ranks that hp-train itself "
                "starts go on: with launch.nodes on several machines"
            )
        world = from_environment(platform, config.launch.timeout_seconds)
        # Only rank 0 runs `start`; its errors are raised on all ranks, which then end together.
        path, owner, checkpoint = coordinator(world.all, "preparing the run", start, RunFolderError)
        ended_by = _train_here(config, path, owner, checkpoint, name, False, choice)
        # Disconnected first, so that other ranks do not wait while rank 0 writes the samples.
        get_platform(platform).disconnect()
        if ended_by is None and is_first_process():
            write_samples(RunFolder(Path(path)), config)
    else:
        path, owner, checkpoint = start()
        arguments = (path, owner, checkpoint, name, True, choice)
        # In this process: a second one would import the framework again.
        if _trains_here(config):
            ended_by = _train_here(config, *arguments)
        else:
            ended_by = _train_on_local_ranks(config, arguments, node)
    _raise_if_stopped(ended_by, RunFolder(Path(path)), config)
    return Path(path)


def _raise_if_stopped(ended_by: int | None, run: RunFolder, config: TrainerConfig) -> None:
    if ended_by is not None:
        # After the ranks have ended, when the checkpoint of the stop is complete.
        advice = _how_to_continue(run, config)
        raise StoppedError(f"stopped by {signal.Signals(ended_by).name}. {advice}", ended_by)


def _nodes_file(run: RunFolder) -> Path:
    return run.path / "nodes.json"


def _train_on_node(config: TrainerConfig, run: RunFolder, node: Node) -> int | None:
    """Run the ranks of a machine other than the first, which directs them."""
    try:
        ended_by: int | None = serve_node(
            run_rank,
            _nodes_file(run),
            node.number,
            config.launch.nodes or 1,
            world_size_of(config),
            import_platform(config.platform),
            replacement=_replacement(config),
            log_dir=run.logs,
            timeout_seconds=config.launch.timeout_seconds,
            stop_seconds=config.launch.stop_seconds,
        )
    except Interrupted as interrupted:
        return int(interrupted.signal)
    return ended_by


def _train_on_local_ranks(config: TrainerConfig, arguments: RankArguments, node: Node | None) -> int | None:
    report(f"starting {world_size_of(config)} ranks on {arguments[3]}")
    try:
        if node is None or config.launch.nodes is None:
            return run_with_restarts(run_rank, arguments, config)
        with Nodes(config.launch.nodes, _nodes_file(RunFolder(Path(arguments[0]))), node.host) as nodes:
            ended_by = nodes.result = run_with_restarts(run_rank, arguments, config, nodes)
            return ended_by
    except LaunchError as error:
        ended_by = stopped_by(error)
        if ended_by is not None:
            return ended_by
        advice = _how_to_continue(RunFolder(Path(arguments[0])), config, error.kind)
        raise LaunchError(f"{error}\n{advice}", error.rank, error.kind, error.signal) from error


def run_rank(
    folder: str,
    owner: str,
    checkpoint: str | None,
    platform: str,
    samples: bool,
    choice: Choice = "newest that fits",
) -> int | None:
    """Run one rank of a job with prepared data; return the signal that ended it before its last step, None if done."""
    with _errors_in_one_line():
        return _run_rank(RunFolder.open(Path(folder), owner), checkpoint, get_platform(platform), samples, choice)


def _run_rank(run: RunFolder, checkpoint: str | None, platform: Platform, samples: bool, choice: Choice) -> int | None:
    # The configuration is read from the run folder, not passed: a resumed run on another machine reads the same.
    config = run.load_config().config
    start = (checkpoint, choice)
    if _generation(config) is None:
        ended_by = _train_rank(run, config, platform, start, None)
    else:
        ended_by = _train_through_deaths(run, config, platform, start)
    if samples and ended_by is None and current_world(platform).rank == 0:
        write_samples(run, config)
    return ended_by


def _generation(config: TrainerConfig) -> Generation | None:
    """Return the generation of the ranks; None where ranks that die are not replaced."""
    return None if config.fault_tolerance.copies is None else current_generation()


def _train_through_deaths(
    run: RunFolder, config: TrainerConfig, platform: Platform, start: tuple[str | None, Choice]
) -> int | None:
    """Train on this rank, in a new generation of ranks with a new trainer after each death of another rank."""
    settings = config.fault_tolerance
    assert settings.copies is not None
    copies = StateCopies(partner=settings.copies > 0, interval=settings.interval, memory=lasting_memory())
    while True:
        failure: Exception
        try:
            ended_by = _train_rank(run, config, platform, start, copies)
            # No rank returns before all have ended: one that has returned could not go on with a replacement.
            current_world(platform).all.all_gather_bytes(b"")
            return ended_by
        except Exception as error:
            if not is_of_collective(error):
                raise
            failure = error
        finally:
            copies.leave()
        text = "".join(traceback.format_exception(failure))
        _release_frames(failure)
        if next_generation(hung=isinstance(failure, HangError)) is None:
            failure.add_note(text)
            raise failure
        del failure


def _release_frames(error: BaseException | None) -> None:
    """Release the frames of an error and its causes, which refer to the model and its connections."""
    while error is not None:
        # `traceback.clear_frames` is not enough: a cleared frame still refers to its function, and so to its closure.
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _train_rank(
    run: RunFolder,
    config: TrainerConfig,
    platform: Platform,
    start: tuple[str | None, Choice],
    copies: StateCopies | None,
) -> int | None:
    """Build the trainer, load the state to continue from, and train."""
    world = current_world(platform)
    is_first, generation = world.rank == 0, _generation(config)
    asked, lost_replicas = config.parallel.dp_replicate, 0
    if generation is not None:
        config = with_fewer_replicas(config, world.size, generation.first_size)
        lost_replicas = asked - config.parallel.dp_replicate
    with watched_set_up(run.stalls, world, config.launch.timeout_seconds):
        sources = None if copies is None else copies.meet(world, replicas_of(config, platform))
        if copies is not None and generation is not None and generation.number:
            storage = checkpoint_storage(run, config)
            sources, start = newest_state(world.all, storage, start, sources)
            if sources is None:
                copies.clear()
        checkpoint, choice = start
        if is_first:
            report("building the model")
        # Without initial weights, since a checkpoint or a copy fills all of them.
        trainer = Trainer(
            run,
            config,
            platform,
            initial_weights=checkpoint is None and sources is None,
            copies=copies,
            lost_replicas=lost_replicas,
        )
        if sources is not None:
            trainer.restore(sources)
        elif checkpoint is not None:
            if is_first:
                report(f"loading {checkpoint}")
            trainer.resume(checkpoint, choice)
    if generation is not None and generation.number and is_first:
        lost = f" in step {copies.lost_step}" if copies is not None and copies.lost_step else ""
        read = f"have read {checkpoint}" if checkpoint is not None else "start from the beginning"
        where = "" if sources is not None else f", without copies: all ranks {read}"
        if lost_replicas:
            where += f", with {asked - lost_replicas} of {asked} replicas and the same global batch"
        report(
            f"{generation.reason}{lost}; training goes on from step {trainer.progress.step} after "
            f"{time.monotonic() - generation.lost_at:.1f} s{where}"
        )
    if generation is not None and generation.is_last:
        trainer.run(only_save=True)
        raise _not_replaced(generation, config, asked)
    return trainer.run()


def _not_replaced(generation: Generation, config: TrainerConfig, num_replicas: int) -> MachineError:
    """Return the error of a job that ends because ranks that died are not replaced, after it has saved its state."""
    why = f"more ranks have died than fault_tolerance.max_deaths = {config.fault_tolerance.max_deaths}"
    if generation.lacks_node:
        seconds = config.fault_tolerance.node_seconds
        why = f"no other machine has come within fault_tolerance.node_seconds = {seconds:g}"
    if num_replicas > 1:
        why += ", no replica is complete"
    return MachineError(f"{generation.reason}: {why}, and this state has been saved")


def newest_state(
    group: Group, storage: Storage, start: tuple[str | None, Choice], sources: Sources | None
) -> tuple[Sources | None, tuple[str | None, Choice]]:
    """Choose between the copies in memory and a newer checkpoint than `start`, after a death; a collective call."""
    step = None if sources is None else sources.step
    newest = coordinator(group, "looking for a checkpoint", lambda: _newest_after(storage, step), CheckpointError)
    # The choice is that of the job's first checkpoint, until it has written another one.
    if newest is None or (sources is None and newest == start[0]):
        return sources, start
    return None, (newest, "newest that fits")


def _newest_after(storage: Storage, step: int | None) -> str | None:
    """Return the newest sound checkpoint; None unless it is later than `step`."""
    names = list_checkpoints(storage)
    # By their names first, since `find_latest` reads all contents.
    if not names or (step is not None and step_of(names[0]) <= step):
        return None
    newest = find_latest(storage).checkpoint
    return None if newest is None or (step is not None and newest.step <= step) else newest.folder


@contextlib.contextmanager
def _errors_in_one_line() -> Iterator[None]:
    """Convert errors of the machine and calls of `sys.exit` to errors with place and advice in one line."""
    try:
        yield
    except SystemExit as leaving:
        # A local rank that exits with code 0 would be taken for one that has finished.
        raise TrainingError(f"something {describe_exit(leaving, 'before the run was done')}") from leaving
    except Exception as error:
        message = describe_machine_error(error)
        if message is None or isinstance(error, HPError):
            raise
        raise MachineError(message) from error


def _train_here(config: TrainerConfig, path: str, *arguments: Any) -> int | None:
    """Run one rank in this process; errors that have no traceback become a `TrainingError` with advice."""
    try:
        return run_rank(path, *arguments)
    except HPError as error:
        # A bug: the advice would hide the traceback that is needed to find it.
        if error.needs_traceback:
            raise
        advice = _how_to_continue(RunFolder(Path(path)), config, type(error).__name__)
        raise TrainingError(f"{error}\n{advice}") from error


def _remove_empty(folder: Path) -> None:
    """Remove the folder of a run that could not start."""
    with contextlib.suppress(OSError):
        folder.rmdir()


def _how_to_continue(run: RunFolder, config: TrainerConfig, kind: str | None = None) -> str:
    """Return the newest checkpoint of a run that ended early by an error `kind`, and the command that continues it."""
    # The command that continues from the newest checkpoint has just failed.
    if kind == UnfitCheckpointError.__name__:
        return (
            "No checkpoint was changed. Take back the settings that changed, continue from another checkpoint "
            f"(`hp-train checkpoints {run.path}` lists them, `hp-train resume {run.path} --from-step=N` uses one), or "
            "start a new run"
        )
    try:
        # Without reading contents: this is only advice, and checkpoints may be large.
        newest = find_latest(checkpoint_storage(run, config), content=False).checkpoint
    except OSError as error:
        return f"The checkpoints of {run.path} cannot be read: {error}"
    if newest is None:
        return f"There is no checkpoint yet; start again with `hp-train run {run.config_file} --run.folder={run.path}`"
    return (
        f"The newest checkpoint is of step {newest.step} of {config.training.steps}; continue with "
        f"`hp-train resume {run.path}`"
    )


RankArguments = tuple[str, str, str | None, str, bool, Choice]

# Errors that a restart would repeat: losses that are not finite, invalid input, a run taken over by another job.
_FINAL = {
    error.__name__
    for error in (ConfigError, DataError, RunFolderError, RunLockedError, TrainingError, UnfitCheckpointError)
}
_PAUSE_SECONDS = 1.0


def run_with_restarts(
    run_rank: Callable[..., int | None], arguments: RankArguments, config: TrainerConfig, nodes: Nodes | None = None
) -> int | None:
    """Run a job on local ranks, restarted from checkpoints while it makes progress; return the signal that ended it."""
    path, owner, checkpoint, *rest = arguments
    run = RunFolder(Path(path), owner)
    restarts_left, failures = config.launch.max_restarts, 0
    while True:
        try:
            return _run_once(run_rank, (path, owner, checkpoint, *rest), config, run.logs, nodes)
        except LaunchError as error:
            # A rank that was stopped by a signal has not failed.
            if not config.launch.max_restarts or error.kind in _FINAL or stopped_by(error) is not None:
                raise
            # With contents: a rank may have failed while it wrote, and a restart must not start from a damaged
            # checkpoint.
            newest = find_latest(checkpoint_storage(run, config)).checkpoint
            # A newer checkpoint means progress, and resets the count.
            if newest is not None and newest.folder != checkpoint:
                restarts_left, checkpoint = config.launch.max_restarts, newest.folder
                # The choice was made for the first checkpoint.
                rest[-1] = "newest that fits"
            if not restarts_left:
                raise
            restarts_left, failures = restarts_left - 1, failures + 1
            # Another job may have taken the run over while the ranks were ending.
            run.check_owner()
            # The next ranks would overwrite the logs of those that have ended.
            for log in run.logs.glob("rank*.log"):
                # Not the logs of earlier failures, such as `rank1.failed-1.log`.
                if log.stem.removeprefix("rank").isdecimal():
                    log.rename(log.with_name(f"{log.stem}.failed-{failures}.log"))
            step = newest.step if newest is not None else 0
            _coordination.report(str(error))
            _coordination.report(
                f"restarting the ranks from step {step} of {config.training.steps}; "
                f"restarts left without a newer checkpoint: {restarts_left}"
            )
            # Devices and ports of the ended ranks may take a moment to become free.
            time.sleep(_PAUSE_SECONDS)


def stopped_by(error: LaunchError) -> int | None:
    """Return the stop signal that ended a rank before it reached the other ranks; None: the rank failed."""
    # Python converts SIGINT to this exception until a rank has installed its handlers.
    if error.kind == "KeyboardInterrupt":
        return signal.SIGINT
    return error.signal if error.signal in STOP_SIGNALS else None


def _run_once(
    run_rank: Callable[..., int | None],
    arguments: tuple[Any, ...],
    config: TrainerConfig,
    logs: Path,
    nodes: Nodes | None,
) -> int | None:
    try:
        ended_by: list[int | None] = launch(
            run_rank,
            arguments,
            num_ranks=world_size_of(config),
            platform=str(arguments[3]),
            log_dir=logs,
            timeout_seconds=config.launch.timeout_seconds,
            stop_seconds=config.launch.stop_seconds,
            replacement=None if config.fault_tolerance.copies is None else _replacement(config),
            nodes=nodes,
        )
    except Interrupted as interrupted:
        # `launch` has forwarded the signal and waited for the ranks to end.
        return int(interrupted.signal)
    # All ranks agree on the signal, see `Trainer.run`.
    return ended_by[0]


def _replacement(config: TrainerConfig) -> Replacement:
    settings = config.fault_tolerance
    return Replacement(
        settings.max_deaths,
        settings.stopped_seconds,
        report,
        settings.spares,
        settings.node_seconds,
        functools.partial(remaining_ranks, config, world_size_of(config)),
    )


def remaining_ranks(config: TrainerConfig, first_size: int, size: int, dead: Collection[int]) -> list[int]:
    """Return the ranks of the complete replicas, as many as can share the global batch; empty: none is complete."""
    now = dims_of(with_fewer_replicas(config, size, first_size), size)
    replicas = [now.coordinate(rank)["dp_replicate"] for rank in range(size)]
    complete = sorted(set(replicas) - {replicas[rank] for rank in dead})
    for count in range(len(complete), 0, -1):
        new_size = count * size // now.dp_replicate
        if not list(layout_problems(with_fewer_replicas(config, new_size, first_size), new_size)):
            return [rank for rank, replica in enumerate(replicas) if replica in complete[:count]]
    return []
