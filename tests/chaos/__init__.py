"""Faults made on purpose around a real server: `make chaos`, and its short form in tests/e2e/test_chaos.py."""
