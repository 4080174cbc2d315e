"""Calls, their words and their fingerprints."""

import subprocess
import sys

import numpy as np
import pytest

from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.call import (
    UNEVEN,
    Barrier,
    Distribution,
    Gathering,
    Objects,
    Reduction,
    Refusal,
    label,
    making,
    shape_detail,
)
from hpcdist.transport.call.kinds import LOOSE, Kind
from hpcdist.transport.call.reduction import ReduceOp, rule_for

F4, F8 = dtype_row(np.dtype("f4")), dtype_row(np.dtype("f8"))
X = np.ones(6)
CALL = Reduction(Kind.ALL_REDUCE, None, X, F4, (2, 3), 0, ReduceOp.SUM, rule_for(ReduceOp.SUM, F4))
CALLS = [
    CALL,
    Distribution(Kind.SCATTER, None, X, F4, (2, 3), 0),
    Gathering(Kind.ALL_GATHER, X, None, F4, (2, 3), 0),
]

# ---- fingerprints


@pytest.mark.parametrize(
    "change",
    [
        {"kind": Kind.REDUCE},
        {"dtype": F8},
        {"shape": (3, 2)},
        {"shape": (6,)},
        {"shape": ()},
        {"op": ReduceOp.MAX},
        {"root": 1},
    ],
)
def test_calls_that_differ_have_fingerprints_that_differ(change):
    assert CALL._replace(**change).fingerprint() != CALL.fingerprint()


def test_no_two_families_have_a_fingerprint_in_common():
    calls = [
        *CALLS,
        Barrier(),
        Objects(Kind.ALL_GATHER_OBJECT, ()),
        Objects(Kind.ALL_GATHER_OBJECT, (), words="told"),
        Objects(Kind.ALL_GATHER_OBJECT, (), words="shared"),
        Refusal(Kind.SCAN, 0, KeyError),
    ]
    calls += [making(each, range(2)) for each in (*CALLS, Barrier())]
    calls += [each._replace(device=object()) for each in CALLS]
    assert len({call.fingerprint() for call in calls}) == len(calls)


@pytest.mark.parametrize("device", [None, object()])
def test_dtypes_have_fingerprints_that_differ_on_devices_too(device):
    rows = [dtype_row(np.dtype(name)) for name in ("?", "i1", "i2", "u1", "f4", "c8", "S3")]
    for call in CALLS:
        found = {call._replace(dtype=row, device=device).fingerprint() for row in rows}
        assert len(found) == len(rows)


def test_what_each_rank_may_choose_is_not_in_the_fingerprint():
    for call in CALLS:
        same = call._replace(send=np.ones(1), recv=np.ones(2), detail=9, finish=print)
        assert same.fingerprint() == call.fingerprint()
        is_loose = call._replace(shape=(99,)).fingerprint() == call.fingerprint()
        assert is_loose == (call.kind in LOOSE)
    for kind in LOOSE:
        loose = Objects(kind, ())
        assert loose.fingerprint() == loose._replace(shape=(99,)).fingerprint()


def test_fingerprints_are_the_same_in_every_process():
    script = """
import numpy as np
from hpcdist.arrays.dtypes import dtype_row
from hpcdist.transport.call.call import Barrier, Distribution, Objects, Reduction
from hpcdist.transport.call.call import making, shape_detail
from hpcdist.transport.call.kinds import Kind
from hpcdist.transport.call.reduction import ReduceOp
x = np.ones(3)
for dtype in map(np.dtype, ("f4", "S5", "M8[s]", [("a", "i4"), ("b", "f8", (2,))])):
    row = dtype_row(dtype)
    print(Distribution(Kind.SCATTER, None, x, row, (3, 0), 2).fingerprint())
    print(Reduction(Kind.SCAN, None, x, row, (3, 0), 2, ReduceOp.AVG, None).fingerprint())
print(Barrier().fingerprint(), Objects(Kind.BROADCAST_OBJECT_LIST, (), (2,), 1).fingerprint())
print(Objects(Kind.GATHER_OBJECT, (), words="told").fingerprint())
print(making(Barrier(), [0]).fingerprint())
print(shape_detail((1, 2)), shape_detail(()))
"""
    told = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "random")
    }
    assert len(told) == 1


def test_fingerprints_and_details_fit_into_signed_integers():
    for shape in [(), (0,), (1,), (2**40, 3), tuple(range(10))]:
        assert 0 <= CALL._replace(shape=shape).fingerprint() < 2**62
        assert UNEVEN < shape_detail(shape) < 2**63 - 1


def test_a_call_says_in_words_what_it_is():
    assert label(CALL, [0, 1]) == "all_reduce(shape (2, 3), float32, SUM)"
    broadcast = Distribution(Kind.BROADCAST, None, X, F8, (4,), 1)
    assert label(broadcast, [3, 7]) == "broadcast(shape (4,), float64, root 7)"
    assert label(Barrier(), [0]) == "barrier()"
    assert "2 objects" in label(Objects(Kind.BROADCAST_OBJECT_LIST, (), (2,)), [0])
