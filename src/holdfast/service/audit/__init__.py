"""Parts of the audit log without a database: the hash chain, the redaction, and the rendering of rows."""
