"""Arrays of every library and layout become buffers, or are refused with the remedy."""

import array
import ctypes
import sys

import ml_dtypes
import numpy as np
import pytest

import hpcdist as dist
from hpcdist.arrays.buffer import as_buffer, as_output, carried, ordinary, typed, wrap_like
from hpcdist.arrays.dtypes import BYTES_CODE, dtype_row, name_of_code
from hpcdist.arrays.packing import adjacent_view, join, scatter_into

NAMED = [
    "bool",
    *[f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)],
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
LONG = [np.dtype(each).name for each in ("longdouble", "clongdouble")]
ML = ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
OTHERS = [
    "S5",
    "U3",
    "V7",
    np.dtype([("a", "i4"), ("b", "f8", (2,))]),
    np.dtype([("a", "u1"), ("b", "f8")], align=True),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [4, 0], "itemsize": 12}),
    np.dtype({"names": ["a", "b"], "formats": ["i4", "i2"], "offsets": [0, 2], "itemsize": 4}),
    np.dtype([("a", [("b", "i2"), ("c", "S3")])]),
    ml_dtypes.int4,
    ml_dtypes.float8_e3m4,
]


# ---- the dtype table


def test_every_dtype_with_a_row_has_a_code_of_its_own_that_names_it():
    rows = [dtype_row(np.dtype(name)) for name in NAMED]
    rows += [dtype_row(np.dtype(getattr(ml_dtypes, name))) for name in ML]
    rows += [dtype_row(np.dtype(name)) for name in LONG]
    assert len({row.code for row in rows}) == len(rows)
    assert all(row.code < BYTES_CODE for row in rows)
    assert [name_of_code(row.code) for row in rows] == NAMED + ML + LONG


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_every_other_fixed_size_dtype_travels_as_bytes(dtype):
    row = dtype_row(np.dtype(dtype))
    assert row.family == "bytes"
    assert row.code >= BYTES_CODE
    x = np.zeros((2, 3), dtype)
    buffer = as_buffer(x)
    assert buffer.data.dtype == np.uint8
    assert buffer.data.nbytes == x.nbytes


@pytest.mark.parametrize("dtype", ["M8[ns]", "m8[s]"])
def test_times_travel_as_integers(dtype):
    row = dtype_row(np.dtype(dtype))
    assert row.family == "time"
    assert row.code >= BYTES_CODE
    buffer = as_buffer(np.zeros((2, 3), dtype))
    assert (buffer.data.dtype, buffer.data.shape) == (np.int64, (6,))


@pytest.mark.parametrize(
    "dtype",
    ["f8,i4", "i4,u1", "g,i8", np.dtype([("value", "f8"), ("index", "i4")], align=True)],
    ids=str,
)
def test_pairs_of_a_number_and_an_index_travel_as_they_are(dtype):
    x = np.zeros((2, 3), dtype)
    row = dtype_row(x.dtype)
    assert row.family == "pair"
    assert row.code >= BYTES_CODE
    assert as_buffer(x).data is x
    assert as_buffer(x[::2]).data.dtype == x.dtype
    memoryview(x).release()  # which MPI needs


def test_dtypes_that_differ_have_codes_that_differ():
    codes = [dtype_row(np.dtype(each)).code for each in OTHERS]
    assert len(set(codes)) == len(codes)
    units = [dtype_row(np.dtype(f"M8[{unit}]")).code for unit in ("s", "ms", "us", "ns")]
    assert len(set(units)) == 4


def test_byte_order_and_metadata_make_no_difference():
    for name in ("i4", "f8", "c16", "M8[s]", [("a", "i4")]):
        plain = np.dtype(name)
        assert dtype_row(plain.newbyteorder(">")).code == dtype_row(plain).code
    assert dtype_row(np.dtype("f4", metadata={"unit": "m"})).code == dtype_row(np.dtype("f4")).code


@pytest.mark.parametrize(
    "dtype",
    [object, [("a", object)], [("a", "i4"), ("b", [("c", object)])]],
)
def test_dtypes_that_hold_objects_are_refused_and_the_object_collectives_named(dtype):
    with pytest.raises(dist.UsageError, match=r"all_gather_object.*broadcast_object_list.*astype"):
        as_buffer(np.zeros(2, dtype))


def test_strings_of_variable_length_are_refused():
    strings = getattr(getattr(np, "dtypes", None), "StringDType", None)
    if strings is None:
        pytest.skip("this NumPy has none")
    with pytest.raises(dist.UsageError, match="object collective"):
        as_buffer(np.array(["a", "bc"], strings()))


def test_dtypes_without_a_size_are_refused():
    with pytest.raises(dist.UsageError, match="no size"):
        as_buffer(np.zeros(3, "V0"))


# ---- layouts


