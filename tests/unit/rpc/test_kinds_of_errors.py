"""What a call raised is rebuilt as what it was, whatever Python keeps in it."""

import pickle
import subprocess
import sys

import pytest

from hpcdist.errors import CollectiveTimeout, RemoteError
from hpcdist.rpc import outcome


class WithKeywords(Exception):
    def __init__(self, name, *, code=2):
        super().__init__(name)
        self.code = code


class WithSlots(ValueError):
    __slots__ = ("place",)

    def __init__(self, place):
        super().__init__(place)
        self.place = place


class WithWords(Exception):
    def __init__(self, code, name):
        super().__init__(f"{code}: {name}")
        self.code, self.name = code, name


ERRORS = [
    KeyError("key"),
    OSError(2, "no such file"),
    OSError(13, "not allowed", "file.txt"),
    OSError("words only"),
    ConnectionResetError(104, "reset"),
    TimeoutError("late"),
    MemoryError("too much"),
    StopIteration(3),
    UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
    ImportError("no module", name="nothing"),
    AttributeError("no attribute"),
    SyntaxError("wrong", ("file.py", 1, 2, "text")),
    subprocess.CalledProcessError(3, ["false"]),
    WithKeywords("name", code=5),
    WithSlots(7),
    WithWords(7, "name"),
    CollectiveTimeout("nobody came", (1, 2)),
]
FIELDS = (
    "args",
    "errno",
    "filename",
    "value",
    "object",
    "name",
    "lineno",
    "cmd",
    "code",
    "place",
    "missing",
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: f"{type(error).__name__}-{error}")
def test_an_error_comes_back_as_it_was(error):
    failed = outcome.describe(error, 1, "work on rank 1")
    rebuilt = outcome.rebuild(failed)
    for each in (rebuilt, pickle.loads(pickle.dumps(rebuilt))):
        assert isinstance(each, RemoteError)
        assert isinstance(each, type(error))
        assert str(each) == str(error)
        assert each.rank == 1
        for name in FIELDS:
            assert getattr(each, name, None) == getattr(error, name, None)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="a group of exceptions is of Python 3.11")
def test_a_group_of_errors_comes_back_with_its_members():
    group = ExceptionGroup("two", [ValueError(1), KeyError(2)])  # noqa: F821
    rebuilt = outcome.rebuild(outcome.describe(group, 1, "work on rank 1"))
    assert [type(each) for each in rebuilt.exceptions] == [ValueError, KeyError]


def test_a_traceback_begins_with_what_was_called():
    def work():
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong") as caught:
        work()
    text = outcome.describe(caught.value, 1, "work on rank 1").text
    assert "in work" in text
    assert "hpcdist/rpc" not in text
