"""The folder of a run: its files, its creation with prepared data, and the storage of its checkpoints."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import secrets
import shutil
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hp_trainer._files import copy_file, other_kind, read_plain_text, write_atomically, write_new
from hp_trainer.checkpoint import Checkpoint, LocalStorage, Storage, list_checkpoints
from hp_trainer.config import LoadedConfig, TrainerConfig, default_values, dump_config, load_config, to_plain
from hp_trainer.exceptions import CheckpointError, ConfigError, DataError, RunFolderError
from hp_trainer.models.hugging_face import COMPANIONS
from hp_trainer.plugins import registries
from hp_trainer.registries import Registries
from hp_trainer.run.lock import LOCK_FILE, check_owner

_MARK = "run.json"
# Prefix of the file that tests whether a folder is writable, on file systems without unnamed temporary files.
PROBE = ".hp-train-"
# Small files that every checkpoint has a copy of, so that a checkpoint is enough to continue its run.
_COPIED = (_MARK, "config.yaml", "data/data.json")
_MOST_BYTES = 4 << 20
# The only files that a job can leave if it is killed before it has written the mark.
_BEFORE_THE_MARK = (LOCK_FILE, f"{_MARK}.incomplete-", PROBE)


class RunFolder:
    """The paths of a run.

    ```
    run.json           identity of the run
    lock.json          the job that trains it, while it does
    config.yaml        resolved configuration
    metrics.jsonl      one line per step
    loss.png           loss curve
    expert_loads.png   load of every expert over the steps
    samples.txt        text sampled from the model
    data/              reference to the prepared data in the cache
    model/             config.json and tokenizer of `model.from`
    checkpoints/       step-00000100/ ...
    stalls/            reports of ranks that stalled
    digests.gz         digests of the first steps (training.record_steps)
    profile/           rank0-trace.json ... of the steps chosen with profile.first and profile.last
    logs/              rank1.log ... (rank 0 writes to the terminal)
    ```

    Attributes:
        owner: nonce of the lock under which this process writes (`RunLock.nonce`); None: no lock.
    """

    def __init__(self, path: Path, owner: str | None = None) -> None:
        self.path = path
        self.owner = owner
        self.config_file = path / "config.yaml"
        self.metrics_file = path / "metrics.jsonl"
        self.loss_picture = path / "loss.png"
        self.loads_picture = path / "expert_loads.png"
        self.samples_file = path / "samples.txt"
        self.data = path / "data"
        self.model_files = path / "model"
        self.checkpoints = path / "checkpoints"
        self.stalls = path / "stalls"
        self.digests_file = path / "digests.gz"
        self.logs = path / "logs"
        self.profile = path / "profile"

    @classmethod
    def check_new(cls, path: Path) -> str | None:
        """Return why a new run cannot use `path`; None: it can."""
        if cls.exists(path):
            return f"has the run {_read_mark(path).get('id', '?')}"
        if list_checkpoints(LocalStorage(path / "checkpoints")):
            return "has checkpoints of a run"
        if path.is_dir() and any(not inner.name.startswith(_BEFORE_THE_MARK) for inner in path.iterdir()):
            return "has files that do not belong to a run"
        return "is a file" if path.exists() and not path.is_dir() else None

    @classmethod
    def exists(cls, path: Path) -> bool:
        """Return whether there is a run in `path`, including one whose job was killed while it created the folder."""
        return (path / _MARK).is_file()

    @classmethod
    def create(cls, path: Path, config: TrainerConfig) -> RunFolder:
        """Create the folder of a new run and write its configuration. If that fails, the folder is deleted again.

        Raises:
            RunFolderError: the folder has another run or other files.
        """
        reason = cls.check_new(path)
        if reason is not None:
            raise _taken(path, reason)
        path.mkdir(parents=True, exist_ok=True)
        try:
            # Exclusive creation: of two runs that start at the same time in one folder, one gets it.
            write_new(path / _MARK, _new_mark())
        except FileExistsError:
            raise _taken(path, "has just been taken by another run") from None
        folder = cls(path)
        try:
            folder.fill(config)
        # Also for an interrupt, so that a second start finds no half-made run.
        except BaseException:
            folder.delete()
            raise
        return folder

    @classmethod
    def open(cls, path: Path, owner: str | None = None) -> RunFolder:
        """Return the folder of an existing run, for a job with the lock `owner`, or only for reading (None).

        Raises:
            RunFolderError: there is no run in it.
        """
        if not cls.exists(path):
            raise RunFolderError(
                f"{path} has no run (no {_MARK}); give the folder that `hp-train` printed, or start a run with "
                f"`hp-train run CONFIG --run.folder=...`"
            )
        _read_mark(path)
        return cls(path, owner)

    @classmethod
    def restore(cls, path: Path, storage: Storage | None = None) -> list[str]:
        """Write small files that a run has lost from its newest checkpoint with a copy, and return their names.

        Args:
            storage: the run's checkpoints; None: as its configuration says, or `checkpoints/`.
        """
        lost = [name for name in _COPIED if not (path / name).exists()]
        # Several runs may share a folder of checkpoints, so that files which only training writes must show a run here.
        if not lost or not any((path / name).exists() for name in (_MARK, "checkpoints", "metrics.jsonl")):
            return []
        storage = storage or _storage_of(cls(path))
        names, copies = list_checkpoints(storage), {}
        for name in names:
            with contextlib.suppress(CheckpointError, FileNotFoundError):
                found = Checkpoint(storage, name).state.get("run_files")
                if not found or (_MARK not in lost and found.get(_MARK) != read_plain_text(path / _MARK, _MOST_BYTES)):
                    continue
                copies = {file: text for file, text in found.items() if file in lost}
                break
        # Checkpoints of earlier versions have no copies.
        if names and _MARK in lost:
            copies.setdefault(_MARK, _new_mark())
        for file, text in copies.items():
            (path / file).parent.mkdir(exist_ok=True)
            # Another rank of the job may have just done the same.
            with contextlib.suppress(FileExistsError):
                write_new(path / file, str(text))
        return list(copies)

    def copies(self) -> dict[str, str]:
        """Return the texts of the small files by name, for a checkpoint."""
        return {
            name: read_plain_text(self.path / name, _MOST_BYTES) for name in _COPIED if (self.path / name).is_file()
        }

    def fill(self, config: TrainerConfig) -> None:
        """Create the subfolders and write the configuration, where they do not exist yet."""
        # A job that was killed here may have created some of them.
        for inner in (self.data, self.checkpoints, self.logs):
            inner.mkdir(exist_ok=True)
        self.write_config(config)

    def refuse_other_kinds(self) -> None:
        """Raise if a file that training writes is a named pipe or a socket, for whose reader it would wait forever.

        Raises:
            RunFolderError: naming the file.
        """
        for file in (self.metrics_file, self.loss_picture, self.loads_picture, self.samples_file):
            if (kind := other_kind(file)) in ("a named pipe", "a socket"):
                raise RunFolderError(f"{file} is {kind}; expected a regular file: move it away")

    def sweep(self) -> None:
        """Delete incomplete files of a job that was killed. Only the job with the lock may call this."""
        found = [self.path.glob("*.incomplete-*"), self.data.glob("*.incomplete-*"), self.path.glob(f"{PROBE}*")]
        for left in itertools.chain(*found):
            # The caller has the lock, so that no live process writes these.
            if left.is_file():
                left.unlink(missing_ok=True)

    def delete(self) -> None:
        """Delete the run and everything in it."""
        # The mark is deleted last: if the process is killed meanwhile, the folder still counts as a run.
        for inner in self.path.iterdir():
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner, ignore_errors=True)
            elif inner.name != _MARK:
                inner.unlink(missing_ok=True)
        shutil.rmtree(self.path, ignore_errors=True)

    def check_owner(self) -> None:
        """Raise if another job has taken the run over. Without a lock nothing is checked.

        Raises:
            RunLockedError: another job has the run.
        """
        if self.owner is not None:
            check_owner(self.path, self.owner)

    @property
    def run_id(self) -> str:
        return str(_read_mark(self.path)["id"])

    def load_config(
        self, overrides: Sequence[tuple[str, str]] = (), registered: Registries | None = None
    ) -> LoadedConfig:
        """Return the run's configuration, with overrides.

        Raises:
            ConfigError: listing every problem.
        """
        return load_config(self.config_file, overrides, registered=registered or registries(), resolved=True)

    def write_config(self, config: TrainerConfig) -> None:
        """Replace the configuration of the run atomically."""
        write_atomically(self.config_file, dump_config(config))


def default_run_folder(config_file: Path, now: datetime | None = None) -> Path:
    """Return `runs/<name of the configuration file>-<date and time>`."""
    return Path("runs") / f"{config_file.stem}-{(now or datetime.now()):%Y%m%d-%H%M%S}"


def chosen_run_folder(loaded: LoadedConfig, config_file: Path) -> Path:
    """Return the folder of a new run: `run.folder`, or the default.

    A relative path is relative to the YAML file that sets it, or on the command line to the working directory.
    """
    wanted = loaded.config.run.folder
    if wanted is None:
        return default_run_folder(config_file)
    # Sources are `file:line` or `--option`.
    source = loaded.sources.get("run.folder", "--")
    base = Path() if source.startswith("--") else Path(source.rpartition(":")[0]).parent
    return base / Path(wanted).expanduser()


def _taken(path: Path, reason: str) -> RunFolderError:
    ways = f", delete it, or continue with `hp-train resume {path}`" if RunFolder.exists(path) else ""
    return RunFolderError(f"run folder {path} {reason}; choose another with --run.folder=...{ways}")


def _read_mark(path: Path) -> dict[str, Any]:
    try:
        mark = json.loads(read_plain_text(path / _MARK))
    except (OSError, ValueError, RecursionError) as error:
        # EINVAL: it is no regular file, or too large. With another error it may be sound, and must not be deleted.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise RunFolderError(f"{path / _MARK} is damaged: {error}; {_REBUILT}") from error
    if not isinstance(mark, dict) or not isinstance(mark.get("id"), str) or not mark["id"]:
        raise RunFolderError(f"{path / _MARK} is damaged: it has no id; {_REBUILT}")
    return mark


_REBUILT = "delete it, and `hp-train resume` rebuilds it from a checkpoint"


def _new_mark() -> str:
    return json.dumps({"id": secrets.token_hex(6), "created": datetime.now(UTC).isoformat(timespec="seconds")})


def _storage_of(run: RunFolder) -> Storage:
    """Return the storage of the run's checkpoints, as far as its configuration can be read."""
    with contextlib.suppress(ConfigError):
        if run.config_file.is_file():
            return checkpoint_storage(run, run.load_config().config)
    return LocalStorage(run.checkpoints)