def layouts():
    x = np.arange(24.0).reshape(4, 6)
    whole = np.zeros((8, 12))
    whole[::2, ::2] = x
    return {
        "C": x.copy(),
        "F": x.copy(order="F"),
        "strided": whole[::2, ::2],
        "transposed": x.T.copy().T,
        "reversed": x[::-1, ::-1].copy()[::-1, ::-1],
        "big-endian": x.astype(">f8"),
        "subclass": x.copy().view(np.matrix),
        "0-d": np.array(3.0),
        "empty": np.zeros((0, 3)),
        "empty strided": np.zeros((0, 3))[:, ::2],
        "broadcast-like": x.copy()[:, :1],
        "a column": x.copy()[:, 2],
    }


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("layout", layouts())
def test_a_buffer_is_contiguous_native_memory_in_logical_order(layout):
    x = layouts()[layout]
    buffer = as_buffer(x)
    assert buffer.data.flags.c_contiguous
    assert buffer.data.dtype.isnative
    assert buffer.shape == x.shape
    np.testing.assert_array_equal(buffer.data.reshape(x.shape), np.asarray(x))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("layout", layouts())
def test_what_is_written_to_an_output_is_unpacked_into_the_users_array(layout):
    x = layouts()[layout]
    buffer = as_output(x)
    buffer.data[...] = 7
    buffer.unpack()
    assert (np.asarray(x) == 7).all()


def test_contiguous_arrays_are_used_where_they_are():
    x = np.zeros((3, 4))
    for view in (x, x[1:], x.reshape(-1)[2:5], np.array(1.0)):
        assert np.shares_memory(as_buffer(view).data, view)
        assert as_buffer(view).home is None


def test_only_ordinary_arrays_take_the_short_way():
    assert ordinary(np.zeros(3)).name == "float64"
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for other in (
        frozen,
        np.zeros((3, 3)).T,
        np.zeros(3, ">f8"),
        np.zeros(3, ml_dtypes.bfloat16),
        np.zeros(3, "S2"),
        np.ma.zeros(3),
        bytearray(3),
        3.0,
        [1],
    ):
        assert ordinary(other) is None


@pytest.mark.parametrize("dtype", ["?", "f2", ml_dtypes.bfloat16, "S5", "M8[s]", [("a", "i4")]])
def test_carried_dtypes_come_back_as_themselves(dtype):
    x = np.zeros((2, 3), dtype)[:, ::2]
    buffer = as_output(x)
    assert typed(buffer.data, buffer.dtype).dtype == x.dtype
    buffer.data.view(np.uint8)[...] = 1
    buffer.unpack()
    assert bytes(x.tobytes()) == b"\1" * x.nbytes


# ---- libraries and protocols


def test_objects_with_the_buffer_protocol_are_seen_in_place(tmp_path):
    mapped = np.memmap(tmp_path / "file", np.float64, "w+", shape=4)
    for x in (
        bytearray(16),
        array.array("d", [0, 0]),
        memoryview(bytearray(8)),
        memoryview(np.zeros((2, 3)))[1:],
        (ctypes.c_double * 3)(),
        (ctypes.c_int16 * 2 * 3)(),
        mapped,
    ):
        buffer = as_output(x)
        buffer.data[...] = 1
        buffer.unpack()
        assert np.asarray(memoryview(x)).ravel()[-1] == 1


def test_memory_that_is_read_only_is_an_input_but_no_output(tmp_path):
    np.arange(4.0).tofile(tmp_path / "file")
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    for x in (
        b"bytes",
        memoryview(b"bytes"),
        frozen,
        frozen[::2],
        np.float32(3),
        np.bool_(True),
        np.bytes_(b"abc"),
        np.broadcast_to(np.zeros(1), (3,)),
        np.memmap(tmp_path / "file", np.float64, "r"),
    ):
        assert as_buffer(x).data.size > 0
        with pytest.raises(dist.UsageError, match=r"tensor is read-only.*writable copy"):
            as_output(x)
    with pytest.raises(dist.UsageError, match="out_tensor is read-only"):
        as_output(b"x", "out_tensor")


@pytest.mark.parametrize("x", [3, 3.0, None, "text", [1.0], (1,), {}, len, object()])
def test_what_is_no_array_is_refused_with_what_to_do(x):
    with pytest.raises(dist.UsageError, match=r"is not an array; pass .*numpy.asarray.*object"):
        as_buffer(x)


def test_masked_arrays_are_refused():
    with pytest.raises(dist.UsageError, match=r"masked array.*filled.*\.mask"):
        as_buffer(np.ma.masked_array([1, 2], [True, False]))


class Dlpack:
    """An array of a library that knows DLPack and nothing else."""

    def __init__(self, device_type=1):
        self.x = np.arange(3.0)
        self.device_type = device_type

    def __dlpack__(self, **options):
        return self.x.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.device_type, 0


