"""Checkpoints that torch.distributed.checkpoint reads and writes, and pickles that nothing is made of."""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import pytest
from training_runs import FOUR_RANKS, Lab, losses, tensors

from hp_trainer import cli

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

SETTINGS = {"training__ema__decay": 0.9}


@pytest.fixture(autouse=True)
def on_torch(hp_platform):
    if hp_platform.name != "torch":
        pytest.skip("the format is torch's")


def exported(lab: Lab, run, name: str = "dcp") -> Path:
    assert cli.main(["export", str(run.path), f"--to={lab.folder / name}", "--format=dcp"]) == 0
    return lab.folder / name


def as_torch_reads(folder: Path, saved: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    state = {name: torch.zeros(value.shape) for name, value in saved.items()}
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    return state


def refused(capsys, *words: str) -> str:
    assert cli.main([str(word) for word in words]) == 2
    return capsys.readouterr().err


def test_torch_reads_every_tensor_of_a_checkpoint_that_four_ranks_wrote(lab: Lab):
    run = lab.run("run", FOUR_RANKS["folded"], 4, training__steps=2, **SETTINGS)
    saved = tensors(run, ("model.", "optimizer.", "ema."))
    found = as_torch_reads(exported(lab, run), saved)
    for name, value in saved.items():
        np.testing.assert_array_equal(found[name].numpy(), value)


def test_a_run_goes_on_exactly_from_what_torch_has_written_in_between(lab: Lab, capsys):
    full = lab.run("full", **SETTINGS)
    stopped = lab.interrupted_copy(full, "stopped")
    saved = tensors(stopped, ("model.", "optimizer.", "ema."))
    folder = exported(lab, stopped)
    state = as_torch_reads(folder, saved)
    length = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["hp.state"].size
    state["hp.state"] = torch.zeros(length, dtype=torch.uint8)
    dcp.load(state, checkpoint_id=str(folder), no_dist=True)
    dcp.save(state | {"note": "of another kind"}, checkpoint_id=str(lab.folder / "again"), no_dist=True)
    for checkpoint in stopped.checkpoints.iterdir():
        for file in checkpoint.iterdir():
            file.unlink()
        checkpoint.rmdir()
    assert cli.main(["import", str(lab.folder / "again"), f"--run={stopped.path}"]) == 0
    assert "step-00000003; continue with `hp-train resume" in capsys.readouterr().out
    assert losses(lab.resume(stopped, **SETTINGS)) == losses(full)


def test_weights_become_a_file_that_transformers_reads(lab: Lab, tmp_path: Path):
    from safetensors.torch import load_file

    state = {
        "model.b": torch.arange(6.0).reshape(2, 3),
        "model.a": torch.ones(3, dtype=torch.bfloat16),
        "other": torch.ones(1),
    }
    dcp.save(state, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert cli.main(["import", str(tmp_path / "dcp"), f"--to={tmp_path / 'out'}", "--prefix=model."]) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"a", "b"}
    for name, value in found.items():
        assert torch.equal(value, state[f"model.{name}"])


class Evil:
    def __reduce__(self):
        return print, ("run by a pickle",)


def of_metadata(words: bytes) -> bytes:
    """A pickle that says these words after it has named the class Metadata."""
    return b"\x80\x04\x8c\x25torch.distributed.checkpoint.metadata\x8c\x08Metadata\x93" + words


NESTED = b")" + b"\x94h\x00\x86" * 200
HOSTILE = {
    "a call": (pickle.dumps(Evil()), "expected Metadata, got builtins.print"),
    "no metadata": (pickle.dumps({"a": 1}), "expected Metadata, got Pairs"),
    "another class": (pickle.dumps(torch.nn.Linear), "got the name torch.nn.modules.linear.Linear"),
    "nothing": (b"", "pickle exhausted before seeing STOP"),
    "no pickle": (b"damaged", "byte 0 has opcode DICT, which metadata do not need"),
    "a class attribute": (of_metadata(b"}\x8c\x05owned\x88sb."), "sets the state of something that it did not create"),
    "another field": (of_metadata(b")\x81}\x8c\x05owned\x88sb."), "Metadata has no field 'owned'"),
    "a far memo": (of_metadata(b"r\xff\xff\xff\xff."), "expected Metadata, got the name"),
    "memory": (b"\x80\x05\x96" + b"\xff" * 7 + b"\x7f.", "bytes in a bytearray8, but only 1 remain"),
    "a persistent object": (b"\x80\x04\x8c\x01xQ.", "has opcode BINPERSID, which metadata do not need"),
    "an endless key": (of_metadata(b")\x81}" + NESTED + b"\x88sb."), "Metadata has no field tuple"),
    "an empty stack": (b"\x80\x04b.", "it is not a valid pickle"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_of_a_hostile_pickle_nothing_is_made(tmp_path: Path, capsys, kind):
    content, reason = HOSTILE[kind]
    (tmp_path / ".metadata").write_bytes(content)
    message = refused(capsys, "import", tmp_path, f"--to={tmp_path / 'out'}")
    assert ".metadata is damaged or no metadata" in message
    assert reason in message
    assert "run by a pickle" not in capsys.readouterr().out
    assert not hasattr(dcp.metadata.Metadata, "owned")


def without_a_piece(metadata):
    metadata.state_dict_metadata["x"].chunks.pop()


def with_a_piece_outside(metadata):
    metadata.state_dict_metadata["x"].chunks[0].offsets = torch.Size([1])


def with_a_piece_twice(metadata):
    saved = metadata.state_dict_metadata["x"]
    saved.size = torch.Size([4])
    saved.chunks.append(saved.chunks[0])


def without_a_dtype(metadata):
    metadata.state_dict_metadata["x"].properties.dtype = "float32"


def with_pieces_as_the_size_of_another(metadata):
    saved = metadata.state_dict_metadata["x"]
    metadata.state_dict_metadata["y"] = type(saved)(saved.properties, saved.chunks, saved.chunks)


def with_a_compressed_file(metadata):
    for stored in metadata.storage_data.values():
        stored.transform_descriptors = ["zstd"]


def with_a_file_elsewhere(metadata):
    for stored in metadata.storage_data.values():
        stored.relative_path = "../elsewhere"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_piece, "tensor 'x': 2 of 2 elements are in no box"),
        (with_a_piece_outside, "tensor 'x': Box(offset=(1,), shape=(2,)) is outside the shape (2,)"),
        (with_a_piece_twice, "tensor 'x': Box(offset=(0,), shape=(2,)) and Box(offset=(0,), shape=(2,)) overlap"),
        (without_a_dtype, "tensor 'x' has no dtype"),
        (with_pieces_as_the_size_of_another, "expected a torch.Size, got list"),
        (with_a_compressed_file, "its tensors are transformed, for example compressed"),
        (with_a_file_elsewhere, "names the file '../elsewhere', which is not in the folder"),
    ],
)
def test_metadata_that_would_leave_memory_unwritten_or_leave_the_folder_are_refused(tmp_path, capsys, damage, message):
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    damage(metadata)
    file.write_bytes(pickle.dumps(metadata))
    found = refused(capsys, "import", tmp_path / "dcp", f"--to={tmp_path / 'out'}")
    assert ".metadata is damaged or no metadata" in found
    assert message in found


