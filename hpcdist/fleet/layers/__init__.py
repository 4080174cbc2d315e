"""Paddle's ``fleet.layers``; see `mpu`."""
