"""Run inside a sandbox: the package `anthropic`, unmodified, calls the bridge and prints the answers.

The models' names select their behaviour; `scripted_model.py` has them. Needs nothing of this repository.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import anthropic

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Asks.",
    "input_schema": {"type": "object", "properties": {}},
}
#: Reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY.
client: Any = anthropic.Anthropic()
messages: list[Any] = [{"role": "user", "content": "hello"}]
got: dict[str, Any] = {"models": [model.id for model in client.models.list()]}


def ask(model: str, messages: list[Any] = messages, **more: Any) -> Any:
    return client.messages.create(model=model, max_tokens=100, messages=messages, **more)


whole = ask("say")
got["whole"] = whole.content[0].text
got["usage"] = [whole.usage.input_tokens, whole.usage.output_tokens]

pieces = []
with client.messages.stream(model="steps", max_tokens=100, messages=messages) as stream:
    for piece in stream.text_stream:
        pieces.append(piece)
        # The model goes on at a request of the client: a piece that came late would hang here.
        ask("step")
got["pieces"] = pieces

requested = ask("tools", tools=[TOOL])
call = next(block for block in requested.content if block.type == "tool_use")
result = {"type": "tool_result", "tool_use_id": call.id, "content": f"rain in {call.input['city']}"}
turns = [*messages, {"role": "assistant", "content": requested.content}, {"role": "user", "content": [result]}]
got["tools"] = ask("tools", turns, tools=[TOOL]).content[0].text
with client.messages.stream(model="tools", max_tokens=100, messages=messages, tools=[TOOL]) as stream:
    blocks = stream.get_final_message().content
got["streamed tool"] = [[block.name, json.dumps(block.input)] for block in blocks if block.type == "tool_use"]

try:
    ask("refused")
except anthropic.NotFoundError as error:
    got["error"] = [error.status_code, error.response.json()["error"]["message"]]

with client.messages.stream(model="endless", max_tokens=100, messages=messages) as stream:
    next(stream.text_stream)
got["left"] = ask("left").content[0].text
got["counted"] = client.messages.count_tokens(model="say", messages=messages).input_tokens > 0

print(json.dumps(got), flush=True)
# The last one is left by a client that dies.
with client.messages.stream(model="endless", max_tokens=100, messages=messages) as stream:
    next(stream.text_stream)
    os.kill(os.getpid(), signal.SIGKILL)
