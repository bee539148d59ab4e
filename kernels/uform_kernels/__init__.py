"""Exact pair losses, MaxSim and choice losses: torch and Triton, nothing else."""
