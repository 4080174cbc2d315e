"""`predict`: what collectives and training steps take on more ranks than were measured. Pure.

Read `costs` (what a collective costs), `model` (the terms of its time), `fitting` (their seconds,
from rows of the benchmark) and this.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hpcdist.bench.fitting import fit
from hpcdist.bench.model import HDR, Model, Network
from hpcdist.errors import UsageError

__all__ = ["Model", "Network", "explain", "fit", "predict", "step_time"]

_BUCKET = 25 << 20


def predict(
    models: Iterable[Model],
    ranks: Sequence[int],
    sizes: Sequence[int],
    *,
    ranks_per_node: int | None = None,
    network: Network = HDR,
) -> list[dict[str, Any]]:
    """Return what each model says for each number of ranks and each size.

    Args:
        models: from `fit`.
        ranks: numbers of ranks.
        sizes: bytes that each rank hands in, as in the rows.
        ranks_per_node: ranks that share a node; None for as many as were measured.
        network: for models of which only one node was measured.

    Returns:
        Rows with ``case``, ``library``, ``dtype``, ``memory``, ``ranks``, ``nodes``, ``nbytes``
        (None for a barrier), ``seconds``, and ``assumed``: what is not measured, in words.

    Raises:
        UsageError: a number of ranks or bytes, or the network, is impossible.

    """
    _check_request(ranks, sizes, ranks_per_node, network)
    found = []
    for model in models:
        local = model.local if ranks_per_node is None else ranks_per_node
        for size in ranks:
            nodes, here = -(-size // local), min(size, local)
            for nbytes in sizes if model.sizes else (0,):
                found.append(
                    {
                        "case": model.case,
                        "library": model.library,
                        "dtype": model.dtype,
                        "memory": model.memory,
                        "ranks": size,
                        "nodes": nodes,
                        "nbytes": nbytes if model.sizes else None,
                        "seconds": model.time_of(here, nodes, nbytes, network),
                        "assumed": "; ".join(_assumed(model, here, nodes, nbytes, network)),
                    }
                )
    return found


def _check_request(
    ranks: Sequence[int], sizes: Sequence[int], ranks_per_node: int | None, network: Network
) -> None:
    wrong = [each for each in (*ranks, ranks_per_node) if each is not None and each < 1]
    wrong += [each for each in sizes if each < 0]
    if wrong or not ranks or not sizes:
        raise UsageError(
            f"a prediction needs ranks and ranks per node of 1 or more and sizes of 0 or more, got "
            f"ranks {list(ranks)}, sizes {list(sizes)}, ranks per node {ranks_per_node}"
        )
    if network.alpha_s < 0 or network.bytes_per_s <= 0:
        raise UsageError(f"a network has a latency and a bandwidth above 0, got {network!r}")


def _assumed(model: Model, local: int, nodes: int, nbytes: int, network: Network) -> Iterator[str]:
    if nodes > 1 and model.nodes == 1 and model.travels(local, nodes):
        yield str(network)
    if nodes > model.nodes > 1:
        yield f"a network as between {model.nodes} nodes"
    if local > model.local:
        yield f"{local} ranks on a node as {model.local}"
    if model.sizes is not None and not model.sizes[0] <= nbytes <= model.sizes[1]:
        yield f"sizes beyond {model.sizes[0]} to {model.sizes[1]} bytes"


def explain(models: Iterable[Model]) -> list[dict[str, Any]]:
    """Return the models in numbers for people.

    Returns:
        Rows with ``case``, ``library``, ``dtype``, ``memory``, ``alpha_us`` (a round between
        the ranks of a node), ``GB_per_s`` (of a rank's large arrays, all ranks of the node at
        it), ``residual`` (median relative error) and ``points``; and ``network``, in words, where
        it was measured.

    """
    return [
        {
            "case": model.case,
            "library": model.library,
            "dtype": model.dtype,
            "memory": model.memory,
            "alpha_us": 1e6 * (model.seconds.get("rounds") or model.seconds.get("call", 0.0)),
            "GB_per_s": _bandwidth(model),
            "residual": model.residual,
            "points": model.points,
            "network": str(model.network()) if model.nodes > 1 else None,
        }
        for model in models
    ]


def _bandwidth(model: Model) -> float | None:
    """Return GB/s of one rank for its last byte; None where bytes cost nothing."""
    seconds = model.seconds
    per_byte = model.local * (seconds.get("shared", 0.0) + seconds.get("beyond", 0.0))
    per_byte += seconds.get("core", 0.0)
    return 1e-9 / per_byte if per_byte else None


def step_time(
    models: Iterable[Model],
    compute_s: float,
    gradient_bytes: int,
    ranks: int,
    hidden: float = 0.0,
    *,
    ranks_per_node: int | None = None,
    network: Network = HDR,
    bucket_bytes: int = _BUCKET,
) -> float:
    """Return the seconds of a step of `DataParallel` under weak scaling.

    Every rank computes for `compute_s`, and the gradients are averaged in buckets.

    Args:
        models: from `fit`; that of hpcdist's ``all_reduce`` is used, of float32 if it is there.
        compute_s: seconds of the step without communication.
        gradient_bytes: bytes of all gradients of one rank.
        ranks: number of ranks.
        hidden: share of the communication that the backward pass hides, 0 to 1, as
            `DataParallel.comm_stats` tells; never more than it computes.
        ranks_per_node: as in `predict`.
        network: as in `predict`.
        bucket_bytes: of `DataParallel`, by default its 25 MiB.

    Raises:
        UsageError: there is no such model, or a number is impossible.

    """
    own = [each for each in models if (each.case, each.library) == ("all_reduce", "hpcdist")]
    if not own:
        raise UsageError("a step needs the model of all_reduce of hpcdist, and there is none")
    if not (0 <= hidden <= 1 and compute_s >= 0 and gradient_bytes >= 0 and bucket_bytes > 0):
        raise UsageError(
            f"a step has compute_s={compute_s}, gradient_bytes={gradient_bytes}, hidden={hidden}, "
            f"bucket_bytes={bucket_bytes}: seconds and bytes are 0 or more, hidden is a share"
        )
    model = min(own, key=lambda each: (each.dtype != "float32", each.memory != "ordinary"))
    full, rest = divmod(gradient_bytes, bucket_bytes)
    buckets = [bucket_bytes] * bool(full) + [rest] * bool(rest)
    if not buckets or ranks == 1:
        return compute_s
    told = predict([model], [ranks], buckets, ranks_per_node=ranks_per_node, network=network)
    seconds: dict[int, float] = {row["nbytes"]: row["seconds"] for row in told}
    sent_s = full * seconds.get(bucket_bytes, 0.0) + seconds.get(rest, 0.0)
    return compute_s + max(sent_s * (1 - hidden), sent_s - compute_s)
