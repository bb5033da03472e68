"""What survives a crash of the server: the keeper, the ledger, and recovery from both."""
