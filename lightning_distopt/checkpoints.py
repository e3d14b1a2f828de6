"""What each rank keeps beside a checkpoint: its own replica, optimizer state and algorithm state.

The checkpoint itself is Lightning's, one file that loads anywhere. Where ranks hold what it cannot hold, each rank
writes a part of its own, and reads it when the run goes on; no rank ever sees another rank's::

    checkpoints/epoch=3.ckpt                                  the mean of the replicas, and the id of its parts
    checkpoints/rank_states/epoch=3.ckpt/5d0c17aa-rank-0-of-2.pt
    checkpoints/rank_states/epoch=3.ckpt/5d0c17aa-rank-1-of-2.pt

The id changes with every save. So a save that dies half-way, over an older checkpoint of the same name, leaves that one
with all its parts. The folder is not named after the checkpoint at the first level: ``ckpt_path="last"`` takes whatever
has "last" in its name for a checkpoint.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from fsspec.core import url_to_fs

from lightning_distopt.collectives import DistributedRuntimeException, Group

__all__ = ["KEY", "agree", "load_part", "new_id", "part_path", "remove_parts", "save_part"]

KEY = "lightning_distopt"  # of the entry in the checkpoint that says which parts belong to it
_FOLDER = "rank_states"
_NAME = re.compile(r"(?P<id>[0-9a-f]{8})-rank-(?P<rank>\d+)-of-(?P<size>\d+)\.pt(\.tmp)?")


def new_id() -> str:
    """Return an id for the parts of one save. Leaves all random generators alone."""
    return secrets.token_hex(4)


def part_path(checkpoint: str | Path, part_id: str, rank: int, size: int) -> str:
    """Return where a rank's part of a checkpoint lies."""
    return f"{_folder_of(checkpoint)}/{part_id}-rank-{rank}-of-{size}.pt"


def save_part(part: dict[str, Any], checkpoint: str | Path, part_id: str, rank: int, size: int) -> None:
    """Write one rank's part: as a whole or, after an error, not at all.

    Args:
        part: tensors, numbers, strings, and lists and dictionaries of them.
        checkpoint: path of the checkpoint, which need not exist yet.
        part_id: of this save.
        rank: whose part.
        size: number of ranks.
    """
    path = part_path(checkpoint, part_id, rank, size)
    files, path = url_to_fs(path)
    files.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
    try:
        with files.open(f"{path}.tmp", "wb") as file:
            torch.save({**part, "id": part_id}, file)
        files.mv(f"{path}.tmp", path)
    except BaseException:
        with contextlib.suppress(OSError):
            files.rm_file(f"{path}.tmp")
        raise


def load_part(checkpoint: str | Path, part_id: str, rank: int, size: int, weights_only: bool = True) -> dict[str, Any]:
    """Read what :func:`save_part` wrote.

    Args:
        checkpoint: path of the checkpoint.
        part_id: the id that its parts have.
        rank: whose part.
        size: number of ranks.
        weights_only: refuse anything but tensors and plain values, as ``torch.load`` does.

    Raises:
        DistributedRuntimeException: the part is missing, incomplete or another one; names it.
    """
    path = part_path(checkpoint, part_id, rank, size)
    files, local = url_to_fs(path)
    if not files.exists(local):
        raise DistributedRuntimeException(f"{path} is missing")
    try:
        with files.open(local, "rb") as file:
            part: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=weights_only)
        found = part["id"]
    except Exception as error:  # what torch raises for a damaged file is not documented
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DistributedRuntimeException(f"{path} is incomplete or damaged, or cannot be read: {reason}") from error
    if found != part_id:
        raise DistributedRuntimeException(f"{path} belongs to another checkpoint")
    return part


def remove_parts(checkpoint: str | Path, rank: int, size: int, keep: str = "", only: str = "") -> None:
    """Remove this rank's parts of a checkpoint; on rank 0 also those of ranks that this run does not have.

    Args:
        checkpoint: path of the checkpoint.
        rank: this rank. Each removes its own, which may lie on its own disk.
        size: number of ranks.
        keep: id of the parts that stay.
        only: id of the parts that go; by default all the others.
    """
    files, folder = url_to_fs(_folder_of(checkpoint))
    with contextlib.suppress(OSError, NotImplementedError):
        for path in files.ls(folder, detail=False):
            found = _NAME.fullmatch(PurePosixPath(path).name)
            if found is None or found["id"] == keep or (only and found["id"] != only):
                continue
            if int(found["rank"]) == rank or (rank == 0 and int(found["rank"]) >= size):
                with contextlib.suppress(FileNotFoundError):
                    files.rm_file(path)
        # The last rank to come finds them empty.
        files.rmdir(folder)
        files.rmdir(str(PurePosixPath(folder).parent))


def agree(error: BaseException | None, what: str, group: Group, undo: Callable[[], None] | None = None) -> None:
    """Let every rank know whether all succeeded. Collective.

    Args:
        error: what went wrong on this rank, if anything.
        what: what was tried, for the message: "checkpoint x was not saved".
        group: all ranks.
        undo: called on every rank before raising, where any rank had an error. Not called where one was lost: then
            nobody knows what the others have done.

    Raises:
        DistributedRuntimeException: on every rank, if any rank had an error.
    """
    texts = group.gather_objects(None if error is None else f"{type(error).__name__}: {error}")
    failed = [f"rank {rank}: {text}" for rank, text in enumerate(texts) if text is not None]
    if failed:
        if undo is not None:
            undo()
        raise DistributedRuntimeException(f"{what}. {'; '.join(failed)}") from error


def _folder_of(checkpoint: str | Path) -> str:
    path = os.fspath(checkpoint)
    if os.path.islink(path):  # ModelCheckpoint(save_last="link")
        path = os.path.realpath(path)
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{_FOLDER}/{name}"
