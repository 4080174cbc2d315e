"""`Manifest`: what a checkpoint consists of; the last file to be written, and the first to be read.

It is JSON with a checksum of its own in front. `schema` says what must be in it.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from hpcdist.checkpoint.blocks import BLOCK, CHECKSUM, Piece, checksum
from hpcdist.checkpoint.boxes import Box, run
from hpcdist.checkpoint.formats import Tensor, dtype_of_name, is_tensor_dtype
from hpcdist.checkpoint.nodes import CONTAINERS, Node
from hpcdist.checkpoint.plan import Array
from hpcdist.checkpoint.schema import Wrong, check_contents, check_form
from hpcdist.errors import CheckpointError
from hpcdist.named_tuple import NamedTuple

FORMAT = "hpcdist checkpoint"
VERSION = 3
"""1 did not tell torch's and JAX's arrays from NumPy's; the pieces of 2 were runs of elements."""

LARGEST = 1 << 30
"""Bytes of the largest manifest that is read."""

_START = f'{{"{CHECKSUM}":"%016x","content":'
_BEFORE, _AFTER = len(_START % 0), 1


class Manifest(NamedTuple):
    """`files` are names and bytes; `pieces` of each array have each element of it once."""

    structure: Node
    arrays: dict[str, Array]
    pieces: dict[str, list[Piece]]
    files: list[tuple[str, int]]
    ranks: int
    step: int | None = None

    def itemsize(self, name: str) -> int:
        """Return the bytes of an element of an array."""
        return dtype_of_name(self.arrays[name].dtype).itemsize

    def nbytes(self, name: str) -> int:
        """Return the bytes of an array."""
        return self.arrays[name].size * self.itemsize(name)

    @property
    def total(self) -> int:
        """Bytes of all arrays."""
        return sum(map(self.nbytes, self.arrays))


def entry_of(name: str, box: Box, array: Array) -> Tensor:
    """Return the entry of a box of an array in the header of a data file."""
    nbytes = box.size * dtype_of_name(array.dtype).itemsize
    if box.size == array.size:
        return Tensor(name, array.dtype, array.shape, nbytes)
    return Tensor(f"{name}{box}", array.dtype, box.lengths, nbytes)


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
                    [file, offset, *box.offsets, *box.lengths, base64.b64encode(checksums).decode()]
                    for file, offset, box, checksums in manifest.pieces[name]
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
    whole = text.endswith(b"}") and text[:_BEFORE] == (_START % checksum(content)).encode()
    if not whole:
        raise CheckpointError(
            f"{where} is damaged: it is not what was saved; load another checkpoint"
        )
    try:
        found = json.loads(content, object_pairs_hook=_without_doubles, parse_constant=_refuse)
        _check_version(found, where)
        check_form(found)
        manifest = _manifest(found)
        check_contents(manifest.structure, manifest.arrays, manifest.pieces, manifest.files)
    except (ValueError, RecursionError) as error:
        problem = str(error) if isinstance(error, Wrong) else "it is not proper JSON"
        raise CheckpointError(f"{where} is damaged: {problem}; load another checkpoint") from error
    if found["version"] < 2:
        return manifest._replace(structure=_with_tensors(manifest.structure, manifest.arrays))
    return manifest


def _manifest(found: Any) -> Manifest:
    rows, piece = found["arrays"].items(), _piece if found["version"] > 2 else _old_piece
    return Manifest(
        structure=found["structure"],
        arrays={name: Array(row["dtype"], tuple(row["shape"])) for name, row in rows},
        pieces={name: [piece(each) for each in row["pieces"]] for name, row in rows},
        files=[(name, nbytes) for name, nbytes in found["files"]],
        ranks=found["ranks"],
        step=found["step"],
    )


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise Wrong("it has two entries of one name")
    return found


def _refuse(constant: str) -> Any:
    raise Wrong(f"it has {constant}")


def _check_version(found: Any, where: str) -> None:
    version = found.get("version") if isinstance(found, dict) else None
    if type(version) is int and version > VERSION:
        raise CheckpointError(
            f"{where} is of version {version}, which this hpcdist cannot read; install a newer one"
        )


def _with_tensors(node: Node, arrays: dict[str, Array], inside: bool = False) -> Node:
    """Return a node of version 1 in which the arrays of torch's optimizers are tensors."""
    ((kind, content),) = node.items()
    if kind == "array" and inside and is_tensor_dtype(arrays[content].dtype):
        return {"tensor": content}
    if kind == "dict":
        inside = inside or {"state", "param_groups"} <= {key for key, _ in content}
        return {kind: [[key, _with_tensors(child, arrays, inside)] for key, child in content]}
    if kind in CONTAINERS:
        return {kind: [_with_tensors(child, arrays, inside) for child in content]}
    return node


def _piece(row: list[Any]) -> Piece:
    """Return a piece: its offsets and lengths stand between its place and its checksums."""
    behind = len(row) // 2 + 1
    box = Box(tuple(row[2:behind]), tuple(row[behind:-1]))
    return Piece(row[0], row[1], box, base64.b64decode(row[-1]))


def _old_piece(row: list[Any]) -> Piece:
    """Return a piece of versions 1 and 2: from an element to before another one."""
    if len(row) != 5:
        raise Wrong(f"a piece must be a list of 5, not {row!r:.80}")
    return Piece(row[0], row[1], run(row[2], row[3]), base64.b64decode(row[-1]))
