"""Sessions around terminals and shells: owners, policy, lifetime, audit and metrics, over gRPC and HTTP.

Talks to sandboxes through the client alone, and to its database through `store`. docs/service.md is for users,
docs/architecture.md says which module does what.
"""
