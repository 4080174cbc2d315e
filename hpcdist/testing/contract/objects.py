"""Objects: whatever pickles, of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import hpcdist as dist
from hpcdist.testing.contract.base import (
    Contract,
)


class ObjectCollectives(Contract):
    """Objects: whatever pickles, of any size."""

    def test_objects_of_any_size_are_gathered(self) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for count in (3, 100_000):
                gathered: list[Any] = []
                dist.all_gather_object(gathered, {"rank": rank, "x": np.full(count, rank)})
                assert [each["rank"] for each in gathered] == list(range(size))
                assert all((each["x"] == r).all() for r, each in enumerate(gathered))
                gathered[rank]["x"][0] = -1  # what arrives is writable and nobody else's

        self.run(check)

    @pytest.mark.parametrize("count", [1, 50_000])
    def test_objects_go_from_and_to_one_rank(self, count: int) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            for root in range(size):
                shared: list[Any] = [None, None]
                if rank == root:
                    shared = [np.full(count, root), "text"]
                dist.broadcast_object_list(shared, root)
                assert (shared[0] == root).all()
                assert shared[1] == "text"
                out: list[Any] = ["anything", "longer"]
                given = [np.full(count, each) for each in range(size)]
                dist.scatter_object_list(out, given if rank == root else None, root)
                assert len(out) == 1
                assert (out[0] == rank).all()
                gathered: Any = [None] * size if rank == root else None
                dist.gather_object(np.full(count, rank), gathered, root)
                if rank == root:
                    assert all((x == each).all() for each, x in enumerate(gathered))

        self.run(check)

    @pytest.mark.parametrize("count", [1, 50_000])
    def test_objects_are_exchanged_between_all(self, count: int) -> None:
        def check() -> None:
            rank, size = dist.get_rank(), dist.get_world_size()
            out: list[Any] = []
            given = [(rank, each, np.full(count, each)) for each in range(size)]
            dist.all_to_all_object(out, given)
            assert [each[:2] for each in out] == [(each, rank) for each in range(size)]
            assert all((each[2] == rank).all() for each in out)
            work = dist.send_object_list([rank, np.full(count, rank)], (rank + 1) % size)
            got: list[Any] = [None, None]
            dist.recv_object_list(got, (rank - 1) % size)
            work.wait()
            assert got[0] == (rank - 1) % size

        self.run(check)
