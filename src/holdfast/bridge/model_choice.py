"""Which model answers: one for all, or by the name that is asked for. Holds the connections to providers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from holdfast.bridge.function_model import ModelError, ModelFunction
from holdfast.bridge.redaction import Redaction
from holdfast.bridge.upstream import ProviderClient, Upstream, require_httpx
from holdfast.errors import InvalidParams

OneModel = Upstream | ModelFunction
#: What `sandbox_agent_bridge` takes.
Model = OneModel | Mapping[str, OneModel]
#: In a mapping: all names that it does not have.
ANY: Final = "*"

Chosen = ProviderClient | ModelFunction


class ModelChoice:
    """The models of one bridge by their names."""

    def __init__(self, model: Model) -> None:
        given = dict(model) if isinstance(model, Mapping) else {ANY: model}
        if not given:
            raise InvalidParams("model: the mapping is empty; give a model for at least one name, or for '*'")
        sessions: dict[int, ProviderClient] = {}
        self._by_name: dict[str, Chosen] = {}
        for name, each in given.items():
            if isinstance(each, Upstream):
                require_httpx()
                # One that stands under several names has one pool of connections.
                self._by_name[name] = sessions.setdefault(id(each), ProviderClient(each))
            elif callable(each):
                self._by_name[name] = each
            else:
                raise InvalidParams(
                    f"model {name!r}: a {type(each).__name__} is neither an Upstream nor a function"
                )
        self._sessions = list(sessions.values())

    def choose(self, name: str) -> Chosen:
        """Whoever answers for this name; ModelError (404) if nobody does."""
        found = self._by_name.get(name, self._by_name.get(ANY))
        if found is None:
            raise ModelError(f"model {name!r}: there is none; there are {', '.join(sorted(self._by_name))}", 404)
        return found

    @property
    def names(self) -> list[str]:
        return sorted(name for name in self._by_name if name != ANY)

    @property
    def only_provider(self) -> ProviderClient | None:
        """The provider, if it is the only model: then it may be asked for what names no model."""
        only = self._by_name.get(ANY)
        return only if len(self._by_name) == 1 and isinstance(only, ProviderClient) else None

    @property
    def redaction(self) -> Redaction:
        """What no record may hold."""
        return Redaction.joined(session.upstream.redaction for session in self._sessions)

    async def aclose(self) -> None:
        for session in self._sessions:
            await session.aclose()
