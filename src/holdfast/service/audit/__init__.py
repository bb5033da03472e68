"""What the audit log is made of: the hash chain, the removal of secrets, and how rows read. No database here."""
