"""`use_var` may be names, pairs, tensors, variables or a schema; what it cannot be is told."""

from types import SimpleNamespace

import numpy as np
import pytest

from hpcdist.data.slots import Slot, slots_of
from hpcdist.errors import UsageError


def variable(name, dtype, shape=(-1, 1), lod_level=0):
    return SimpleNamespace(name=name, dtype=dtype, shape=shape, lod_level=lod_level)


@pytest.mark.parametrize(
    ("entry", "slot"),
    [
        ("x", Slot("x")),
        (("x", "int64"), Slot("x", np.dtype("int64"))),
        (["x", np.float32, 3], Slot("x", np.dtype("float32"), (3,))),
        (("x", "string"), Slot("x", "string")),
        (("x", str), Slot("x", "string")),
        (("x", bytes), Slot("x", "bytes")),
        (("x", None, ()), Slot("x", None, ())),
        (variable("x", "VarType.FP32", (-1, 13)), Slot("x", np.dtype("float32"), (13,))),
        (variable("x", "paddle.int64", lod_level=1), Slot("x", np.dtype("int64"))),
        (variable("x", "torch.float64", (8,)), Slot("x", np.dtype("float64"), ())),
        (variable("x", np.int32, (8, None)), Slot("x", np.dtype("int32"))),
    ],
)
def test_an_entry_names_a_column(entry, slot):
    assert slots_of([entry]) == (slot,)


def test_a_torch_tensor_with_a_name_is_a_column():
    torch = pytest.importorskip("torch")

    class Named(torch.Tensor):
        name = "x"

    tensor = torch.zeros(8, 3, dtype=torch.float32).as_subclass(Named)
    assert slots_of([tensor]) == (Slot("x", np.dtype("float32"), (3,)),)
    with pytest.raises(UsageError, match="has no name"):
        slots_of([torch.zeros(8)])


def test_a_schema_of_arrow_names_its_columns():
    pa = pytest.importorskip("pyarrow")
    schema = pa.schema(
        {
            "a": pa.float64(),
            "b": pa.list_(pa.int32()),
            "c": pa.list_(pa.float32(), 4),
            "d": pa.large_string(),
        }
    )
    assert slots_of(schema) == (
        Slot("a", np.dtype("float64"), ()),
        Slot("b", np.dtype("int32")),
        Slot("c", np.dtype("float32"), (4,)),
        Slot("d", "string", ()),
    )


@pytest.mark.parametrize(
    ("use_var", "said"),
    [
        ("words", "must be a list of names"),
        (3, "must be a list of names"),
        ([3], "each entry of use_var is a name"),
        (["x", ("y", "int64"), "x"], "has 'x' more than once"),
        ([("x", "complex64")], "'x' has dtype complex64"),
        ([("x", "nonsense")], "'x' has dtype nonsense"),
        ([("x", object)], "'x' has dtype"),
        ([("x", "int64", -1)], "the shape of a row of 'x'"),
    ],
)
def test_what_names_no_column_is_a_value_error(use_var, said):
    with pytest.raises(ValueError, match=said) as caught:
        slots_of(use_var)
    assert isinstance(caught.value, UsageError)
