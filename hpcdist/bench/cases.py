"""`CASES`: everything that can be measured. A new case is a new row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from hpcdist.bench import datasets, harness, messages
from hpcdist.bench.harness import Harness
from hpcdist.bench.rows import Point, Row
from hpcdist.errors import UsageError
from hpcdist.named_tuple import NamedTuple
from hpcdist.text import read_sizes

USUAL_SIZES = read_sizes("8:16M:8")
QUICK_SIZES = read_sizes("8,32K,2M")
OVERLAP_SIZES = read_sizes("256K,2M,16M")
DATASET_SIZES = read_sizes("16M")
OBJECT_SIZES = read_sizes("0,1M")
SMALL = (8,)

HOST, DEVICE = "host", "device"
BOTH = (HOST, DEVICE)
NEVER = ()


class Case(NamedTuple):
    """One row of the table.

    Attributes:
        kind: the set it belongs to; naming the set on the command line means all of its cases.
        text: one line.
        measure: what measures one point. Collective.
        sizes: those it is measured at when none are asked for; None if it has no size.
        typed: whether dtype and kind of memory make a difference.
        least: the ranks it needs.
        usual: where the arrays must be for it to be measured when no case is named.
        moved: whether what it works on is on the device if there is one, whatever the dtype.

    """

    kind: str
    text: str
    measure: Callable[[Harness, Point], list[Row]]
    sizes: tuple[int, ...] | None = USUAL_SIZES
    typed: bool = True
    least: int = 1
    usual: tuple[str, ...] = BOTH
    moved: bool = False


def _messages(
    text: str,
    pattern: messages.Pattern,
    parts: Callable[[int], int],
    sizes: tuple[int, ...] = USUAL_SIZES,
    usual: tuple[str, ...] = BOTH,
) -> Case:
    measure = partial(harness.measure_messages, pattern, parts)
    return Case("messages", text, measure, sizes, least=2, usual=usual)


def _array(text: str, usual: tuple[str, ...] = BOTH) -> Case:
    return Case("collectives", text, harness.measure_calls, usual=usual)


def _bare(kind: str, text: str, usual: tuple[str, ...] = (HOST,)) -> Case:
    return Case(kind, text, harness.measure_calls, None, typed=False, usual=usual)


def _objects(text: str) -> Case:
    return Case("objects", text, harness.measure_calls, OBJECT_SIZES, typed=False, usual=(HOST,))


def _overlap(text: str, computing: str, usual: tuple[str, ...] = BOTH) -> Case:
    measure = partial(harness.measure_overlap, computing)
    return Case("overlap", text, measure, OVERLAP_SIZES, usual=usual)


def _dataset(text: str, measure: Callable[[Harness, Point], list[Row]]) -> Case:
    return Case("datasets", text, measure, DATASET_SIZES, typed=False, usual=NEVER)


def _start(text: str, measure: Callable[[Harness, Point], list[Row]]) -> Case:
    return Case("startup", text, measure, None, typed=False, usual=(HOST,))


CASES: Mapping[str, Case] = {
    "latency": _messages("half of send and back, one pair", messages.send_and_back, lambda _: 2),
    "bandwidth": _messages("a window of 64 messages one way", messages.one_way, messages.window_of),
    "bidirectional": _messages(
        "a window of 64 messages each way", messages.both_ways, messages.window_of, usual=NEVER
    ),
    "message_rate": _messages(
        "windows of small messages by all pairs", messages.all_pairs, messages.window_of, SMALL
    ),
    "all_reduce": _array("the reduction on every rank"),
    "reduce": _array("the reduction on one rank", usual=NEVER),
    "reduce_scatter": _array("a part of the reduction on every rank"),
    "broadcast": _array("one rank's array on every rank"),
    "all_gather": _array("all arrays on every rank, in one array"),
    "all_gather_list": _array("all arrays on every rank, one by one", usual=NEVER),
    "gather": _array("all arrays on one rank", usual=NEVER),
    "scatter": _array("a part of one rank's array on every rank", usual=NEVER),
    "alltoall": _array("part j of every rank on rank j, part by part", usual=NEVER),
    "alltoall_single": _array("part j of every rank on rank j, in one array"),
    "scan": _array("the reduction up to each rank", usual=NEVER),
    "barrier": _bare("collectives", "all ranks wait for each other"),
    "new_group": _bare("groups", "a group of all ranks, made and destroyed", usual=NEVER),
    "broadcast_object_list": _objects("a dictionary of rank 0, with an array of this size in it"),
    "all_gather_object": _objects("every rank's dictionary, with an array of this size in it"),
    "overlap_sleep": _overlap("all_reduce behind computing that leaves the core alone", "sleep"),
    "overlap_numpy": _overlap(
        "all_reduce behind computing that keeps the core busy", "NumPy", usual=(HOST,)
    ),
    "overlap_python": _overlap(
        "all_reduce behind computing under the interpreter's lock", "Python", usual=NEVER
    ),
    "overlap_matmul": _overlap(
        "all_reduce behind products of matrices, where the array is", "matmul", usual=(DEVICE,)
    ),
    "data_parallel": Case(
        "training",
        "a step of 21 million parameters, 32 samples per rank",
        harness.measure_step,
        None,
        typed=False,
        moved=True,
    ),
    "dataset_shuffle": _dataset(
        "a global shuffle of so many bytes of text on every rank, beside batches of pickles",
        datasets.measure_shuffle,
    ),
    "dataset_batch": _dataset(
        "512 of the rows of so many bytes of text, at random", datasets.measure_batch
    ),
    "startup_init": _start(
        "init_parallel_env of this job", partial(harness.measure_start, "init_s")
    ),
    "startup_process": _start(
        "from the start of the process to the end of init_parallel_env",
        partial(harness.measure_start, "process_s"),
    ),
    "startup_import": _start("import in a fresh interpreter, on rank 0", harness.measure_import),
}
KINDS = tuple(dict.fromkeys(case.kind for case in CASES.values()))
"""The sets of cases."""


def choose_cases(words: Sequence[str], *, on_device: bool = False) -> tuple[str, ...]:
    """Return the cases that are named, alone or by their set; ``all``; the usual ones for none."""
    if not words:
        where = DEVICE if on_device else HOST
        return tuple(name for name, case in CASES.items() if where in case.usual)
    chosen: list[str] = []
    for word in words:
        named = [name for name, case in CASES.items() if word in (name, case.kind, "all")]
        if not named:
            raise UsageError(
                f"there is no case {word!r}; the cases are {', '.join(CASES)}, and the sets of "
                f"cases {', '.join((*KINDS, 'all'))}"
            )
        chosen += named
    return tuple(dict.fromkeys(chosen))
