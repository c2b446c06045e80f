"""The model runner for x86 CPUs with VNNI: kernels of our own, compiled by numba when they are first used."""