def test_arrays_that_only_know_dlpack_are_seen_in_place():
    x = Dlpack()
    buffer = as_buffer(x)
    assert np.shares_memory(buffer.data, x.x)


@pytest.mark.parametrize("device_type", [4, 8, 10, 14])
def test_dlpack_memory_of_other_devices_is_refused_with_the_remedy(device_type):
    with pytest.raises(dist.UsageError, match=r"Dlpack lives.*no CUDA GPU; copy it to the host"):
        as_buffer(Dlpack(device_type))


def test_cuda_memory_without_cupy_is_refused_with_the_remedy(monkeypatch):
    class Cuda:
        @property
        def __cuda_array_interface__(self):
            return {"shape": (3,), "typestr": "<f4", "data": (64, False)}

    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.delitem(sys.modules, "hpcdist.arrays.cupy", raising=False)
    for given in (Cuda(), Dlpack(2)):
        with pytest.raises(dist.UsageError, match=r"through CuPy.*pip install cupy-cuda12x"):
            as_buffer(given)
    with pytest.raises(dist.UsageError, match="out_tensor: an array in GPU memory"):
        as_output(Cuda(), "out_tensor")


def test_memory_that_cannot_be_shown_is_refused_with_the_remedy():
    class Stubborn(Dlpack):
        def __dlpack__(self, **options):
            raise BufferError("not today")

    with pytest.raises(dist.UsageError, match=r"Stubborn does not show its memory \(not today\)"):
        as_buffer(Stubborn())


def test_torch_tensors_of_every_dtype_share_their_memory():
    torch = pytest.importorskip("torch")
    names = [*NAMED, *ML]
    for name in names:
        tensor = torch.zeros(2, 3, dtype=getattr(torch, name))
        buffer = as_output(tensor)
        assert buffer.dtype.name == name
        assert buffer.data.ctypes.data == tensor.data_ptr()
        fresh = np.ones(2, buffer.dtype.numpy)
        wrapped = wrap_like(tensor, carried(fresh, buffer.dtype), buffer.dtype, (2,))
        assert wrapped.dtype is tensor.dtype
        assert wrapped.data_ptr() == fresh.ctypes.data


def test_torch_parameters_and_strided_tensors_are_written_through():
    torch = pytest.importorskip("torch")
    for tensor in (
        torch.nn.Parameter(torch.zeros(3)),
        torch.zeros(4, 4).t(),
        torch.zeros(6, dtype=torch.bfloat16)[::2],
    ):
        buffer = as_output(tensor)
        typed(buffer.data, buffer.dtype)[...] = 1
        buffer.unpack()
        assert (tensor == 1).all()


def test_jax_arrays_are_inputs():
    jax = pytest.importorskip("jax")
    x = jax.numpy.arange(4.0)
    assert as_buffer(x).data.tolist() == [0, 1, 2, 3]
    with pytest.raises(dist.UsageError, match="read-only"):
        as_output(x)


# ---- many arrays in one run of memory


def buffers(arrays):
    return [as_output(each) for each in arrays]


def test_rows_of_one_array_are_used_where_they_are():
    whole = np.arange(12.0).reshape(3, 4)
    joined = join(buffers(list(whole)))
    assert np.shares_memory(joined, whole)
    assert joined.tolist() == list(range(12))
    assert np.shares_memory(join(buffers(list(whole[1:]))), whole)


@pytest.mark.parametrize(
    "pick",
    [
        lambda x: [x[2], x[1], x[0]],
        lambda x: [x[0], x[2]],
        lambda x: [x[0], x[0]],
        lambda x: [x[0], np.ones(4)],
        lambda x: [x[0].copy(), x[1].copy()],
        lambda x: [x[0, ::2], x[1, ::2]],
    ],
)
def test_other_arrays_are_copied_in_their_order(pick):
    arrays = pick(np.arange(12.0).reshape(3, 4))
    assert adjacent_view(buffers(arrays)) is None
    assert join(buffers(arrays)).tolist() == np.concatenate(arrays).tolist()


def test_neighbours_between_the_elements_of_their_base_are_copied():
    raw = np.arange(5.0)
    shifted = raw.view(np.uint8)[4:36].view(np.float64)
    parts = [shifted[:2], shifted[2:]]
    assert join(buffers(parts)).tobytes() == shifted.tobytes()


def test_a_run_of_memory_is_spread_over_any_arrays():
    targets = [np.zeros(2), np.zeros((2, 2)).T, np.zeros(6)[::3], np.zeros(0), np.array(0.0)]
    scatter_into(np.arange(9.0), buffers(targets))
    assert targets[0].tolist() == [0, 1]
    assert targets[1].tolist() == [[2, 3], [4, 5]]
    assert targets[2].tolist() == [6, 7]
    assert targets[4] == 8
