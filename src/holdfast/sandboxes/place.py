"""Former names of `holdfast.sandboxes.target`, for kinds of sandboxes written before it had that name."""

from holdfast.sandboxes.target import (
    CommandTarget as CommandPlace,
    SandboxTarget as Place,
    Signs as Signs,
    environment as environment,
)

__all__ = ["CommandPlace", "Place", "Signs", "environment"]
