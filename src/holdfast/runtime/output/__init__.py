"""Output of jobs: logs addressed by byte offset, journals addressed by `seq`, and their readers."""
