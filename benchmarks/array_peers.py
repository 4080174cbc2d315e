"""What other libraries of arrays across ranks do for the cases of `arrays.py`.

Each has a function that returns a table: by the name of a case what makes, of the parts that this
rank has, the call to be timed. Without the library, or where it does not do a case, the entry is
missing. All start their ranks as mpi4py has them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from hpcdist.bench.interleaved import Call
from hpcdist.bench.libraries.torch import start_gloo

Peer = Mapping[str, Callable[..., Call]]


def dtensor(comm: Any) -> Peer:
    """Return what torch's DTensor does, over gloo."""
    if start_gloo(comm) is None:
        raise ImportError("torch is not installed")
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (comm.size,))

    def placed(x: Any, placement: Any) -> Any:
        return DTensor.from_local(torch.from_numpy(x), mesh, [placement], run_check=False)

    def cut(x: Any) -> Any:
        return placed(x, Shard(0))

    def moved(x: Any, source: Any, target: Any) -> Call:
        return partial(placed(x, source).redistribute, placements=[target])

    def chain(x: Any, y: Any) -> Call:
        a, b = cut(x), cut(y)
        return lambda: (a * 2.0 + b) * a - b / 3.0

    def added(fresh: Callable[[], Any]) -> Call:
        def call() -> Any:
            a = cut(fresh())
            return a + a

        return call

    def with_vector(fresh: Callable[[], Any], vector: Any) -> Call:
        row = placed(vector, Replicate())
        return lambda: cut(fresh()) + row

    def summed(x: Any) -> Call:
        a = cut(x)
        return lambda: a.sum(0).redistribute(placements=[Replicate()])

    return {
        "a + b": lambda x, y: partial(operator.add, cut(x), cut(y)),
        "np.exp(a)": lambda x: cut(x).exp,
        "a.sum(1)": lambda x: partial(cut(x).sum, 1),
        "a + b of a new shape": added,
        "y + vector of a new shape": with_vector,
        "a.sum(1) of a new shape": lambda fresh: lambda: cut(fresh()).sum(1),
        "(a * 2 + b) * a - b / 3": chain,
        "a.sum(0)": summed,
        "S0 -> S1": lambda x: moved(x, Shard(0), Shard(1)),
        "S0 -> R": lambda x: moved(x, Shard(0), Replicate()),
        "R -> S0": lambda x: moved(x, Replicate(), Shard(0)),
        "P -> S0": lambda x: moved(x, Partial(), Shard(0)),
        "a @ b": lambda x, y: partial(operator.matmul, cut(x), cut(y)),
    }


def heat(comm: Any) -> Peer:
    """Return what Heat does."""
    import heat as ht
    import torch

    torch.set_num_threads(1)

    def cut(x: Any) -> Any:
        return ht.array(torch.from_numpy(x), is_split=0)

    def chain(x: Any, y: Any) -> Call:
        a, b = cut(x), cut(y)
        return lambda: (a * 2.0 + b) * a - b / 3.0

    def added(fresh: Callable[[], Any]) -> Call:
        def call() -> Any:
            a = cut(fresh())
            return a + a

        return call

    def with_vector(fresh: Callable[[], Any], vector: Any) -> Call:
        row = ht.array(torch.from_numpy(vector))
        return lambda: cut(fresh()) + row

    return {
        "a + b": lambda x, y: partial(operator.add, cut(x), cut(y)),
        "np.exp(a)": lambda x: partial(ht.exp, cut(x)),
        "a.sum(1)": lambda x: partial(ht.sum, cut(x), axis=1),
        "a.sum()": lambda x: partial(ht.sum, cut(x)),
        "a + b of a new shape": added,
        "y + vector of a new shape": with_vector,
        "a.sum(1) of a new shape": lambda fresh: lambda: ht.sum(cut(fresh()), axis=1),
        "(a * 2 + b) * a - b / 3": chain,
        "a.sum(0)": lambda x: partial(ht.sum, cut(x), axis=0),
        "a.std()": lambda x: partial(ht.std, cut(x)),
        "S0 -> S1": lambda x: partial(ht.resplit, cut(x), 1),
        "S0 -> R": lambda x: partial(ht.resplit, cut(x), None),
        "R -> S0": lambda x: partial(ht.resplit, ht.array(torch.from_numpy(x)), 0),
        "a @ b": lambda x, y: partial(ht.matmul, cut(x), cut(y)),
        "np.sort(a)": lambda x: partial(ht.sort, cut(x)),
        "fft2(z)": lambda z: partial(ht.fft.fft2, cut(z)),
    }


def mpi4py_fft(comm: Any) -> Peer:
    """Return what mpi4py-fft does."""
    from mpi4py_fft import PFFT, newDistArray
    from mpi4py_fft.pencil import Pencil, Subcomm

    def turned(x: Any) -> Call:
        shape = x.shape[0] * comm.size, x.shape[1]
        rows = Pencil(Subcomm(comm, [0, 1]), shape, axis=1)
        columns = rows.pencil(0)
        out = np.empty(columns.subshape, x.dtype)
        return partial(rows.transfer(columns, x.dtype).forward, x, out)

    def transformed(z: Any) -> Call:
        plan = PFFT(comm, (z.shape[0] * comm.size, z.shape[1]), axes=(0, 1), dtype=z.dtype)
        given, out = newDistArray(plan, False), newDistArray(plan, True)
        given[...] = z
        return partial(plan.forward, given, out, normalize=False)

    return {"S0 -> S1": turned, "fft2(z)": transformed}


PEERS: dict[str, Callable[[Any], Peer]] = {
    "DTensor": dtensor,
    "Heat": heat,
    "mpi4py-fft": mpi4py_fft,
}


def peers_here(comm: Any) -> tuple[dict[str, Peer], list[str]]:
    """Return the libraries that all ranks have, and why others are left out. Collective."""
    found: dict[str, Peer] = {}
    missing = []
    for name, start in PEERS.items():
        peer, why = _attempt(comm, partial(start, comm))
        if peer is None:
            missing.append(f"{name} is left out: {why}")
        else:
            found[name] = peer
    return found, missing


def calls_of(
    comm: Any, peers: Mapping[str, Peer], case: str, *given: Any
) -> tuple[dict[str, Call], list[str]]:
    """Return what calls a case of each library, and why some cannot. Collective."""
    found: dict[str, Call] = {}
    missing = []
    for name, peer in peers.items():
        if case not in peer:
            continue
        call, why = _attempt(comm, lambda peer=peer: _made(peer[case], given))
        if call is None:
            missing.append(f"{name} does not do {case}: {why}")
        else:
            found[name] = call
    return found, missing


def _made(make: Callable[..., Call], given: Any) -> Call:
    call = make(*given)
    call()
    return call


def _attempt(comm: Any, make: Callable[[], Any]) -> tuple[Any, str]:
    """Return what is made, or None on all ranks and why one of them cannot."""
    made, why = None, ""
    try:
        made = make()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().splitlines()[0][:100]
    reasons = [each for each in comm.allgather(why) if each]
    return (None, reasons[0]) if reasons else (made, "")
