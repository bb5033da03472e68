"""The benchmark: each figure beside a baseline that is measured in the same run. `python -m bench` runs it.

`docs/benchmarks.md` describes each row.
"""
