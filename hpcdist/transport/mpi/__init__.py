"""Host memory over MPI, and in shared memory where the ranks of a node agree by MPI."""
