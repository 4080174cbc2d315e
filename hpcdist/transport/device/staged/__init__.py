"""Device memory through locked host memory, piece by piece."""