def test_pieces_that_tensors_share_are_checked_once(monkeypatch):
    checkpoint_metadata = pytest.importorskip("hp_platform_torch.trainer.distributed_checkpoint")
    checked, kinds = [], dcp.metadata
    cover = checkpoint_metadata.cover_exactly
    monkeypatch.setattr(checkpoint_metadata, "cover_exactly", lambda *args: (checked.append(args), cover(*args))[1])
    pieces = [kinds.ChunkStorageMetadata(torch.Size([i]), torch.Size([1])) for i in range(3)]
    properties, sizes = kinds.TensorProperties(dtype=torch.float32), [torch.Size([3]), torch.Size([4])]
    shared = {str(i): kinds.TensorStorageMetadata(properties, sizes[0], pieces) for i in range(9)}
    read = checkpoint_metadata.parse_metadata(pickle.dumps(kinds.Metadata(shared, storage_data={})))
    assert read.state_dict_metadata["8"].chunks == pieces
    assert len(checked) == 1
    shared["x"] = kinds.TensorStorageMetadata(properties, sizes[1], pieces)
    with pytest.raises(ValueError, match="tensor 'x': 1 of 4 elements are in no box"):
        checkpoint_metadata.parse_metadata(pickle.dumps(kinds.Metadata(shared, storage_data={})))


def test_a_tensor_larger_than_its_file_is_refused_before_memory_is_reserved(tmp_path: Path, capsys):
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    file = tmp_path / "dcp" / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    saved = metadata.state_dict_metadata["x"]
    saved.size = saved.chunks[0].sizes = torch.Size([2**40])
    file.write_bytes(pickle.dumps(metadata))
    message = refused(capsys, "import", tmp_path / "dcp", f"--to={tmp_path / 'out'}")
    assert "tensor 'x' cannot be read: no file has all of its bytes" in message
    for stored in metadata.storage_data.values():
        stored.length = 2**43
    file.write_bytes(pickle.dumps(metadata))
    assert "__0_0.distcp has " in refused(capsys, "import", tmp_path / "dcp", f"--to={tmp_path / 'out'}")
    (tmp_path / "dcp" / "__0_0.distcp").unlink()
    assert "__0_0.distcp is missing" in refused(capsys, "import", tmp_path / "dcp", f"--to={tmp_path / 'out'}")


def test_what_does_not_fit_is_refused_by_name(lab: Lab, tmp_path: Path, capsys):
    run = lab.run("run", training__steps=1)
    assert "it has no file .metadata" in refused(capsys, "import", tmp_path, f"--run={run.path}")
    dcp.save({"x": torch.ones(2)}, checkpoint_id=str(tmp_path / "other"), no_dist=True)
    assert "has no hp.state" in refused(capsys, "import", tmp_path / "other", f"--run={run.path}")
    message = refused(capsys, "import", tmp_path / "other", f"--to={tmp_path / 'out'}", "--prefix=model.")
    assert "no tensor has a name that starts with 'model.'; there are x" in message
    folder = exported(lab, run)
    larger = lab.run("larger", training__steps=1, model__hidden_size=24)
    assert "hidden_size is 16 there and 24 here" in refused(capsys, "import", folder, f"--run={larger.path}")
    assert "import needs either --run=RUN or --to=DIR" in refused(capsys, "import", folder)
    assert "--dtype is for models" in refused(
        capsys, "export", run.path, f"--to={tmp_path / 'x'}", "--format=dcp", "--dtype=float16"
    )
    assert "is not empty; choose another --to" in refused(capsys, "export", run.path, f"--to={folder}", "--format=dcp")
    (data,) = folder.glob("*.distcp")
    data.write_bytes(data.read_bytes()[:-2000])
    assert "cannot be read" in refused(capsys, "import", folder, f"--run={run.path}")
