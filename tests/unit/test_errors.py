"""Errors are what programs catch."""

import pickle

import hpcdist as dist


def test_errors_are_what_python_programs_expect_and_survive_pickling():
    assert issubclass(dist.UsageError, ValueError)
    assert issubclass(dist.CollectiveTimeout, TimeoutError)
    assert issubclass(dist.NotInGroupWarning, UserWarning)
    for kind in (dist.UsageError, dist.MismatchError, dist.TransportError):
        assert issubclass(kind, dist.HpcdistError)
        assert issubclass(kind, RuntimeError)
    timeout = pickle.loads(pickle.dumps(dist.CollectiveTimeout("late", (1, 2))))
    assert (str(timeout), timeout.missing) == ("late", (1, 2))
    remote = pickle.loads(pickle.dumps(dist.RemoteError("failed", 3, "its traceback")))
    assert (str(remote), remote.rank, remote.traceback) == ("failed", 3, "its traceback")
