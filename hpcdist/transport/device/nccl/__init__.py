"""Device memory by NCCL."""
