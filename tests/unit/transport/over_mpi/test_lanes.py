"""What nodes send each other is cut into pieces."""

import numpy as np
from hypothesis import given, strategies as st

from hpcdist.transport.mpi.hierarchical.lanes import PIECE_BYTES, in_turn

lengths = st.lists(st.integers(0, 40_000), min_size=1, max_size=4)


@given(lengths, st.integers(1, 40))
def test_pieces_are_of_some_bytes_and_together_the_runs(lengths, itemsize):
    runs = {node: np.zeros(length, f"V{itemsize}") for node, length in enumerate(lengths)}
    ends, last = dict.fromkeys(runs, 0), set()
    for node, piece, is_last in in_turn([*runs.items()]):
        assert 0 < piece.nbytes <= PIECE_BYTES
        assert node not in last
        assert piece.ctypes.data == runs[node].ctypes.data + ends[node] * itemsize
        ends[node] += piece.size
        if is_last:
            last.add(node)
    assert ends == {node: run.size for node, run in runs.items()}
    assert last == {node for node, run in runs.items() if run.size}
