"""Device memory: by NCCL, by an MPI that can take it, or staged through host memory."""
