"""The database below the tables: SQLite and PostgreSQL, schema and migrations."""
