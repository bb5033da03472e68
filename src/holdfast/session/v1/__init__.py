"""Generated from proto/holdfast/session/v1/session.proto by `make proto`; a test sees that it is up to date."""
