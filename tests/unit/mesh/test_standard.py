"""The functions of `hpcdist.array` take what the array API standard says."""

import inspect
import os
import subprocess
import sys

import numpy as np
import pytest

import hpcdist as dist
import hpcdist.array as xp

strict = pytest.importorskip("array_api_strict")

KEYWORD, VARIABLE = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
OPEN = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def functions():
    """Return the functions of the standard, as the strict namespace has them."""
    rooms = {"": strict, "linalg.": strict.linalg, "fft.": strict.fft}
    for prefix, room in rooms.items():
        for name in getattr(room, "__all__", dir(room)):
            function = getattr(room, name)
            if inspect.isfunction(function) and name not in OWN:
                yield prefix + name, function


OWN = ("set_array_api_strict_flags", "get_array_api_strict_flags", "reset_array_api_strict_flags")
FUNCTIONS = dict(functions())


def ours(name):
    found = xp
    for part in name.split("."):
        found = getattr(found, part)
    return found


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_takes_the_arguments_of_the_standard(name):
    try:
        mine = [*inspect.signature(ours(name)).parameters.values()]
    except ValueError:
        pytest.skip("NumPy's own function, which tells nothing of its arguments")
    wanted = [*inspect.signature(FUNCTIONS[name]).parameters.values()]
    positional = [each for each in wanted if each.kind in OPEN]
    for one, other in zip([each for each in mine if each.kind in OPEN], positional, strict=False):
        if other.kind is not inspect.Parameter.POSITIONAL_ONLY:
            assert one.name == other.name
            assert one.kind is other.kind
        assert (one.default is one.empty) <= (other.default is other.empty)
    assert len([each for each in mine if each.kind in OPEN]) >= len(positional)
    names = {each.name: each for each in mine if each.kind in (KEYWORD, OPEN[1])}
    for other in wanted:
        if other.kind is KEYWORD:
            assert other.name in names
            assert (names[other.name].default is other.empty) == (other.default is other.empty)
    needed = [each.name for each in mine[len(positional) :] if each.default is each.empty]
    variable = [
        each.name for each in mine if each.kind in (VARIABLE, inspect.Parameter.VAR_POSITIONAL)
    ]
    assert {*needed} <= {*variable, *[each.name for each in wanted]}


def test_an_array_has_what_the_standard_says():
    def check():
        a = xp.ones((2, 2))
        members = [name for name in dir(strict.asarray(1)) if not name.startswith("_")]
        special = [name for name in vars(type(strict.asarray(1))) if name.startswith("__")]
        special.remove("__buffer__")  # its own
        mine = {*dir(a)}
        assert [name for name in [*members, *special] if name not in mine] == []

    dist.simulate(1, check)


def test_dtypes_promote_as_the_standard_says():
    names = [*xp.__array_namespace_info__().dtypes()]

    def check():
        for one in names:
            for other in names:
                try:
                    wanted = str(strict.result_type(getattr(strict, one), getattr(strict, other)))
                except TypeError:  # the standard does not say
                    continue
                a, b = (xp.ones(2, dtype=getattr(xp, name)) for name in (one, other))
                wanted = np.dtype(wanted.rpartition(".")[2])
                for found in (xp.result_type(a, b), xp.equal(a, b).dtype and (a * b).dtype):
                    assert found == wanted

    dist.simulate(2, check)


def test_other_code_finds_the_namespace():
    compat = pytest.importorskip("array_api_compat")

    def check():
        a = xp.ones(3)
        assert compat.is_array_api_obj(a)
        assert compat.array_namespace(a, xp.zeros(2)).sum is xp.sum
        assert compat.device(a) == "cpu"
        assert compat.to_device(a, "cpu") is a
        assert compat.size(a) == 3

    dist.simulate(1, check)


def test_the_first_array_starts_hpcdist_with_what_the_settings_say():
    program = """
import numpy as np
import hpcdist as dist, hpcdist.array as xp
a = xp.asarray([[1, 2], [3, 4]])
assert [*a.placements] == [dist.Shard(1)], a
assert np.asarray(a).tolist() == [[1, 2], [3, 4]]
assert dist.get_world_size() == 1
with dist.array_policy("error", placements=[]):
    assert [*xp.zeros(3).placements] == [dist.Replicate()]
"""
    settings = {"HPCDIST_ARRAY_PLACEMENTS": "S-1", "HPCDIST_ARRAY_REPLICATE": "allow"}
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr


def test_new_arrays_are_not_contributions():
    with (
        pytest.raises(dist.UsageError, match="not contributions"),
        dist.array_policy(placements=[dist.Partial()]),
    ):
        pass
