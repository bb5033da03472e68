"""Former names of `holdfast.sandboxes.target`, for kinds of sandboxes that were written with them."""

from holdfast.sandboxes import target

CommandPlace = target.CommandTarget
Place = target.SandboxTarget
Signs = target.Signs
