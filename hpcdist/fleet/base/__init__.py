"""Paddle's ``fleet.base``: topologies, role makers and strategies."""
