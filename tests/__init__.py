"""Tests; a package, so that benchmarks/traffic.py can use cuda_on_cpu/."""
