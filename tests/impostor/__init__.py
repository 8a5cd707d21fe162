"""A pretended CUDA device for tests on machines without one. README.md says how it works."""
