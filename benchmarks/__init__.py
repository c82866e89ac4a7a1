"""Measurements, and the peers that they are measured against."""
