"""Sessions around terminals and shells: owners, policy, lifetime, audit and metrics, over gRPC and HTTP.

Uses sandboxes through the client, and the database through `store`. docs/service.md is for users,
docs/architecture.md describes the modules.
"""
