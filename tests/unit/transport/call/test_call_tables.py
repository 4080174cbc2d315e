"""Tables of operations: what has no row is found when they are built, and not as a hang."""

import re
import subprocess
import sys

import pytest
from tiers import first_of

from hpcdist.transport.call.kinds import ARRAYS, COLLECTIVES, OPTIONAL, Family, Kind, table_for

ROWS = {kind: kind.name for kind in Kind if kind.family in ARRAYS}


def test_a_table_with_a_row_for_each_operation_is_what_was_given():
    assert table_for("toy", ARRAYS, ROWS) == ROWS
    some = {kind: name for kind, name in ROWS.items() if kind is not Kind.SCAN}
    assert table_for("toy", ARRAYS, some, without=[Kind.SCAN]) == some


@pytest.mark.parametrize("kind", sorted(ROWS))
def test_an_operation_without_a_row_is_named(kind):
    rows = {each: name for each, name in ROWS.items() if each is not kind}
    with pytest.raises(TypeError, match=rf"table toy.* lacks {kind.name}:"):
        table_for("toy", ARRAYS, rows)


def test_a_row_that_is_of_no_use_is_named():
    with pytest.raises(TypeError, match=r"must not have BARRIER, SEND"):
        table_for("toy", ARRAYS, {**ROWS, Kind.SEND: "", Kind.BARRIER: ""})
    rows = {kind: name for kind, name in ROWS.items() if kind is not Kind.SCATTER}
    with pytest.raises(TypeError, match=r"lacks SCATTER and must not have SCAN"):
        table_for("toy", ARRAYS, rows, without=[Kind.SCAN])


def test_every_operation_has_a_family_and_is_a_collective_or_a_message():
    for kind in Kind:
        collective = kind.family in COLLECTIVES | OPTIONAL
        assert collective != (kind.family is Family.MESSAGE)


def test_a_table_of_all_collectives_may_leave_out_what_is_optional():
    rows = {kind: kind.name for kind in Kind if kind.family in COLLECTIVES}
    assert Kind.EXCHANGE not in table_for("toy", COLLECTIVES, rows)


TABLES = {
    "transport.shm.collectives": "REDUCTION",
    "transport.mpi.collectives": "REDUCTION",
    "transport.mpi.objects": "OBJECTS",
    "transport.mpi.persistent": "REDUCTION",
    "transport.threads.collectives": "REDUCTION",
    "transport.device.staged.plan": "GATHERING",
    "transport.device.nccl.backend": "GATHERING",
    "transport.call.runs": "GATHERING",
}


@pytest.mark.parametrize("module", first_of(TABLES))
def test_a_new_operation_ends_the_import_of_what_has_no_row_for_it(module):
    """The file of the operations is changed as by somebody who adds one, wherever he does."""
    program = f"""
import sys
from importlib import import_module, util
spec = util.find_spec("hpcdist.transport.call.kinds")
source = spec.loader.get_source(spec.name)
last = "EXCHANGE = 21, Family.EXCHANGE\\n"
assert last in source
source = source.replace(last, last + "    NEW = 22, Family.{TABLES[module]}\\n")
kinds = util.module_from_spec(spec)
for name in [name for name in sys.modules if name.startswith("hpcdist.")]:
    del sys.modules[name]
sys.modules[spec.name] = kinds
exec(compile(source, spec.origin, "exec"), vars(kinds))
assert kinds.Kind.NEW.family is kinds.Family.{TABLES[module]}
import_module("hpcdist.{module}")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert re.search(r"TypeError: the table .* lacks NEW:", done.stderr), done.stderr
