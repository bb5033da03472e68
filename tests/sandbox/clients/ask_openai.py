"""Run inside a sandbox: the package `openai`, unmodified, calls the bridge in its two ways and prints the answers.

The models' names select their behaviour; `scripted_model.py` has them. Needs nothing of this repository.
"""

from __future__ import annotations

import json
import os
import signal
from typing import Any

import openai

TOOL: dict[str, Any] = {
    "name": "weather",
    "description": "Asks.",
    "parameters": {"type": "object", "properties": {}},
}
#: Reads OPENAI_BASE_URL and OPENAI_API_KEY.
client: Any = openai.OpenAI()
chat = client.chat.completions
messages: list[Any] = [{"role": "user", "content": "hello"}]
got: dict[str, Any] = {"models": [model.id for model in client.models.list()]}

# Chat: whole, streamed, a tool, an error, a stream that is left.
whole = chat.create(model="say", messages=messages)
got["whole"] = whole.choices[0].message.content
got["usage"] = [whole.usage.prompt_tokens, whole.usage.completion_tokens]

pieces = []
for chunk in chat.create(model="steps", messages=messages, stream=True):
    if chunk.choices and chunk.choices[0].delta.content:
        pieces.append(chunk.choices[0].delta.content)
        # The model goes on at a request of the client: a piece that came late would hang here.
        chat.create(model="step", messages=messages)
got["pieces"] = pieces

tools = [{"type": "function", "function": TOOL}]
requested = chat.create(model="tools", messages=messages, tools=tools).choices[0].message
call = requested.tool_calls[0]
result = {
    "role": "tool",
    "tool_call_id": call.id,
    "content": f"rain in {json.loads(call.function.arguments)['city']}",
}
got["tools"] = (
    chat.create(model="tools", messages=[*messages, requested, result], tools=tools).choices[0].message.content
)
with chat.stream(model="tools", messages=messages, tools=tools) as stream:
    calls = stream.get_final_completion().choices[0].message.tool_calls
got["streamed tool"] = [[call.function.name, call.function.arguments] for call in calls]

try:
    chat.create(model="refused", messages=messages)
except openai.NotFoundError as error:
    got["error"] = [error.status_code, error.response.json()["error"]["message"]]

with chat.create(model="endless", messages=messages, stream=True) as stream:
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
got["left"] = chat.create(model="left", messages=messages).choices[0].message.content

# Responses: whole, streamed, a tool.
got["response"] = client.responses.create(model="say", input="hello").output_text
with client.responses.stream(model="say", input="hello") as stream:
    deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    got["response pieces"] = [deltas, stream.get_final_response().output_text]
first = client.responses.create(model="tools", input="hello", tools=[{"type": "function", **TOOL}])
call = next(item for item in first.output if item.type == "function_call")
rain = f"rain in {json.loads(call.arguments)['city']}"
turns: list[Any] = [{"role": "user", "content": "hello"}, *first.output]
turns.append({"type": "function_call_output", "call_id": call.call_id, "output": rain})
got["response tools"] = client.responses.create(model="tools", input=turns).output_text

print(json.dumps(got), flush=True)
# The last one is left by a client that dies.
stream = chat.create(model="endless", messages=messages, stream=True)
next(chunk for chunk in stream if chunk.choices[0].delta.content)
os.kill(os.getpid(), signal.SIGKILL)