def create_run(path: Path, config: TrainerConfig) -> RunFolder:
    """Create the folder of a new run and prepare its data, on one process. If that fails, the folder is deleted again.

    Raises:
        RunFolderError: the folder is not empty.
        DataError: the data cannot be read, or are too few for one sample.
    """
    run = RunFolder.create(path, config)
    try:
        run.sweep()
        _prepare(run, config)
    except BaseException:
        run.delete()
        raise
    return run


def complete_run(run: RunFolder, config: TrainerConfig) -> None:
    """Complete a run whose job was killed while it created the run; on one process.

    Raises:
        DataError: the data cannot be read, or are too few for one sample.
    """
    run.sweep()
    run.fill(config)
    _prepare(run, config)


def prepare_again(run: RunFolder, config: TrainerConfig) -> list[str]:
    """Prepare data and copies of the model's files that a run has lost, and return the names of their folders.

    Whether the data are those of the run is checked when a checkpoint is loaded.

    Raises:
        DataError: the data cannot be read.
    """
    again = []
    if not run.data.is_dir():
        run.data.mkdir()
        registries().datasets.get(config.data.name).build(config.data.options).prepare(run.data)
        again.append(run.data.name)
    if config.model.source is not None and not run.model_files.is_dir() and Path(config.model.source).is_dir():
        _copy_model_files(run, config)
        again.append(run.model_files.name)
    return again


