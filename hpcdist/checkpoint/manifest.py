"""`Manifest`: what a checkpoint consists of; the last file to be written, and the first to be read.

It is JSON with a checksum of its own in front.
"""

from __future__ import annotations

import base64
import json
from typing import Any, NamedTuple

from hpcdist.checkpoint.blocks import BLOCK, CHECKSUM, Piece, checksum
from hpcdist.checkpoint.formats import dtype_of_name
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.state import Node
from hpcdist.errors import CheckpointError

FORMAT = "hpcdist checkpoint"
VERSION = 1

_START = f'{{"{CHECKSUM}":"%016x","content":'
_BEFORE, _AFTER = len(_START % 0), 1


class Manifest(NamedTuple):
    """`files` are names and bytes; `pieces` of each array are in order and cover it."""

    structure: Node
    arrays: dict[str, Array]
    pieces: dict[str, list[Piece]]
    files: list[tuple[str, int]]
    ranks: int
    step: int | None = None

    def nbytes(self, name: str) -> int:
        """Return the bytes of an array."""
        array = self.arrays[name]
        return array.size * dtype_of_name(array.dtype).itemsize

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(map(self.nbytes, self.arrays))


def to_json(manifest: Manifest) -> bytes:
    """Return the contents of the file."""
    content = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "block": BLOCK,
        "files": manifest.files,
        "structure": manifest.structure,
        "arrays": {
            name: {
                "dtype": array.dtype,
                "shape": array.shape,
                "pieces": [
                    [*piece[:-1], base64.b64encode(piece.checksums).decode()]
                    for piece in manifest.pieces[name]
                ],
            }
            for name, array in manifest.arrays.items()
        },
    }
    text = json.dumps(content, separators=(",", ":"), allow_nan=False).encode()
    return (_START % checksum(text)).encode() + text + b"}"


def from_json(text: bytes, where: str) -> Manifest:
    """Read what `to_json` has written; `where` it was found is for messages.

    Raises:
        CheckpointError: it is not the manifest of a checkpoint, or damaged, or too new.

    """
    content = text[_BEFORE:-_AFTER]
    if not text.startswith(_START[:10].encode()) or f'"{FORMAT}"'.encode() not in content[:60]:
        raise CheckpointError(
            f"{where} does not belong to a checkpoint of hpcdist; name the folder given to save"
        )
    if text[:_BEFORE] != (_START % checksum(content)).encode():
        raise CheckpointError(
            f"{where} is damaged: it is not what was saved; load another checkpoint"
        )
    found: dict[str, Any] = json.loads(content)
    if found["version"] > VERSION or found["block"] != BLOCK:
        raise CheckpointError(
            f"{where} is of version {found['version']}, which this hpcdist cannot read; install a "
            "newer one"
        )
    rows = found["arrays"].items()
    return Manifest(
        structure=found["structure"],
        arrays={name: Array(row["dtype"], tuple(row["shape"])) for name, row in rows},
        pieces={name: [_piece(*each) for each in row["pieces"]] for name, row in rows},
        files=[(name, nbytes) for name, nbytes in found["files"]],
        ranks=found["ranks"],
        step=found["step"],
    )


def _piece(file: int, offset: int, start: int, stop: int, checksums: str) -> Piece:
    return Piece(file, offset, start, stop, base64.b64decode(checksums))
