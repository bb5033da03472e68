"""Durability: the keeper, the ledger, the recorders, and recovery of processes and shells after a crash."""