def _prepare(run: RunFolder, config: TrainerConfig) -> None:
    source = registries().datasets.get(config.data.name).build(config.data.options)
    source.prepare(run.data)
    _copy_model_files(run, config)
    # Opened in any case, because too little training data is found here, before a rank starts.
    dataset = source.open(run.data, config.training.sequence_length)
    if config.training.eval_interval is not None and not len(dataset.evaluation):
        raise DataError(
            f"the evaluation data have no sample of training.sequence_length={config.training.sequence_length} tokens, "
            f"but training.eval_interval={config.training.eval_interval} is set; reserve more text for evaluation "
            "(data.eval_fraction), or set training.eval_interval=null"
        )


def _copy_model_files(run: RunFolder, config: TrainerConfig) -> None:
    """Copy configuration and tokenizer of `model.from` to the run folder, for a later export."""
    if config.model.source is None:
        return
    run.model_files.mkdir(exist_ok=True)
    for name in COMPANIONS:
        file = Path(config.model.source) / name
        if file.is_file():
            copy_file(file, run.model_files / name)


def checkpoint_storage(run: RunFolder, config: TrainerConfig) -> Storage:
    """Return the storage of the run's checkpoints: `checkpoint.folder`, or `checkpoints/` in the run folder."""
    folder = run.checkpoints if config.checkpoint.folder is None else Path(config.checkpoint.folder)
    component = config.checkpoint.storage
    storage: Storage = registries().checkpoint_storages.get(component.name).build(component.options, folder)
    return storage


def check_model(checkpoint: Checkpoint, config: TrainerConfig) -> None:
    """Raise if a checkpoint has another model than the configuration.

    Raises:
        CheckpointError: the models differ; names every option that does.
    """
    checkpoint.check_model(to_plain(config.model), model_defaults(config))


def model_defaults(config: TrainerConfig) -> dict[str, Any]:
    """Return the defaults of the model's options as plain values."""
    return default_values(type(config.model.options))
