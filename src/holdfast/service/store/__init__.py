"""The database: sessions, leases, the audit log, approvals, agents. The only folder that knows SQL."""
