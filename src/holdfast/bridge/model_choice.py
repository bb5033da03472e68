"""Selects the model for a call: one for all calls, or one by requested name. Owns the connections to providers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.bridge.function_model import ModelError, ModelFunction
from holdfast.bridge.redaction import Redaction
from holdfast.bridge.upstream import ProviderClient, Upstream, require_httpx
from holdfast.errors import InvalidParams

OneModel = Upstream | ModelFunction
#: The `model` argument of `sandbox_agent_bridge`.
Model = OneModel | Mapping[str, OneModel]
#: Key of a mapping for all other names.
ANY: Final = "*"

Chosen = ProviderClient | ModelFunction


class ModelChoice:
    """The models of one bridge by their names."""

    def __init__(self, model: Model) -> None:
        given = dict(model) if isinstance(model, Mapping) else {ANY: model}
        if not given:
            raise InvalidParams("model: the mapping is empty; give a model for at least one name, or for '*'")
        clients: dict[int, ProviderClient] = {}
        self._by_name: dict[str, Chosen] = {}
        for name, each in given.items():
            if isinstance(each, Upstream):
                require_httpx()
                # A provider under several names has one pool of connections.
                self._by_name[name] = clients.setdefault(id(each), ProviderClient(each))
            elif callable(each):
                self._by_name[name] = each
            else:
                raise InvalidParams(
                    f"model {name!r}: a {type(each).__name__} is neither an Upstream nor a function"
                )
        self._clients = list(clients.values())

    def choose(self, name: str) -> Chosen:
        """Return the model for this name; raise ModelError (404) if there is none."""
        found = self._by_name.get(name, self._by_name.get(ANY))
        if found is None:
            raise ModelError(f"model {name!r}: not found; known models: {', '.join(sorted(self._by_name))}", 404)
        return found

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self._by_name if name != ANY)

    @property
    def only_provider(self) -> ProviderClient | None:
        """The provider, if it is the only model: requests without a model name go to it."""
        only = self._by_name.get(ANY)
        return only if len(self._by_name) == 1 and isinstance(only, ProviderClient) else None

    @property
    def redaction(self) -> Redaction:
        """Secrets that no record may contain."""
        return Redaction.joined(client.upstream.redaction for client in self._clients)

    async def aclose(self) -> None:
        for client in self._clients:
            await client.aclose()
